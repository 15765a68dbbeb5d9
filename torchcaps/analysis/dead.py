"""Capsules that never wake up."""

import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchcaps._core.plotting import COLORS, MARKERS, new_figure, save_figure, style_axes
from torchcaps.analysis.common import Progress, require_capsules
from torchcaps.analysis.couplings import routed
from torchcaps.capsules import Capsules
from torchcaps.models import CapsuleNetwork
from torchcaps.nn.activations import CapsuleActivation, ExpSquash, Squash
from torchcaps.routing import Routing

__all__ = ["DeadCapsules", "DeadLayer", "dead_capsules", "draw_dead"]

DASHES = ("-", "--", "-.", ":")


@dataclass(frozen=True)
class DeadLayer:
    """How awake the capsules of one layer get.

    Attributes:
        name: of the layer; ``primary`` for the primary capsules.
        measure: what was looked at: ``"length"``, ``"length / sqrt(D)"``, ``"activation"`` or ``"couplings received"``;
            empty where there is nothing to look at, and ``why`` says why.
        peak: the most that each capsule reached on any image, ``[*G, N]``; ``None`` without a measure.
        n, n_dead, share: capsules, those that never passed the threshold, and their share.
        by_type: share of dead capsules over the places of each type, ``[N]``.
        n_dead_types: types that are dead at every place.
    """

    name: str
    measure: str
    why: str
    peak: Tensor | None
    n: int
    n_dead: int
    share: float
    by_type: Tensor | None
    n_dead_types: int


@dataclass(frozen=True)
class DeadCapsules:
    """The layers, the lowest first, the threshold, and how many images were looked at."""

    layers: tuple[DeadLayer, ...]
    threshold: float
    n_images: int


def dead_capsules(
    model: CapsuleNetwork,
    images: Tensor,
    threshold: float = 0.05,
    batch_size: int = 32,
    progress: Progress | None = None,
) -> DeadCapsules:
    """Count the capsules that no image brings over a threshold, in every layer, by type and place.

    A capsule is as awake as its paper says that what it stands for is there: by its activation (Hinton 2018), its
    length (Sabour 2017) or its length over ``sqrt(D)`` (Choi 2019), all in 0..1, so the threshold is absolute; the
    margin loss wants absent classes below 0.1, and half of that is dead. Layer-normed poses (Tsai 2020) have about the
    same length whatever they see, so there it is the couplings that a parent receives, over what it would if all got
    the same: 1 is an even share. Children, and so layer-normed primary capsules, receive none, and are left out.

    Deviation: the papers don't count dead capsules; measures and threshold are ours.

    Args:
        model: a capsule network.
        images: as the model takes them. Class capsules of classes that are not among them may well look dead.
        threshold: what counts as awake lies over it.
        batch_size: images at a time.
        progress: called after each batch.
    """
    network = require_capsules(model, "counting dead capsules")
    if len(images) == 0:
        raise ValueError("images must be one or more, got none")
    if not 0 <= threshold < 1:
        raise ValueError(f"threshold must be at least 0 and below 1, got {threshold}")
    layers = network.capsules.layers
    named: Any = layers.items() if isinstance(layers, nn.ModuleDict) else enumerate(layers)
    names, routings = ["primary"], []
    for name, layer in named:
        names.append(str(name))
        routings.append(layer.routing)
    peaks: list[Tensor | None] = [None] * len(names)
    measures: list[tuple[str, str]] = []
    for start, output, capsules in routed(network, images, batch_size, progress):
        assert output.trace is not None
        if start == 0:
            measures = [_primary_measure(network.front[-1], capsules[0])]
            measures += [_measure(routing, made) for routing, made in zip(routings, capsules[1:], strict=True)]
        couplings = [None, *(trace.couplings[-1] for trace in output.trace)]
        for n, ((measure, _), made, coupling) in enumerate(zip(measures, capsules, couplings, strict=True)):
            if measure:
                highest = _activity(measure, made, coupling).amax(0).cpu()
                known = peaks[n]
                peaks[n] = highest if known is None else torch.maximum(known, highest)
    found = []
    for name, (measure, why), peak in zip(names, measures, peaks, strict=True):
        found.append(_layer(name, measure, why, peak, threshold))
    if all(peak is None for peak in peaks):
        raise ValueError(f"no layer of {network.name} says how awake its capsules are: {found[-1].why}")
    return DeadCapsules(tuple(found), threshold, len(images))


