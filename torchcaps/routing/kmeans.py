"""K-means routing, after the code of leftthomas/CapsuleLayer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from torchcaps.capsules import Capsules
from torchcaps.functional import squash
from torchcaps.routing.base import Routing, State, vote_limit
from torchcaps.votes import Votes

__all__ = ["KMeans"]

MIN_SQUARE = 1e-6  # lower bound of squared lengths in a divisor, so that gradients of quotients are at most 1e3


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

    Lengths and divisors below 1e-3 count as 1e-3.

    Domain: votes up to 5e9 in float32 with one iteration, 2e5 with 2 and 2e3 with 3; larger ones raise a ValueError
    (`torchcaps.routing.base.vote_limit`).

    Deviation: in a convolution the original code routes the positions of one child type at a time and sums the results
    over the types before the squash; here all children of a window are routed together.

    >>> import torch, torchcaps
    >>> parents = torchcaps.route(torch.randn(2, 6, 5, 4), KMeans(similarity="cosine"))
    >>> parents.pose.shape
    torch.Size([2, 5, 4])
    """

    paper = "none (leftthomas/CapsuleLayer)"
    equation = "none"

    iterations: int = 3
    similarity: Literal["dot", "cosine", "tanimoto", "pearson"] = "dot"

    def max_vote(self, dtype: torch.dtype) -> float | None:
        """Return the limit of votes; the initial centers take part in one more agreement."""
        return vote_limit(dtype, self.iterations + 1, MIN_SQUARE**-0.5)

    def step(self, coefficients: Mapping[str, Tensor], votes: Votes, children: Capsules, state: State, t: int) -> State:
        """Update the centers."""
        if state.memory is None:
            center, squares = votes.sum(votes.uniform(children.pose)), self._squares(votes, children)
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
        squares = votes.sqnorm(children.pose)
        if self.similarity == "pearson":
            one = children.pose.new_ones(()).expand(*votes.shape[:-3], *votes.shape[-2:])
            squares = (squares - votes.dot(one) ** 2 / votes.shape[-1]).clamp_min(0)
        return squares

    def _similarity(self, votes: Votes, center: Tensor, squares: Tensor | None) -> Tensor:
        """Return the similarity of each vote and the center of its parent, ``[B, *L, I, J]``."""
        assert squares is not None
        if self.similarity == "tanimoto":
            product = votes.dot(center)
            divisor = squares + (center * center).sum(-1).unsqueeze(-2) - product
            return product / divisor.clamp_min(MIN_SQUARE)
        if self.similarity == "pearson":
            center = center - center.mean(-1, keepdim=True)
        return votes.dot(_unit(center)) / squares.clamp_min(MIN_SQUARE).sqrt()


def _unit(vectors: Tensor) -> Tensor:
    """Return vectors of length 1; those shorter than 1e-3 are multiplied by 1e3."""
    return vectors / (vectors * vectors).sum(-1, keepdim=True).clamp_min(MIN_SQUARE).sqrt()
