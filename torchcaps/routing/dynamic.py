"""Routing by agreement."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from torchcaps.capsules import Capsules
from torchcaps.functional import squash
from torchcaps.routing.base import Coefficient, Geometry, Routing, State
from torchcaps.votes import Votes

__all__ = ["Dynamic"]


@dataclass(frozen=True)
class Dynamic(Routing):
    """Routing by agreement: Sabour 2017, Procedure 1.

    Each child's logits start equal; ``iterations`` times they become couplings by a softmax over the parents,
    the coupled votes are summed and squashed, and each child's logits grow where its vote agrees with the
    parent::

        c_i = softmax(b_i)                  line 4, eq. 3
        s_j = Σ_i c_ij v_ij                 line 5, eq. 2
        v_j = squash(s_j)                   line 6, eq. 1
        b_ij += <v_ij, v_j>                 line 7

    Args:
        iterations: the paper takes 3. One, with nothing else asked for, is `Uniform`.
        gradient: ``"full"`` through every iteration, as the authors' code does; ``"last"`` takes the couplings
            of the last iteration as constants, as many re-implementations do.
        leak: a place for "none of the above" in the softmax, with a logit of 0 and no parent (section 7, the
            CIFAR-10 net). Couplings then sum to less than 1.
        prior: learned logits to start from (section 3: "the log prior probabilities"), instead of 0.
        bias: a learned bias on ``s_j`` (the authors' code, not the paper), 0.1 at first.

    Deviation: in a convolution the paper has no prior; here one is kept for each slot and parent type, shared by
    all places.
    """

    paper = "Sabour 2017"
    equation = "Procedure 1"

    iterations: int = 3
    gradient: Literal["full", "last"] = "full"
    leak: bool = False
    prior: bool = False
    bias: bool = False

    def coefficients(self, geometry: Geometry) -> dict[str, Coefficient]:
        """Own the prior and the bias where there are any."""
        owned = {}
        if self.prior:
            owned["prior"] = Coefficient(("I", "J"), 0.0)
        if self.bias:
            owned["bias"] = Coefficient(("J", "D"), 0.1)
        return owned

    def step(self, p: Mapping[str, Tensor], votes: Votes, children: Capsules, state: State, t: int) -> State:
        """Update the logits by the last parents, then the parents."""
        if self.gradient == "last" and t < self.iterations - 1:
            with torch.no_grad():
                return self._step(p, votes, children, state, t)
        return self._step(p, votes, children, state, t)

    def _step(self, p: Mapping[str, Tensor], votes: Votes, children: Capsules, state: State, t: int) -> State:
        # Agreements add up, and <v_ij, v_j> is linear in v_j: so do the parents, which are far fewer.
        query = None if state.pose is None else state.pose if state.memory is None else state.memory + state.pose
        if query is None and not self.prior:
            logits = children.pose.new_zeros(()).expand(votes.shape[:-1])
            coupling = votes.uniform(children.pose, self.leak)  # the softmax of equal logits
            total = votes.sum(coupling)
        elif not self.prior:
            assert query is not None
            total, coupling, logits = votes.attend(query, self.leak, through=self.gradient == "full")
        else:
            logits = p["prior"].expand(votes.shape[:-1])
            if query is not None:
                logits = self._agreement(votes, query) + p["prior"]
            coupling = votes.softmax(logits, self.leak)
            total = votes.sum(coupling)
        if self.bias:
            total = total + p["bias"]
        return State(pose=squash(total), coupling=coupling, logits=logits, memory=query)

    def _agreement(self, votes: Votes, query: Tensor) -> Tensor:
        """Return the agreement with the parents of all iterations before."""
        if self.gradient == "last":
            with torch.no_grad():
                return votes.dot(query)
        return votes.dot(query)
