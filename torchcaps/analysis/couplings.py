"""Who listens to whom: couplings at every iteration, how evenly they are spread, and where in the image they lie."""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchcaps._core.plotting import COLORS, MARKERS, new_figure, save_figure, show_image, style_axes
from torchcaps.analysis.common import Progress, evaluating, require_capsules
from torchcaps.analysis.perturbation import first_labels
from torchcaps.analysis.reconstruction import mixed
from torchcaps.capsules import Capsules
from torchcaps.metrics import coupling_entropy
from torchcaps.models import CapsuleNetwork, Output
from torchcaps.nn.layers import CapsuleLayer
from torchcaps.nn.sizes import as_padding, as_pair, resolve_padding
from torchcaps.routing import Routing
from torchcaps.votes import Wiring

__all__ = ["CouplingMaps", "LayerCouplings", "coupling_maps", "draw_couplings", "routed", "spread"]


@dataclass(frozen=True)
class LayerCouplings:
    """The couplings of one capsule layer.

    Attributes:
        name, routing: of the layer.
        couples: over what couplings sum to 1: ``"parents"``, ``"children"``, or ``""`` for free couplings.
        entropy: how evenly, 0 (one gets all) to 1, for each image and iteration ``[B, T]``; or ``None``, and
            ``why_no_entropy`` says why.
        maps: coupling to the class of each image, summed over the child types of each place ``[B, T, H, W]``; or
            ``None``, and ``why_no_maps`` says why.
        even: what a map shows at every place where all competitors get the same; 0 for free couplings.
        places: row of the first place's centre in the image's pixels, rows from one to the next, and the same for
            columns; empty where the way from image to grid is not known.
        couplings: of the first images ``[kept, T, *L, I, J]``.
    """

    name: str
    routing: str
    couples: str
    entropy: Tensor | None
    why_no_entropy: str
    maps: Tensor | None
    why_no_maps: str
    even: float
    places: tuple[float, ...]
    couplings: Tensor


@dataclass(frozen=True)
class CouplingMaps:
    """Images ``[B, C, H, W]``, the class of each that maps are for ``[B]``, and the layers, the lowest first."""

    images: Tensor
    classes: Tensor
    layers: tuple[LayerCouplings, ...]


def coupling_maps(
    model: CapsuleNetwork,
    images: Tensor,
    labels: Tensor | None = None,
    keep: int = 1,
    batch_size: int = 32,
    progress: Progress | None = None,
) -> CouplingMaps:
    """Trace the couplings of every layer and iteration (Sabour 2017, Procedure 1, and what came after it).

    The entropy is over those who compete: the parents of a child, or the children of a parent (Choi 2019, eq. 6),
    over the logarithm of their number. With competition over all receptive fields (Hinton 2018) a child's parents
    count wherever they stand; what a leak takes is left out, and slots that read padding are nobody's.

    Args:
        model: a capsule network.
        images: as the model takes them.
        labels: the class that maps are for, the first where an image has several; by default the predicted one.
        keep: of so many images the couplings themselves are returned: a large tensor.
        batch_size: images at a time, fewer than elsewhere: couplings of convolutions are large.
        progress: called after each batch.
    """
    network = require_capsules(model, "coupling maps")
    if len(images) == 0:
        raise ValueError("images must be one or more, got none")
    if not 0 <= keep <= len(images):
        raise ValueError(f"keep must be a number of images, 0..{len(images)}, got {keep}")
    numbers = None if labels is None else first_labels(network, labels, len(images))
    names = _names(network)
    parts: list[list[_Part]] = [[] for _ in names]
    classes = []
    for start, output, children in routed(network, images, batch_size, progress):
        chosen = network.top_class(output)
        if numbers is not None:
            chosen = numbers[start : start + batch_size].to(chosen.device)
        classes.append(chosen.cpu())
        assert output.trace is not None
        for n, (layer, trace) in enumerate(zip(names.values(), output.trace, strict=True)):
            top = n == len(names) - 1
            coupling = torch.stack([_given(c, layer.routing) for c in trace.couplings], dim=1)  # [B, T, *L, I, J]
            parts[n].append(_part(coupling, layer, children[n], chosen if top else None, max(0, keep - start)))
    found = []
    grids = _places(network, [part[0].wiring for part in parts], parts[0][0].grid)
    for (name, layer), pieces, places in zip(names.items(), parts, grids, strict=True):
        first = pieces[0]
        found.append(
            LayerCouplings(
                name,
                str(layer.routing),
                layer.routing.coupling_axis or "",
                None if first.entropy is None else torch.cat([p.entropy for p in pieces if p.entropy is not None]),
                first.why_no_entropy,
                None if first.maps is None else torch.cat([p.maps for p in pieces if p.maps is not None]),
                first.why_no_maps,
                first.even,
                places if first.maps is not None else (),
                torch.cat([p.couplings for p in pieces]),
            )
        )
    return CouplingMaps(images.cpu(), torch.cat(classes), tuple(found))


