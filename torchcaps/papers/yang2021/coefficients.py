"""Items of Yang 2021 about the routing coefficients: ascent, lost classes, sparsity, assumptions of section III."""

from functools import partial

from torchcaps.papers.measures.coefficients import (
    draw_class_coefficients,
    measure_class_coefficients,
    measure_coefficient_signs,
)
from torchcaps.papers.measures.training import draw_curves, draw_early_training, measure_early_training
from torchcaps.papers.yang2021.runs import ERROR, FASHION, QUADRATIC, routing_variants
from torchcaps.reproduce.scales import NARROW_CAPSNET
from torchcaps.reproduce.schema import Cell, Claim, Item, Measurement, Run, TableRow
from torchcaps.routing import Quadratic

__all__ = ["ASSUMPTIONS", "LOST", "RATES", "SPARSITY"]

_VARIANTS = routing_variants(FASHION)
# A deviation from the default, kept for what it shows: the ascent does not follow the schedule of the weights.
_CONSTANT = {name: _VARIANTS[name].replace(ascent_lr="constant") for name in ("L2", "L1")}

RATES = Item(
    "rates",
    "Ours: ascent",
    "Quadratic-program routing with a decaying learning rate of the weights: the ascent follows it, or is constant.",
    columns={
        "following": ERROR,
        "constant": ERROR,
        "lowest recall, following": "of the classes, %",
        "lowest recall, constant": "of the classes, %",
    },
    rows=tuple(
        TableRow(
            variant,
            {
                "following": Cell(None, _VARIANTS[variant]),
                "lowest recall, following": Cell(None, _VARIANTS[variant], "lowest recall"),
                **(
                    {
                        "constant": Cell(None, _CONSTANT[variant]),
                        "lowest recall, constant": Cell(None, _CONSTANT[variant], "lowest recall"),
                    }
                    if variant in _CONSTANT
                    else {}
                ),
            },
        )
        for variant in ("Dynamic", "L2", "L1")
    ),
    claims=tuple(
        Claim(
            f"an ascent that follows the schedule has a lower error than a constant one ({variant})",
            (variant, "following"),
            (variant, "constant"),
            origin="ours",
        )
        for variant in _CONSTANT
    ),
    draw=partial(draw_curves, columns=("following", "constant")),
    notes=(
        "The paper gives the schedule of the weights but not the learning rate of the ascent on the coefficients. The "
        "objective has nine incorrect classes per correct one, so the ascent shrinks coefficients; the descent on the "
        "weights counteracts it only while its learning rate is large. The setting ascent_lr='constant' is our "
        "deviation; by default the ascent follows.",
    ),
)

CLASS_COEFFICIENTS = {
    label: Measurement(
        f"yang2021-lost-{label.replace('/', '').replace(', ', '-').lower()}",
        measure_class_coefficients,
        {"net": run, "dynamic": _VARIANTS["Dynamic"]},
        smoke={"n_images": 64},
        version=2,  # the scale of lambda
    )
    for label, run in {
        **{f"{variant}, following": _VARIANTS[variant] for variant in QUADRATIC},
        **{f"{variant}, constant": run for variant, run in _CONSTANT.items()},
    }.items()
}
LOST = Item(
    "lost",
    "Ours: lost classes",
    "The class with the smallest coefficients after training: their magnitude, and the recall of the class, with this "
    "network and with dynamic routing; the ascent follows the learning-rate schedule or is constant.",
    columns={
        "magnitude": "% of the mean over classes",
        "recall": "test accuracy, %",
        "recall, dynamic routing": "test accuracy, %",
        "other classes": "test accuracy, %",
        "other classes, dynamic routing": "test accuracy, %",
    },
    rows=tuple(
        TableRow(
            label,
            {
                "magnitude": Cell(None, measurement, "smallest_magnitude"),
                "recall": Cell(None, measurement, "recall"),
                "recall, dynamic routing": Cell(None, measurement, "recall_dynamic"),
                "other classes": Cell(None, measurement, "recall_of_others"),
                "other classes, dynamic routing": Cell(None, measurement, "recall_of_others_dynamic"),
            },
            variance_group=label.split(", ")[1],
        )
        for label, measurement in CLASS_COEFFICIENTS.items()
    ),
    draw=partial(draw_class_coefficients, CLASS_COEFFICIENTS),
    notes=(
        "The paper does not report single classes. Its objective adds the squared length of the labelled capsule and "
        "subtracts those of the others. If classes are similar, more images resemble a class than belong to it, "
        "which is the likely reason why the ascent shrinks its coefficients.",
    ),
)


