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
from torchcaps.votes.similarity import unit

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
            center, squares = votes.sum(votes.uniform(children.pose)), None
        else:
            center, squares = state.memory
        if self.similarity == "dot":
            found = votes.attend(unit(center, MIN_SQUARE))
        else:
            found, squares = votes.attend_similar(center, self.similarity, MIN_SQUARE, squares)
        return State(squash(found.total), None, found.coupling, found.logits, memory=(found.total, squares))

    def pack(self, state: State) -> tuple[Tensor, ...]:
        """Return the centers."""
        return (state.memory[0],)

    def unpack(self, tensors: tuple[Tensor, ...]) -> State:
        """Return the state of these centers."""
        return State(pose=squash(tensors[0]), memory=(tensors[0], None))
