"""Dead capsules: those that no image activates."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from torchcaps._core.plotting import COLORS, MARKERS, new_figure, save_figure, style_axes
from torchcaps.analysis.common import Progress, capsule_layers, require_capsules, traced_outputs
from torchcaps.analysis.registry import Analysis, Column, Subject, Summary, register_analysis
from torchcaps.capsules import Capsules
from torchcaps.models import Network
from torchcaps.nn.activations import CapsuleActivation, ExpSquash, Squash
from torchcaps.routing import Routing

__all__ = ["DeadCapsules", "DeadLayer", "DeadOptions", "dead_capsules", "draw_dead"]

DASHES = ("-", "--", "-.", ":")
BATCH_SIZE = 32  # traces of convolutional layers are large


@dataclass(frozen=True)
class DeadLayer:
    """Dead capsules of one layer.

    Attributes:
        name: of the layer; ``primary`` for the primary capsules.
        measure: the activity that was measured: ``"length"``, ``"length / sqrt(D)"``, ``"activation"`` or ``"couplings
            received"``; empty if none is defined, with the reason in ``why``.
        why: the reason why the layer was not measured, or an empty string.
        peak: largest activity of each capsule on any image, ``[*G, N]``; ``None`` without a measure.
        n: number of capsules.
        n_dead: number of capsules that never exceeded the threshold.
        fraction: ``n_dead / n``.
        by_type: fraction of dead capsules over the positions of each type, ``[N]``.
        n_dead_types: number of types that are dead at every position.

    >>> import torch, torchcaps
    >>> model = torchcaps.create_model("capsnet_small", width=4, types=2, hidden=(8,))
    >>> images, labels = torch.rand(4, 1, 28, 28), torch.arange(4)
    >>> from torchcaps.analysis import dead_capsules
    >>> layer = dead_capsules(model, images).layers[-1]
    >>> layer.name, layer.measure, layer.n
    ('digit', 'length', 10)
    """

    name: str
    measure: str
    why: str
    peak: Tensor | None
    n: int
    n_dead: int
    fraction: float
    by_type: Tensor | None
    n_dead_types: int


@dataclass(frozen=True)
class DeadCapsules:
    """The layers, the lowest first, the threshold, and the number of images.

    >>> import torch, torchcaps
    >>> model = torchcaps.create_model("capsnet_small", width=4, types=2, hidden=(8,))
    >>> images, labels = torch.rand(4, 1, 28, 28), torch.arange(4)
    >>> from torchcaps.analysis import dead_capsules
    >>> [layer.name for layer in dead_capsules(model, images).layers]
    ['primary', 'digit']
    """

    layers: tuple[DeadLayer, ...]
    threshold: float
    n_images: int


def dead_capsules(
    model: Network,
    images: Tensor,
    threshold: float = 0.05,
    batch_size: int = BATCH_SIZE,
    progress: Progress | None = None,
) -> DeadCapsules:
    """Count the capsules whose activity exceeds a threshold on no image, by layer and type.

    The activity is the one that represents presence in the layer's paper: the activation (Hinton 2018), the length
    (Sabour 2017, section 2) or the length over ``sqrt(D)`` (Choi 2019, section 3.5), all in 0..1. The default threshold
    is half of 0.1, the margin loss's bound for absent classes. Layer-normalised poses (Tsai 2020) have nearly constant
    length; there it is the sum of the couplings that a parent receives, relative to uniform couplings.
    Children receive none, so layer-normalised primary capsules are not measured.

    Args:
        model: a capsule network.
        images: ``[B, C, H, W]``, as the model takes them. Capsules of classes that are not among them may seem dead.
        threshold: largest activity of a dead capsule, in ``[0, 1)``.
        batch_size: images per forward pass.
        progress: called after each batch.

    Deviation: the papers do not count dead capsules; activities and threshold are ours.

    >>> import torchcaps
    >>> model = torchcaps.create_model("capsnet_small", width=4, types=2, hidden=(8,))
    >>> [layer.name for layer in dead_capsules(model, torch.rand(2, 1, 28, 28)).layers]
    ['primary', 'digit']
    """
    network = require_capsules(model, "counting dead capsules")
    if len(images) == 0:
        raise ValueError("images must contain at least one image, got none")
    if not 0 <= threshold < 1:
        raise ValueError(f"threshold must be at least 0 and below 1, got {threshold}")
    layers = capsule_layers(network)
    names, routings = ["primary", *layers], [layer.routing for layer in layers.values()]
    peaks: list[Tensor | None] = [None] * len(names)
    measures: list[tuple[str, str]] = []
    for start, output, capsules in traced_outputs(network, images, batch_size, progress):
        assert output.trace is not None
        if start == 0:
            measures = [_primary_measure(network.front[-1], capsules[0])]
            measures += [_routing_measure(routing, caps) for routing, caps in zip(routings, capsules[1:], strict=True)]
        couplings = [None, *(trace.couplings[-1] for trace in output.trace)]
        for n, ((measure, _), caps, coupling) in enumerate(zip(measures, capsules, couplings, strict=True)):
            if measure:
                highest = _activity(measure, caps, coupling).amax(0).cpu()
                previous = peaks[n]
                peaks[n] = highest if previous is None else torch.maximum(previous, highest)
    results = []
    for name, (measure, why), peak in zip(names, measures, peaks, strict=True):
        results.append(_count_dead(name, measure, why, peak, threshold))
    if all(peak is None for peak in peaks):
        raise ValueError(f"no layer of {network.name} has a measure of activity: {results[-1].why}")
    return DeadCapsules(tuple(results), threshold, len(images))


def _primary_measure(module: nn.Module, capsules: Capsules) -> tuple[str, str]:
    """Return the measure of activity of the primary capsules, or an empty string and the reason."""
    if capsules.activation is not None:
        return "activation", ""
    activation = getattr(module, "activation", None)
    if isinstance(activation, Squash | ExpSquash):
        return "length", ""
    if isinstance(activation, CapsuleActivation):
        return "length / sqrt(D)", ""
    if isinstance(activation, nn.LayerNorm):
        return "", "layer-normalised poses have constant length, and primary capsules receive no couplings"
    return "", "the lengths of these poses are unbounded, and primary capsules receive no couplings"


def _routing_measure(routing: Routing, capsules: Capsules) -> tuple[str, str]:
    """Return the measure of activity of a layer's parents, or an empty string and the reason."""
    if capsules.activation is not None:
        return "activation", ""
    if routing.presence is not None:
        return {"length": "length", "normalized": "length / sqrt(D)"}[routing.presence], ""
    if routing.coupling_axis == "parents":
        return "couplings received", ""
    return "", f"{type(routing).__name__} has no measure of presence, and its parents do not compete for couplings"


