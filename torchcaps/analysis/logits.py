"""How routing settles: by how much logits still change in every iteration."""

import copy
import dataclasses
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from torchcaps._core.plotting import COLORS, MARKERS, new_figure, save_figure, style_axes
from torchcaps._core.registry import check_name
from torchcaps.analysis.common import Progress, outputs, require_capsules
from torchcaps.models import CapsuleNetwork, Network
from torchcaps.nn import CapsuleLayer
from torchcaps.routing import Routing, Trace

__all__ = ["LogitChange", "draw_logit_change", "logit_change"]


@dataclass(frozen=True)
class LogitChange:
    """How much routing logits change in each iteration.

    Args:
        change: the mean of ``|b_ij(t + 1) - b_ij(t)|`` over images, places, children and parents,
            ``[layers, iterations]``. The first column is the change away from the logits that routing starts with.
        coupling_change: the same of the couplings ``c_ij``.
        layers: the names of the layers.
        measured: for each layer what ``b`` is: ``"logits"`` or ``"log couplings"``.
        trained: for each layer the iterations that the model itself runs.
        n_images: how many images.
    """

    change: Tensor
    coupling_change: Tensor
    layers: tuple[str, ...]
    measured: tuple[str, ...]
    trained: tuple[int, ...]
    n_images: int


def logit_change(
    model: Network,
    images: Tensor,
    iterations: int = 5,
    layer: str | int | None = None,
    batch_size: int = 32,
    progress: Progress | None = None,
) -> LogitChange:
    """Measure by how much each iteration of routing still changes the logits: Sabour 2017, appendix A, figure A.1.

    A copy of the model routes for as many iterations as are asked for, whatever it was trained with; the model is not
    touched. Of several capsule layers that route one after the other, each is measured with those below it as they
    were trained; layers that step concurrently (Tsai 2020) are all measured in one run.

    What changes depends on the routing. `Dynamic` adds an agreement to its logits in every iteration (line 7 of
    Procedure 1); `InvertedAttention` replaces them, from 0 at first. `EM` has no logits before its first step and
    densities after it, which mean something only against those of the other parents: there, and wherever a routing
    has no logits to start with, it is the logarithm of the couplings. The change of the couplings themselves is
    measured beside it, and compares between routings.

    The published curve falls to 1e-5 by the fifth iteration. Procedure 1 does not ask for that: it changes a logit by
    the agreement ``<v_ij, v_j>``, which does not vanish while the parent is there. Here the change of `Dynamic` stays
    level or grows.

    Args:
        model: a model with a capsule layer that routes in iterations.
        images: ``[B, C, H, W]`` as the model takes them.
        iterations: how many changes to measure, one or more.
        layer: the name of one capsule layer, or its number from 0; by default all that route in iterations.
        batch_size: images at a time. All logits of all iterations are kept for that long.
        progress: called after every batch, in each run.

    Deviation: in padded convolutions the slots that read zeros count as well.
    """
    network = copy.deepcopy(require_capsules(model, "the change of logits"))
    if isinstance(iterations, bool) or not isinstance(iterations, int) or iterations < 1:
        raise ValueError(f"iterations must be a whole number of 1 or more, got {iterations!r}")
    if images.dim() != 4 or len(images) == 0:
        raise ValueError(f"images must be [B, C, H, W], one or more, got {list(images.shape)}")
    layers = _layers(network)
    chosen = _chosen(layers, layer, model.name)
    trained = {name: layers[name].routing for name in layers}
    iterative = [name for name in layers if _iterates(trained[name])]
    # Layers that step together need the same number of iterations; with one that can't, the model has 1 everywhere.
    together = network.capsules.schedule == "concurrent" and len(iterative) == len(layers)
    if not together:
        network.capsules.schedule = "sequential"
    sums = {name: torch.zeros(2, iterations, dtype=torch.float64) for name in chosen}
    measured: dict[str, str] = {}
    for run in [chosen] if together else [[name] for name in chosen]:
        for name, changed in layers.items():
            longer = name in (iterative if together else run)
            # One more than asked for: the logits of an iteration are those that it couples by, before its own update.
            changed.routing = _lasting(trained[name], iterations + 1) if longer else trained[name]
        for output in outputs(network, images, batch_size=batch_size, trace=True, progress=progress):
            assert output.trace is not None
            for name in run:
                trace = output.trace[list(layers).index(name)]
                values, measured[name] = _logits(trace, layers[name].routing, name)
                # Every image has as many logits, so the mean over all is that over images.
                changes = torch.stack([_changes(values), _changes(cast(list[Tensor], list(trace.couplings)))])
                sums[name] += changes * (len(output.scores) / len(images))
    return LogitChange(
        change=torch.stack([sums[name][0] for name in chosen]),
        coupling_change=torch.stack([sums[name][1] for name in chosen]),
        layers=tuple(chosen),
        measured=tuple(measured[name] for name in chosen),
        trained=tuple(trained[name].iterations for name in chosen),
        n_images=len(images),
    )


