"""Cost measurements: seconds per training step, inference time and training memory, parameters per layer."""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from torchcaps._core.plotting import COLORS, MARKERS, new_figure, save_figure, style_axes
from torchcaps._core.stats import student_quantile
from torchcaps.bench.memory import TrainingCase, measure_training_peaks
from torchcaps.bench.timing import training_step
from torchcaps.models import create_model
from torchcaps.models.registry import find_model
from torchcaps.reproduce.runner import MeasurementContext
from torchcaps.reproduce.schema import Measurement
from torchcaps.reproduce.statistics import Results
from torchcaps.reproduce.store import MeasurementCheckpoint
from torchcaps.routing import EM, Dynamic, InvertedAttention, Quadratic

__all__ = [
    "SESSIONS",
    "draw_iteration_cost",
    "epoch_seconds",
    "iteration_cost",
    "model_cost",
    "parameters_per_layer",
    "routing_seconds",
    "smoke_options",
    "step_seconds",
]

SESSIONS = (  # a note on items that compare times
    "A seed is a repetition of the whole measurement at another time. Times differ between them by a factor of up to "
    "two, with the machine and with what else runs on it; ratios of times, measured in turns, differ less and are "
    "compared."
)
ROUTINGS = {"dynamic": Dynamic, "em": EM, "inverted": InvertedAttention}
ROUTING_NAMES = {"dynamic": "dynamic", "em": "EM", "inverted": "inverted attention"}


@dataclasses.dataclass(frozen=True)
class _Duration:
    """Durations of one function.

    Args:
        repetitions: seconds of each repetition.
    """

    repetitions: tuple[float, ...]

    @property
    def minimum(self) -> float:
        """The shortest, in seconds: noise of the machine only adds time."""
        return min(self.repetitions)

    @property
    def half_width(self) -> float:
        """Half-width of the 95 % interval of the mean over the repetitions (Student's t), 0 for a single one.

        It stands for the uncertainty of the minimum, and is larger than that.
        """
        n = len(self.repetitions)
        return student_quantile(n - 1) * statistics.stdev(self.repetitions) / math.sqrt(n) if n > 1 else 0.0

    def result(self, name: str, factor: float) -> dict[str, Any]:
        """Return the duration as a result with its interval, in another unit, and the seconds of each repetition."""
        numbers = {name: factor * self.minimum, f"{name}_ci95": factor * self.half_width}
        return {**numbers, f"{name}_repetitions": list(self.repetitions)}


def _durations(
    functions: Mapping[str, Callable[[], object]], repeats: int, progress: Callable[[], object]
) -> dict[str, _Duration]:
    """Return the duration of each function; they are called in turns, and the first turn is a warm-up.

    With one thread this is CPU time, without the time in which other processes ran. Other processes still slow it down
    by a factor of up to two, through caches and memory, and not all functions alike: only ratios within one call are
    compared, and a claim needs several calls, one per seed, at different times.
    """
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(1 + repeats):
        for name, function in functions.items():
            start = clock()
            function()
            seconds[name].append(clock() - start)
            progress()
    return {name: _Duration(tuple(repetitions)) for name, (_, *repetitions) in seconds.items()}