def routed(
    model: CapsuleNetwork, images: Tensor, batch_size: int, progress: Progress | None = None
) -> Iterator[tuple[int, Output, list[Capsules]]]:
    """Give, batch by batch: where it starts, the output with its trace, and the children of each layer as they end.

    The first children are the primary capsules, and one more stands behind the last: the class capsules.
    """
    caught: list[Capsules] = []

    def catch(module: nn.Module, given: Any, made: Any) -> None:
        caught.append(made)

    handle = model.front.register_forward_hook(catch)
    try:
        with evaluating(model):
            for start in range(0, len(images), batch_size):
                caught.clear()
                output = model(images[start : start + batch_size], trace=True)
                yield start, output, [*caught, *(trace.states[-1].capsules() for trace in output.trace)]
                if progress is not None:
                    progress()
    finally:
        handle.remove()


def _names(model: CapsuleNetwork) -> dict[str, CapsuleLayer]:
    layers = model.capsules.layers
    named = layers.items() if isinstance(layers, nn.ModuleDict) else enumerate(layers)
    return {str(name): layer for name, layer in named}  # type: ignore[misc]


def _given(coupling: Tensor | None, routing: Routing) -> Tensor:
    if coupling is None:
        raise ValueError(f"coupling maps need couplings, and {type(routing).__name__} keeps none in its states")
    return coupling


# One layer -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    entropy: Tensor | None
    why_no_entropy: str
    maps: Tensor | None
    why_no_maps: str
    even: float
    couplings: Tensor
    wiring: Wiring
    grid: tuple[int, ...]


def _part(coupling: Tensor, layer: CapsuleLayer, children: Capsules, classes: Tensor | None, keep: int) -> _Part:
    """Make of the couplings ``[B, T, *L, I, J]`` of some images what is kept of them."""
    routing = layer.routing
    wiring = layer.vote_inputs(layer.check_children(children))[-1]
    why_no_entropy = _why_no_entropy(routing, coupling)
    entropy = None
    if not why_no_entropy:
        steps = [spread(coupling[:, t], routing, wiring).flatten(1).mean(1) for t in range(coupling.shape[1])]
        entropy = torch.stack(steps, dim=1).cpu()
    grid = tuple(children.pose.shape[1:-2])
    why_no_maps = _why_no_maps(routing, wiring, grid, classes)
    maps, even = None, 0.0
    if not why_no_maps:
        assert classes is not None
        types = children.pose.shape[-2]
        competitors = coupling.shape[-1] if routing.coupling_axis == "parents" else coupling.shape[-2]
        leak = int(getattr(routing, "leak", False) is True)
        even = types / (competitors + leak) if routing.coupling_axis else 0.0
        maps = _maps(coupling, wiring, grid, types, classes).cpu()
    return _Part(entropy, why_no_entropy, maps, why_no_maps, even, coupling[:keep].cpu(), wiring, grid)


def _why_no_entropy(routing: Routing, coupling: Tensor) -> str:
    if routing.coupling_axis is None:
        return f"couplings of {type(routing).__name__} are free: any sign and any sum, so they have no entropy"
    n = coupling.shape[-1 if routing.coupling_axis == "parents" else -2]
    return "" if n > 1 else f"there is but one of the {routing.coupling_axis}, so nobody competes"


def _why_no_maps(routing: Routing, wiring: Wiring, grid: tuple[int, ...], classes: Tensor | None) -> str:
    if classes is None:
        return "its parents are no classes"
    if wiring.slot_kind == "type":
        return f"{type(routing).__name__} couples whole child channels, not places"
    if len(grid) != 2 or grid == (1, 1):
        return "its children stand on no grid"
    return ""


