"""A forward pass with trace, as the page shows it: scores, capsules, couplings, feature maps, reconstructions."""

import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps.analysis.common import capsule_layers
from torchcaps.analysis.couplings import normalized_entropy, why_no_entropy
from torchcaps.analysis.receptive_fields import receptive_field_centers
from torchcaps.capsules import Capsules
from torchcaps.explorer.arrays import encode_array
from torchcaps.explorer.inputs import ResolvedInput
from torchcaps.explorer.session import ExploredRun, iterations_changed
from torchcaps.models import Output
from torchcaps.nn.layers import CapsuleLayer
from torchcaps.routing.base import Trace
from torchcaps.votes import Wiring

__all__ = ["TracedForward", "activity", "child_states", "describe_forward", "trace_forward"]

MAX_FEATURE_MAPS = 16  # channels of a convolution that are sent
MAX_MAP_SIDE = 32  # pixels
MAX_POSE_VALUES = 40_000  # of primary capsules; lengths are always sent
MAX_COUPLINGS = 400_000  # of one layer; above, child types are summed
MAX_EDGES = 160  # connections of the parse tree per layer


@dataclass(frozen=True)
class TracedForward:
    """Output of a network with trace, its feature maps, primary capsules, layers and their wirings."""

    output: Output
    features: dict[str, Tensor]
    primary: Capsules | None
    layers: dict[str, CapsuleLayer]
    wirings: list[Wiring]

    @property
    def traces(self) -> tuple[Trace, ...]:
        """The trace of each capsule layer."""
        return self.output.trace or ()


def trace_forward(run: ExploredRun, pixels: Tensor, iterations: int | None = None) -> TracedForward:
    """Run the network on pixels ``[1, C, H, W]`` and record feature maps and primary capsules."""
    features: dict[str, Tensor] = {}
    primary: list[Capsules] = []

    def record(name: str) -> Any:
        """Return a forward hook that stores feature maps as ``features[name]``, and primary capsules."""

        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            """Store an output if it is a feature map ``[B, C, H, W]`` or capsules."""
            if isinstance(output, Tensor) and output.dim() == 4:
                features[name] = output
            elif isinstance(output, Capsules):
                primary.append(output)

        return hook

    handles = [module.register_forward_hook(record(name)) for name, module in run.model.front.named_children()]
    try:
        with iterations_changed(run, iterations):
            output = run.pixels(pixels, trace=True)
            network = run.capsules
            layers = {} if network is None else capsule_layers(network)
            wirings = []
            children = primary[-1] if primary else None
            for layer, trace in zip(layers.values(), output.trace or (), strict=True):
                assert children is not None
                wirings.append(layer.vote_inputs(layer.check_children(children))[-1])
                children = trace.states[-1].capsules()
    finally:
        for handle in handles:
            handle.remove()
    return TracedForward(output, features, primary[-1] if primary else None, layers, wirings)


def activity(capsules: Capsules) -> Tensor:
    """Return the activation of capsules, or their length if they have none: ``[B, ...]``."""
    return capsules.length() if capsules.activation is None else capsules.activation


def child_states(traced: TracedForward, schedule: str, layer: int, t: int) -> Capsules:
    """Return the children that a layer routes in iteration ``t``; see `torchcaps.nn.CapsuleStack`."""
    if layer == 0:
        assert traced.primary is not None
        return traced.primary
    below = traced.traces[layer - 1].states
    if schedule == "sequential":
        return below[-1].capsules()
    return below[max(0, t - 1)].capsules()


