"""Tsai 2020: variants of inverted attention on CIFAR-10."""

from functools import partial

from torchcaps.papers.measures.training import draw_curves
from torchcaps.papers.tsai2020.cifar import ACCURACY, INVERTED
from torchcaps.reproduce.schema import Cell, Claim, Item, Run, TableRow
from torchcaps.routing import InvertedAttention

__all__ = ["ABLATIONS"]


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
            "activations do not improve accuracy",
            ("the paper's, 2 iterations", "CIFAR-10"),
            ("C, activations as in EM, 2 iterations", "CIFAR-10"),
            lower_is_better=False,
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
