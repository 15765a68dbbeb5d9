"""Which way capsules move."""

from collections.abc import Callable
from typing import Any

from torchcaps import analysis
from torchcaps.cli.kinds.job import PIECE, Columns, Found, Job, decimal, drawn, pieces, whole
from torchcaps.cli.runs import share

__all__ = ["alignment", "cosines", "directions"]


def _aligned(job: Job, call: Callable[..., Any]) -> Any:
    batch = job.batch(job.one)
    tick = job.tick("alignment", 31 * pieces(len(batch.images)))  # 30 transformations, and none
    before = job.options.before_tanh
    return call(job.one.model, batch.images, batch.labels, before_tanh=before, batch_size=PIECE, progress=tick)


def alignment(job: Job) -> Found:
    """Measure how well capsules keep to a direction."""
    found: analysis.Alignment = _aligned(job, analysis.align)
    classes = job.one.classes
    rows = {classes[n]: found.ratios[n] for n, count in enumerate(found.n) if count} | {"average": found.averages}
    columns: Columns = {name: (name, decimal(3)) for name in found.names}
    numbers = {name: dict(zip(found.names, row.tolist(), strict=True)) for name, row in rows.items()}
    mean, spread = found.reference
    notes = [f"Random vectors have {mean:.3f} ± {spread:.3f}."]
    if found.n_still:
        notes.append(f"{found.n_still:,} times a capsule did not move at all; these are left out.")
    also = {"random": {"mean": mean, "std": spread}}
    draw = drawn(analysis.draw_alignment, found, job.title, classes=classes)
    return Found("alignment ratio", sum(found.n), "class", columns, numbers, draw, tuple(notes), also)


def cosines(job: Job) -> Found:
    """Measure whether both sides of a transformation move a capsule apart."""
    found: analysis.Alignment = _aligned(job, analysis.align)
    numbers: dict[str, dict[str, Any]] = {}
    for n, name in enumerate(("rotation", "x shift", "y shift")):
        values = found.cosines[:, n][found.moved[:, n]]
        known = len(values) > 0
        numbers[name] = {
            "images": len(values),
            "mean": float(values.mean()) if known else None,
            "opposite": float((values < 0).double().mean()) if known else None,
        }
    columns: Columns = {
        "images": ("images", whole),
        "mean": ("mean cosine", decimal(3)),
        "opposite": ("below 0", share),
    }
    note = "−1: both sides move the capsule apart along one line; +1: it can't tell them apart."
    draw = drawn(analysis.draw_cosines, found, job.title)
    title = "cosine between the directions of + and −"
    return Found(title, sum(found.n), "transformation", columns, numbers, draw, (note,))


def directions(job: Job) -> Found:
    """Show two capsules on their way."""
    found: analysis.Directions = _aligned(job, analysis.directions)
    numbers = {
        name: {
            "cosine": found.cosines[n],
            "transformation": found.names[n],
            "class": job.one.classes[found.labels[n]],
            "image": found.images[n],
            "in_the_plane": found.shown[n],
        }
        for n, name in enumerate(("lowest", "highest"))
    }
    columns: Columns = {
        "cosine": ("cosine", decimal(3)),
        "transformation": ("transformation", str),
        "class": ("class", str),
        "image": ("image", whole),
        "in_the_plane": ("in the plane", share),
    }
    draw = drawn(analysis.draw_directions, found, job.title, classes=job.one.classes)
    return Found("two capsules on their way", len(job.dataset), "case", columns, numbers, draw)
