"""Section 7 and appendix A: other data sets, and the number of routing iterations."""

from functools import partial

from torchcaps.papers.measures.generalization import measure_generalization_gap, measure_training_loss
from torchcaps.papers.measures.geometry import draw_logit_changes, measure_logit_changes
from torchcaps.papers.measures.training import draw_curves, measure_ensemble
from torchcaps.reproduce.scales import CPU_CIFAR, CPU_DIGITS, LONG_CIFAR, NARROW_CAPSNET
from torchcaps.reproduce.schema import Cell, Claim, Item, Measurement, Published, Run, TableRow
from torchcaps.routing import Dynamic

__all__ = ["FIG_A1", "FIG_A2", "OVERFITTING", "SECTION_7", "SEVEN"]

CIFAR_NET = {**CPU_CIFAR, **NARROW_CAPSNET}
CIFAR_3 = Run("sabour2017_cifar10", cpu=CIFAR_NET, long=LONG_CIFAR)  # long: 40 minutes on one thread
CIFAR_1 = CIFAR_3.replace(routing=Dynamic(1, leak=True))
CIFAR_NO_LEAK = CIFAR_3.replace(routing=Dynamic(3))
SEVEN = Measurement(
    "sabour2017-sec7-ensemble",
    measure_ensemble,
    {"nets": CIFAR_3},
    ensemble_size=7,
    options={"data": "cifar10"},
    smoke={"n_images": 32},
)
SECTION_7 = Item(
    "sec7",
    "Section 7",
    "Other data sets: CIFAR-10 with a none-of-the-above category and an ensemble of 7, smallNORB, and SVHN with a "
    "small network.",
    columns={"error": "test error, %"},
    rows=(
        TableRow("CIFAR-10, one model", {"error": Cell(None, CIFAR_3)}),
        TableRow("CIFAR-10, one model without none-of-the-above", {"error": Cell(None, CIFAR_NO_LEAK)}),
        TableRow("CIFAR-10, 7 models", {"error": Cell(10.6, SEVEN, "error")}),
        TableRow("smallNORB", {"error": Cell(2.7, Run("sabour2017_smallnorb", cpu={**CPU_DIGITS, **NARROW_CAPSNET}))}),
        TableRow("SVHN, small network", {"error": Cell(4.3, Run("sabour2017_svhn", cpu=CPU_DIGITS))}),
    ),
    claims=(
        Claim(
            "a none-of-the-above category helps on CIFAR-10",
            ("CIFAR-10, one model", "error"),
            ("CIFAR-10, one model without none-of-the-above", "error"),
        ),
        Claim(
            "seven models have a lower error than one",
            ("CIFAR-10, 7 models", "error"),
            ("CIFAR-10, one model", "error"),
            origin="ours",
        ),
    ),
    notes=(
        "All five papers report dynamic routing on CIFAR-10: this one 10.6 % error (seven models), Yang 15.3, Tsai "
        "15.9, Choi 30 to 37 and Chen 40.9. Crops, colour jitter, padding, leak, width and length of training differ.",
        "The scale long trains on all 50,000 images for 10 epochs with the networks of the scale cpu.",
    ),
)

# Points of one training: the learning rate does not depend on the number of steps, so that a shorter run is the
# beginning of a longer one with the same seed. 300,000 steps are the paper's, 6,400 take 20 minutes on one thread.
STAGES = {
    stage: Run("sabour2017_mnist", {"steps": full}, {**NARROW_CAPSNET, "steps": cpu}, {"steps": long})
    for stage, full, cpu, long in (
        ("1/64", 4_688, 25, 100),
        ("1/16", 18_750, 100, 400),
        ("1/4", 75_000, 400, 1_600),
        ("all", 300_000, 1_600, 6_400),
    )
}
A_1 = Measurement(
    "sabour2017-figA1",
    measure_logit_changes,
    STAGES,
    cpu={"n_images": 500},
    smoke={"n_images": 16, "iterations": 3},
    version=2,
)
FIG_A1 = Item(
    "figa1",
    "Figure A.1",
    "Mean change of a routing logit per iteration at several points of the training, with more iterations than in "
    "training.",
    columns={
        **dict.fromkeys(("untrained", *(f"{stage} of the steps" for stage in STAGES)), "mean |change|"),
        "couplings, all of the steps": "mean |change|",
    },
    rows=tuple(
        TableRow(
            f"iteration {number}",
            {
                "untrained": Cell(None, A_1, f"untrained {number}"),
                **{
                    f"{stage} of the steps": Cell(
                        {("all", 2): Published(0.007), ("all", 5): Published(1e-5)}.get((stage, number)),
                        A_1,
                        f"{stage} {number}",
                    )
                    for stage in STAGES
                },
                "couplings, all of the steps": Cell(None, A_1, f"all coupling {number}"),
            },
        )
        for number in range(1, 7)
    ),
    claims=(
        Claim(
            "logits change less in later iterations, from the start of the training",
            ("iteration 5", "1/64 of the steps"),
            ("iteration 2", "1/64 of the steps"),
            convergence="not applicable",
            convergence_reason="the claim is about the start of the training",
        ),
        Claim(
            "logits change less in later iterations, at the end of the training",
            ("iteration 5", "all of the steps"),
            ("iteration 2", "all of the steps"),
        ),
    ),
    draw=partial(draw_logit_changes, A_1),
    notes=(
        "All columns are points of one training, with the paper's learning rate and all 60,000 images: 300,000 steps "
        "at the scale full, 1,600 at the scale cpu, 6,400 at the scale long.",
        "The paper reports 0.007 in the second iteration after 500 epochs, and about 1e-5 in the fifth.",
        "By Procedure 1 the change of a logit is the agreement <v_ij, v_j> itself. It does not vanish while the "
        "parent is active, unless votes are small or orthogonal to the capsule.",
    ),
)