def spread(coupling: Tensor, routing: Routing, wiring: Wiring) -> Tensor:
    """Return the entropy of couplings over those who compete, 0 to 1, one for each slot, parent or child.

    Shapes:
        ``[B, *L, I, J] -> [B, n]``
    """
    if routing.coupling_axis == "children":
        return coupling_entropy(coupling, -2).flatten(1)
    index = wiring.index(coupling.device)
    if wiring.slot_kind == "type":
        index = index.amax(-1)  # a slot is there where it reads one child or more
    index = index.flatten()
    if wiring.competition == "local" or wiring.grid is None:
        return coupling_entropy(coupling, -1).flatten(1)[:, index >= 0]
    # Global competition: each child's couplings stand at all places that read it.
    n_children = wiring.grid[0] * wiring.grid[1] * wiring.types
    flat = coupling.flatten(1, -2)[:, index >= 0]  # [B, slots, J]
    child = index[index >= 0]
    total = flat.new_zeros(len(flat), n_children).index_add(1, child, flat.sum(-1))
    share = flat / total[:, child].clamp_min(torch.finfo(flat.dtype).tiny).unsqueeze(-1)
    entropy = torch.zeros_like(total).index_add(1, child, torch.special.entr(share).sum(-1))
    competitors = torch.bincount(child, minlength=n_children) * coupling.shape[-1]
    entropy = entropy / competitors.to(entropy).clamp_min(2).log()
    return entropy[:, competitors > 1]  # a child that no window reads has no parents


def _maps(coupling: Tensor, wiring: Wiring, grid: tuple[int, ...], types: int, classes: Tensor) -> Tensor:
    """Add up at each place what its children give to a class: ``[B, T, *L, I, J] -> [B, T, H, W]``."""
    chosen = classes.view(-1, *[1] * (coupling.dim() - 1)).expand(*coupling.shape[:-1], 1)
    given = coupling.gather(-1, chosen).squeeze(-1).flatten(2)  # [B, T, slots]
    child = wiring.index(coupling.device).flatten()  # in the order (row, column, type), dense layers too
    place = torch.div(child[child >= 0], types, rounding_mode="floor")
    empty = given.new_zeros(*given.shape[:2], grid[0] * grid[1])
    return empty.index_add(2, place, given[:, :, child >= 0]).unflatten(2, (grid[0], grid[1]))


# Where a grid lies in the image ----------------------------------------------------------------------------------


def _places(model: CapsuleNetwork, wirings: list[Wiring], primary: tuple[int, ...]) -> list[tuple[float, ...]]:
    """Return for each layer where the centres of its children's windows lie: first and step, of rows and of columns.

    Windows that stop short of the edge move them: the places of a 6x6 grid over 28x28 all lie in its middle.
    """
    height, width = model.spec.image[1:]
    start, step = [0.0, 0.0], [1.0, 1.0]
    for window in _windows(model.front):
        kernel, stride = as_pair(window.kernel_size, "kernel_size"), as_pair(window.stride, "stride")
        padding = resolve_padding(as_padding(window.padding), (height, width), kernel, stride)
        height = (height + padding[0] + padding[1] - kernel[0]) // stride[0] + 1
        width = (width + padding[2] + padding[3] - kernel[1]) // stride[1] + 1
        _step_through(start, step, kernel, stride, padding)
    if (height, width) != primary:
        return [() for _ in wirings]  # something in front that we don't know
    found: list[tuple[float, ...]] = []
    for wiring in wirings:
        found.append((start[0], step[0], start[1], step[1]))
        _step_through(start, step, wiring.kernel, wiring.stride, wiring.padding)
    return found


def _windows(front: nn.Sequential) -> Iterator[Any]:
    """Name what moves over the image in windows, in order; of a residual block the convolutions, not the shortcut."""
    for module in front:
        if hasattr(module, "kernel_size"):
            yield module
        else:
            yield from (inner for inner in module.children() if isinstance(inner, nn.Conv2d))


def _step_through(start: list[float], step: list[float], kernel: Any, stride: Any, padding: Any) -> None:
    for axis in (0, 1):
        start[axis] += step[axis] * ((kernel[axis] - 1) / 2 - padding[2 * axis])
        step[axis] *= stride[axis]


# Drawing ---------------------------------------------------------------------------------------------------------


def draw_couplings(
    result: CouplingMaps, out: Path | str, title: str = "", n: int = 4, classes: Sequence[str] | None = None
) -> None:
    """Draw ``n`` images with their maps at every iteration, and the entropy of every layer by iteration.

    Purple: less than an even share, orange: more; the line is the outline of the image's ink. Each place is drawn
    around the centre of what it sees. Classes have their numbers, or the names in ``classes``.
    """
    mapped = next((layer for layer in result.layers if layer.maps is not None), None)
    known = any(layer.entropy is not None for layer in result.layers)
    n = min(n, len(result.images))
    n_steps = 0 if mapped is None or mapped.maps is None else mapped.maps.shape[1]
    wide = 1.3 * (1 + n_steps) + 0.9 if mapped else 0.0
    beside = 4.2 if known else 2.6
    figure = new_figure(wide + beside, max(3.4, 1.3 * n + 0.7 if mapped else 0))
    if title:
        figure.suptitle(title, fontsize=11)
    if mapped is not None:
        left, right = figure.subfigures(1, 2, width_ratios=[wide, beside])
        _draw_maps(left, result, mapped, n, classes)
        _draw_entropy(right.subplots(), result, known)
    else:
        _draw_entropy(figure.subplots(), result, known)
    save_figure(figure, out)


