"""Figures 3, 4 and 5: reconstructions, and what the dimensions of a capsule represent."""

from functools import partial

from torchcaps.papers.measures.decoding import (
    draw_measured_perturbation,
    draw_measured_reconstruction,
    draw_measured_segmentation,
    measure_perturbation,
    measure_reconstruction,
    measure_segmentation,
)
from torchcaps.papers.measures.properties import measure_width_dimension
from torchcaps.papers.sabour2017.digits import MNIST, MULTI
from torchcaps.reproduce.schema import Cell, Claim, Item, Measurement, TableRow

__all__ = ["FIG_3", "FIG_4", "FIG_5"]

# Trained longer, for figures: reconstructions are still blurred after the steps of the tables.
LONG_MNIST = MNIST.replace(cpu={"max_train_images": None, "epochs": 6})
LONG_MULTI = MULTI.replace(cpu={"steps": 4_500})
_LONG = "At the scale cpu this network is trained on all 60,000 images for 6 epochs, four times as long as in Table 1."

FIG_3_MEASURE = Measurement(
    "sabour2017-fig3", measure_reconstruction, {"net": LONG_MNIST}, cpu={"n_images": 10_000}, smoke={"n_images": 32}
)
FIG_3 = Item(
    "fig3",
    "Figure 3",
    "Test digits and their reconstructions: correctly classified ones, and misclassified ones decoded by label and by "
    "prediction.",
    columns={"squared error": "sum over pixels"},
    rows=(
        TableRow("all test images, by label", {"squared error": Cell(None, FIG_3_MEASURE, "squared_error")}),
        TableRow(
            "misclassified, by label",
            {"squared error": Cell(None, FIG_3_MEASURE, "squared_error_of_incorrect_by_label")},
        ),
        TableRow(
            "misclassified, by prediction",
            {"squared error": Cell(None, FIG_3_MEASURE, "squared_error_of_incorrect_by_prediction")},
        ),
    ),
    draw=partial(draw_measured_reconstruction, FIG_3_MEASURE),
    notes=(_LONG, "The paper shows images only; the numbers are our addition."),
)

FIG_4_MEASURE = Measurement("sabour2017-fig4", measure_perturbation, {"net": LONG_MNIST})
WIDTH = Measurement(
    "sabour2017-width",
    measure_width_dimension,
    {"net": LONG_MNIST},
    smoke={"n_images": 60, "n_per_class": 2},
    estimated_seconds=60,
)


def _width_row(label: str, prefix: str = "") -> TableRow:
    """Return a row with the measures of the width."""
    cells = {
        "width": Cell(None, WIDTH, f"{prefix}width_classes"),
        "largest response": Cell(None, WIDTH, f"{prefix}width_response"),
        "its fraction": Cell(None, WIDTH, f"{prefix}width_fraction"),
    }
    return TableRow(label, cells)


FIG_4 = Item(
    "fig4",
    "Figure 4",
    "Reconstructions while each of the 16 dimensions of the labelled capsule is perturbed by -0.25 to 0.25; whether "
    "one of them represents the width of the digit.",
    columns={
        "change": "squared, at both ends",
        "width": "classes with a direction for it, %",
        "largest response": "of the width, standard deviations",
        "its fraction": "of all responses of that direction, %",
    },
    rows=(
        TableRow("dimension with the largest change", {"change": Cell(None, FIG_4_MEASURE, "largest_change")}),
        TableRow("dimension with the smallest change", {"change": Cell(None, FIG_4_MEASURE, "smallest_change")}),
        _width_row("the 16 dimensions"),
        _width_row("16 random directions", "random_"),
    ),
    claims=(
        Claim(
            "one dimension almost always represents the width: more often than a random direction does",
            ("the 16 dimensions", "width"),
            ("16 random directions", "width"),
            lower_is_better=False,
        ),
    ),
    draw=partial(draw_measured_perturbation, FIG_4_MEASURE),
    notes=(
        _LONG,
        "The paper shows images only; the numbers are our addition.",
        "The response of a direction is the change of a property (width, height, slant, ink, position) of the "
        "reconstruction from -0.25 to 0.25, averaged over 20 images of a class, in standard deviations of the property "
        "among the test images of the class. A direction represents the width if its response in the width is at "
        "least 1 and at least half of the sum of its responses. Random orthonormal directions are the control.",
    ),
)

FIG_5_MEASURE = Measurement(
    "sabour2017-fig5",
    measure_segmentation,
    {"net": LONG_MULTI},
    cpu={"n_images": 2_000},
    smoke={"n_images": 32, "n_shown": 4},
)
FIG_5 = Item(
    "fig5",
    "Figure 5",
    "Reconstructions of two overlapping digits in two colours; misclassified ones by label and by prediction; absent "
    "classes.",
    columns={"overlap": "intersection over union, %"},
    rows=(
        TableRow("reconstruction by label", {"overlap": Cell(None, FIG_5_MEASURE, "by_label")}),
        TableRow("reconstruction by prediction", {"overlap": Cell(None, FIG_5_MEASURE, "by_prediction")}),
        TableRow(
            "by label, both digits predicted correctly", {"overlap": Cell(None, FIG_5_MEASURE, "by_label_if_correct")}
        ),
        TableRow("by label, one or both incorrect", {"overlap": Cell(None, FIG_5_MEASURE, "by_label_if_incorrect")}),
        TableRow(
            "foreground assigned to the digit with the brighter reconstruction",
            {"overlap": Cell(None, FIG_5_MEASURE, "by_intensity")},
        ),
        TableRow("all foreground assigned to both digits", {"overlap": Cell(None, FIG_5_MEASURE, "baseline")}),
    ),
    claims=(
        Claim(
            "reconstructions segment overlapping digits better than assigning all foreground to both",
            ("reconstruction by label", "overlap"),
            ("all foreground assigned to both digits", "overlap"),
            lower_is_better=False,
        ),
        Claim(
            "reconstructions tell which digit a foreground pixel belongs to",
            ("foreground assigned to the digit with the brighter reconstruction", "overlap"),
            ("all foreground assigned to both digits", "overlap"),
            lower_is_better=False,
            origin="ours",  # a criterion that was added after the paper's own had been measured
        ),
    ),
    draw=partial(draw_measured_segmentation, FIG_5_MEASURE),
    notes=(
        "At the scale cpu this network is trained for 4,500 steps, three times as long as in Table 1.",
        "The paper shows images and no score. Foreground is above 0.5, in reconstructions and in the true digits.",
        "A class is absent if it is neither label nor prediction; its reconstruction should be empty.",
    ),
)
