"""Votes as a tensor: the definition of every method, and the plain path that faster ones must equal."""

from typing import Self

import torch
from torch import Tensor

from torchcaps.capsules import disable_autocast
from torchcaps.votes.base import Votes
from torchcaps.votes.transform import make_votes, side_by_side
from torchcaps.votes.wiring import Wiring

__all__ = ["DenseVotes"]


class DenseVotes(Votes):
    """Votes that are stored: ``[B, *L, I, J, D]``."""

    def __init__(self, votes: Tensor, wiring: Wiring) -> None:
        super().__init__(wiring, tuple(votes.shape))
        self._votes = votes

    @classmethod
    def make(cls, pose: Tensor, weight: Tensor, bias: Tensor | None, rows: int, wiring: Wiring) -> Self:
        """Transform children ``[B, I, K]`` or ``[B, *G, N, K]``; see `torchcaps.votes.transform` for the rest."""
        read = wiring.gather(pose)
        children = [read] if wiring.slot_kind == "capsule" else list(read.unbind(-2))
        return cls(make_votes(side_by_side(children, rows), weight, bias), wiring)

    def sum(self, coupling: Tensor) -> Tensor:
        """Return ``s_j = Σ_i c_ij v_ij``."""
        return (coupling.unsqueeze(-1) * self._votes).sum(-3)

    def dot(self, query: Tensor) -> Tensor:
        """Return ``a_ij = <q_j, v_ij>``."""
        return (query.unsqueeze(-3) * self._votes).sum(-1)

    def sqsum(self, coupling: Tensor, mean: Tensor) -> Tensor:
        """Return ``Σ_i c_ij (v_ij - mu_j)²``."""
        return (coupling.unsqueeze(-1) * (self._votes - mean.unsqueeze(-3)) ** 2).sum(-3)

    def sqdist(self, mean: Tensor, scale: Tensor) -> Tensor:
        """Return ``Σ_d w_jd (v_ijd - mu_jd)²``."""
        return (scale.unsqueeze(-3) * (self._votes - mean.unsqueeze(-3)) ** 2).sum(-1)

    def mix(self, kernel: Tensor) -> Tensor:
        """Return ``Σ_md A_jimd v_mjd``."""
        with disable_autocast(self._votes):
            return torch.einsum("jimd,b...mjd->b...ij", kernel, self._votes)

    def dense(self) -> Tensor:
        """Return the tensor."""
        return self._votes

    def detach(self) -> Self:
        """Return the same votes, through which no gradient flows."""
        return type(self)(self._votes.detach(), self.wiring)