LOSSES = {
    label: Measurement(name, measure_training_loss, {"record": run}, from_records=True)
    for label, name, run in (
        ("1 iteration", "sabour2017-figA2-1", CIFAR_1),
        ("3 iterations", "sabour2017-figA2-3", CIFAR_3),
    )
}
FIG_A2 = Item(
    "figa2",
    "Figure A.2",
    "Training loss on CIFAR-10 with one and with three routing iterations.",
    columns={
        "CIFAR-10": "test error, %",
        "first epoch": "mean training loss",
        "last epoch": "mean training loss",
    },
    rows=tuple(
        TableRow(
            label,
            {
                "CIFAR-10": Cell(None, run),
                "first epoch": Cell(None, LOSSES[label], "first_loss"),
                "last epoch": Cell(None, LOSSES[label], "last_loss"),
            },
            variance_group="nets",
        )
        for label, run in (("1 iteration", CIFAR_1), ("3 iterations", CIFAR_3))
    ),
    claims=(
        Claim(
            "three iterations optimise the loss faster than one",
            ("3 iterations", "first epoch"),
            ("1 iteration", "first epoch"),
            convergence="not applicable",
            convergence_reason="the claim is about the start of the training",
        ),
        Claim(
            "three iterations converge to a lower training loss than one",
            ("3 iterations", "last epoch"),
            ("1 iteration", "last epoch"),
        ),
    ),
    draw=partial(draw_curves, columns=("CIFAR-10",), key="train_loss"),
    notes=(
        "The paper shows curves of the training loss; their values are not in the text.",
        "The loss is the mean over an epoch of augmented images, while the network is trained.",
    ),
)

# Few images and many epochs, so that a network can overfit: 8 steps per epoch at the scale cpu.
FEW_IMAGES = {
    **NARROW_CAPSNET,
    "width": 32,
    "types": 4,
    "max_train_images": 1_000,
    "epochs": 60,
    "lr_schedule": CPU_CIFAR["lr_schedule"],
}
LONG_FEW_IMAGES = {**NARROW_CAPSNET, "max_train_images": 5_000, "epochs": 60}  # 25 minutes on one thread
GAPS = {
    iterations: Measurement(
        f"sabour2017-overfitting-{iterations}",
        measure_generalization_gap,
        {
            "net": Run(
                "sabour2017_cifar10",
                {"routing": Dynamic(iterations, leak=True)} if iterations != 3 else {},
                FEW_IMAGES,
                LONG_FEW_IMAGES,
            )
        },
        cpu={"n_images": 5_000},
        long={"n_images": 10_000},
        smoke={"n_images": 32},
    )
    for iterations in (1, 3, 5)
}
OVERFITTING = Item(
    "overfitting",
    "Appendix A",
    "Errors on training and on test images of CIFAR-10, by the number of routing iterations.",
    columns={"training": "error, %", "test": "error, %", "gap": "test minus training, points"},
    rows=tuple(
        TableRow(
            f"{iterations} iteration{'s' * (iterations > 1)}",
            {
                "training": Cell(None, gap, "training_error"),
                "test": Cell(None, gap, "test_error"),
                "gap": Cell(None, gap, "gap"),
            },
            variance_group="nets",
        )
        for iterations, gap in GAPS.items()
    ),
    claims=(
        Claim(
            "more iterations increase the capacity: 3 have a lower training error than 1",
            ("3 iterations", "training"),
            ("1 iteration", "training"),
        ),
        Claim(
            "more iterations overfit: the gap is larger with 3 than with 1",
            ("1 iteration", "gap"),
            ("3 iterations", "gap"),
        ),
        Claim(
            "more iterations overfit: the gap is larger with 5 than with 3",
            ("3 iterations", "gap"),
            ("5 iterations", "gap"),
        ),
    ),
    notes=(
        "The paper states the result and shows the training loss of Figure A.2 only. Training images are measured "
        "without augmentation.",
        "At the scale cpu: 32 channels, 4 types, 1,000 images, 60 epochs; at the scale long: 64 channels, 8 types, "
        "5,000 images, 60 epochs; so that there is something to overfit.",
    ),
)
