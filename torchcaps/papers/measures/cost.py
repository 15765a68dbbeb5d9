"""What things cost: seconds of a step, memory by iterations, parameters layer by layer."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from torchcaps._core.plotting import COLORS, MARKERS, new_figure, save_figure, style_axes
from torchcaps.models import create_model
from torchcaps.papers.measures.peak import training_peaks
from torchcaps.reproduce.context import Context
from torchcaps.reproduce.kept import Kept
from torchcaps.reproduce.planner import timed_step
from torchcaps.reproduce.schema import Measure
from torchcaps.reproduce.statistics import Results
from torchcaps.routing import EM, Dynamic, InvertedAttention, Quadratic

__all__ = ["draw_iteration_cost", "epoch_seconds", "iteration_cost", "layer_counts", "net_cost", "routing_seconds"]


def _interleaved(
    steps: Mapping[str, Callable[[], object]], repeat: int, tick: Callable[[], object]
) -> dict[str, float]:
    """Return the least seconds of each, taken in turns: machines are noisy, and noise only adds."""
    least = dict.fromkeys(steps, float("inf"))
    for _ in range(1 + repeat):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            least[name] = min(least[name], time.perf_counter() - start)
            tick()
    return least


def _narrowed(context: Context, name: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a model, at the scale ``smoke`` those of a narrow one."""
    from torchcaps.models.registry import MODELS

    return {**fields, **(MODELS.get(name).spec.smoke_changes() if context.scale == "smoke" else {})}


def epoch_seconds(
    context: Context, nets: dict[str, str], images: int = 60_000, batch: int = 100, repeat: int = 3
) -> dict[str, Any]:
    """Measure what an epoch takes, by the least of a few training steps in turns: the paper's nets, whole."""
    models = {label: create_model(name, **_narrowed(context, name, {})) for label, name in nets.items()}
    steps = {label: timed_step(model, batch) for label, model in models.items()}
    least = _interleaved(steps, repeat, context.tick)
    return {label: seconds * images / batch for label, seconds in least.items()} | {
        "ratio": least[list(nets)[-1]] / least[next(iter(nets))],
        "threads": torch.get_num_threads(),
    }


def routing_seconds(
    context: Context, model: str, batch: int = 128, repeat: int = 3, reconstruction: bool = True
) -> dict[str, Any]:
    """Measure a training step with dynamic routing and with the quadratic program, its step of ascent included.

    The ascent takes a forward pass of its own, with the weights as the descent has left them: Algorithm 1.
    """
    routings = {"dynamic": Dynamic(3), "l2": Quadratic("l2", initial=0.1), "l1": Quadratic("l1", initial=0.1)}
    fields = _narrowed(context, model, {"reconstruction": reconstruction})
    models = {label: create_model(model, **fields, routing=routing) for label, routing in routings.items()}
    steps = {label: timed_step(net, batch) for label, net in models.items()}
    least = _interleaved(steps, repeat, context.tick)
    found: dict[str, Any] = {label: 100 * seconds for label, seconds in least.items()}
    for label in ("l2", "l1"):
        found[f"{label}_saved"] = 100 * (1 - least[label] / least["dynamic"])
    return found | {"threads": torch.get_num_threads()}


def iteration_cost(
    context: Context, nets: dict[str, str], iterations: int = 5, batch: int = 128, repeat: int = 2
) -> dict[str, Any]:
    """Measure inference, and the memory of training, of nets by their routing iterations. What is known of one net
    is kept where the next is killed.
    """
    kinds = {"dynamic": Dynamic, "em": EM, "inverted": InvertedAttention}
    kept = Kept(context.folder / "cost.pt", {"nets": nets, "iterations": iterations, "batch": batch, "repeat": repeat})
    found: dict[str, Any] = kept.read() or {"iterations": iterations}
    for label, name in nets.items():
        if f"{label} memory 1" in found:
            continue  # before it was killed
        counts = range(1, iterations + 1)
        cases = {str(count): (name, {"routing": kinds[label](count)}) for count in counts}
        seconds, memory = _inference_and_memory(context, cases, batch, repeat)
        found |= {f"{label} seconds {count}": seconds[count] for count in cases}
        found |= {f"{label} memory {count}": memory[count] for count in cases}
        if kept.due:
            kept.write(found)
    kept.clear()
    return found


def net_cost(context: Context, nets: dict[str, str], batch: int = 128, repeat: int = 2) -> dict[str, Any]:
    """Measure inference, and the memory of training, of several nets."""
    seconds, memory = _inference_and_memory(context, {label: (name, {}) for label, name in nets.items()}, batch, repeat)
    return {f"{label} seconds": seconds[label] for label in nets} | {f"{label} memory": memory[label] for label in nets}


def _inference_and_memory(
    context: Context, cases: Mapping[str, tuple[str, dict[str, Any]]], batch: int, repeat: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the milliseconds of a batch's inference, and the MiB of training with it, of (model, its fields)."""
    cases = {label: (name, _narrowed(context, name, fields)) for label, (name, fields) in cases.items()}
    peaks = training_peaks(cases, batch, context.tick)
    steps = {}
    for label, (name, fields) in cases.items():
        model = create_model(name, **fields).eval()
        images = torch.rand(batch, *model.spec.image, generator=torch.Generator().manual_seed(0))
        steps[label] = lambda model=model, images=images: _inferred(model, images)
    seconds = _interleaved(steps, repeat, context.tick)
    return {k: 1_000 * v for k, v in seconds.items()}, {k: v / 2**20 for k, v in peaks.items()}


@torch.no_grad()
def _inferred(model: Any, images: torch.Tensor) -> None:
    model(images)


def draw_iteration_cost(measure: Measure, results: Results, out: Path) -> None:
    """Draw both by iterations."""
    record = results.first(measure)
    if record is None:
        return
    found = record["found"]
    counts = range(1, int(found["iterations"]) + 1)
    figure = new_figure(8, 3.4)
    panels = figure.subplots(1, 2)
    words = {"dynamic": "dynamic", "em": "EM", "inverted": "inverted attention"}
    for axes, kind, unit in zip(panels, ("seconds", "memory"), ("milliseconds", "MiB"), strict=True):
        for number, (label, name) in enumerate(words.items()):
            values = [found[f"{label} {kind} {count}"] for count in counts]
            axes.plot(counts, values, color=COLORS[number], marker=MARKERS[number], label=name)
        style_axes(axes, "inference, one batch" if kind == "seconds" else "memory to train", "routing iterations", unit)
        if all(found[f"{label} {kind} {count}"] > 0 for label in words for count in counts):
            axes.set_yscale("log")  # small nets may find all that they need in memory that is there already
        axes.set_xticks(list(counts))
    panels[0].legend(frameon=False, fontsize=8)
    figure.suptitle(results.title, fontsize=11)
    save_figure(figure, out)


def layer_counts(context: Context, model: str, layers: dict[str, str]) -> dict[str, Any]:
    """Count the parameters of a network's layers, by the names that a paper gives them."""
    with torch.device("meta"):
        counts = {name: p.numel() for name, p in create_model(model).named_parameters()}
    return {
        label: sum(count for name, count in counts.items() if name.startswith(prefix))
        for label, prefix in layers.items()
    } | {"total": sum(counts.values())}
