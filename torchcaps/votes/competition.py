"""How the parents of a child share it out: softmax within a receptive field, or over all that read the child."""

import torch
from torch import Tensor

from torchcaps.votes.wiring import Wiring

__all__ = ["softmax", "uniform"]


def softmax(logits: Tensor, wiring: Wiring, leak: bool = False) -> Tensor:
    """Normalise ``[..., I, J]`` over the parents that compete for a child.

    Args:
        logits: ``[B, *L, I, J]``.
        wiring: local competition is over ``J`` alone; global over ``J`` at every site that reads the child.
        leak: one more competitor with a logit of 0 and no parent behind it, so that the sum stays below 1
            (Sabour 2017, section 7: "none of the above").
    """
    if wiring.competition == "local":
        if not leak:
            return logits.softmax(-1)
        zero = torch.zeros_like(logits[..., :1])
        return torch.cat([zero, logits], dim=-1).softmax(-1)[..., 1:]
    child, n_children = _children(wiring, logits.device)
    flat = logits.flatten(1, -2)  # [B, L * I, J]
    # Shift by the child's largest logit. No gradient: the result does not depend on the shift.
    largest = flat.detach().amax(-1)
    floor = 0.0 if leak else -torch.inf
    shift = largest.new_full((largest.shape[0], n_children), floor)
    shift = shift.scatter_reduce(1, child.expand(largest.shape), largest, "amax")
    power = (flat - shift[:, child].unsqueeze(-1)).exp()
    total = torch.exp(-shift) if leak else torch.zeros_like(shift)
    total = total.index_add(1, child, power.sum(-1))
    return (power / total[:, child].unsqueeze(-1)).view_as(logits)


def uniform(wiring: Wiring, n_parents: int, like: Tensor, leak: bool = False) -> Tensor:
    """Return what `softmax` makes of equal logits; broadcasts to ``[B, *L, I, J]``."""
    if wiring.competition == "local":
        return like.new_full((), 1 / (n_parents + leak))
    child, n_children = _children(wiring, like.device)
    readers = like.new_zeros(n_children).index_add(0, child, like.new_ones(()).expand(child.shape))
    share = 1 / (readers * n_parents + leak)  # [children]
    return share[child].view(*wiring.sites, wiring.n_slots, 1)


def _children(wiring: Wiring, device: torch.device) -> tuple[Tensor, int]:
    """Number the child of each slot, ``[L * I]``; padding reads one more child that nobody has."""
    n_children = wiring.types if wiring.grid is None else wiring.grid[0] * wiring.grid[1] * wiring.types
    index = wiring.index(device).flatten()
    return torch.where(index < 0, n_children, index), n_children + 1
