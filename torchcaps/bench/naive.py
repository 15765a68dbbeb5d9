"""The usual way to write capsule layers in PyTorch, from the papers' equations: what speed is measured against.

Votes are one tensor, made by a broadcast matrix product ``[J, I, Y, X] @ [B, 1, I, X, 1]``; couplings are multiplied in
by broadcasting and summed. Inverted attention contracts poses, weights and couplings or parents in one einsum of three
operands, on windows that were unfolded. Choi's votes are a grouped convolution. The routing itself is the same.
"""

from collections.abc import Callable
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

__all__ = ["ContractedVotes", "explicit_votes", "make_explicit"]

ALONE = "inverted attention asks for sums and agreements alone"
Module = TypeVar("Module", bound=nn.Module)


def make_explicit(module: Module) -> Module:
    """Let capsule layers make and reduce votes in the usual way, and convolutions have torch's usual layout."""
    for layer in module.modules():
        if isinstance(layer, Network):
            layer.channels_last = False
        if isinstance(layer, CapsuleLayer):
            layer.make_votes = _maker(layer)  # type: ignore[method-assign]
        elif isinstance(layer, Convolution):
            layer.plain = True
    return module


def _maker(layer: CapsuleLayer) -> Callable[..., Votes]:
    contracted = isinstance(layer.routing, InvertedAttention) and not layer.routing.activations

    def make_votes(children: Capsules, couplings: bool = False) -> Votes:
        parts = layer.vote_inputs(children)
        return ContractedVotes(*parts) if contracted else explicit_votes(*parts)

    return make_votes


def explicit_votes(pose: Tensor, weight: Tensor, bias: Tensor | None, rows: int, wiring: Wiring) -> DenseVotes:
    """Return votes that are stored, made by a broadcast matrix product, or by a grouped convolution."""
    if weight.dim() != 4:
        raise ValueError("the usual way is written for matrices that all places share")
    if wiring.slot_kind == "type" and wiring.grid is not None and rows == 1:
        votes = _grouped(pose, weight, wiring)
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


def _grouped(pose: Tensor, weight: Tensor, wiring: Wiring) -> Tensor:
    """Return the votes of Choi 2019: one convolution in groups, a group for each child type."""
    types, _, n_parents, outs = weight.shape
    images = wiring.pad(pose).permute(0, 3, 4, 1, 2).flatten(1, 2)  # [B, N * K, H, W]
    kernel = weight.unflatten(1, (*wiring.kernel, -1)).permute(0, 4, 5, 3, 1, 2).flatten(0, 2)  # [N * J * Y, K, *k]
    maps = F.conv2d(images, kernel, stride=wiring.stride, groups=types)
    return maps.unflatten(1, (types, n_parents, outs)).permute(0, 4, 5, 1, 2, 3)


class ContractedVotes(Votes):
    """Votes that are contracted as they are made: einsums of three operands, as in the code of Tsai 2020."""

    def __init__(self, pose: Tensor, weight: Tensor, bias: Tensor | None, rows: int, wiring: Wiring) -> None:
        n_parents, outs = weight.shape[-2:]
        super().__init__(wiring, (pose.shape[0], *wiring.sites, wiring.n_slots, n_parents, rows * outs))
        if bias is not None or weight.dim() != 4 or wiring.slot_kind != "capsule":
            raise ValueError("the einsums of inverted attention are for matrices that all places share, without a bias")
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
        """Return the votes themselves."""
        votes = torch.einsum("siax,ixjy->sijay", self._slots, self._weight)
        return votes.flatten(-2).view(self.shape)

    def sqsum(self, coupling: Tensor, mean: Tensor) -> Tensor:
        """Is not asked for."""
        raise TypeError(ALONE)

    def sqdist(self, mean: Tensor, scale: Tensor) -> Tensor:
        """Is not asked for."""
        raise TypeError(ALONE)

    def mix(self, kernel: Tensor) -> Tensor:
        """Is not asked for."""
        raise TypeError(ALONE)

    def detach(self) -> Self:
        """Return the same votes, through which no gradient flows."""
        raise TypeError(ALONE)