def smoke_options(context: MeasurementContext, model: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return model options, narrowed at the scale ``smoke``."""
    return {**options, **(find_model(model).spec.smoke_changes() if context.scale == "smoke" else {})}


def epoch_seconds(
    context: MeasurementContext,
    models: Mapping[str, str],
    images_per_epoch: int = 60_000,
    batch_size: int = 100,
    repeats: int = 5,
    model_options: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> dict[str, Any]:
    """Measure the duration of an epoch of the paper's models: the fastest of a few training steps, extrapolated.

    Args:
        context: context of the measurement.
        models: model names by label; ``ratio`` is the time of the last relative to the first, ``fraction`` its inverse,
            and ``reference`` is 1, with which both are compared.
        images_per_epoch: size of the training set.
        batch_size: images per step.
        repeats: number of timed steps per model.
        model_options: options of the models, by label.
    """
    networks = {
        label: create_model(name, **smoke_options(context, name, model_options.get(label, {})))
        for label, name in models.items()
    }
    steps = {label: training_step(network, batch_size) for label, network in networks.items()}
    durations = _durations(steps, repeats, context.progress)
    first, last = (durations[label].minimum for label in (next(iter(models)), list(models)[-1]))
    results: dict[str, Any] = {"ratio": last / first, "fraction": first / last, "reference": 1.0}
    results["threads"] = torch.get_num_threads()
    for label, duration in durations.items():
        results |= duration.result(label, images_per_epoch / batch_size)
    return results


def routing_seconds(
    context: MeasurementContext, model: str, batch_size: int = 128, repeats: int = 5, reconstruction: bool = True
) -> dict[str, Any]:
    """Measure 100 training steps with dynamic routing and with quadratic-program routing, ascent included.

    The ascent has a forward pass of its own with the weights after the descent step (Yang 2021, Algorithm 1), or, in
    results that end in ``_reused``, reuses the children of the descent's forward pass.
    """
    routings = {"dynamic": Dynamic(3), "l2": Quadratic("l2", initial=0.1), "l1": Quadratic("l1", initial=0.1)}
    options = smoke_options(context, model, {"reconstruction": reconstruction})
    networks = {label: create_model(model, **options, routing=routing) for label, routing in routings.items()}
    steps = {label: training_step(network, batch_size) for label, network in networks.items()}
    for label in ("l2", "l1"):
        recipe = dataclasses.replace(networks[label].recipe, reuse_children=True)
        steps[f"{label}_reused"] = training_step(networks[label], batch_size, recipe)
    durations = _durations(steps, repeats, context.progress)
    results: dict[str, Any] = {"threads": torch.get_num_threads()}
    for label, duration in durations.items():
        results |= duration.result(label, 100)
        results[f"{label}_saved"] = 100 * (1 - duration.minimum / durations["dynamic"].minimum)
    return results


def step_seconds(
    context: MeasurementContext, models: Mapping[str, str], batch_size: int = 128, repeats: int = 5
) -> dict[str, Any]:
    """Measure 100 training steps in seconds, inference on a batch in milliseconds, and the time saved in per cent.

    Args:
        context: context of the measurement.
        models: model names by label; savings are relative to the first.
        batch_size: images per step.
        repeats: number of timed steps per model.
    """
    networks = {label: create_model(name, **smoke_options(context, name, {})) for label, name in models.items()}
    works: dict[str, Callable[[], object]] = {}
    for label, network in networks.items():
        works[f"{label} training"] = training_step(network, batch_size)
        images = torch.rand(batch_size, *network.spec.image, generator=torch.Generator().manual_seed(0))
        works[f"{label} inference"] = lambda network=network, images=images: _infer(network, images)
    durations = _durations(works, repeats, context.progress)
    first = next(iter(models))
    results: dict[str, Any] = {"threads": torch.get_num_threads()}
    for name, duration in durations.items():
        label, _, activity = name.rpartition(" ")
        results |= duration.result(name, 100 if activity == "training" else 1_000)
        results[f"{name}_saved"] = 100 * (1 - duration.minimum / durations[f"{first} {activity}"].minimum)
    return results


def iteration_cost(
    context: MeasurementContext,
    models: Mapping[str, str],
    iterations: int = 5,
    batch_size: int = 128,
    repeats: int = 2,
) -> dict[str, Any]:
    """Measure inference time and training memory by the number of routing iterations.

    Results of finished models are kept in a checkpoint.

    Args:
        context: context of the measurement.
        models: model names by routing (a key of ``ROUTINGS``).
        iterations: largest number of iterations.
        batch_size: images per batch.
        repeats: number of timed passes per case.
    """
    options = {"models": dict(models), "iterations": iterations, "batch_size": batch_size, "repeats": repeats}
    checkpoint = MeasurementCheckpoint(context.directory / "cost.pt", options)
    results: dict[str, Any] = checkpoint.load() or {"iterations": iterations}
    for label, name in models.items():
        if f"{label} memory 1" in results:
            continue  # measured before the interruption
        cases = {str(n): (name, {"routing": ROUTINGS[label](n)}) for n in range(1, iterations + 1)}
        milliseconds, memory = _inference_and_memory(context, cases, batch_size, repeats)
        results |= {f"{label} milliseconds {n}": milliseconds[n] for n in cases}
        results |= {f"{label} memory {n}": memory[n] for n in cases}
        if checkpoint.due:
            checkpoint.save(results)
    checkpoint.remove()
    return results


def model_cost(
    context: MeasurementContext, models: Mapping[str, str], batch_size: int = 128, repeats: int = 2
) -> dict[str, Any]:
    """Measure inference time and training memory of several models, by label."""
    cases: dict[str, tuple[str, dict[str, Any]]] = {label: (name, {}) for label, name in models.items()}
    milliseconds, memory = _inference_and_memory(context, cases, batch_size, repeats)
    times = {f"{label} milliseconds": milliseconds[label] for label in models}
    return times | {f"{label} memory": memory[label] for label in models}


def _inference_and_memory(
    context: MeasurementContext, cases: Mapping[str, tuple[str, dict[str, Any]]], batch_size: int, repeats: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Return milliseconds of inference on a batch and MiB of training memory of each case (model, its options)."""
    cases = {label: (name, smoke_options(context, name, options)) for label, (name, options) in cases.items()}
    training = {label: TrainingCase(model, batch_size, options) for label, (model, options) in cases.items()}
    peaks = measure_training_peaks(training, context.progress)
    passes = {}
    for label, (name, options) in cases.items():
        model = create_model(name, **options).eval()
        images = torch.rand(batch_size, *model.spec.image, generator=torch.Generator().manual_seed(0))
        passes[label] = lambda model=model, images=images: _infer(model, images)
    durations = _durations(passes, repeats, context.progress)
    milliseconds = {label: 1_000 * duration.minimum for label, duration in durations.items()}
    return milliseconds, {label: peak.training_bytes / 2**20 for label, peak in peaks.items()}


@torch.no_grad()
def _infer(model: Any, images: torch.Tensor) -> None:
    """Run one forward pass without gradients."""
    model(images)


def draw_iteration_cost(measurement: Measurement, results: Results, out: Path) -> None:
    """Draw inference time and training memory over the number of iterations."""
    numbers = results.first(measurement)
    if numbers is None:
        return
    iterations = range(1, int(numbers["iterations"]) + 1)
    figure = new_figure(8, 3.4)
    panels = figure.subplots(1, 2)
    titles = {"milliseconds": ("inference, one batch", "milliseconds"), "memory": ("training memory", "MiB")}
    for axes, (kind, (title, unit)) in zip(panels, titles.items(), strict=True):
        for index, (label, name) in enumerate(ROUTING_NAMES.items()):
            values = [numbers[f"{label} {kind} {n}"] for n in iterations]
            axes.plot(iterations, values, color=COLORS[index], marker=MARKERS[index], label=name)
        style_axes(axes, title, "routing iterations", unit)
        if all(numbers[f"{label} {kind} {n}"] > 0 for label in ROUTING_NAMES for n in iterations):
            axes.set_yscale("log")  # a small model may add no memory to the process
        axes.set_xticks(list(iterations))
    panels[0].legend(frameon=False, fontsize=8)
    figure.suptitle(results.title, fontsize=11)
    save_figure(figure, out)


def parameters_per_layer(context: MeasurementContext, model: str, layers: Mapping[str, str]) -> dict[str, Any]:
    """Count the parameters of each layer.

    Args:
        context: context of the measurement.
        model: name of the model.
        layers: prefix of the parameter names by the layer's name in the paper.
    """
    with torch.device("meta"):
        counts = {name: p.numel() for name, p in create_model(model).named_parameters()}
    return {
        label: sum(count for name, count in counts.items() if name.startswith(prefix))
        for label, prefix in layers.items()
    } | {"total": sum(counts.values())}