def _layers(model: CapsuleNetwork) -> dict[str, CapsuleLayer]:
    return {name: cast(CapsuleLayer, layer) for name, layer in model.capsules.layers.named_children()}


def _iterates(routing: Routing) -> bool:
    """Return whether the number of iterations is the user's to choose."""
    return any(field.name == "iterations" for field in dataclasses.fields(routing))


def _lasting(routing: Routing, iterations: int) -> Routing:
    return dataclasses.replace(routing, iterations=iterations)  # type: ignore[call-arg]


def _chosen(layers: dict[str, CapsuleLayer], layer: str | int | None, model: str) -> list[str]:
    """Return the names of the layers to measure."""
    if layer is None:
        chosen = [name for name in layers if _iterates(layers[name].routing)]
        if not chosen:
            routing = type(next(iter(layers.values())).routing).__name__
            raise ValueError(
                f"the change of logits needs a routing with iterations, such as Dynamic, and {model} has {routing}, "
                "which goes through the votes once"
            )
        return chosen
    if isinstance(layer, int):
        if not -len(layers) <= layer < len(layers):
            raise ValueError(f"layer must lie in 0..{len(layers) - 1}, got {layer}")
        layer = list(layers)[layer]
    name = check_name(layer, layers, "layer")
    if not _iterates(layers[name].routing):
        routing = type(layers[name].routing).__name__
        raise ValueError(f"layer {name!r} has {routing} routing, which goes through the votes once: no logits change")
    return [name]


def _changes(values: list[Tensor]) -> Tensor:
    """Return the mean size of each step from one tensor to the next."""
    steps = [(after - before).abs().double().mean() for before, after in itertools.pairwise(values)]
    return torch.stack(steps).cpu()


def _logits(trace: Trace, routing: Routing, name: str) -> tuple[list[Tensor], str]:
    """Return what routing iterates on, at every iteration, and what it is."""
    logits = [value for value in trace.logits if value is not None]
    if len(logits) == len(trace.states) and all(state.coupling is not None for state in trace.states):
        return logits, "logits"
    if routing.coupling_axis is None or any(state.coupling is None for state in trace.states):
        raise ValueError(f"layer {name!r} has {type(routing).__name__} routing, which shows no logits that change")
    local = routing.coupling_axis == "parents" and routing.competition == "local"
    values = []
    for state in trace.states:
        assert state.coupling is not None
        if local and state.logits is not None:
            values.append(state.logits.log_softmax(-1))  # also where a coupling is too small for its dtype
        else:
            values.append(state.coupling.clamp_min(torch.finfo(state.coupling.dtype).tiny).log())
    return values, "log couplings"


DASHES = ("-", "--", ":", "-.")


def draw_logit_change(results: Mapping[str, LogitChange], out: Path | str, title: str = "") -> None:
    """Draw the change of logits by iteration, on a logarithmic scale: Sabour 2017, figure A.1.

    Args:
        results: by name: of several models, or of one at several stages of its training.
        out: the file, .png, .svg or .pdf.
        title: over the figure.
    """
    if not results:
        raise ValueError("results must hold one or more, got none")
    lines = [
        (label if len(result.layers) == 1 else f"{label}, {layer}", number, place, result)
        for number, (label, result) in enumerate(results.items())
        for place, layer in enumerate(result.layers)
    ]
    figure = new_figure(7.2, 3.0 + (0.25 * math.ceil(len(lines) / 3) if len(lines) > 1 else 0))
    panels = figure.subplots(1, 2)
    names = {name for result in results.values() for name in result.measured}
    wanted = {"change": " or ".join(sorted(names, reverse=True)), "coupling_change": "couplings"}
    for axes, (field, what) in zip(panels, wanted.items(), strict=True):
        for label, number, place, result in lines:
            values = getattr(result, field)[place].tolist()
            axes.plot(
                range(1, len(values) + 1),
                [value if value > 0 else float("nan") for value in values],  # what has settled has no logarithm
                color=COLORS[number % len(COLORS)],
                marker=MARKERS[number % len(MARKERS)],
                linestyle=DASHES[place % len(DASHES)],
                markersize=5,
                label=label,
            )
        values = torch.cat([getattr(result, field).flatten() for result in results.values()])
        if bool((values > 0).any()):
            axes.set_yscale("log")
            # Whole powers of ten: a curve that is nearly level looks so.
            ends = values[values > 0].log10()
            low, high = math.floor(float(ends.min())), math.ceil(float(ends.max()))
            axes.set_ylim(10.0**low, 10.0 ** max(high, low + 1))
        style_axes(axes, what, "routing iteration", "mean change" if field == "change" else "")
        longest = max(result.change.shape[1] for result in results.values())
        axes.set_xticks(range(1, longest + 1))
        axes.set_xlim(0.7, longest + 0.3)
    if len(lines) > 1:
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    if title:
        figure.suptitle(title, fontsize=11)
    save_figure(figure, out)