def _activity(measure: str, capsules: Capsules, coupling: Tensor | None) -> Tensor:
    """Return the activity of each capsule on each image: ``[B, *G, N]``."""
    if measure == "activation":
        assert capsules.activation is not None
        return capsules.activation
    if measure == "couplings received":
        assert coupling is not None
        received = coupling.sum(-2)  # [B, *L, J]
        return received / received.flatten(1).mean(1).view(-1, *[1] * (received.dim() - 1))
    return capsules.length(normalized=measure != "length")


def _count_dead(name: str, measure: str, why: str, peak: Tensor | None, threshold: float) -> DeadLayer:
    """Return the counts of a layer; without activities (``peak`` is ``None``), a result with the reason ``why``."""
    if peak is None:
        return DeadLayer(name, measure, why, None, 0, 0, 0.0, None, 0)
    dead = (peak <= threshold).reshape(-1, peak.shape[-1])  # [positions, N]
    n_dead = int(dead.sum())
    by_type = dead.float().mean(0)
    return DeadLayer(
        name, measure, "", peak, dead.numel(), n_dead, n_dead / dead.numel(), by_type, int(dead.all(0).sum())
    )


# Figure -------------------------------------------------------------------------------------------------------------


def draw_dead(result: DeadCapsules, out: Path | str, title: str = "") -> None:
    """Draw the fraction of dead capsules of each layer, and the distribution of the peak activities.

    >>> import torch, torchcaps
    >>> model = torchcaps.create_model("capsnet_small", width=4, types=2, hidden=(8,))
    >>> images, labels = torch.rand(4, 1, 28, 28), torch.arange(4)
    >>> draw_dead(dead_capsules(model, images), "dead.png")
    """
    figure = new_figure(9.0, max(3.2, 1.5 + 0.5 * len(result.layers)))
    bars, curves = figure.subplots(1, 2)
    style_axes(bars, f"never above {result.threshold:g} on {result.n_images:,} images", "dead capsules, %")
    style_axes(curves, "peak activity of the capsules", "largest activity on any image", "cumulative capsules, %")
    measured = [layer for layer in result.layers if layer.peak is not None]
    ticks = []
    for row, layer in enumerate(result.layers):
        color = COLORS[row % len(COLORS)]
        if layer.peak is None:
            ticks.append(layer.name)
            text = textwrap.fill(f"not measured: {layer.why}", 52)
            bars.text(2, row, text, va="center", fontsize=7, backgroundcolor="w")
            continue
        bar = bars.barh(row, 100 * layer.fraction, height=0.55, color=color)
        bars.bar_label(bar, [f"{100 * layer.fraction:.3g} %"], fontsize=8, padding=3)
        n_types = layer.peak.shape[-1]
        ticks.append(f"{layer.name}: {layer.n_dead:,} of {layer.n:,}")
        if layer.n > n_types:
            ticks[-1] += f"\n{layer.n_dead_types} of {n_types} types entirely"
        values = layer.peak.flatten().double().sort().values
        values = torch.cat([values[:1], values])  # the curve starts at 0 %
        heights = torch.linspace(0, 100, len(values))
        curves.step(
            values.tolist(),
            heights.tolist(),
            where="post",
            color=color,
            linestyle=DASHES[row % len(DASHES)],
            marker=MARKERS[row % len(MARKERS)],
            markevery=max(1, len(values) // 8),
            markersize=4,
            label=f"{layer.name} ({layer.measure})",
        )
    bars.set_yticks(range(len(result.layers)), ticks, fontsize=8)
    bars.set_ylim(len(result.layers) - 0.5, -0.5)
    bars.set_xlim(0, 112)
    bars.set_xticks(range(0, 101, 20))
    curves.axvline(result.threshold, color="#666666", linewidth=1, linestyle=":")
    curves.set_ylim(0, 102)
    curves.set_xlim(left=0)
    if any(float(layer.peak.max()) > 5 for layer in measured if layer.peak is not None):
        curves.set_xscale("symlog", linthresh=1)
    curves.legend(fontsize=8, edgecolor="none", framealpha=0.9)
    if title:
        figure.suptitle(title, fontsize=11)
    save_figure(figure, out)


# Declaration --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeadOptions:
    """Options of the analysis ``dead``.

    Args:
        threshold: largest activity of a dead capsule, at least 0 and below 1.
    """

    threshold: float = 0.05


def _run(subject: Subject, options: DeadOptions) -> DeadCapsules:
    batch = subject.batch()
    progress = subject.track(subject.n_batches(BATCH_SIZE))
    return dead_capsules(subject.model, batch.images, options.threshold, progress=progress)


def _summarize(result: DeadCapsules, classes: Sequence[str]) -> Summary:
    """Return the summary table: number and fraction of dead capsules, by layer."""
    rows, notes = {}, []
    for layer in result.layers:
        if layer.peak is None:
            rows[layer.name] = {}
            notes.append(f"{layer.name}: {layer.why}.")
            continue
        rows[layer.name] = {
            "capsules": layer.n,
            "dead": layer.n_dead,
            "fraction": layer.fraction,
            "dead_types": layer.n_dead_types if layer.n > layer.peak.shape[-1] else None,
            "measure": layer.measure,
        }
    columns = {
        "capsules": Column("capsules", ",d"),
        "dead": Column("dead", ",d"),
        "fraction": Column("fraction", "percent"),
        "dead_types": Column("types dead at all positions", ",d"),
        "measure": Column("measured by"),
    }
    title = f"capsules whose activity never exceeds {result.threshold:g}"
    return Summary(title, result.n_images, "layer", columns, rows, tuple(notes))


DEAD = register_analysis(
    Analysis(
        "dead",
        "capsules that no image activates",
        _run,
        _summarize,
        lambda result, out, title, classes: draw_dead(result, out, title),
        DeadOptions,
    )
)