def _primary_measure(module: nn.Module, capsules: Capsules) -> tuple[str, str]:
    """Return how the primary capsules say that something is there, or nothing and why not."""
    if capsules.activation is not None:
        return "activation", ""
    activation = getattr(module, "activation", None)
    if isinstance(activation, Squash | ExpSquash):
        return "length", ""
    if isinstance(activation, CapsuleActivation):
        return "length / sqrt(D)", ""
    if isinstance(activation, nn.LayerNorm):
        return (
            "",
            "layer-normed poses have the same length whatever they see, and primary capsules receive no couplings",
        )
    return "", "the lengths of these poses have no bound, and primary capsules receive no couplings"


def _measure(routing: Routing, capsules: Capsules) -> tuple[str, str]:
    if capsules.activation is not None:
        return "activation", ""
    if routing.presence is not None:
        return {"length": "length", "normalized": "length / sqrt(D)"}[routing.presence], ""
    if routing.coupling_axis == "parents":
        return "couplings received", ""
    return "", f"{type(routing).__name__} says nothing of presence, and its parents don't compete for couplings"


def _activity(measure: str, capsules: Capsules, coupling: Tensor | None) -> Tensor:
    """Return how awake each capsule is on each image: ``[B, *G, N]``."""
    if measure == "activation":
        assert capsules.activation is not None
        return capsules.activation
    if measure == "couplings received":
        assert coupling is not None
        received = coupling.sum(-2)  # [B, *L, J]
        return received / received.flatten(1).mean(1).view(-1, *[1] * (received.dim() - 1))
    return capsules.length(normalized=measure != "length")


def _layer(name: str, measure: str, why: str, peak: Tensor | None, threshold: float) -> DeadLayer:
    if peak is None:
        return DeadLayer(name, measure, why, None, 0, 0, 0.0, None, 0)
    dead = (peak <= threshold).reshape(-1, peak.shape[-1])  # [places, N]
    n_dead = int(dead.sum())
    by_type = dead.float().mean(0)
    return DeadLayer(
        name, measure, "", peak, dead.numel(), n_dead, n_dead / dead.numel(), by_type, int(dead.all(0).sum())
    )


# Drawing ---------------------------------------------------------------------------------------------------------


def draw_dead(result: DeadCapsules, out: Path | str, title: str = "") -> None:
    """Draw the share of dead capsules of each layer, and how awake its capsules get at most."""
    figure = new_figure(9.0, max(3.2, 1.5 + 0.5 * len(result.layers)))
    bars, curves = figure.subplots(1, 2)
    style_axes(bars, f"never over {result.threshold:g} on {result.n_images:,} images", "dead, %")
    style_axes(curves, "how awake capsules get", "most on any image", "capsules that get no further, %")
    known = [layer for layer in result.layers if layer.peak is not None]
    ticks = []
    for row, layer in enumerate(result.layers):
        colour = COLORS[row % len(COLORS)]
        if layer.peak is None:
            ticks.append(layer.name)
            words = textwrap.fill(f"not measured: {layer.why}", 52)
            bars.text(2, row, words, va="center", fontsize=7, backgroundcolor="w")
            continue
        bar = bars.barh(row, 100 * layer.share, height=0.55, color=colour)
        bars.bar_label(bar, [f"{100 * layer.share:.3g} %"], fontsize=8, padding=3)
        n_types = layer.peak.shape[-1]
        ticks.append(f"{layer.name}: {layer.n_dead:,} of {layer.n:,}")
        if layer.n > n_types:
            ticks[-1] += f"\n{layer.n_dead_types} of {n_types} types everywhere"
        values = layer.peak.flatten().double().sort().values
        values = torch.cat([values[:1], values])  # from none at all
        heights = torch.linspace(0, 100, len(values))
        curves.step(
            values.tolist(),
            heights.tolist(),
            where="post",
            color=colour,
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
    if any(float(layer.peak.max()) > 5 for layer in known if layer.peak is not None):
        curves.set_xscale("symlog", linthresh=1)
    curves.legend(fontsize=8, edgecolor="none", framealpha=0.9)
    if title:
        figure.suptitle(title, fontsize=11)
    save_figure(figure, out)
