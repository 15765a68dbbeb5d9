"""Details that are computed on request: the numbers of one parent, and the credit of each pixel for a class."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchcaps.analysis.attacks import frozen
from torchcaps.analysis.receptive_fields import receptive_field_centers, receptive_field_size
from torchcaps.explorer.arrays import encode_array
from torchcaps.explorer.forward import TracedForward, activity, check_site, child_states, trace_forward
from torchcaps.explorer.inputs import ResolvedInput
from torchcaps.explorer.session import ExploredRun, iterations_changed
from torchcaps.models import CapsuleNetwork
from torchcaps.votes import Wiring

__all__ = ["describe_credit", "describe_parent"]

MAX_CHILDREN_SHOWN = 12


@torch.no_grad()
def describe_parent(
    run: ExploredRun,
    resolved: ResolvedInput,
    layer: int,
    site: list[int] | None,
    parent: int,
    iteration: int,
    iterations: int | None,
) -> dict[str, Any]:
    """Return logits, couplings and votes of the strongest children of a parent, their sum, and the parent's pose.

    Args:
        run: the run.
        resolved: its input.
        layer: index of the capsule layer.
        site: row and column of the parent; by default the middle of the grid.
        parent: index of the parent.
        iteration: index of the routing iteration.
        iterations: number of routing iterations; ``None``: as trained.
    """
    network = _require_capsules(run, "the table of a parent")
    traced = trace_forward(run, resolved.pixels, iterations)
    if layer >= len(traced.layers):
        raise ValueError(f"layer must be below {len(traced.layers)}, the number of capsule layers, got {layer}")
    module, wiring, states = list(traced.layers.values())[layer], traced.wirings[layer], traced.traces[layer].states
    if iteration >= len(states):
        raise ValueError(f"iteration must be below {len(states)}, the number of iterations, got {iteration}")
    state = states[iteration]
    if state.coupling is None or parent >= state.coupling.shape[-1]:
        n_parents = 0 if state.coupling is None else state.coupling.shape[-1]
        raise ValueError(f"parent must be below {n_parents}, the number of parents with couplings, got {parent}")
    where = (0, *check_site(site, wiring))
    children = child_states(traced, network.capsules.schedule, layer, iteration)
    with iterations_changed(run, iterations):
        votes = module.votes(children).dense()[where][:, parent]  # [I, D]
    coupling = state.coupling[where][:, parent]
    logits = None if state.logits is None else state.logits[where][:, parent]
    capsules = state.capsules()
    pose = capsules.pose[where][parent]
    index = wiring.index()[tuple(where[1:])] if wiring.sites else wiring.index()
    index = torch.arange(len(coupling)) if wiring.slot_kind == "type" else index
    total = (coupling.unsqueeze(-1) * votes).sum(0)
    rows = []
    for slot in coupling.abs().argsort(descending=True, stable=True)[:MAX_CHILDREN_SHOWN].tolist():
        if int(index[slot]) < 0:
            continue
        rows.append(
            {
                "child": int(index[slot]),
                "logit": None if logits is None else float(logits[slot]),
                "coupling": float(coupling[slot]),
                "vote_length": float(votes[slot].norm()),
                "agreement": float(votes[slot] @ pose),
            }
        )
    return {
        "children": rows,
        "n_children": len(coupling),
        "coupling_sum": float(coupling.sum()),
        "logits": None if logits is None else [float(logits.min()), float(logits.mean()), float(logits.max())],
        "sum": encode_array(total),
        "sum_length": float(total.norm()),
        "pose": encode_array(pose),
        "pose_length": float(pose.norm()),
        "activation": None if capsules.activation is None else float(capsules.activation[where][parent]),
    }


def describe_credit(run: ExploredRun, resolved: ResolvedInput, target: int, iterations: int | None) -> dict[str, Any]:
    """Return two maps of the pixels' credit for a class: by couplings, and by the gradient of its score.

    The first one starts with 1 at the class capsule. A child receives from each parent its coupling times the child's
    activity. A pixel gets the mean credit of the primary capsules whose receptive fields contain it, weighted by a
    triangular window. A network without capsules has the gradient only.
    """
    if target >= run.model.spec.classes:
        raise ValueError(f"target must be below {run.model.spec.classes}, the number of classes, got {target}")
    network, height, width = run.capsules, *run.shape[1:]
    by_coupling, why = None, run.missing_parts().get("capsules", "the primary capsules are not on a grid")
    if network is not None:
        traced = trace_forward(run, resolved.pixels, iterations)
        with torch.no_grad():
            positions = _credit_by_position(network, traced, target)
            by_coupling = None if positions is None else _project(run, network, traced, positions)
    with iterations_changed(run, iterations), frozen(run.pixels):
        pixels = resolved.pixels.clone().requires_grad_()
        score = run.pixels(pixels).scores[0, target]
        gradient = torch.autograd.grad(score, pixels)[0][0]
    return {
        "size": [height, width],
        "coupling": None if by_coupling is None else encode_array(by_coupling),
        "why": "" if by_coupling is not None else why,
        "gradient": encode_array(gradient.sum(0)),
        "score": float(score.detach()),
    }


def _require_capsules(run: ExploredRun, purpose: str) -> CapsuleNetwork:
    if run.capsules is None:
        raise ValueError(f"{run.model.name} is a convolutional network without capsules, which {purpose} needs")
    return run.capsules


def _credit_by_position(network: CapsuleNetwork, traced: TracedForward, target: int) -> Tensor | None:
    """Return the credit of each position of the primary capsules, ``[H, W]``; ``None`` without a grid."""
    assert traced.primary is not None
    if traced.primary.pose.dim() != 5:
        return None
    top = traced.traces[-1].states[-1].coupling
    if top is None:
        return None
    credit = torch.zeros(int(top[0, ..., 0, :].numel()))
    credit[target] = 1.0
    for n in reversed(range(len(traced.layers))):
        states = traced.traces[n].states
        coupling = states[-1].coupling
        if coupling is None:
            return None
        children = child_states(traced, network.capsules.schedule, n, len(states) - 1)
        credit = _credit_of_children(coupling[0], activity(children)[0].flatten(), traced.wirings[n], credit)
    grid = traced.primary.pose.shape[1:3]
    return credit.view(*grid, -1).sum(-1)


def _credit_of_children(coupling: Tensor, child_activity: Tensor, wiring: Wiring, credit: Tensor) -> Tensor:
    """Return the credit of all children ``[n]``, given that of the parents ``[L * J]`` and couplings ``[*L, I, J]``."""
    n_parents = coupling.shape[-1]
    to_slots = (coupling.reshape(-1, *coupling.shape[-2:]) * credit.view(-1, 1, n_parents)).sum(-1)  # [L, I]
    index = wiring.index()
    if wiring.slot_kind == "type":
        index = index.reshape(len(to_slots), -1, index.shape[-1])  # [L, I, cells]
        to_slots = (to_slots / index.shape[-1]).unsqueeze(-1).expand(index.shape)
    index = index.reshape(-1)
    received = torch.zeros(len(child_activity) + 1)
    received.index_add_(0, torch.where(index < 0, len(child_activity), index), to_slots.reshape(-1).float())
    return received[:-1] * child_activity


def _project(run: ExploredRun, network: CapsuleNetwork, traced: TracedForward, positions: Tensor) -> Tensor:
    """Return for each pixel the mean credit of the positions whose receptive fields contain it: ``[H, W]``."""
    height, width = run.shape[1:]
    centers = receptive_field_centers(network, traced.wirings[:1], tuple(positions.shape))[0]
    if not centers:
        return F.interpolate(positions[None, None], size=(height, width), mode="bilinear", align_corners=False)[0, 0]
    size = receptive_field_size(network)
    offset = [(a - b) / 2 for a, b in zip(run.shape[1:], run.model.spec.image[1:], strict=True)]
    windows = []
    for axis, side in ((0, height), (1, width)):
        start, step = centers[2 * axis] + offset[axis], centers[2 * axis + 1]
        middle = start + step * torch.arange(positions.shape[axis])
        distance = (torch.arange(side)[None] - middle[:, None]).abs()
        window = (1 - distance / (size[axis] / 2 + 0.5)).clamp_min(0)
        windows.append(window)
    weight = windows[0].sum(0)[:, None] * windows[1].sum(0)
    return (windows[0].T @ positions @ windows[1]) / weight.clamp_min(1e-12)
