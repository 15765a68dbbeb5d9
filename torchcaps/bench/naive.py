"""Naive baseline: capsule layers as commonly written in PyTorch, from the papers' equations.

Votes are one tensor, computed by a broadcast matrix product ``[J, I, Y, X] @ [B, 1, I, X, 1]``; couplings are
multiplied by broadcasting and summed. Inverted attention contracts poses, weights and couplings (or parents) in one
einsum of three operands, on unfolded windows. The votes of Choi 2019 are a grouped convolution. The routing itself is
the same.
"""

from typing import Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps.capsules import Capsules
from torchcaps.models import Network
from torchcaps.nn.conv import Convolution
from torchcaps.nn.layers import CapsuleLayer
from torchcaps.routing import InvertedAttention
from torchcaps.votes import DenseVotes, Votes, Wiring

__all__ = ["EinsumVotes", "broadcast_votes", "naive_votes", "use_naive_votes"]

Module = TypeVar("Module", bound=nn.Module)
NOT_IMPLEMENTED = "EinsumVotes implements only sum, dot and dense, the reductions of inverted attention"


def use_naive_votes(module: Module) -> Module:
    """Switch all capsule layers to `naive_votes` and all convolutions to torch's default layout; return the module.

    >>> import torch, torchcaps
    >>> layer = use_naive_votes(torchcaps.nn.DenseCapsules(6, 4, 3, 8, routing="dynamic"))
    >>> layer(torch.randn(2, 6, 4)).pose.shape
    torch.Size([2, 3, 8])
    """
    for layer in module.modules():
        if isinstance(layer, Network):
            layer.channels_last = False
        if isinstance(layer, CapsuleLayer):
            layer.votes_factory = naive_votes
        elif isinstance(layer, Convolution):
            layer.plain = True
    return module


def naive_votes(layer: CapsuleLayer, children: Capsules, couplings: bool = False) -> Votes:
    """Return the votes of a layer as the naive baseline computes them; a `CapsuleLayer.votes_factory`."""
    inputs = layer.vote_inputs(children)
    if isinstance(layer.routing, InvertedAttention) and not layer.routing.activations:
        return EinsumVotes(*inputs)
    return broadcast_votes(*inputs)


def broadcast_votes(pose: Tensor, weight: Tensor, bias: Tensor | None, rows: int, wiring: Wiring) -> DenseVotes:
    """Return stored votes, by a broadcast matrix product or, if slots read windows, by a grouped convolution."""
    if weight.dim() != 4:
        raise ValueError(f"weight must be [I, X, J, Y], shared by all positions, got shape {list(weight.shape)}")
    if wiring.slot_kind == "type" and wiring.grid is not None and rows == 1:
        votes = _grouped_convolution(pose, weight, wiring)
    else:
        slots = wiring.gather(pose)  # [B, *L, I, K], or one more axis for the window
        slots = slots if wiring.slot_kind == "capsule" else slots.flatten(-2)
        matrix = weight.permute(2, 0, 3, 1).contiguous()  # [J, I, Y, X]
        children = slots.flatten(1, -3) if wiring.grid is not None else slots.unsqueeze(1)  # [B, L, I, K]
        matrices = children.unflatten(-1, (rows, -1)).unsqueeze(2)  # [B, L, 1, I, A, X]
        if rows == 1:
            votes = (matrix @ matrices.transpose(-1, -2)).squeeze(-1)  # [B, L, J, I, Y]
        else:
            votes = (matrices @ matrix.transpose(-1, -2)).flatten(-2)  # [B, L, J, I, A * Y]
        votes = votes.transpose(2, 3).unflatten(1, wiring.sites or (1,))
        votes = votes if wiring.grid is not None else votes.squeeze(1)
    return DenseVotes(votes if bias is None else votes + bias, wiring)


def _grouped_convolution(pose: Tensor, weight: Tensor, wiring: Wiring) -> Tensor:
    """Return the votes of Choi 2019, eq. 5: a grouped convolution with one group per child type."""
    types, _, n_parents, outs = weight.shape
    images = wiring.pad(pose).permute(0, 3, 4, 1, 2).flatten(1, 2)  # [B, N * K, H, W]
    kernel = weight.unflatten(1, (*wiring.kernel, -1)).permute(0, 4, 5, 3, 1, 2).flatten(0, 2)  # [N * J * Y, K, *k]
    maps = F.conv2d(images, kernel, stride=wiring.stride, groups=types)
    return maps.unflatten(1, (types, n_parents, outs)).permute(0, 4, 5, 1, 2, 3)


class EinsumVotes(Votes):
    """Votes that are contracted by einsums of three operands, as in the code of Tsai 2020.

    Only the reductions of inverted attention are implemented: ``sum``, ``dot`` and ``dense``.
    """

    def __init__(self, pose: Tensor, weight: Tensor, bias: Tensor | None, rows: int, wiring: Wiring) -> None:
        n_parents, outs = weight.shape[-2:]
        super().__init__(wiring, (pose.shape[0], *wiring.sites, wiring.n_slots, n_parents, rows * outs))
        if bias is not None or weight.dim() != 4 or wiring.slot_kind != "capsule":
            raise ValueError(
                "EinsumVotes requires weight [I, X, J, Y], bias=None and slot_kind='capsule', got weight "
                f"{list(weight.shape)}, bias {bias is not None} and slot_kind={wiring.slot_kind!r}"
            )
        self._slots = wiring.gather(pose).unflatten(-1, (rows, -1)).flatten(0, -4)  # [S, I, A, X]
        self._weight, self._rows = weight, rows

    def sum(self, coupling: Tensor) -> Tensor:
        """Return ``s_j = Σ_i c_ij v_ij``."""
        flat = coupling.expand(self.shape[:-1]).flatten(0, -3)
        total = torch.einsum("sij,siax,ixjy->sjay", flat, self._slots, self._weight)
        return total.flatten(-2).view(*self.shape[:-3], *self.shape[-2:])

    def dot(self, query: Tensor) -> Tensor:
        """Return ``a_ij = <q_j, v_ij>``."""
        flat = query.flatten(0, -3).unflatten(-1, (self._rows, -1))
        return torch.einsum("siax,ixjy,sjay->sij", self._slots, self._weight, flat).view(self.shape[:-1])

    def dense(self) -> Tensor:
        """Return the vote tensor."""
        votes = torch.einsum("siax,ixjy->sijay", self._slots, self._weight)
        return votes.flatten(-2).view(self.shape)

    def sqsum(self, coupling: Tensor, mean: Tensor) -> Tensor:
        """Not implemented."""
        raise NotImplementedError(NOT_IMPLEMENTED)

    def sqdist(self, mean: Tensor, scale: Tensor) -> Tensor:
        """Not implemented."""
        raise NotImplementedError(NOT_IMPLEMENTED)

    def mix(self, kernel: Tensor) -> Tensor:
        """Not implemented."""
        raise NotImplementedError(NOT_IMPLEMENTED)

    def detach(self) -> Self:
        """Not implemented."""
        raise NotImplementedError(NOT_IMPLEMENTED)
