"""Coupling coefficients of every layer and iteration: their entropy, and maps over the image."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchcaps._core.plotting import COLORS, MARKERS, new_figure, save_figure, show_image, style_axes
from torchcaps.analysis.common import (
    Progress,
    capsule_layers,
    first_labels,
    require_capsules,
    round_robin_indices,
    traced_outputs,
)
from torchcaps.analysis.receptive_fields import receptive_field_centers
from torchcaps.analysis.registry import Analysis, Column, NoOptions, Subject, Summary, register_analysis
from torchcaps.capsules import Capsules
from torchcaps.metrics import coupling_entropy
from torchcaps.models import Network
from torchcaps.nn.layers import CapsuleLayer
from torchcaps.routing import Routing
from torchcaps.votes import Wiring

__all__ = ["CouplingMaps", "LayerCouplings", "coupling_maps", "draw_couplings", "normalized_entropy", "why_no_entropy"]

BATCH_SIZE = 32  # couplings of convolutional layers are large


@dataclass(frozen=True)
class LayerCouplings:
    """Couplings of one capsule layer.

    Attributes:
        name: of the layer.
        routing: its routing.
        couples: the competitors, over which couplings sum to 1: ``"parents"``, ``"children"``, or ``""`` for
            unnormalised couplings.
        entropy: normalised entropy, 0 (one competitor gets all) to 1 (uniform), by image and iteration ``[B, T]``; or
            ``None``, with the reason in ``why_no_entropy``.
        maps: coupling to the class of each image, summed over the child types at each position ``[B, T, H, W]``; or
            ``None``, with the reason in ``why_no_maps``.
        uniform: value of a map under uniform couplings; 0 for unnormalised couplings.
        centers: see `torchcaps.analysis.receptive_fields`; empty if they are unknown.
        couplings: of the first images ``[n_kept, T, *L, I, J]``.
    """

    name: str
    routing: str
    couples: str
    entropy: Tensor | None
    why_no_entropy: str
    maps: Tensor | None
    why_no_maps: str
    uniform: float
    centers: tuple[float, ...]
    couplings: Tensor


@dataclass(frozen=True)
class CouplingMaps:
    """Images ``[B, C, H, W]``, the class of each map ``[B]``, and the layers, the lowest first."""

    images: Tensor
    classes: Tensor
    layers: tuple[LayerCouplings, ...]


def coupling_maps(
    model: Network,
    images: Tensor,
    labels: Tensor | None = None,
    n_kept: int = 1,
    batch_size: int = BATCH_SIZE,
    progress: Progress | None = None,
) -> CouplingMaps:
    """Trace the couplings ``c_ij`` of every layer and iteration (Sabour 2017, Procedure 1, and later routings).

    The entropy is over the competitors: the parents of a child or the children of a parent (Choi 2019, eq. 8), divided
    by the logarithm of their number. If all receptive fields compete (Hinton 2018), the parents of a child are counted
    at all positions. The part of a leak (none-of-the-above) is excluded, and so are slots that read padding.

    Args:
        model: a capsule network.
        images: ``[B, C, H, W]``, as the model takes them.
        labels: class of the maps, the first one if an image has several; by default the predicted class.
        n_kept: number of images whose couplings are returned, a large tensor.
        batch_size: images per forward pass.
        progress: called after each batch.

    >>> import torchcaps
    >>> model = torchcaps.create_model("capsnet_small", width=4, types=2, hidden=(8,))
    >>> result = coupling_maps(model, torch.rand(2, 1, 28, 28))
    >>> [(layer.name, layer.couples, list(layer.entropy.shape)) for layer in result.layers]
    [('digit', 'parents', [2, 3])]
    """
    network = require_capsules(model, "coupling maps")
    if len(images) == 0:
        raise ValueError("images must contain at least one image, got none")
    if not 0 <= n_kept <= len(images):
        raise ValueError(f"n_kept must be a number of images in 0..{len(images)}, got {n_kept}")
    given = None if labels is None else first_labels(network, labels, len(images))
    layers = capsule_layers(network)
    batches: list[list[_BatchCouplings]] = [[] for _ in layers]
    classes = []
    for start, output, capsules in traced_outputs(network, images, batch_size, progress):
        selected = network.top_class(output)
        if given is not None:
            selected = given[start : start + batch_size].to(selected.device)
        classes.append(selected.cpu())
        assert output.trace is not None
        for n, (layer, trace) in enumerate(zip(layers.values(), output.trace, strict=True)):
            coupling = torch.stack([_check_coupling(c, layer.routing) for c in trace.couplings], dim=1)
            top_classes = selected if n == len(layers) - 1 else None
            batches[n].append(_measure_batch(coupling, layer, capsules[n], top_classes, max(0, n_kept - start)))
    results = []
    centers = receptive_field_centers(network, [parts[0].wiring for parts in batches], batches[0][0].grid)
    for (name, layer), parts, layer_centers in zip(layers.items(), batches, centers, strict=True):
        first = parts[0]
        results.append(
            LayerCouplings(
                name,
                str(layer.routing),
                layer.routing.coupling_axis or "",
                None if first.entropy is None else torch.cat([p.entropy for p in parts if p.entropy is not None]),
                first.why_no_entropy,
                None if first.maps is None else torch.cat([p.maps for p in parts if p.maps is not None]),
                first.why_no_maps,
                first.uniform,
                layer_centers if first.maps is not None else (),
                torch.cat([p.couplings for p in parts]),
            )
        )
    return CouplingMaps(images.cpu(), torch.cat(classes), tuple(results))


def _check_coupling(coupling: Tensor | None, routing: Routing) -> Tensor:
    if coupling is None:
        raise ValueError(f"coupling maps need couplings, but {type(routing).__name__} has none in its states")
    return coupling


# One layer and batch ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _BatchCouplings:
    """The entries of `LayerCouplings` for one batch, and the geometry of the layer."""

    entropy: Tensor | None
    why_no_entropy: str
    maps: Tensor | None
    why_no_maps: str
    uniform: float
    couplings: Tensor
    wiring: Wiring
    grid: tuple[int, ...]


def _measure_batch(
    coupling: Tensor, layer: CapsuleLayer, children: Capsules, classes: Tensor | None, n_kept: int
) -> _BatchCouplings:
    """Return entropy and maps of couplings ``[B, T, *L, I, J]``; ``classes`` for the layer of class capsules only."""
    routing = layer.routing
    wiring = layer.vote_inputs(layer.check_children(children))[-1]
    reason = why_no_entropy(routing, coupling)
    entropy = None
    if not reason:
        n_iterations = coupling.shape[1]
        means = [normalized_entropy(coupling[:, t], routing, wiring).flatten(1).mean(1) for t in range(n_iterations)]
        entropy = torch.stack(means, dim=1).cpu()
    grid = tuple(children.pose.shape[1:-2])
    why_no_maps = _why_no_maps(routing, wiring, grid, classes)
    maps, uniform = None, 0.0
    if not why_no_maps:
        assert classes is not None
        types = children.pose.shape[-2]
        n_competitors = coupling.shape[-1] if routing.coupling_axis == "parents" else coupling.shape[-2]
        leak = int(getattr(routing, "leak", False) is True)
        uniform = types / (n_competitors + leak) if routing.coupling_axis else 0.0
        maps = _class_maps(coupling, wiring, grid, types, classes).cpu()
    return _BatchCouplings(entropy, reason, maps, why_no_maps, uniform, coupling[:n_kept].cpu(), wiring, grid)


def why_no_entropy(routing: Routing, coupling: Tensor) -> str:
    """Return the reason why these couplings have no entropy, or an empty string."""
    if routing.coupling_axis is None:
        return f"couplings of {type(routing).__name__} are unnormalised (any sign, any sum): entropy is undefined"
    n = coupling.shape[-1 if routing.coupling_axis == "parents" else -2]
    return "" if n > 1 else f"the number of {routing.coupling_axis} is 1: there is no competition"


def _why_no_maps(routing: Routing, wiring: Wiring, grid: tuple[int, ...], classes: Tensor | None) -> str:
    """Return the reason why this layer has no maps, or an empty string."""
    if classes is None:
        return "its parents are not classes"
    if wiring.slot_kind == "type":
        return f"{type(routing).__name__} has one coupling per child channel, not per position"
    if len(grid) != 2 or grid == (1, 1):
        return "its children are not on a grid"
    return ""


def normalized_entropy(coupling: Tensor, routing: Routing, wiring: Wiring) -> Tensor:
    """Return the entropy over the competitors, 0 to 1, one for each slot, parent or child.

    Shapes:
        ``[B, *L, I, J] -> [B, n]``
    """
    if routing.coupling_axis == "children":
        return coupling_entropy(coupling, -2).flatten(1)
    index = wiring.index(coupling.device)
    if wiring.slot_kind == "type":
        index = index.amax(-1)  # a slot exists if it reads at least one child
    index = index.flatten()
    if wiring.competition == "local" or wiring.grid is None:
        return coupling_entropy(coupling, -1).flatten(1)[:, index >= 0]
    # Global competition: a child has couplings at all positions whose window reads it.
    n_children = wiring.grid[0] * wiring.grid[1] * wiring.types
    flat = coupling.flatten(1, -2)[:, index >= 0]  # [B, slots, J]
    child = index[index >= 0]
    total = flat.new_zeros(len(flat), n_children).index_add(1, child, flat.sum(-1))
    fraction = flat / total[:, child].clamp_min(torch.finfo(flat.dtype).tiny).unsqueeze(-1)
    entropy = torch.zeros_like(total).index_add(1, child, torch.special.entr(fraction).sum(-1))
    n_competitors = torch.bincount(child, minlength=n_children) * coupling.shape[-1]
    entropy = entropy / n_competitors.to(entropy).clamp_min(2).log()
    return entropy[:, n_competitors > 1]  # a child that no window reads has no parents


def _class_maps(coupling: Tensor, wiring: Wiring, grid: tuple[int, ...], types: int, classes: Tensor) -> Tensor:
    """Sum the couplings to each image's class over the children at each position, by iteration ``T``.

    Shapes:
        coupling ``[B, T, *L, I, J]``, classes ``[B]`` ``-> [B, T, H, W]``
    """
    parent = classes.view(-1, *[1] * (coupling.dim() - 1)).expand(*coupling.shape[:-1], 1)
    to_class = coupling.gather(-1, parent).squeeze(-1).flatten(2)  # [B, T, slots]
    child = wiring.index(coupling.device).flatten()  # ordered by (row, column, type), in dense layers too
    position = torch.div(child[child >= 0], types, rounding_mode="floor")
    zeros = to_class.new_zeros(*to_class.shape[:2], grid[0] * grid[1])
    return zeros.index_add(2, position, to_class[:, :, child >= 0]).unflatten(2, (grid[0], grid[1]))


# Figure -------------------------------------------------------------------------------------------------------------


def draw_couplings(
    result: CouplingMaps, out: Path | str, title: str = "", n: int = 4, classes: Sequence[str] | None = None
) -> None:
    """Draw ``n`` images with their maps at every iteration, and the entropy of every layer by iteration.

    Purple is below the uniform coupling, orange above; the line is the outline of the foreground. Each position is
    drawn around the centre of its receptive field.

    Args:
        result: the return value of `coupling_maps`.
        out: the file, .png, .svg or .pdf.
        title: above the figure.
        n: number of images.
        classes: class names, by default their indices.
    """
    mapped = next((layer for layer in result.layers if layer.maps is not None), None)
    has_entropy = any(layer.entropy is not None for layer in result.layers)
    n = min(n, len(result.images))
    n_iterations = 0 if mapped is None or mapped.maps is None else mapped.maps.shape[1]
    maps_width = 1.3 * (1 + n_iterations) + 0.9 if mapped else 0.0
    entropy_width = 4.2 if has_entropy else 2.6
    figure = new_figure(maps_width + entropy_width, max(3.4, 1.3 * n + 0.7 if mapped else 0))
    if title:
        figure.suptitle(title, fontsize=11)
    if mapped is not None:
        left, right = figure.subfigures(1, 2, width_ratios=[maps_width, entropy_width])
        _draw_maps(left, result, mapped, n, classes)
        _draw_entropy(right.subplots(), result, has_entropy)
    else:
        _draw_entropy(figure.subplots(), result, has_entropy)
    save_figure(figure, out)


def _draw_maps(figure: Any, result: CouplingMaps, layer: LayerCouplings, n: int, classes: Sequence[str] | None) -> None:
    """Draw one row per image: the image, then its coupling map of each iteration."""
    assert layer.maps is not None
    selected = round_robin_indices(result.classes, torch.ones(len(result.classes)))[:n]
    maps = layer.maps[selected].float()
    grid = figure.subplots(n, 1 + maps.shape[1], squeeze=False)
    largest = max(float((maps - layer.uniform).abs().max()), 1e-6)
    height, width = result.images.shape[2:]
    if layer.centers:
        top, row_step, left, column_step = layer.centers
    else:  # unknown: spread over the whole image
        row_step, column_step = height / maps.shape[2], width / maps.shape[3]
        top, left = (row_step - 1) / 2, (column_step - 1) / 2
    rows, columns = maps.shape[2:]
    extent = (
        left - column_step / 2,
        left + column_step * (columns - 0.5),
        top + row_step * (rows - 0.5),
        top - row_step / 2,
    )
    heat_map = None
    for row, index in enumerate(selected):
        image = result.images[index]
        grey = image.float().mean(0)
        middle = float(grey.min() + grey.max()) / 2
        for column, axes in enumerate(grid[row]):
            if column == 0:
                show_image(axes, image[:1] if len(image) == 2 else image)
                label = int(result.classes[index])
                axes.set_title(f"class {label}" if classes is None else classes[label], fontsize=9)
                continue
            colors = {"cmap": "PuOr_r", "vmin": layer.uniform - largest, "vmax": layer.uniform + largest}
            heat_map = axes.imshow(maps[row, column - 1].numpy(), extent=extent, interpolation="nearest", **colors)
            if grey.max() > grey.min():
                axes.contour(grey.numpy(), levels=[middle], colors="k", linewidths=0.8, linestyles="solid")
            axes.set_xlim(-0.5, width - 0.5)
            axes.set_ylim(height - 0.5, -0.5)
            axes.set_xticks([])
            axes.set_yticks([])
            axes.set_facecolor("#cccccc")
            if row == 0:
                axes.set_title(f"iteration {column}", fontsize=9)
    bar = figure.colorbar(heat_map, ax=grid[:, 1:], shrink=0.9, aspect=30, pad=0.02)
    bar.set_label("coupling to the class" + (f" (uniform: {layer.uniform:.2g})" if layer.couples else ""), fontsize=9)
    bar.ax.tick_params(labelsize=8)


def _draw_entropy(axes: Any, result: CouplingMaps, has_entropy: bool) -> None:
    """Draw mean and standard deviation of the entropy by iteration, and the reasons for missing values."""
    reasons: dict[str, list[str]] = {}
    lowest, n_iterations = 0.99, 1
    for index, layer in enumerate(result.layers):
        if layer.entropy is None:
            reasons.setdefault(layer.why_no_entropy, []).append(layer.name)
            continue
        mean, std = layer.entropy.mean(0), layer.entropy.std(0, correction=0)
        lowest, n_iterations = min(lowest, float((mean - std).min())), max(n_iterations, len(mean))
        color, marker = COLORS[index % len(COLORS)], MARKERS[index % len(MARKERS)]
        style = {"color": color, "marker": marker, "capsize": 3, "label": f"{layer.name} ({float(mean[-1]):.4f})"}
        axes.errorbar(range(1, len(mean) + 1), mean.tolist(), std.tolist(), **style)
    lines = [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]
    if all(layer.maps is None for layer in result.layers):
        lines.append(f"no maps of {result.layers[-1].name}: {result.layers[-1].why_no_maps}")
    text = "\n".join(textwrap.fill(line, 58 if has_entropy else 34) for line in lines)
    if not has_entropy:
        axes.set_axis_off()
        axes.text(0.5, 0.5, text, transform=axes.transAxes, fontsize=8, ha="center", va="center")
        return
    style_axes(axes, "", "routing iteration", "normalised entropy (1: uniform, 0: one-hot)")
    axes.set_title(text, fontsize=8)
    span = 1 - lowest
    axes.set_ylim(lowest - 0.1 * span, 1 + 0.05 * span)
    axes.set_xlim(0.7, n_iterations + 0.3)
    axes.set_xticks(range(1, n_iterations + 1))
    axes.legend(frameon=False, fontsize=8, title="mean ± std over images (last mean)", title_fontsize=8)


# Declaration --------------------------------------------------------------------------------------------------------


def _run(subject: Subject, options: NoOptions) -> CouplingMaps:
    batch = subject.batch()
    progress = subject.track(subject.n_batches(BATCH_SIZE))
    return coupling_maps(subject.model, batch.images, batch.labels, n_kept=0, progress=progress)


def _summarize(result: CouplingMaps, classes: Sequence[str]) -> Summary:
    rows, notes = {}, []
    for layer in result.layers:
        values = [] if layer.entropy is None else layer.entropy.mean(0).tolist()
        rows[layer.name] = {str(iteration): value for iteration, value in enumerate(values, 1)}
        if layer.entropy is None:
            notes.append(f"{layer.name}: {layer.why_no_entropy}.")
    if result.layers[-1].maps is None:
        notes.append(f"No maps of {result.layers[-1].name}: {result.layers[-1].why_no_maps}.")
    n_iterations = max(len(row) for row in rows.values())
    columns = {str(n): Column(f"iteration {n}", ".4f") for n in range(1, n_iterations + 1)}
    title = "normalised entropy of the couplings (1: uniform, 0: one-hot)"
    return Summary(title, len(result.images), "layer", columns, rows, tuple(notes))


COUPLINGS = register_analysis(
    Analysis(
        "couplings",
        "entropy of the couplings by iteration, and maps of them over the image",
        _run,
        _summarize,
        lambda result, out, title, classes: draw_couplings(result, out, title, classes=classes),
        n_images=100,
    )
)