@torch.no_grad()
def describe_forward(
    run: ExploredRun, resolved: ResolvedInput, iterations: int | None, sites: list[list[int] | None], n_decoded: int = 1
) -> dict[str, Any]:
    """Return the JSON of a forward pass. The caller holds `torchcaps.explorer.session.compute_lock`.

    Args:
        run: the run.
        resolved: its input.
        iterations: number of routing iterations; ``None``: as trained.
        sites: for each capsule layer, row and column of the parents whose couplings are returned.
        n_decoded: number of classes to decode, highest scores first.
    """
    start = time.perf_counter()
    traced = trace_forward(run, resolved.pixels, iterations)
    output = traced.output
    probabilities = run.model.probabilities(output.scores.float())[0]
    predicted = run.model.predict_multi_hot(output.scores)[0]
    order = probabilities.argsort(descending=True, stable=True).tolist()
    attacked = resolved.pixels is not resolved.clean
    result: dict[str, Any] = {
        "image": encode_array(resolved.pixels[0]),
        "clean": encode_array(resolved.clean[0]) if attacked else None,
        "labels": None if resolved.labels is None else list(resolved.labels),
        "scores": output.scores[0].tolist(),
        "probabilities": probabilities.tolist(),
        "order": order,
        "predicted": [index for index in order if predicted[index]],
        "features": [_describe_features(name, maps) for name, maps in traced.features.items()],
        "primary": None if traced.primary is None else _describe_primary(traced.primary),
        "capsules": None,
        "reconstruction": None,
        "layers": [],
    }
    if output.capsules is not None:
        result["capsules"] = {
            "pose": encode_array(output.capsules.pose[0]),
            "activity": activity(output.capsules)[0].tolist(),
        }
        result["layers"] = _describe_layers(run, traced, sites)
        network = run.capsules
        if network is not None and network.decoder is not None:
            classes = order[: max(n_decoded, network.n_objects or 1)]
            images = network.decode(output.capsules, torch.tensor([classes]))[0]
            result["reconstruction"] = {"classes": classes, "images": encode_array(images)}
    result["milliseconds"] = 1000 * (time.perf_counter() - start)
    return result


def _describe_features(name: str, maps: Tensor) -> dict[str, Any]:
    """Return the first channels of a feature map as bytes, scaled from its smallest to its largest value."""
    shown = maps[0, :MAX_FEATURE_MAPS]
    height, width = (min(side, MAX_MAP_SIDE) for side in shown.shape[1:])
    shown = F.adaptive_avg_pool2d(shown, (height, width))
    low, high = float(shown.min()), float(shown.max())
    scaled = (shown - low) * (255 / max(high - low, 1e-12))
    return {
        "name": name,
        "shape": list(maps.shape[1:]),
        "low": low,
        "high": high,
        "maps": encode_array(scaled.round(), "uint8"),
    }


