"""Measurements of pose and routing: alignment of capsules, changes of routing logits, affine robustness."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torchcaps._core.plotting import COLORS, MARKERS, new_figure, save_figure, style_axes
from torchcaps._core.serialize import result_from_dict, result_to_dict
from torchcaps.analysis.affine import AffineSweep, draw_affine
from torchcaps.analysis.alignment import Alignment
from torchcaps.analysis.alignment_figures import draw_cosines
from torchcaps.analysis.logits import LogitChange, draw_logit_change
from torchcaps.analysis.trajectories import Trajectories, draw_trajectories
from torchcaps.reproduce.runner import MeasurementContext
from torchcaps.reproduce.schema import Measurement
from torchcaps.reproduce.statistics import NORMAL_QUANTILE, Results
from torchcaps.reproduce.store import MeasurementCheckpoint
from torchcaps.training import TrainedRun
from torchcaps.training.setup import build_network

__all__ = [
    "TRANSFORMS",
    "draw_affine_robustness",
    "draw_alignment_ratios",
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
    context: MeasurementContext,
    net: TrainedRun,
    n_images: int = 10_000,
    before_tanh: bool = False,
    untrained: bool = False,
) -> dict[str, Any]:
    """Measure the alignment ratio (Choi 2019, eq. 15) by class and transform, and the cosines between the directions of
    opposite transforms.

    Args:
        context: context of the measurement.
        net: the network.
        n_images: number of test images.
        before_tanh: use capsules before their tanh.
        untrained: use the weights with which the training of ``net`` began: the control. Images change smoothly under
            a transform and a network with random weights is smooth too, so its capsules have high ratios.
    """
    model = build_network(net.spec) if untrained else None
    result: Alignment = context.analyze(net, "alignment", n_images, model=model, before_tanh=before_tanh)
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


def draw_alignment_ratios(measurements: Mapping[str, Measurement], results: Results, out: Path) -> None:
    """Draw the alignment ratios of several networks by transform: the average of each seed, and the classes of the
    first seed as small points. A line marks the mean of random vectors.
    """
    records = {label: [record["results"] for _, record in results.records(m)] for label, m in measurements.items()}
    records = {label: seeds for label, seeds in records.items() if seeds}
    if not records:
        return
    figure = new_figure(7.2, 3.8)
    axes = figure.subplots()
    for index, (label, seeds) in enumerate(records.items()):
        offset = 0.2 * (index - (len(records) - 1) / 2)
        positions = [column + offset for column in range(len(TRANSFORMS))]
        color, marker = COLORS[index % len(COLORS)], MARKERS[index % len(MARKERS)]
        classes = [name for name in map(str, range(len(seeds[0]["n"]))) if f"{name} {TRANSFORMS[0]}" in seeds[0]]
        for name in classes:
            ratios = [seeds[0][f"{name} {transform}"] for transform in TRANSFORMS]
            axes.scatter(positions, ratios, s=6, color=color, alpha=0.35, linewidths=0)
        for number, seed in enumerate(seeds):
            averages = [seed[f"average {transform}"] for transform in TRANSFORMS]
            style: dict[str, Any] = {"marker": marker, "s": 40, "facecolors": "none", "edgecolors": color}
            axes.scatter(positions, averages, label=label if number == 0 else None, linewidths=1.4, **style)
    first = next(iter(records.values()))[0]
    axes.axhline(first[f"random {TRANSFORMS[0]}"], color="0.4", linewidth=1, linestyle="--", label="random vectors")
    title = f"{results.item.title}, scale {results.store.scale}: average of each seed; small: classes"
    style_axes(axes, title, "transformation of the image", "alignment ratio")
    axes.set_xticks(range(len(TRANSFORMS)), [name.replace("-", "−") for name in TRANSFORMS])
    axes.set_ylim(top=1.0)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    save_figure(figure, out)


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
    context: MeasurementContext, n_images: int = 1_000, iterations: int = 6, **stages: TrainedRun
) -> dict[str, Any]:
    """Measure the mean change of routing logits and couplings per iteration at several points of a training.

    Args:
        context: context of the measurement.
        n_images: number of test images.
        iterations: number of routing iterations, usually more than in training.
        stages: the network at points of its training, by name; ``untrained``, its initial weights, is added.
    """
    first = next(iter(stages.values()))
    models = {"untrained": build_network(first.spec), **{stage: net.model for stage, net in stages.items()}}
    numbers: dict[str, Any] = {}
    for stage, model in models.items():
        result: LogitChange = context.analyze(first, "logits", n_images, model=model, iterations=iterations)
        changes = zip(result.change[-1], result.coupling_change[-1], strict=True)
        for iteration, (logit, coupling) in enumerate(changes, start=1):
            numbers[f"{stage} {iteration}"] = float(logit)
            numbers[f"{stage} coupling {iteration}"] = float(coupling)
        numbers |= result_to_dict(result, f"{stage}_")
    return numbers | {f"{stage}_steps": net.step for stage, net in stages.items()}


def draw_logit_changes(measurement: Measurement, results: Results, out: Path) -> None:
    """Draw the change per iteration, one curve per point of the training."""
    numbers = results.first(measurement)
    if numbers is None:
        return
    labels = {f"{numbers[f'{stage}_steps']:,} steps": stage for stage in measurement.runs}
    stages = {"untrained": "untrained", **labels}
    changes = {label: result_from_dict(LogitChange, numbers, f"{stage}_") for label, stage in stages.items()}
    draw_logit_change(changes, out, results.title)


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
