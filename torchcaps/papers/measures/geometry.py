"""Measurements of pose and routing: alignment of capsules, changes of routing logits, affine robustness."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torchcaps._core.serialize import result_from_dict, result_to_dict
from torchcaps.analysis.affine import AffineSweep, draw_affine
from torchcaps.analysis.alignment import Alignment, draw_alignment, draw_cosines
from torchcaps.analysis.logits import LogitChange, draw_logit_change
from torchcaps.analysis.trajectories import Trajectories, draw_trajectories
from torchcaps.models import create_model
from torchcaps.reproduce.runner import MeasurementContext
from torchcaps.reproduce.schema import Measurement
from torchcaps.reproduce.statistics import NORMAL_QUANTILE, Results
from torchcaps.reproduce.store import MeasurementCheckpoint
from torchcaps.training import TrainedRun

__all__ = [
    "TRANSFORMS",
    "draw_affine_robustness",
    "draw_alignment_table",
    "draw_capsule_paths",
    "draw_cosine_histogram",
    "draw_logit_changes",
    "measure_affine_robustness",
    "measure_alignment_ratios",
    "measure_capsule_paths",
    "measure_logit_changes",
]

TRANSFORMS = ("Rot+", "x+", "y+", "Rot-", "x-", "y-")  # columns of Choi 2019, table 3, in the order of the analysis


def measure_alignment_ratios(
    context: MeasurementContext, net: TrainedRun, n_images: int = 10_000, before_tanh: bool = False
) -> dict[str, Any]:
    """Measure the alignment ratio (Choi 2019, eq. 15) by class and transform, and the cosines between the directions of
    opposite transforms.
    """
    result: Alignment = context.analyze(net, "alignment", n_images, before_tanh=before_tanh)
    numbers: dict[str, Any] = {}
    for column, name in enumerate(TRANSFORMS):
        numbers[f"average {name}"] = float(result.averages[column])
        for label in range(result.ratios.shape[0]):
            if int(result.n[label]):
                numbers[f"{label} {name}"] = float(result.ratios[label, column])
        numbers[f"average {name}_ci95"] = _average_half_width(result, column)
        numbers[f"random {name}"] = result.reference[0]
        numbers[f"random as printed {name}"] = result.printed_reference[0]
    cosines = result.cosines[result.moved]
    numbers |= {
        "cosine_mean": float(cosines.mean()),
        "cosine_below_minus_half": 100 * float((cosines < -0.5).float().mean()),
        "cosine_above_half": 100 * float((cosines > 0.5).float().mean()),
    }
    return {**numbers, **result_to_dict(result)}


def _average_half_width(result: Alignment, column: int) -> float:
    """Return the half-width of the 95 % interval of the mean over classes, from the standard deviations within them."""
    n = torch.tensor(result.n)
    seen = n > 0
    variance = result.std[seen, column].double().square() / n[seen]
    return NORMAL_QUANTILE * float(variance.sum().sqrt()) / int(seen.sum())


def draw_alignment_table(measurement: Measurement, results: Results, out: Path) -> None:
    """Draw the ratios by class and transform."""
    numbers = results.first(measurement)
    if numbers is not None:
        draw_alignment(result_from_dict(Alignment, numbers), out, results.title)


def draw_cosine_histogram(measurement: Measurement, results: Results, out: Path) -> None:
    """Draw the histogram of cosines."""
    numbers = results.first(measurement)
    if numbers is not None:
        draw_cosines(result_from_dict(Alignment, numbers), out, results.title)


def measure_capsule_paths(context: MeasurementContext, net: TrainedRun, n_images: int = 500) -> dict[str, Any]:
    """Find two images whose capsules illustrate cosines of -1 and 1 between opposite transforms."""
    return result_to_dict(context.analyze(net, "trajectories", n_images))


def draw_capsule_paths(measurement: Measurement, results: Results, out: Path) -> None:
    """Draw the paths of these two capsules."""
    numbers = results.first(measurement)
    if numbers is not None:
        draw_trajectories(result_from_dict(Trajectories, numbers), out, results.title)


def measure_logit_changes(
    context: MeasurementContext, net: TrainedRun, n_images: int = 1_000, iterations: int = 6
) -> dict[str, Any]:
    """Measure the mean change of routing logits and couplings per iteration, before and after training."""
    untrained = create_model(net.spec.model, **net.spec.model_options)
    numbers: dict[str, Any] = {}
    for stage, model in (("untrained", untrained), ("trained", net.model)):
        result: LogitChange = context.analyze(net, "logits", n_images, model=model, iterations=iterations)
        changes = zip(result.change[-1], result.coupling_change[-1], strict=True)
        for iteration, (logit, coupling) in enumerate(changes, start=1):
            numbers[f"{stage} {iteration}"] = float(logit)
            numbers[f"{stage} coupling {iteration}"] = float(coupling)
        numbers |= result_to_dict(result, f"{stage}_")
    return numbers


def draw_logit_changes(measurement: Measurement, results: Results, out: Path) -> None:
    """Draw the change per iteration, before and after training."""
    numbers = results.first(measurement)
    if numbers is None:
        return
    stages = {stage: result_from_dict(LogitChange, numbers, f"{stage}_") for stage in ("untrained", "trained")}
    draw_logit_change(stages, out, results.title)


def measure_affine_robustness(
    context: MeasurementContext,
    net: TrainedRun,
    n_images: int = 10_000,
    n_affine: int | None = None,
    n_sweep: int = 1_000,
) -> dict[str, Any]:
    """Measure the test accuracy on the training distribution (digits at random positions), on affinely transformed
    digits, and under a sweep of single transforms.

    The counts are kept in a checkpoint: the official affNIST test set has 320,000 images.

    Args:
        context: context of the measurement.
        net: the network.
        n_images: number of digits at random positions.
        n_affine: number of affinely transformed digits; all by default.
        n_sweep: number of digits in the sweep.
    """
    options = {"n_images": n_images, "n_affine": n_affine, "net": repr(net.spec)}
    checkpoint = MeasurementCheckpoint(context.directory / "affine.pt", options)
    start = {"correct": 0, "seen": 0, "batch": 0}
    state = checkpoint.load() or {"numbers": {}, **start}
    numbers: dict[str, Any] = state["numbers"]
    for name, data, n in (("expanded", "expanded-mnist", n_images), ("affine", "affnist", n_affine)):
        if name in numbers:
            continue  # measured before the interruption
        loader = net.loader(context.dataset(data, n=n))
        for index in range(state["batch"], len(loader)):
            batch = loader.batch(0, index)
            with torch.no_grad():
                state["correct"] += int(net.model.is_correct(net.model(batch.images), batch.labels).sum())
            state["seen"] += len(batch.labels)
            if checkpoint.due:
                checkpoint.save({**state, "numbers": numbers, "batch": index + 1})
            context.progress()
        numbers |= {name: 100 * state["correct"] / state["seen"], f"{name}_images": state["seen"]}
        state |= start
    sweep: AffineSweep = context.analyze(net, "affine", n_sweep, "expanded-mnist")
    checkpoint.remove()
    return {**numbers, "steps": net.step, **result_to_dict(sweep, "sweep_")}


def draw_affine_robustness(measurements: Mapping[str, Measurement], results: Results, out: Path) -> None:
    """Draw accuracy under increasing rotation, scale, shear and shift, of all networks."""
    numbers = {name: results.first(measurement) for name, measurement in measurements.items()}
    sweeps = {name: result_from_dict(AffineSweep, n, "sweep_") for name, n in numbers.items() if n is not None}
    if sweeps:
        draw_affine(sweeps, out, results.title)
