"""Chen, Li, Wang, Crandall 2019: Generalized capsule networks with trainable routing procedure (G-CapsNets).

`PAPER`, at the end, says what was claimed, what it costs and where we deviate. Run an item by
``torchcaps reproduce chen2019 table2 --scale cpu``.
"""

from functools import partial

from torchcaps.papers import PAPERS
from torchcaps.papers.measures.cost import parameters_per_layer
from torchcaps.papers.measures.robustness import (
    GAN_FILE,
    draw_black_box,
    draw_gan_images,
    draw_white_box,
    measure_black_box,
    measure_gan_errors,
    measure_gan_images,
    measure_white_box,
)
from torchcaps.reproduce.scales import CPU_CIFAR, CPU_DIGITS, NARROW_CAPSNET, NARROW_CNN
from torchcaps.reproduce.schema import Cell, Claim, Item, Measurement, Paper, ParameterCount, Published, Run, TableRow

__all__ = ["PAPER"]

CAPSNET = {**CPU_DIGITS, **NARROW_CAPSNET}
CNN = Run("chen2019_cnn_mnist", cpu={**CPU_DIGITS, **NARROW_CNN})
DYNAMIC = Run("chen2019_dynamic_mnist", cpu=CAPSNET)
FC = Run("chen2019_fc_mnist", cpu=CAPSNET)
CONV = Run("chen2019_conv_mnist", cpu=CAPSNET)
FC_PLAIN, CONV_PLAIN = FC.replace(reconstruction=False), CONV.replace(reconstruction=False)
LENET = Run("chen2019_lenet", cpu=CPU_DIGITS)

SMALL = {**CPU_CIFAR, "width": 32, "types": 16}
C_CNN = Run("chen2019_cnn_cifar10", cpu={**CPU_CIFAR, "width": 32, "channels": 128})
C_DYNAMIC = Run("chen2019_dynamic_cifar10", cpu=SMALL)
C_FC = Run("chen2019_fc_cifar10", cpu=SMALL)
C_CONV = Run("chen2019_conv_cifar10", cpu=SMALL)
C_MULTI = Run("chen2019_multi_cifar10", cpu=CPU_CIFAR)
_SAME = "on CIFAR-10 the convolutional and the fully-connected net are one function: a window over the whole grid"

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
                "CIFAR-10": Cell(Published(36.54, 0.78), C_CNN),
                "size, CIFAR-10": Cell(Published(9.6e6, note="no reading of the net has 9.6M"), ParameterCount(C_CNN)),
            },
        ),
        TableRow(
            "CapsNets**",
            {
                "MNIST": Cell(Published(1.24, 0.10), DYNAMIC),
                "size, MNIST": Cell(8.2e6, ParameterCount(DYNAMIC)),
                "CIFAR-10": Cell(Published(40.88, 0.67), C_DYNAMIC),
                "size, CIFAR-10": Cell(
                    Published(2.67e6, note="that of the net with couplings; dynamic routing has none"),
                    ParameterCount(C_DYNAMIC),
                ),
            },
        ),
        TableRow(
            "FC G-CapsNets",
            {
                "MNIST": Cell(Published(0.67, 0.05), FC),
                "size, MNIST": Cell(8.2e6, ParameterCount(FC)),
                "CIFAR-10": Cell(Published(32.70, 0.47), C_FC),
                "size, CIFAR-10": Cell(2.67e6, ParameterCount(C_FC)),
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
                "CIFAR-10": Cell(Published(33.53, 0.52, _SAME), C_CONV),
                "size, CIFAR-10": Cell(2.67e6, ParameterCount(C_CONV)),
            },
        ),
        TableRow(
            "Conv G-CapsNets*",
            {"MNIST": Cell(Published(0.86, 0.13), CONV_PLAIN), "size, MNIST": Cell(5.5e6, ParameterCount(CONV_PLAIN))},
        ),
        TableRow(
            "Multi-layer G-CapsNets",
            {
                "CIFAR-10": Cell(Published(34.29, 0.33), C_MULTI),
                "size, CIFAR-10": Cell(
                    Published(0.716e6, note="see the multi-layer net's own table"), ParameterCount(C_MULTI)
                ),
            },
        ),
    ),
    claims=(
        Claim(
            "trainable couplings are better than dynamic routing", ("FC G-CapsNets", "MNIST"), ("CapsNets**", "MNIST")
        ),
        Claim("G-CapsNets are better than the CNN", ("FC G-CapsNets", "MNIST"), ("CNN", "MNIST")),
        Claim("fully-connected is better than convolutional", ("FC G-CapsNets", "MNIST"), ("Conv G-CapsNets", "MNIST")),
    ),
    notes=(
        "Between transform and routing there is no nonlinearity, so that in a fully-connected layer, and in any whose "
        "window covers the grid, the couplings add nothing but another geometry of optimisation.",
        "The released baseline with dynamic routing lacks the primary squash and trains by SGD: a weaker one than the "
        "paper's words, which is what runs here (preset='official' is the other).",
    ),
)

