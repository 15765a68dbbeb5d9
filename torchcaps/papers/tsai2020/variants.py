"""Tsai 2020: variants of inverted attention on CIFAR-10, and the variance of the three routings."""

from functools import partial

from torchcaps.models.recipe import LossConfig
from torchcaps.papers.measures.training import draw_curves, measure_spread
from torchcaps.papers.tsai2020.cifar import ACCURACY, DYNAMIC, EM_ROUTING, INVERTED, LONG_SPREAD, SPREAD
from torchcaps.reproduce.schema import Cell, Claim, Item, Measurement, Run, TableRow
from torchcaps.routing import InvertedAttention

__all__ = ["ABLATIONS", "INITIAL_POSES", "LOSSES", "VARIANCE"]


def _with(run: Run, routing: InvertedAttention, **options: str) -> Run:
    """Return a run with another routing and other options of the model."""
    return run.replace(routing=routing, **({"model_options": options} if options else {}))


def _row(label: str, run: Run) -> TableRow:
    return TableRow(label, {"CIFAR-10": Cell(None, run, "accuracy")})


_ABLATIONS = {  # run by number of iterations, and the numbers of iterations
    "the paper's": (lambda n: INVERTED if n == 2 else _with(INVERTED, InvertedAttention(n)), range(1, 6)),
    "A, no layer norm": (lambda n: _with(INVERTED, InvertedAttention(n, normalize=False)), range(1, 6)),
    "B, sequential": (lambda n: _with(INVERTED, InvertedAttention(n), schedule="sequential"), range(2, 6)),
    "C, activations as in EM": (lambda n: _with(INVERTED, InvertedAttention(n, activations=True)), range(1, 6)),
}
ABLATIONS = Item(
    "ablations",
    "Figure 4, ablations",
    "Inverted attention without layer norm (A), with sequential routing (B), and with activations as in EM routing "
    "(C).",
    columns={"CIFAR-10": ACCURACY},
    rows=tuple(
        _row(f"{label}, {count} iteration{'s' * (count > 1)}", make(count))
        for label, (make, counts) in _ABLATIONS.items()
        for count in counts
    ),
    claims=(
        Claim(
            "layer normalisation is necessary",
            ("the paper's, 2 iterations", "CIFAR-10"),
            ("A, no layer norm, 2 iterations", "CIFAR-10"),
            lower_is_better=False,
        ),
        Claim(
            "concurrent routing is more accurate than sequential",
            ("the paper's, 2 iterations", "CIFAR-10"),
            ("B, sequential, 2 iterations", "CIFAR-10"),
            lower_is_better=False,
        ),
        Claim(
            "activations do not improve accuracy (by more than one point)",
            ("the paper's, 2 iterations", "CIFAR-10"),
            ("C, activations as in EM, 2 iterations", "CIFAR-10"),
            lower_is_better=False,
            margin=1.0,
        ),
    ),
    draw=partial(draw_curves, columns=("CIFAR-10",), groups=tuple(_ABLATIONS)),
    notes=(
        "With one iteration B equals the paper's own routing, so it starts at two.",
        "The paper does not define the activations of C; ours are those of EM routing and scale the pose before the "
        "classifier.",
        "The paper reports that A ends in uniform predictions with five iterations.",
    ),
)

INITIAL_POSES = Item(
    "initial",
    "Footnote 1, initial poses",
    "Inverted attention with other poses before the first iteration than zero.",
    columns={"CIFAR-10": ACCURACY},
    rows=(
        _row("zero", INVERTED),
        _row("random, fixed", _with(INVERTED, InvertedAttention(2, initial="random"))),
        _row("learned", _with(INVERTED, InvertedAttention(2, initial="learned"))),
    ),
    claims=(
        Claim(
            "zero poses are as good a start as random ones (within one point)",
            ("zero", "CIFAR-10"),
            ("random, fixed", "CIFAR-10"),
            lower_is_better=False,
            margin=1.0,
        ),
        Claim(
            "zero poses are as good a start as learned ones (within one point)",
            ("zero", "CIFAR-10"),
            ("learned", "CIFAR-10"),
            lower_is_better=False,
            margin=1.0,
        ),
    ),
    draw=partial(draw_curves, columns=("CIFAR-10",)),
    notes=(
        "Random poses are drawn from a standard normal distribution when the network is built and stay as they are; "
        "learned ones start from the same distribution. Both give one pose per parent type, for all positions.",
    ),
)

_SPREAD = LossConfig("spread", margin_schedule="linear", margin_steps=350 * 391)  # epochs times batches, as EM routing
LOSSES = Item(
    "losses",
    "Section 4.1, losses",
    "Inverted attention trained with the losses of dynamic routing (margin) and EM routing (spread).",
    columns={"CIFAR-10": ACCURACY},
    rows=(
        _row("cross-entropy", INVERTED),
        _row("margin loss", INVERTED.replace(classifier="sigmoid")),
        _row(
            "spread loss",
            INVERTED.replace({"loss": SPREAD}, {"loss": LONG_SPREAD}, loss=_SPREAD, classifier="sigmoid"),
        ),
    ),
    claims=tuple(
        Claim(
            f"the cross-entropy is at least as accurate as the {loss} loss (within one point)",
            ("cross-entropy", "CIFAR-10"),
            (f"{loss} loss", "CIFAR-10"),
            lower_is_better=False,
            margin=1.0,
        )
        for loss in ("margin", "spread")
    ),
    draw=partial(draw_curves, columns=("CIFAR-10",)),
    notes=(
        "Both losses need scores from 0 to 1, and layer normalisation fixes the length of a capsule: the score is the "
        "sigmoid of the shared classifier's logit (our choice).",
    ),
)


def _spread_over_seeds(name: str, run: Run) -> Measurement:
    """Return the measurement of a routing's variation over seeds."""
    return Measurement(
        f"tsai2020-variance-{name}",
        measure_spread,
        runs={"records": run},
        ensemble_size=3,
        from_records=True,
        estimated_seconds=0.1,
    )


_SPREADS = {
    "Inverted attention": _spread_over_seeds("inverted", INVERTED),
    "Dynamic routing": _spread_over_seeds("dynamic", DYNAMIC),
    "EM routing": _spread_over_seeds("em", EM_ROUTING),
}
VARIANCE = Item(
    "variance",
    "Figure 4, variance",
    "Variation of the accuracy over seeds of the three routings on the simple backbone.",
    columns={"standard deviation": "points of accuracy", "range": "points of accuracy", "mean": ACCURACY},
    rows=tuple(
        TableRow(
            label,
            {
                "standard deviation": Cell(None, measurement, "std"),
                "range": Cell(None, measurement, "range"),
                "mean": Cell(None, measurement, "mean"),
            },
            variance_group="spread",
        )
        for label, measurement in _SPREADS.items()
    ),
    claims=tuple(
        Claim(
            f"the accuracy of inverted attention varies less over seeds than that of {other}",
            ("Inverted attention", "standard deviation"),
            (other, "standard deviation"),
        )
        for other in ("Dynamic routing", "EM routing")
    ),
    notes=(
        "A measurement is the standard deviation of the accuracies of three networks with consecutive seeds, trained "
        "as in Table 1; its own repetitions take the next three seeds.",
    ),
)
