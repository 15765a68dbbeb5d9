"""Items of Chen 2019 about test errors, parameters and time: Table 2, supplement Table 1, cost of routing."""

from torchcaps.papers.chen2019.runs import (
    CIFAR_CNN,
    CIFAR_CONV,
    CIFAR_DYNAMIC,
    CIFAR_FC,
    CIFAR_MULTI,
    CNN,
    CONV,
    CONV_PLAIN,
    DYNAMIC,
    FC,
    FC_PLAIN,
)
from torchcaps.papers.measures.cost import SESSIONS, parameters_per_layer, step_seconds
from torchcaps.reproduce.schema import Cell, Claim, Item, Measurement, ParameterCount, Published, TableRow

__all__ = ["COST", "MULTI", "TABLE_2"]

_SAME = (
    "on CIFAR-10 the convolutional and the fully-connected network are the same function: the kernel covers the grid"
)

TABLE_2 = Item(
    "table2",
    "Table 2",
    "Test error and parameters of G-CapsNets, CapsNet with dynamic routing (**) and a CNN; * is without "
    "reconstruction.",
    columns={
        "MNIST": "test error, %",
        "size, MNIST": "parameters",
        "CIFAR-10": "test error, %",
        "size, CIFAR-10": "parameters",
    },
    rows=(
        TableRow(
            "CNN",
            {
                "MNIST": Cell(Published(0.91, 0.09), CNN),
                "size, MNIST": Cell(35.4e6, ParameterCount(CNN)),
                "CIFAR-10": Cell(Published(36.54, 0.78), CIFAR_CNN),
                "size, CIFAR-10": Cell(
                    Published(9.6e6, note="no reading of the architecture gives 9.6M"), ParameterCount(CIFAR_CNN)
                ),
            },
        ),
        TableRow(
            "CapsNets**",
            {
                "MNIST": Cell(Published(1.24, 0.10), DYNAMIC),
                "size, MNIST": Cell(8.2e6, ParameterCount(DYNAMIC)),
                "CIFAR-10": Cell(Published(40.88, 0.67), CIFAR_DYNAMIC),
                "size, CIFAR-10": Cell(
                    Published(2.67e6, note="that of the network with trained couplings; dynamic routing has none"),
                    ParameterCount(CIFAR_DYNAMIC),
                ),
            },
        ),
        TableRow(
            "FC G-CapsNets",
            {
                "MNIST": Cell(Published(0.67, 0.05), FC),
                "size, MNIST": Cell(8.2e6, ParameterCount(FC)),
                "CIFAR-10": Cell(Published(32.70, 0.47), CIFAR_FC),
                "size, CIFAR-10": Cell(2.67e6, ParameterCount(CIFAR_FC)),
            },
        ),
        TableRow(
            "FC G-CapsNets*",
            {"MNIST": Cell(Published(0.66, 0.03), FC_PLAIN), "size, MNIST": Cell(6.8e6, ParameterCount(FC_PLAIN))},
        ),
        TableRow(
            "Conv G-CapsNets",
            {
                "MNIST": Cell(Published(0.84, 0.09), CONV),
                "size, MNIST": Cell(6.9e6, ParameterCount(CONV)),
                "CIFAR-10": Cell(Published(33.53, 0.52, _SAME), CIFAR_CONV),
                "size, CIFAR-10": Cell(2.67e6, ParameterCount(CIFAR_CONV)),
            },
        ),
        TableRow(
            "Conv G-CapsNets*",
            {"MNIST": Cell(Published(0.86, 0.13), CONV_PLAIN), "size, MNIST": Cell(5.5e6, ParameterCount(CONV_PLAIN))},
        ),
        TableRow(
            "Multi-layer G-CapsNets",
            {
                "CIFAR-10": Cell(Published(34.29, 0.33), CIFAR_MULTI),
                "size, CIFAR-10": Cell(
                    Published(0.716e6, note="see the table of the multi-layer network"), ParameterCount(CIFAR_MULTI)
                ),
            },
        ),
    ),
    claims=(
        *(
            Claim(text + suffix, (better, column), (worse, column))
            for column, suffix in (("MNIST", ""), ("CIFAR-10", " on CIFAR-10"))
            for text, better, worse in (
                ("trained couplings have a lower error than dynamic routing", "FC G-CapsNets", "CapsNets**"),
                ("G-CapsNets have a lower error than the CNN", "FC G-CapsNets", "CNN"),
            )
        ),
        Claim(
            "fully-connected has a lower error than convolutional",
            ("FC G-CapsNets", "MNIST"),
            ("Conv G-CapsNets", "MNIST"),
        ),
        Claim(
            "a multi-layer G-CapsNet has a lower error than the CNN on CIFAR-10",
            ("Multi-layer G-CapsNets", "CIFAR-10"),
            ("CNN", "CIFAR-10"),
        ),
    ),
    notes=(
        "There is no nonlinearity between transform and routing. In a fully-connected layer, and in any whose kernel "
        "covers the grid, the couplings only change the geometry of the optimisation.",
        "The released baseline with dynamic routing has no primary squash and is trained with SGD, which is weaker "
        "than the baseline that the paper describes; we run the latter (the former: preset='official').",
    ),
)

