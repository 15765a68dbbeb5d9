"""How capsules move when images do, and how far routing has come."""

from pathlib import Path
from typing import Any

import torch

from torchcaps._core.serialize import result_from_dict, result_to_dict
from torchcaps.analysis.affine import AffineSweep, affine_sweep, draw_affine
from torchcaps.analysis.alignment import Alignment, draw_alignment, draw_cosines, measure_alignment
from torchcaps.analysis.logits import LogitChange, draw_logit_change, logit_change
from torchcaps.analysis.trajectories import Trajectories, draw_trajectories, find_trajectories
from torchcaps.models import create_model
from torchcaps.reproduce.context import Context
from torchcaps.reproduce.kept import Kept
from torchcaps.reproduce.schema import Measure
from torchcaps.reproduce.statistics import Results
from torchcaps.training import Trained

__all__ = [
    "alignment",
    "draw_alignment_table",
    "draw_capsule_paths",
    "draw_cosine_histogram",
    "draw_logits",
    "draw_two_domains",
    "logits",
    "paths",
    "two_domains",
]

WAYS = ("Rot+", "x+", "y+", "Rot-", "x-", "y-")  # as the paper's table has them, in the order of the analysis


def alignment(context: Context, net: Trained, images: int = 10_000, before_tanh: bool = False) -> dict[str, Any]:
    """Measure Choi's alignment ratio by class and transformation, and the cosines between opposite directions."""
    batch = context.test_batch(net, images)
    found = measure_alignment(net.model, batch.images, batch.labels, before_tanh=before_tanh, progress=context.tick)
    numbers: dict[str, Any] = {}
    for column, name in enumerate(WAYS):
        numbers[f"average {name}"] = float(found.averages[column])
        for digit in range(found.ratios.shape[0]):
            if int(found.n[digit]):
                numbers[f"{digit} {name}"] = float(found.ratios[digit, column])
        numbers[f"average {name}_half"] = _half_of_average(found, column)
        numbers[f"random {name}"] = found.reference[0]
        numbers[f"random as printed {name}"] = found.printed_reference[0]
    moved = found.cosines[found.moved]
    numbers |= {
        "cosine_mean": float(moved.mean()),
        "cosine_below_minus_half": 100 * float((moved < -0.5).float().mean()),
        "cosine_above_half": 100 * float((moved > 0.5).float().mean()),
    }
    return {**numbers, **result_to_dict(found)}


def _half_of_average(found: Alignment, column: int) -> float:
    """Return half of the 95 % interval of the mean over classes, by the images' deviations within them."""
    n = torch.tensor(found.n)
    seen = n > 0
    variance = found.std[seen, column].double().square() / n[seen]
    return 1.959964 * float(variance.sum().sqrt()) / int(seen.sum())


def draw_alignment_table(measure: Measure, results: Results, out: Path) -> None:
    """Draw ratios by digit and transformation."""
    record = results.first(measure)
    if record is None:
        return
    draw_alignment(result_from_dict(Alignment, record["found"]), out, results.title)


def draw_cosine_histogram(measure: Measure, results: Results, out: Path) -> None:
    """Draw the histogram of cosines."""
    record = results.first(measure)
    if record is None:
        return
    draw_cosines(result_from_dict(Alignment, record["found"]), out, results.title)


def paths(context: Context, net: Trained, images: int = 500) -> dict[str, Any]:
    """Find two images whose capsules show what cosines of -1 and 1 mean."""
    batch = context.test_batch(net, images)
    return result_to_dict(find_trajectories(net.model, batch.images, batch.labels, progress=context.tick))


def draw_capsule_paths(measure: Measure, results: Results, out: Path) -> None:
    """Draw the paths of those two capsules."""
    record = results.first(measure)
    if record is None:
        return
    draw_trajectories(result_from_dict(Trajectories, record["found"]), out, results.title)


def logits(context: Context, net: Trained, images: int = 1_000, iterations: int = 6) -> dict[str, Any]:
    """Measure by how much the logits change in every iteration, before training and after it."""
    batch = context.test_batch(net, images)
    fresh = create_model(net.spec.model, **net.spec.model_options)
    numbers: dict[str, Any] = {}
    for stage, model in (("untrained", fresh), ("trained", net.model)):
        found = logit_change(model, batch.images, iterations, progress=context.tick)
        for number, (change, coupling) in enumerate(zip(found.change[-1], found.coupling_change[-1], strict=True)):
            numbers[f"{stage} {number + 1}"] = float(change)
            numbers[f"{stage} coupling {number + 1}"] = float(coupling)
        numbers |= result_to_dict(found, f"{stage}_")
    return numbers


def draw_logits(measure: Measure, results: Results, out: Path) -> None:
    """Draw the change by iteration."""
    record = results.first(measure)
    if record is None:
        return
    stages = {stage: result_from_dict(LogitChange, record["found"], f"{stage}_") for stage in ("untrained", "trained")}
    draw_logit_change(stages, out, results.title)


def two_domains(
    context: Context, net: Trained, images: int = 10_000, affine: int | None = None, sweep: int = 1_000
) -> dict[str, Any]:
    """Test a network where it was trained, digits at random places, and on affinely transformed digits.

    It is kept every minute, and goes on from there where it was killed: the official test set has 320,000 images.
    """
    kept = Kept(context.folder / "domains.pt", {"images": images, "affine": affine, "net": repr(net.spec)})
    new = {"right": 0, "seen": 0, "next": 0}
    left = kept.read() or {"found": {}, **new}
    found: dict[str, Any] = left["found"]
    for name, data, n in (("expanded", "expanded-mnist", images), ("affine", "affnist", affine)):
        if name in found:
            continue  # before it was killed
        loader = net.loader(context.dataset(data, n=n))
        for number in range(left["next"], len(loader)):
            batch = loader.batch(0, number)
            with torch.no_grad():
                left["right"] += int(net.model.is_correct(net.model(batch.images), batch.labels).sum())
            left["seen"] += len(batch.labels)
            if kept.due:
                kept.write({**left, "found": found, "next": number + 1})
            context.tick()
        found |= {name: 100 * left["right"] / left["seen"], f"{name}_images": left["seen"]}
        left |= new
    batch = context.batch(net, "expanded-mnist", sweep)
    swept = affine_sweep(net.model, batch.images, batch.labels, progress=context.tick)
    kept.clear()
    return {**found, "steps": net.step, **result_to_dict(swept, "sweep_")}


def draw_two_domains(measures: dict[str, Measure], results: Results, out: Path) -> None:
    """Draw accuracy under growing rotations, scales, shears and shifts, of all networks."""
    records = {name: results.first(measure) for name, measure in measures.items()}
    swept = {
        name: result_from_dict(AffineSweep, record["found"], "sweep_")
        for name, record in records.items()
        if record is not None
    }
    if swept:
        draw_affine(swept, out, results.title)
