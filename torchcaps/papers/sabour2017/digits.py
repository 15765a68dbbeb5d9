"""Table 1 and section 5.2: classification of single, overlapping and transformed digits."""

from functools import partial

from torchcaps.papers.measures.geometry import draw_affine_robustness, measure_affine_robustness
from torchcaps.reproduce.scales import CPU_DIGITS, LONG_DIGITS, NARROW_CAPSNET, NARROW_CNN
from torchcaps.reproduce.schema import Cell, Claim, Item, Measurement, Published, Run, TableRow
from torchcaps.routing import Dynamic

__all__ = ["MNIST", "MULTI", "SECTION_52", "TABLE_1"]

MNIST = Run("sabour2017_mnist", cpu={**CPU_DIGITS, **NARROW_CAPSNET}, long=LONG_DIGITS)
CNN = Run("sabour2017_cnn_mnist", cpu={**CPU_DIGITS, **NARROW_CNN}, long=LONG_DIGITS)
PAIRS = {"steps": 1_500, "max_test_images": 5_000, "lr_schedule": CPU_DIGITS["lr_schedule"]}
LONG_PAIRS = {"steps": 6_000, "max_test_images": 10_000}  # 45 to 50 minutes on one thread
MULTI = Run("sabour2017_multimnist", cpu={**PAIRS, **NARROW_CAPSNET}, long=LONG_PAIRS)
MULTI_CNN = Run("sabour2017_cnn_multimnist", cpu={**PAIRS, "width": 96, "features": 1_024}, long=LONG_PAIRS)

TABLE_1 = Item(
    "table1",
    "Table 1",
    "Test error of CapsNet on MNIST and MultiMNIST, by routing iterations, with and without reconstruction.",
    columns={"MNIST": "test error, %", "MultiMNIST": "test error, %"},
    rows=(
        TableRow("Baseline CNN", {"MNIST": Cell(0.39, CNN), "MultiMNIST": Cell(8.1, MULTI_CNN)}),
        TableRow(
            "CapsNet, 1 iteration, no reconstruction",
            {"MNIST": Cell(Published(0.34, 0.032), MNIST.replace(routing=Dynamic(1), reconstruction=False))},
        ),
        TableRow(
            "CapsNet, 1 iteration, reconstruction",
            {
                "MNIST": Cell(Published(0.29, 0.011), MNIST.replace(routing=Dynamic(1))),
                "MultiMNIST": Cell(7.5, MULTI.replace(routing=Dynamic(1))),
            },
        ),
        TableRow(
            "CapsNet, 3 iterations, no reconstruction",
            {"MNIST": Cell(Published(0.35, 0.036), MNIST.replace(reconstruction=False))},
        ),
        TableRow(
            "CapsNet, 3 iterations, reconstruction",
            {
                "MNIST": Cell(Published(0.25, 0.005), MNIST),
                "MultiMNIST": Cell(Published(5.2, note="the text says 5.0"), MULTI),
            },
        ),
    ),
    claims=(
        Claim(
            "reconstruction lowers the error (3 iterations)",
            ("CapsNet, 3 iterations, reconstruction", "MNIST"),
            ("CapsNet, 3 iterations, no reconstruction", "MNIST"),
        ),
        Claim(
            "reconstruction lowers the error (1 iteration)",
            ("CapsNet, 1 iteration, reconstruction", "MNIST"),
            ("CapsNet, 1 iteration, no reconstruction", "MNIST"),
        ),
        Claim(
            "three iterations have a lower error than one (with reconstruction)",
            ("CapsNet, 3 iterations, reconstruction", "MNIST"),
            ("CapsNet, 1 iteration, reconstruction", "MNIST"),
        ),
        Claim(
            "CapsNet has a lower error than the convolutional baseline",
            ("CapsNet, 3 iterations, reconstruction", "MNIST"),
            ("Baseline CNN", "MNIST"),
        ),
        Claim(
            "CapsNet has a lower error than the baseline on overlapping digits",
            ("CapsNet, 3 iterations, reconstruction", "MultiMNIST"),
            ("Baseline CNN", "MultiMNIST"),
        ),
        Claim(
            "three iterations have a lower error than one on overlapping digits",
            ("CapsNet, 3 iterations, reconstruction", "MultiMNIST"),
            ("CapsNet, 1 iteration, reconstruction", "MultiMNIST"),
        ),
    ),
    notes=(
        "The paper's caption says accuracy; the numbers are error rates.",
        "At the scale cpu the MultiMNIST baseline has 4.1M parameters and CapsNet 3.3M; in the paper they have 24.6M "
        "and 11.4M.",
        "Open re-implementations of the MNIST network report 0.34 to 0.36 %, not 0.25 % (XifengGuo/CapsNet-Keras, "
        "issue 16).",
        "The scale long trains on all 60,000 digits for 10 epochs, or for 6,000 steps on pairs of digits, with the "
        "networks of the scale cpu.",
    ),
)