_LAYERS = {
    "Conv#1": ("front.conv1.weight", Published(9_400)),
    "Conv#2": ("front.primary.pose.weight", Published(401_400)),
    "Conv Caps Trans#1": ("capsules.layers.caps1.weight", Published(131_100)),
    "Conv Caps Routing#1": (
        "capsules.layers.caps1.coefficients",
        Published(56_400, note="printed for a 3x3 kernel, (3,3,16)x(7,7,8); the layer has a 4x4 kernel"),
    ),
    "Conv Caps Trans#2": ("capsules.layers.caps2.weight", Published(4_600)),
    "Conv Caps Routing#2": ("capsules.layers.caps2.coefficients", Published(10_400)),
    "FC Caps Trans": ("capsules.layers.classes.weight", Published(92_200)),
    "FC Caps Routing": (
        "capsules.layers.classes.coefficients",
        Published(11_500, note="printed for one coupling per dimension, (16,3,3,8)x10; the code has one per capsule"),
    ),
}
COUNTS = Measurement(
    "chen2019-multi",
    parameters_per_layer,
    options={"model": "chen2019_multi_cifar10", "layers": {label: prefix for label, (prefix, _) in _LAYERS.items()}},
    seed_independent=True,
)
MULTI = Item(
    "multi",
    "Supplement, Table 1",
    "The multi-layer network, layer by layer: parameters as printed, and as counted from its sizes.",
    columns={"parameters": "numbers"},
    rows=(
        *(TableRow(label, {"parameters": Cell(printed, COUNTS, label)}) for label, (_, printed) in _LAYERS.items()),
        TableRow(
            "total",
            {
                "parameters": Cell(
                    Published(716_000, note="the printed rows add up to 717,000, the sizes behind them to 716,992"),
                    COUNTS,
                    "total",
                )
            },
        ),
    ),
    notes=("We build the released version: 4x4 routing kernels, one coupling per capsule.",),
)

_TIMED = {
    "CapsNets**": "chen2019_dynamic_mnist",
    "FC G-CapsNets": "chen2019_fc_mnist",
    "Conv G-CapsNets": "chen2019_conv_mnist",
}
SECONDS = Measurement(
    "chen2019-cost",
    step_seconds,
    options={"models": _TIMED, "batch_size": 100},
    smoke={"batch_size": 8, "repeats": 1},
    estimated_seconds=60,
)
COST = Item(
    "cost",
    "Section 3, cost of routing",
    "Time of the paper's MNIST networks with trained couplings instead of dynamic routing.",
    columns={
        "training": "seconds per 100 steps",
        "inference": "milliseconds per batch",
        "saved in training": "%",
        "saved in inference": "%",
    },
    rows=tuple(
        TableRow(
            label,
            {
                "training": Cell(None, SECONDS, f"{label} training"),
                "inference": Cell(None, SECONDS, f"{label} inference"),
                "saved in training": Cell(None, SECONDS, f"{label} training_saved"),
                "saved in inference": Cell(None, SECONDS, f"{label} inference_saved"),
            },
        )
        for label in _TIMED
    ),
    claims=tuple(
        Claim(
            f"without a routing loop {activity} takes less time (FC)",
            ("FC G-CapsNets", f"saved in {activity}"),
            ("CapsNets**", f"saved in {activity}"),
            lower_is_better=False,
            convergence="not applicable",
            convergence_reason="the time of a step does not depend on the steps before it",
        )
        for activity in ("training", "inference")
    ),
    notes=(
        "The paper states that trained couplings save the time of the routing procedure and prints no times. Batches "
        "of 100 images, in turns; the fastest of six; CPU time if measured with one thread.",
        "Our dynamic routing is about 30 times as fast as a naive implementation, so there is less to save than in the "
        "paper's.",
        SESSIONS,
    ),
)
