"""The pose that a class capsule represents: our measurement of what the abstract states, on images with known poses."""

from typing import Any

from torchcaps.analysis.pose import FACTORS
from torchcaps.models.schedules import OneCycle
from torchcaps.papers.measures.pose import measure_pose
from torchcaps.reproduce.schema import Cell, Claim, Item, Measurement, Run, TableRow
from torchcaps.routing import Dynamic, InvertedAttention, SelfAttention

__all__ = ["POSE"]

SPRITES: dict[str, Any] = {"data": "dsprites", "augmentation": "", "lr_schedule": OneCycle(), "val_fraction": 0.0}
CPU = {"max_train_images": 6_000, "epochs": 5, "max_test_images": None}
LONG = {"max_train_images": 60_000, "epochs": 5}
CAPSNET = Run(
    "capsnet_images",
    {**SPRITES, "channels": (16, 32, 32), "types": 4, "primary_activation": "squash"},
    CPU,
    LONG,
)
CNN = Run("cnn_images", {**SPRITES, "channels": (24, 32, 40, 48), "features": (16,)}, CPU, LONG)
NETS = {
    "dynamic routing": CAPSNET.replace(routing=Dynamic(3)),
    "inverted attention": CAPSNET.replace(routing=InvertedAttention(2)),
    "self-attention": CAPSNET.replace(routing=SelfAttention()),
    "CNN": CNN,
}
MEASUREMENTS = {
    label: Measurement(
        f"sabour2017-pose-{label.replace(' ', '-').lower()}",
        measure_pose,
        {"net": run},
        smoke={"n_train": 64, "n_images": 32},
        estimated_seconds=60,
    )
    for label, run in NETS.items()
}
UNTRAINED = "{}, untrained"


def _row(label: str, measurement: Measurement, prefix: str = "") -> TableRow:
    """Return the R2 of each factor, of a trained or of an untrained network."""
    cells = {name: Cell(None, measurement, f"{prefix}{name}") for name in FACTORS}
    if not prefix:
        cells["test accuracy"] = Cell(None, measurement.runs["net"], "accuracy")
    return TableRow(label, cells)


POSE = Item(
    "pose",
    "Abstract, pose",
    "R2 of linear probes from the capsule of the true class to the known position, scale and orientation of dSprites' "
    "shapes, on values that neither network nor probe has seen.",
    columns={**dict.fromkeys(FACTORS, "R2"), "test accuracy": "test accuracy, %"},
    rows=tuple(
        row
        for label, measurement in MEASUREMENTS.items()
        for row in (_row(label, measurement), _row(UNTRAINED.format(label), measurement, "untrained_"))
    ),
    claims=tuple(
        claim
        for name in ("x", "orientation")
        for claim in (
            Claim(
                f"a class capsule represents the instantiation parameters of its entity ({name}): more of it after "
                "training than before",
                ("dynamic routing", name),
                (UNTRAINED.format("dynamic routing"), name),
                lower_is_better=False,
            ),
            Claim(
                f"the class capsule of dynamic routing represents more of the pose ({name}) than the last hidden layer "
                "of a CNN",
                ("dynamic routing", name),
                ("CNN", name),
                lower_is_better=False,
                origin="ours",
            ),
        )
    ),
    notes=(
        "The paper's abstract says that the activity vector of a capsule represents the instantiation parameters of "
        "its entity; it measures none. Rows, data set and score are ours.",
        "The CNN has as many parameters as the capsule networks, convolutions with batch normalisation as well, and a "
        "hidden layer of 16 units that reads all positions; a class capsule has 16 numbers. An untrained network has "
        "initial weights and the batch statistics of training images.",
        "Test images have the held-out values of all factors, training images of none. One probe per shape; "
        "orientation modulo 90 degrees for squares, 180 for ellipses and 360 for hearts, as cosine and sine of the "
        "multiplied angle.",
        "At the scale cpu 6,000 training images and 5 epochs, at the scale long 60,000 images.",
    ),
)
