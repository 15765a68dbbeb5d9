"""Convergence of routing: change of logits and couplings in every iteration (Sabour 2017, appendix A, Figure A.1)."""

import copy
import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from torchcaps._core.plotting import COLORS, MARKERS, new_figure, save_figure, style_axes
from torchcaps._core.registry import check_name
from torchcaps.analysis.common import Progress, batched_outputs, capsule_layers, require_capsules
from torchcaps.analysis.registry import Analysis, Column, Subject, Summary, register_analysis
from torchcaps.models import Network
from torchcaps.nn import CapsuleLayer
from torchcaps.routing import Routing, Trace

__all__ = ["LogitChange", "LogitOptions", "draw_logit_change", "logit_change"]

DASHES = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class LogitChange:
    """Change of the routing logits in each iteration.

    Args:
        change: mean of ``|b_ij(t + 1) - b_ij(t)|`` over images, positions, children and parents,
            ``[layers, iterations]``. The first column is the change from the initial logits.
        coupling_change: the same for the couplings ``c_ij``.
        layers: names of the layers.
        measured: the meaning of ``b`` in each layer: ``"logits"`` or ``"log couplings"``.
        trained: number of iterations of each layer of the model.
        n_images: number of images.

    >>> import torch, torchcaps
    >>> model = torchcaps.create_model("capsnet_small", width=4, types=2, hidden=(8,))
    >>> images, labels = torch.rand(4, 1, 28, 28), torch.arange(4)
    >>> from torchcaps.analysis import logit_change
    >>> result = logit_change(model, images, iterations=3)
    >>> result.trained, result.change.shape
    ((3,), torch.Size([1, 3]))
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
    """Measure the change of the logits in each routing iteration: Sabour 2017, appendix A, Figure A.1.

    A copy of the model routes for the given number of iterations, whatever it was trained with. Of several layers that
    route one after the other, each is measured with those below it as trained; layers that step concurrently
    (Tsai 2020) are measured together.

    The iterated quantity depends on the routing. `Dynamic` adds an agreement to its logits in every iteration
    (Procedure 1, line 7); `InvertedAttention` replaces them, starting from 0. `EM` has no initial logits, and its
    densities are meaningful relative to other parents only: there, and for any routing without initial logits, it is
    the logarithm of the couplings. The change of the couplings is comparable between routings.

    The published curve falls to 1e-5 by the fifth iteration. Procedure 1 does not imply that: it changes a logit by the
    agreement ``<v_ij, v_j>``, which does not vanish for an active parent. Here the change of `Dynamic` stays constant
    or grows.

    Args:
        model: a capsule network with a layer that routes iteratively.
        images: ``[B, C, H, W]``, as the model takes them.
        iterations: number of changes to measure, 1 or more.
        layer: name or index of one capsule layer; by default all that route iteratively.
        batch_size: images per forward pass; the logits of all iterations are in memory at once.
        progress: called after every batch of each run.

    Deviation: in padded convolutions the slots that read padding are included.

    >>> import torchcaps
    >>> model = torchcaps.create_model("capsnet_small", width=4, types=2, hidden=(8,))
    >>> result = logit_change(model, torch.rand(2, 1, 28, 28), iterations=3)
    >>> result.layers, result.measured, list(result.change.shape)
    (('digit',), ('logits',), [1, 3])
    """
    network = copy.deepcopy(require_capsules(model, "the change of logits"))
    if isinstance(iterations, bool) or not isinstance(iterations, int) or iterations < 1:
        raise ValueError(f"iterations must be an int of 1 or more, got {iterations!r}")
    if images.dim() != 4 or len(images) == 0:
        raise ValueError(f"images must be [B, C, H, W] with at least one image, got {list(images.shape)}")
    layers = capsule_layers(network)
    selected = _select_layers(layers, layer, model.name)
    original = {name: layers[name].routing for name in layers}
    iterative = [name for name in layers if _is_iterative(original[name])]
    # Concurrent layers need the same number of iterations; with a non-iterative layer the model has 1 everywhere.
    together = network.capsules.schedule == "concurrent" and len(iterative) == len(layers)
    if not together:
        network.capsules.schedule = "sequential"
    sums = {name: torch.zeros(2, iterations, dtype=torch.float64) for name in selected}
    measured: dict[str, str] = {}
    for run in [selected] if together else [[name] for name in selected]:
        for name, changed in layers.items():
            longer = name in (iterative if together else run)
            # One more than requested: an iteration's state has the logits before its own update.
            changed.routing = _with_iterations(original[name], iterations + 1) if longer else original[name]
        for output in batched_outputs(network, images, batch_size=batch_size, trace=True, progress=progress):
            assert output.trace is not None
            for name in run:
                trace = output.trace[list(layers).index(name)]
                values, measured[name] = _iterated_values(trace, layers[name].routing, name)
                # All images have equally many logits, so the mean over all is that over images.
                couplings = cast(list[Tensor], list(trace.couplings))
                changes = torch.stack([_mean_changes(values), _mean_changes(couplings)])
                sums[name] += changes * (len(output.scores) / len(images))
    return LogitChange(
        change=torch.stack([sums[name][0] for name in selected]),
        coupling_change=torch.stack([sums[name][1] for name in selected]),
        layers=tuple(selected),
        measured=tuple(measured[name] for name in selected),
        trained=tuple(original[name].iterations for name in selected),
        n_images=len(images),
    )


def _is_iterative(routing: Routing) -> bool:
    """Return whether the number of iterations is a field of the routing."""
    return any(field.name == "iterations" for field in dataclasses.fields(routing))


def _with_iterations(routing: Routing, iterations: int) -> Routing:
    """Return the routing with another number of iterations."""
    return dataclasses.replace(routing, iterations=iterations)  # type: ignore[call-arg]


def _select_layers(layers: dict[str, CapsuleLayer], layer: str | int | None, model: str) -> list[str]:
    """Return the names of the layers to measure."""
    if layer is None:
        selected = [name for name in layers if _is_iterative(layers[name].routing)]
        if not selected:
            routing = type(next(iter(layers.values())).routing).__name__
            raise ValueError(
                f"the change of logits needs an iterative routing, such as Dynamic, but {model} has {routing}, which "
                "makes one pass over the votes"
            )
        return selected
    if isinstance(layer, int):
        if not -len(layers) <= layer < len(layers):
            raise ValueError(f"layer must be an index in 0..{len(layers) - 1}, got {layer}")
        layer = list(layers)[layer]
    name = check_name(layer, layers, "layer")
    if not _is_iterative(layers[name].routing):
        routing = type(layers[name].routing).__name__
        raise ValueError(f"layer {name!r} has {routing} routing, which makes one pass over the votes: no logits change")
    return [name]


def _mean_changes(values: list[Tensor]) -> Tensor:
    """Return the mean absolute difference between successive tensors."""
    steps = [(after - before).abs().double().mean() for before, after in itertools.pairwise(values)]
    return torch.stack(steps).cpu()


def _iterated_values(trace: Trace, routing: Routing, name: str) -> tuple[list[Tensor], str]:
    """Return the logits, or the logarithms of the couplings, at every iteration, and which of them it is."""
    logits = [value for value in trace.logits if value is not None]
    if len(logits) == len(trace.states) and all(state.coupling is not None for state in trace.states):
        return logits, "logits"
    if routing.coupling_axis is None or any(state.coupling is None for state in trace.states):
        raise ValueError(f"layer {name!r} has {type(routing).__name__} routing, which has no logits that change")
    local = routing.coupling_axis == "parents" and routing.competition == "local"
    values = []
    for state in trace.states:
        assert state.coupling is not None
        if local and state.logits is not None:
            values.append(state.logits.log_softmax(-1))  # finite even if a coupling underflows
        else:
            values.append(state.coupling.clamp_min(torch.finfo(state.coupling.dtype).tiny).log())
    return values, "log couplings"


# Figure -------------------------------------------------------------------------------------------------------------


def draw_logit_change(results: Mapping[str, LogitChange], out: Path | str, title: str = "") -> None:
    """Draw the change of logits and couplings by iteration, on a logarithmic scale: Sabour 2017, Figure A.1.

    Args:
        results: by name, of several models or of one at several stages of its training.
        out: the file, .png, .svg or .pdf.
        title: above the figure.

    >>> import torch, torchcaps
    >>> model = torchcaps.create_model("capsnet_small", width=4, types=2, hidden=(8,))
    >>> draw_logit_change({"untrained": logit_change(model, torch.rand(2, 1, 28, 28), iterations=3)}, "fig.png")
    """
    if not results:
        raise ValueError("results must contain at least one measurement, got none")
    lines = [
        (label if len(result.layers) == 1 else f"{label}, {layer}", index, row, result)
        for index, (label, result) in enumerate(results.items())
        for row, layer in enumerate(result.layers)
    ]
    figure = new_figure(7.2, 3.0 + (0.25 * math.ceil(len(lines) / 3) if len(lines) > 1 else 0))
    panels = figure.subplots(1, 2)
    names = {name for result in results.values() for name in result.measured}
    titles = {"change": " or ".join(sorted(names, reverse=True)), "coupling_change": "couplings"}
    for axes, (field, subtitle) in zip(panels, titles.items(), strict=True):
        for label, index, row, result in lines:
            values = getattr(result, field)[row].tolist()
            axes.plot(
                range(1, len(values) + 1),
                [value if value > 0 else float("nan") for value in values],  # 0 has no logarithm
                color=COLORS[index % len(COLORS)],
                marker=MARKERS[index % len(MARKERS)],
                linestyle=DASHES[row % len(DASHES)],
                markersize=5,
                label=label,
            )
        values = torch.cat([getattr(result, field).flatten() for result in results.values()])
        if bool((values > 0).any()):
            axes.set_yscale("log")
            # Whole powers of ten, so that a nearly constant curve looks constant.
            ends = values[values > 0].log10()
            low, high = math.floor(float(ends.min())), math.ceil(float(ends.max()))
            axes.set_ylim(10.0**low, 10.0 ** max(high, low + 1))
        style_axes(axes, subtitle, "routing iteration", "mean absolute change")
        n_iterations = max(result.change.shape[1] for result in results.values())
        axes.set_xticks(range(1, n_iterations + 1))
        axes.set_xlim(0.7, n_iterations + 0.3)
    if len(lines) > 1:
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    if title:
        figure.suptitle(title, fontsize=11)
    save_figure(figure, out)


# Declaration --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LogitOptions:
    """Options of the analysis ``logits``.

    Args:
        iterations: number of routing iterations to measure, whatever the network was trained with.
    """

    iterations: int = 5


def _run(subjects: Sequence[Subject], options: LogitOptions) -> dict[str, LogitChange]:
    """Measure the change of logits and couplings in each routing iteration of each model."""
    return {
        subject.name: logit_change(
            subject.model, subject.batch().images, options.iterations, progress=subject.track(None)
        )
        for subject in subjects
    }


def _summarize(results: Mapping[str, LogitChange], classes: Sequence[str]) -> Summary:
    """Return the summary table: mean absolute change of logits and couplings, by layer and iteration."""
    rows: dict[str, dict[str, Any]] = {}
    for name, result in results.items():
        for n, layer in enumerate(result.layers):
            for quantity, values in ((result.measured[n], result.change[n]), ("couplings", result.coupling_change[n])):
                row = {str(iteration): value for iteration, value in enumerate(values.tolist(), 1)}
                rows[f"{name}, {layer}: {quantity}"] = row
    n_iterations = max(len(row) for row in rows.values())
    columns = {str(n): Column(f"iteration {n}", ".2e") for n in range(1, n_iterations + 1)}
    trained = {
        layer: count for result in results.values() for layer, count in zip(result.layers, result.trained, strict=True)
    }
    note = "Trained with " + ", ".join(f"{count} iterations ({layer})" for layer, count in trained.items()) + "."
    n_images = next(iter(results.values())).n_images
    title = "mean absolute change in each routing iteration"
    return Summary(title, n_images, "layer and quantity", columns, rows, (note,))


LOGITS = register_analysis(
    Analysis(
        "logits",
        "change of the routing logits and couplings in each iteration",
        _run,
        _summarize,
        lambda results, out, title, classes: draw_logit_change(results, out, title),
        LogitOptions,
        n_images=100,
        compares_models=True,
    )
)