# Section 5.2: both stop at a target accuracy on the validation set, digits at random positions.
EARLY = {"val_fraction": 0.05, "target_accuracy": 0.9923, "eval_interval_steps": 500}
STOPPED = {
    "target_accuracy": 0.97,
    "val_fraction": 0.15,  # of 20,000: with fewer the stopping time would be mostly noise
    "eval_interval_steps": 50,
    "steps": 1_500,
    "max_train_images": 20_000,
    "test_data": "affnist-style",
    "max_test_images": 2_000,
}
LONG_STOPPED = {
    "target_accuracy": 0.99,
    "val_fraction": 0.1,
    "eval_interval_steps": 200,
    "steps": 6_000,  # at most: an hour on one thread
    "max_train_images": None,
    "max_test_images": 10_000,
}
AFFINE = Run("sabour2017_affnist", EARLY, {**STOPPED, **NARROW_CAPSNET}, LONG_STOPPED)
AFFINE_CNN = Run(
    "sabour2017_cnn_affnist", EARLY, {**STOPPED, "width": 104}, LONG_STOPPED
)  # 1.8M parameters, like CapsNet
DOMAINS = {
    label: Measurement(
        f"sabour2017-sec52-{name}",
        measure_affine_robustness,
        {"net": run},
        cpu={"n_images": 5_000, "n_affine": 5_000, "n_sweep": 500},
        long={"n_images": 10_000, "n_affine": 10_000},
        smoke={"n_images": 32, "n_affine": 32, "n_sweep": 16},
        datasets=("expanded-mnist", "affnist"),
        estimated_seconds=50,
    )
    for label, name, run in (("CapsNet", "capsnet", AFFINE), ("CNN", "cnn", AFFINE_CNN))
}
SECTION_52 = Item(
    "sec52",
    "Section 5.2",
    "Trained on digits at random positions and stopped at the same accuracy; tested on affinely transformed digits.",
    columns={"expanded MNIST": "test accuracy, %", "affNIST": "test accuracy, %", "stopped after": "steps"},
    rows=tuple(
        TableRow(
            label,
            {
                "expanded MNIST": Cell(published[0], DOMAINS[label], "expanded"),
                "affNIST": Cell(published[1], DOMAINS[label], "affine"),
                "stopped after": Cell(None, DOMAINS[label], "steps"),
            },
            variance_group="nets",
        )
        for label, published in (("CapsNet", (99.23, 79.0)), ("CNN", (99.22, 66.0)))
    ),
    claims=(
        Claim(
            "CapsNet is more robust to affine transformations than the CNN",
            ("CapsNet", "affNIST"),
            ("CNN", "affNIST"),
            lower_is_better=False,
        ),
    ),
    draw=partial(draw_affine_robustness, DOMAINS),
    notes=(
        "The paper does not describe its CNN; ours has as many parameters as CapsNet, pooling and dropout.",
        "At the scales cpu and long the test set is affnist-style, which is generated; the official files are used at "
        "the scale full. Training stops at 97 % at the scale cpu, and at 99 % of all digits at the scale long.",
        "Both runs stop at the first evaluation on the validation set that reaches the target accuracy (early "
        "stopping in the paper).",
    ),
)