_LAYERS = {
    "Conv#1": ("front.conv1.weight", Published(9_400)),
    "Conv#2": ("front.primary.pose.weight", Published(401_400)),
    "Conv Caps Trans#1": ("capsules.layers.caps1.weight", Published(131_100)),
    "Conv Caps Routing#1": (
        "capsules.layers.caps1.coefficients",
        Published(56_400, note="printed for a 3x3 window, (3,3,16)x(7,7,8); the layer's is 4x4"),
    ),
    "Conv Caps Trans#2": ("capsules.layers.caps2.weight", Published(4_600)),
    "Conv Caps Routing#2": ("capsules.layers.caps2.coefficients", Published(10_400)),
    "FC Caps Trans": ("capsules.layers.classes.weight", Published(92_200)),
    "FC Caps Routing": (
        "capsules.layers.classes.coefficients",
        Published(11_500, note="printed for one coupling a dimension, (16,3,3,8)x10; the code has one a capsule"),
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
    "The multi-layer net, layer by layer: parameters as printed, and as its own sizes give them.",
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
    notes=("We build the released net's version: 4x4 routing windows, one coupling a capsule.",),
)

GAN = Measurement(
    "chen2019-gan",
    measure_gan_images,
    cpu={"n_images": 20_000},
    smoke={"n_images": 40, "epochs": 2, "images_per_class": 2, "width": 0.1, "n_shown": 2},
    datasets=("mnist",),
    output_file=GAN_FILE,
    estimated_seconds=1_500,
)
ON_GAN = Measurement(
    "chen2019-table3",
    measure_gan_errors,
    {"baseline": CNN, "fc": FC_PLAIN, "conv": CONV_PLAIN},
    depends_on={"gan": GAN},
)
_UNITS = "no multiple of 1/4,000, and so no percentage of 4,000 images: misprinted units"
_TABLE_3 = {
    1: (19.800, 23.500, 19.725),
    2: (5.600, 3.250, 4.050),
    3: (0.725, 0.000, 0.700),
    4: (Published(0.001, note=_UNITS), 0.000, 0.000),
    5: (Published(0.003, note=_UNITS), 0.000, Published(0.001, note=_UNITS)),
}
_NETS = {"baseline": "CNN", "fc": "FC", "conv": "Conv"}
TABLE_3 = Item(
    "table3",
    "Table 3",
    "Error on 4,000 digits that an AC-GAN makes after each of its first five epochs, of nets trained on real digits.",
    columns=dict.fromkeys(_NETS.values(), "error, %"),
    rows=tuple(
        TableRow(
            f"GAN epoch {epoch}",
            {
                column: Cell(printed, ON_GAN, f"{name} {epoch}")
                for (name, column), printed in zip(_NETS.items(), numbers, strict=True)
            },
        )
        for epoch, numbers in _TABLE_3.items()
    ),
    claims=(
        Claim("FC G-CapsNets generalise better than the CNN (epoch 2)", ("GAN epoch 2", "FC"), ("GAN epoch 2", "CNN")),
        Claim("FC G-CapsNets generalise better than the CNN (epoch 5)", ("GAN epoch 5", "FC"), ("GAN epoch 5", "CNN")),
    ),
    notes=(
        "All three nets see the same images, and every seed has a GAN of its own.",
        "An error here is that of the GAN as much as that of the net: what it makes may not be the digit that it was "
        "asked for.",
        "At the scale cpu an epoch of the GAN is 20,000 images, a third of the paper's.",
    ),
)
FIG_2 = Item(
    "fig2",
    "Figure 2",
    "Digits that the AC-GAN makes after each epoch.",
    measurements=(GAN,),
    draw=partial(draw_gan_images, GAN),
)

_ATTACKED = {
    "CNN": ("cnn", CNN, 11.35, 1),
    "FC G-CapsNets*": ("fc", FC_PLAIN, 8.92, 5),
    "Conv G-CapsNets*": ("conv", CONV_PLAIN, 11.35, 1),
}
BLACK = {
    label: Measurement(
        f"chen2019-blackbox-{name}",
        measure_black_box,
        {"source": LENET, "net": run},
        cpu={"n_images": 10_000},
        smoke={"n_images": 32},
    )
    for label, (name, run, _, _) in _ATTACKED.items()
}
BLACK_BOX = Item(
    "blackbox",
    "Section 4.3, black box",
    "FGSM of 8 levels of 255, made against a LeNet: accuracy of the nets before and after.",
    columns={
        "attacked": "test accuracy, %",
        "clean": "test accuracy, %",
        "white box": "test accuracy, %",
        "most predicted class": "% of images",
    },
    rows=tuple(
        TableRow(
            label,
            {
                "attacked": Cell(
                    Published(
                        printed,
                        note=f"the share of the digit {digit} in MNIST's test set: what constant predictions score",
                    ),
                    BLACK[label],
                    "attacked",
                ),
                "clean": Cell(None, BLACK[label], "clean"),
                "white box": Cell(None, BLACK[label], "white_box"),
                "most predicted class": Cell(None, BLACK[label], "most_predicted"),
            },
            variance_group="nets",
        )
        for label, (_, _, printed, digit) in _ATTACKED.items()
    ),
    draw=partial(draw_black_box, BLACK),
    notes=(
        "The published accuracies are an artefact, by inference: constant predictions, such as inputs in a wrong "
        "scale give.",
        "White box: the same attack by the net's own gradients, for comparison.",
    ),
)

SIZES = (8, 16, 32, 64)  # levels of 255
WHITE = {
    label: {
        eps: Measurement(
            f"chen2019-whitebox-{name}-{eps}",
            measure_white_box,
            {"net": run},
            options={"eps": eps},
            cpu={"iterations": 300, "interval": 50, "n_train_images": 5_000, "n_images": 5_000},
            smoke={"iterations": 2, "interval": 1, "n_train_images": 32, "n_images": 32},
            estimated_seconds=80,
        )
        for eps in SIZES
    }
    for label, (name, run, _, _) in _ATTACKED.items()
}
WHITE_BOX = Item(
    "whitebox",
    "Supplement 6.2, white box",
    "One perturbation for all images, from a generator trained against the net: accuracy over its iterations, for "
    "perturbations of four sizes.",
    columns={"attacked": "test accuracy, %", "random noise": "test accuracy, %", "clean": "test accuracy, %"},
    rows=tuple(
        TableRow(
            f"{label}, {eps} levels",
            {
                "attacked": Cell(None, measure, "attacked"),
                "random noise": Cell(None, measure, "noise"),
                "clean": Cell(None, measure, "clean"),
            },
            variance_group=f"{eps} levels",
        )
        for label, sizes in WHITE.items()
        for eps, measure in sizes.items()
    ),
    claims=tuple(
        Claim(
            f"(ours) the FC net withstands it better than the CNN, {eps} levels",
            (f"FC G-CapsNets*, {eps} levels", "attacked"),
            (f"CNN, {eps} levels", "attacked"),
            lower_is_better=False,
        )
        for eps in SIZES[1:]
    ),
    draw=partial(draw_white_box, WHITE),
    notes=(
        "The size of the perturbation is not stated; 8 to 64 levels of 255 here. The supplement asks for a small "
        "difference of logits and for wrong labels at once; we minimise the cross-entropy with a wrong label drawn "
        "for each image.",
        "The published curve's numbers are not in the text. Random noise of the same size is our control.",
    ),
)

PAPER = Paper(
    "chen2019",
    "Z. Chen, X. Li, C. Wang, D. Crandall: Generalized Capsule Networks with Trainable Routing Procedure. 2019, "
    "arXiv:1808.08692.",
    summary=(
        "Couplings trained as weights do without routing by agreement, are better than it and than a CNN on MNIST "
        "and CIFAR-10, stack into several layers, and generalise better to what a GAN makes."
    ),
    cost="MNIST: 10,000 steps of 100 images, half a second each on two cores; CIFAR-10 10,000 to 20,000.",
    cpu_scale=(
        "a quarter of the channels and capsule types (64 and 8; CNN 32 channels), 20,000 training images and 4 "
        "epochs; CIFAR-10 10,000 and 5 with half the width (the multi-layer net whole); one-cycle rates; the GAN as "
        "published, on 20,000 images an epoch; the white-box generator 300 iterations."
    ),
    deviations=(
        "Errors of the released code are not followed: its mask that keeps capsule 9, its diagonal Jacobian, its "
        "reshapes.",
        "Margins are the paper's 0.9; the released nets have 0.7 and 0.6 (preset='official').",
    ),
    items=(TABLE_2, MULTI, TABLE_3, FIG_2, BLACK_BOX, WHITE_BOX),
)
PAPERS.register(PAPER.name, PAPER)