def _signs(name: str, run: Run) -> Measurement:
    """Return the measurement of a network's coefficients; version 2 since the scale of lambda changed."""
    return Measurement(f"yang2021-signs-{name}", measure_coefficient_signs, {"net": run}, version=2)


SIGNS = {variant: _signs(variant.replace("/", "").lower(), _VARIANTS[variant]) for variant in QUADRATIC}
_STRONG = {
    "L2, lambda 1": FASHION.replace(routing=Quadratic("l2", initial=0.1, penalty_weight=1.0)),
    "L1, lambda 1": FASHION.replace(routing=Quadratic("l1", initial=0.1, penalty_weight=1.0)),
}
_SPARSE = SIGNS | {label: _signs(label.replace(", lambda ", "-").lower(), run) for label, run in _STRONG.items()}
SPARSITY = Item(
    "sparsity",
    "Section III, sparsity by L1",
    "Routing coefficients near zero after training (below a hundredth of the mean magnitude), and Hoyer's sparsity (0 "
    "for equal magnitudes, 1 for a single coefficient that is not zero).",
    columns={"near zero": "% of coefficients", "sparsity": "ratio", "error": ERROR},
    rows=tuple(
        TableRow(
            label,
            {
                "near zero": Cell(None, measurement, "near_zero"),
                "sparsity": Cell(None, measurement, "sparsity"),
                "error": Cell(None, measurement.runs["net"]),
            },
        )
        for label, measurement in _SPARSE.items()
    ),
    claims=tuple(
        Claim(
            f"L1 makes coefficients sparser than L2{suffix}",
            (f"L1{suffix}", "sparsity"),
            (f"L2{suffix}", "sparsity"),
            lower_is_better=False,
            origin="ours" if suffix else "paper",
        )
        for suffix in ("", ", lambda 1")
    ),
    notes=(
        "The paper's lambda of 0.001 can't produce sparsity within a short training: with our learning rate 0.01 on "
        "the mean over 128 images it changes a coefficient by 0.00000016 per step, and coefficients start at 0.1. Rows "
        "with lambda 1 are ours.",
        "The subgradient step of eq. 15 does not set coefficients to exactly zero.",
    ),
)

EARLY = Measurement(
    "yang2021-assumptions",
    measure_early_training,
    options={"model": "yang2021_fashion_mnist", "model_options": {}},
    cpu={"model_options": NARROW_CAPSNET, "steps": 200},
    smoke={"steps": 4, "interval": 2, "batch_size": 8},
    datasets=("fashion-mnist",),
    version=2,  # the scale of lambda
    estimated_seconds=110,
)
ASSUMPTIONS = Item(
    "assumptions",
    "Section III",
    "Two assumptions of the method: coefficients of both signs are useful, and early predictions are mostly incorrect.",
    columns={"negative after training": "% of coefficients", "error in the first quarter": "% of training images"},
    rows=(
        TableRow("Dynamic", {"error in the first quarter": Cell(None, EARLY, "dynamic first_quarter_error")}),
        TableRow(
            "L2",
            {
                "negative after training": Cell(None, SIGNS["L2"], "negative"),
                "error in the first quarter": Cell(None, EARLY, "l2 first_quarter_error"),
            },
        ),
        TableRow(
            "L1",
            {
                "negative after training": Cell(None, SIGNS["L1"], "negative"),
                "error in the first quarter": Cell(None, EARLY, "l1 first_quarter_error"),
            },
        ),
        TableRow("L2/FC", {"negative after training": Cell(None, SIGNS["L2/FC"], "negative")}),
        TableRow("L1/FC", {"negative after training": Cell(None, SIGNS["L1/FC"], "negative")}),
    ),
    draw=partial(draw_early_training, EARLY),
    notes=("The first quarter of the first training steps: of 200 at the scale cpu, of 400 otherwise.",),
)