def _draw_maps(figure: Any, result: CouplingMaps, layer: LayerCouplings, n: int, classes: Sequence[str] | None) -> None:
    assert layer.maps is not None
    chosen = mixed(result.classes, torch.ones(len(result.classes)))[:n]
    maps = layer.maps[chosen].float()
    n_steps = maps.shape[1]
    grid = figure.subplots(n, 1 + n_steps, squeeze=False)
    reach = max(float((maps - layer.even).abs().max()), 1e-6)
    height, width = result.images.shape[2:]
    if layer.places:
        top, down, left, across = layer.places
    else:  # not known: over the whole image
        down, across = height / maps.shape[2], width / maps.shape[3]
        top, left = (down - 1) / 2, (across - 1) / 2
    rows, columns = maps.shape[2:]
    extent = (left - across / 2, left + across * (columns - 0.5), top + down * (rows - 0.5), top - down / 2)
    shown = None
    for row, place in enumerate(chosen):
        image = result.images[place]
        grey = image.float().mean(0)
        middle = float(grey.min() + grey.max()) / 2
        for column, axes in enumerate(grid[row]):
            if column == 0:
                show_image(axes, image[:1] if len(image) == 2 else image)
                number = int(result.classes[place])
                axes.set_title(f"class {number}" if classes is None else classes[number], fontsize=9)
                continue
            colours = {"cmap": "PuOr_r", "vmin": layer.even - reach, "vmax": layer.even + reach}
            shown = axes.imshow(maps[row, column - 1].numpy(), extent=extent, interpolation="nearest", **colours)
            if grey.max() > grey.min():
                axes.contour(grey.numpy(), levels=[middle], colors="k", linewidths=0.8, linestyles="solid")
            axes.set_xlim(-0.5, width - 0.5)
            axes.set_ylim(height - 0.5, -0.5)
            axes.set_xticks([])
            axes.set_yticks([])
            axes.set_facecolor("#cccccc")
            if row == 0:
                axes.set_title(f"iteration {column}", fontsize=9)
    bar = figure.colorbar(shown, ax=grid[:, 1:], shrink=0.9, aspect=30, pad=0.02)
    bar.set_label("coupling to the class" + (f" (even: {layer.even:.2g})" if layer.couples else ""), fontsize=9)
    bar.ax.tick_params(labelsize=8)


def _draw_entropy(axes: Any, result: CouplingMaps, known: bool) -> None:
    reasons: dict[str, list[str]] = {}
    lowest, most = 0.99, 1
    for number, layer in enumerate(result.layers):
        if layer.entropy is None:
            reasons.setdefault(layer.why_no_entropy, []).append(layer.name)
            continue
        mean, around = layer.entropy.mean(0), layer.entropy.std(0, correction=0)
        lowest, most = min(lowest, float((mean - around).min())), max(most, len(mean))
        colour, marker = COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)]
        style = {"color": colour, "marker": marker, "capsize": 3, "label": f"{layer.name} ({float(mean[-1]):.4f})"}
        axes.errorbar(range(1, len(mean) + 1), mean.tolist(), around.tolist(), **style)
    lines = [f"{', '.join(names)}: {why}" for why, names in reasons.items()]
    if all(layer.maps is None for layer in result.layers):
        lines.append(f"no maps of {result.layers[-1].name}: {result.layers[-1].why_no_maps}")
    words = "\n".join(textwrap.fill(line, 58 if known else 34) for line in lines)
    if not known:
        axes.set_axis_off()
        axes.text(0.5, 0.5, words, transform=axes.transAxes, fontsize=8, ha="center", va="center")
        return
    style_axes(axes, "", "iteration", "entropy (1: even, 0: one gets all)")
    axes.set_title(words, fontsize=8)
    room = 1 - lowest
    axes.set_ylim(lowest - 0.1 * room, 1 + 0.05 * room)
    axes.set_xlim(0.7, most + 0.3)
    axes.set_xticks(range(1, most + 1))
    axes.legend(frameon=False, fontsize=8, title="mean and spread over images (last)", title_fontsize=8)
