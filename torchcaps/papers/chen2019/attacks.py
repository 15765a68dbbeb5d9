"""Items of Chen 2019 about adversarial images: black box (section 4.3) and white box (supplement 6.2)."""

from functools import partial

from torchcaps.papers.chen2019.runs import CNN, CONV_PLAIN, DYNAMIC_PLAIN, FC_PLAIN, LENET
from torchcaps.papers.measures.robustness import draw_black_box, draw_white_box, measure_black_box, measure_white_box
from torchcaps.reproduce.schema import Cell, Claim, Item, Measurement, Published, TableRow

__all__ = ["BLACK_BOX", "WHITE_BOX"]

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
    "Accuracy before and after FGSM with a step of 8/255, computed from the gradients of a LeNet.",
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
                        note=f"the fraction of the digit {digit} in MNIST's test set: that of a constant prediction",
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
        "We infer that the published accuracies are an artefact: constant predictions, as caused by wrongly scaled "
        "inputs.",
        "White box: the same attack with the network's own gradients, for comparison.",
    ),
)

_NETWORKS = {
    "CNN": ("cnn", CNN),
    "CapsNets**": ("dynamic", DYNAMIC_PLAIN),
    "FC G-CapsNets*": ("fc", FC_PLAIN),
    "Conv G-CapsNets*": ("conv", CONV_PLAIN),
}
# Largest changes of a pixel, in levels of 255, by the objective of the generator.
_SIZES = {"random class": (8, 16, 32, 64), "untargeted": (16, 32, 64)}
_OBJECTIVES = {"random class": {}, "untargeted": {"objective": "untargeted"}}
WHITE = {
    (label, objective): {
        eps: Measurement(
            f"chen2019-whitebox-{name}-{eps}" + ("-untargeted" if objective == "untargeted" else ""),
            measure_white_box,
            {"net": run},
            options={"eps": eps, **_OBJECTIVES[objective]},
            cpu={"iterations": 300, "interval": 50, "n_train_images": 5_000, "n_images": 5_000},
            smoke={"iterations": 2, "interval": 1, "n_train_images": 32, "n_images": 32},
            estimated_seconds=80,
        )
        for eps in _SIZES[objective]
    }
    for objective in _SIZES
    for label, (name, run) in _NETWORKS.items()
}


def _row(label: str, objective: str, eps: int) -> str:
    return f"{label}, {objective}, {eps} levels"


WHITE_BOX = Item(
    "whitebox",
    "Supplement 6.2, white box",
    "One perturbation for all images, from a generator trained against the network: accuracy over its iterations, for "
    "perturbations of several sizes and two objectives.",
    columns={
        "attacked": "test accuracy, %",
        "after 100 iterations": "test accuracy, %",
        "random noise": "test accuracy, %",
        "clean": "test accuracy, %",
    },
    rows=tuple(
        TableRow(
            _row(label, objective, eps),
            {
                "attacked": Cell(None, measurement, "attacked"),
                **(
                    {"after 100 iterations": Cell(None, measurement, "attacked_early")}
                    if objective == "untargeted"
                    else {}
                ),
                "random noise": Cell(None, measurement, "noise"),
                "clean": Cell(None, measurement, "clean"),
            },
            variance_group=f"{objective}, {eps} levels",
        )
        for (label, objective), sizes in WHITE.items()
        for eps, measurement in sizes.items()
    ),
    claims=(
        *(
            Claim(
                "G-CapsNets fall within 100 iterations, below random noise",
                (_row(label, "untargeted", 64), "random noise"),
                (_row(label, "untargeted", 64), "after 100 iterations"),
                lower_is_better=False,
                case=f"{label}, 64 levels, untargeted",
            )
            for label in ("FC G-CapsNets*", "Conv G-CapsNets*")
        ),
        *(
            Claim(
                "G-CapsNets are not more robust than a CNN",
                (_row("CNN", objective, eps), "attacked"),
                (_row(label, objective, eps), "attacked"),
                lower_is_better=False,
                margin=1.0,
                case=f"{label}, {eps} levels, {objective}",
            )
            for objective in _SIZES
            for label in ("FC G-CapsNets*", "Conv G-CapsNets*")
            for eps in (32, 64)
        ),
    ),
    draw=partial(draw_white_box, WHITE),
    notes=(
        "The paper finds that G-CapsNets are not more robust than CNNs: the accuracy of all three networks falls "
        "within 100 iterations of the generator. A lower accuracy of the CNN by less than a point counts as equal.",
        "The paper does not state the size of the perturbation; we use 8 to 64 levels of 255. The supplement demands "
        "a small difference of logits and incorrect labels at once. 'random class' minimises the cross-entropy with a "
        "random incorrect label per image, which rewards flat scores as much as incorrect ones; 'untargeted' maximises "
        "the cross-entropy with the correct label, away from it.",
        "The values of the published curve are not in the text. CapsNets** (dynamic routing, without reconstruction) "
        "and random noise of the same size are our controls.",
    ),
)
