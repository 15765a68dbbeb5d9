"""K-means routing, after the code of leftthomas/CapsuleLayer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from torchcaps.capsules import Capsules
from torchcaps.functional import squash
from torchcaps.routing.base import Routing, State
from torchcaps.votes import Votes

__all__ = ["KMeans"]

EPS = 1e-24  # added to squared lengths, so that quotients by a length have finite gradients at 0


@dataclass(frozen=True)
class KMeans(Routing):
    """K-means routing: soft k-means of the votes, one cluster per parent. No paper; leftthomas/CapsuleLayer on GitHub.

    The centers start as ``s_j = Σ_i v_ij / J``. In each iteration::

        b_ij = similarity(v_ij, s_j)
        c_i  = softmax_j(b_i)
        s_j  = Σ_i c_ij v_ij

    and after the last one ``v_j = squash(s_j)``. Unlike the logits of `Dynamic`, those of an iteration do not include
    earlier ones, so that the iteration has fixed points.

    Args:
        iterations: number of updates of the centers.
        similarity: ``"dot"``: ``<v, s / |s|>``. ``"cosine"``: ``<v, s> / (|v| |s|)``. ``"tanimoto"``:
            ``<v, s> / (|v|² + |s|² - <v, s>)``. ``"pearson"``: cosine of the vectors minus the mean of their elements.

    Domain: votes up to `torchcaps.routing.base.vote_limit`; larger ones raise a ValueError.

    Deviation: in a convolution the original code routes the positions of one child type at a time and sums the results
    over the types before the squash; here all children of a window are routed together.
    """

    paper = "none (leftthomas/CapsuleLayer)"
    equation = "none"

    iterations: int = 3
    similarity: Literal["dot", "cosine", "tanimoto", "pearson"] = "dot"

    def step(self, coefficients: Mapping[str, Tensor], votes: Votes, children: Capsules, state: State, t: int) -> State:
        """Update the centers."""
        if state.memory is None:
            one = children.pose.new_ones(()).expand(votes.shape[:-1])
            center, squares = votes.sum(one / votes.shape[-2]), self._squares(votes, children)
        else:
            center, squares = state.memory
            if squares is None:
                squares = self._squares(votes, children)
        if self.similarity == "dot":
            center, coupling, logits = votes.attend(_unit(center))
        else:
            logits = self._similarity(votes, center, squares)
            coupling = votes.softmax(logits)
            center = votes.sum(coupling)
        return State(pose=squash(center), coupling=coupling, logits=logits, memory=(center, squares))

    def pack(self, state: State) -> tuple[Tensor, ...]:
        """Return the centers."""
        return (state.memory[0],)

    def unpack(self, tensors: tuple[Tensor, ...]) -> State:
        """Return the state of these centers."""
        return State(pose=squash(tensors[0]), memory=(tensors[0], None))

    def _squares(self, votes: Votes, children: Capsules) -> Tensor | None:
        """Return the squared length of each vote, of each vote minus its mean, or nothing: ``[B, *L, I, J]``."""
        if self.similarity == "dot":
            return None
        one = children.pose.new_ones(()).expand(*votes.shape[:-3], *votes.shape[-2:])
        squares = votes.sqdist(torch.zeros_like(one), one)
        if self.similarity == "pearson":
            squares = (squares - votes.dot(one) ** 2 / votes.shape[-1]).clamp_min(0)
        return squares

    def _similarity(self, votes: Votes, center: Tensor, squares: Tensor | None) -> Tensor:
        """Return the similarity of each vote and the center of its parent, ``[B, *L, I, J]``."""
        assert squares is not None
        if self.similarity == "tanimoto":
            product = votes.dot(center)
            return product / (squares + (center * center).sum(-1).unsqueeze(-2) - product + EPS)
        if self.similarity == "pearson":
            center = center - center.mean(-1, keepdim=True)
        return votes.dot(_unit(center)) / (squares + EPS).sqrt()


def _unit(vectors: Tensor) -> Tensor:
    """Return vectors of length 1, and almost 0 for those shorter than 1e-12."""
    return vectors / ((vectors * vectors).sum(-1, keepdim=True) + EPS).sqrt()