def _describe_primary(primary: Capsules) -> dict[str, Any] | None:
    """Return lengths and poses of the primary capsules, on their grid."""
    if primary.pose.dim() != 5:
        return None
    height, width, types, dim = primary.pose.shape[1:]
    n_posed = max(1, min(types, MAX_POSE_VALUES // (height * width * dim)))
    return {
        "grid": [height, width],
        "types": types,
        "dim": dim,
        "lengths": encode_array(primary.length()[0]),
        "activation": None if primary.activation is None else encode_array(primary.activation[0]),
        "posed_types": n_posed,
        "poses": encode_array(primary.pose[0, :, :, :n_posed]),
    }


# Capsule layers -----------------------------------------------------------------------------------------------------


def _describe_layers(run: ExploredRun, traced: TracedForward, sites: list[list[int] | None]) -> list[dict[str, Any]]:
    """Return `_describe_layer` of each capsule layer, with receptive-field centres in pixels of the run's images."""
    network = run.capsules
    assert network is not None
    assert traced.primary is not None
    grid = tuple(traced.primary.pose.shape[1:-2])
    centers = receptive_field_centers(network, traced.wirings, grid)
    # The network may see a crop of the pixels: its coordinates start at the crop's corner.
    offset = [(a - b) / 2 for a, b in zip(run.shape[1:], run.model.spec.image[1:], strict=True)]
    described = []
    for n, (name, layer) in enumerate(traced.layers.items()):
        children = child_states(traced, network.capsules.schedule, n, len(traced.traces[n].states) - 1)
        site = sites[n] if n < len(sites) else None
        center = centers[n]
        if center:
            center = (center[0] + offset[0], center[1], center[2] + offset[1], center[3])
        described.append(_describe_layer(name, layer, traced.traces[n], traced.wirings[n], children, site, center))
    return described


def _describe_layer(
    name: str,
    layer: CapsuleLayer,
    trace: Trace,
    wiring: Wiring,
    children: Capsules,
    site: list[int] | None,
    centers: tuple[float, ...],
) -> dict[str, Any]:
    """Return couplings, parents, entropy and strongest connections of a layer."""
    couplings = [state.coupling for state in trace.states]
    if any(coupling is None for coupling in couplings):
        return {"name": name, "why": f"{type(layer.routing).__name__} has no couplings in its states."}
    coupling = torch.stack([c for c in couplings if c is not None])[:, 0]  # [T, *L, I, J]
    grid = list(children.pose.shape[1:-2])
    types = children.pose.shape[-2]
    chosen = check_site(site, wiring)
    at_site = coupling[(slice(None), *chosen)] if chosen else coupling  # [T, I, J]
    index = wiring.index()[tuple(chosen)] if chosen else wiring.index()  # [I] or [I, cells]
    by_type = wiring.slot_kind == "type"
    child = torch.arange(len(index)) if by_type else index
    merged = at_site.numel() > MAX_COUPLINGS and not by_type and types > 1
    if merged:
        at_site = at_site.unflatten(1, (-1, types)).sum(2)
        child = child.unflatten(0, (-1, types))[:, 0]
    real = torch.ones(len(child), dtype=torch.bool) if by_type else child >= 0
    sums = at_site[:, real].sum(-1)  # over the parents, [T, children]
    reason = why_no_entropy(layer.routing, coupling)
    entropy = None
    if not reason:
        entropy = [float(normalized_entropy(c[None], layer.routing, wiring).mean()) for c in coupling]
    poses = [state.capsules() for state in trace.states]
    where = (0, *chosen) if chosen else (0,)
    return {
        "name": name,
        "why": "",
        "iterations": len(trace.states),
        "grid": grid if len(grid) == 2 else None,
        "types": types,
        "parents": coupling.shape[-1],
        "sites": list(wiring.sites),
        "site": chosen,
        "by_type": by_type,
        "merged_types": merged,
        "axis": layer.routing.coupling_axis,
        "children": encode_array(child, "int32"),
        "couplings": encode_array(at_site),
        "sums": [[float(s.min()), float(s.mean()), float(s.max())] for s in sums],
        "entropy": entropy,
        "why_no_entropy": reason,
        "activity": encode_array(torch.stack([activity(caps)[where] for caps in poses])),
        "residual": _residuals([caps.pose for caps in poses]),
        "child_activity": encode_array(activity(children)[0].flatten()),
        "centers": list(centers),
        "edges": strongest_edges(coupling[-1], activity(children)[0].flatten(), wiring),
    }


def check_site(site: list[int] | None, wiring: Wiring) -> list[int]:
    """Return a valid output position of a layer: by default the middle; empty for a dense layer."""
    if not wiring.sites:
        return []
    if site is None:
        return [size // 2 for size in wiring.sites]
    for value, size in zip(site, wiring.sites, strict=True):
        if value >= size:
            raise ValueError(f"sites must be inside of the grid {list(wiring.sites)}, got {site}")
    return list(site)


def _residuals(poses: list[Tensor]) -> list[float | None]:
    """Return the relative change of all parents by each iteration but the first."""
    residuals: list[float | None] = [None]
    for before, after in pairwise(poses):
        residuals.append(float((after - before).norm() / after.norm().clamp_min(1e-12)))
    return residuals


def strongest_edges(coupling: Tensor, child_activity: Tensor, wiring: Wiring) -> list[list[float]]:
    """Return the connections with the largest coupling times activity of the child.

    Args:
        coupling: of one iteration, ``[*L, I, J]``.
        child_activity: of all children, ``[n]``, in the order (row, column, type).
        wiring: of the layer.

    Returns:
        Rows of child index, position index of the parent, parent and weight, the strongest first. If slots are child
        types, the child is the type with its mean activity.
    """
    index = wiring.index()
    if wiring.slot_kind == "type":
        means = child_activity.unflatten(0, (-1, wiring.types)).mean(0)
        index = torch.arange(wiring.types).expand(index.shape[:-1])
        slots = means[index]
    else:
        slots = torch.where(index >= 0, child_activity[index.clamp_min(0)], 0)
    weight = (
        (coupling * slots.unsqueeze(-1)).flatten(0, -3) if coupling.dim() > 2 else (coupling * slots[:, None])[None]
    )
    n_slots, n_parents = weight.shape[-2:]
    top = weight.abs().flatten().topk(min(MAX_EDGES, weight.numel()))
    flat, rows = weight.flatten(), []
    children = index.expand(*coupling.shape[:-1]).reshape(-1)
    for position in top.indices.tolist():
        slot = position // n_parents
        child = int(children[slot])
        if child >= 0 and float(flat[position]) != 0:
            rows.append([child, slot // n_slots, position % n_parents, float(flat[position])])
    return rows
