"""Items of Yang 2021 about the decoder and the duration of a training step: Figures 2 and 4."""

from functools import partial

from torchcaps.papers.measures.cost import SESSIONS, routing_seconds
from torchcaps.papers.measures.decoding import draw_foreign_decoder, measure_foreign_decoder
from torchcaps.papers.yang2021.runs import FASHION, routing_variants
from torchcaps.reproduce.schema import Cell, Claim, Item, Measurement, TableRow

__all__ = ["FIG_2", "FIG_4"]

FOREIGN = Measurement(
    "yang2021-fig2",
    measure_foreign_decoder,
    {"own": routing_variants(FASHION)["Dynamic"], "net": routing_variants(FASHION)["L2/FC"]},
    cpu={"n_images": 2_000},
    smoke={"n_images": 32},
)
FIG_2 = Item(
    "fig2",
    "Figure 2",
    "Class capsules of a network without reconstruction, decoded by the decoder of a network with dynamic routing.",
    columns={"squared error": "sum over pixels"},
    rows=(
        TableRow("capsules of the decoder's network", {"squared error": Cell(None, FOREIGN, "own")}),
        TableRow("capsules of the other network", {"squared error": Cell(None, FOREIGN, "foreign")}),
        TableRow("mean image of the class", {"squared error": Cell(None, FOREIGN, "class_mean")}),
    ),
    claims=(
        Claim(
            "capsules of another network decode badly",
            ("capsules of the decoder's network", "squared error"),
            ("capsules of the other network", "squared error"),
        ),
    ),
    draw=partial(draw_foreign_decoder, FOREIGN),
    notes=(
        "The paper concludes from bad reconstructions that capsules need not encode what a decoder needs. They only "
        "show a difference of bases: two networks trained independently share no basis, with or without "
        "reconstruction.",
    ),
)

_ROWS = {
    "Dynamic": "dynamic",
    "L2, own forward pass": "l2",
    "L2, reused children": "l2_reused",
    "L1, own forward pass": "l1",
    "L1, reused children": "l1_reused",
}
SECONDS = {
    column: Measurement(
        name,
        routing_seconds,
        options={"model": "yang2021_fashion_mnist", "reconstruction": reconstruction},
        smoke={"batch_size": 8, "repeats": 1},
        version=2,  # with reused children
        estimated_seconds=60,
    )
    for column, name, reconstruction in (
        ("with reconstruction", "yang2021-fig4", True),
        ("without (/FC)", "yang2021-fig4-fc", False),
    )
}
FIG_4 = Item(
    "fig4",
    "Figure 4",
    "Seconds per 100 training steps of the paper's network: dynamic routing, and quadratic-program routing whose "
    "ascent has a forward pass of its own or reuses the children of the descent.",
    columns={"with reconstruction": "seconds", "without (/FC)": "seconds", "saved": "%", "saved (/FC)": "%"},
    rows=tuple(
        TableRow(
            label,
            {
                **{column: Cell(None, measurement, name) for column, measurement in SECONDS.items()},
                **{
                    column: Cell(None, measurement, f"{name}_saved")
                    for column, measurement in zip(("saved", "saved (/FC)"), SECONDS.values(), strict=True)
                },
            },
        )
        for label, name in _ROWS.items()
    ),
    claims=tuple(
        Claim(
            "a training step is faster than with our dynamic routing",
            (label, "saved"),
            ("Dynamic", "saved"),
            lower_is_better=False,
            case=label,
            convergence="not applicable",
            convergence_reason="the time of a step does not depend on the steps before it",
        )
        for label in ("L2, own forward pass", "L2, reused children")
    ),
    notes=(
        "The paper reports savings of at least 20 %; the figure's numbers are not in the text. Our dynamic routing "
        "is about 30 times as fast as a naive implementation, which leaves little to save.",
        "Six steps of 128 images each, in turns; the fastest one times 100; CPU time if measured with one thread.",
        "Algorithm 1 updates the coefficients after the weights: as printed it needs another forward pass, including "
        "the convolutions. The ascent itself needs the children and the transforms only, so it can reuse the children "
        "of the descent's pass (reuse_children), which are those of the weights before the step. The inferred code "
        "computes both steps from one pass.",
        SESSIONS,
    ),
)
