"""Coupling coefficients of every layer and iteration: their entropy, and maps over the image."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchcaps.analysis.common import (
    Progress,
    capsule_layers,
    first_labels,
    require_capsules,
    traced_outputs,
)
from torchcaps.analysis.couplings_figures import NEARLY_UNIFORM, draw_couplings, is_nearly_uniform
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

    >>> import torch, torchcaps
    >>> model = torchcaps.create_model("capsnet_small", width=4, types=2, hidden=(8,))
    >>> images, labels = torch.rand(4, 1, 28, 28), torch.arange(4)
    >>> from torchcaps.analysis import coupling_maps
    >>> layer = coupling_maps(model, images).layers[0]
    >>> layer.couples, layer.entropy.shape, layer.maps.shape
    ('parents', torch.Size([4, 3]), torch.Size([4, 3, 6, 6]))
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
    """Images ``[B, C, H, W]``, the class of each map ``[B]``, and the layers, the lowest first.

    >>> import torch, torchcaps
    >>> model = torchcaps.create_model("capsnet_small", width=4, types=2, hidden=(8,))
    >>> images, labels = torch.rand(4, 1, 28, 28), torch.arange(4)
    >>> from torchcaps.analysis import coupling_maps
    >>> result = coupling_maps(model, images)
    >>> [layer.name for layer in result.layers], result.classes.shape
    (['digit'], torch.Size([4]))
    """

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


# Declaration --------------------------------------------------------------------------------------------------------


def _run(subject: Subject, options: NoOptions) -> CouplingMaps:
    batch = subject.batch()
    progress = subject.track(subject.n_batches(BATCH_SIZE))
    return coupling_maps(subject.model, batch.images, batch.labels, n_kept=0, progress=progress)


def _summarize(result: CouplingMaps, classes: Sequence[str]) -> Summary:
    """Return the summary table: normalised entropy of the couplings, mean over images, by layer and iteration."""
    rows, notes = {}, []
    for layer in result.layers:
        values = [] if layer.entropy is None else layer.entropy.mean(0).tolist()
        rows[layer.name] = {str(iteration): value for iteration, value in enumerate(values, 1)}
        if layer.entropy is None:
            notes.append(f"{layer.name}: {layer.why_no_entropy}.")
    if is_nearly_uniform(result):
        notes.append(f"{NEARLY_UNIFORM.capitalize()}.")
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
