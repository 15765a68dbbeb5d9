"""Dynamic routing (routing by agreement): Sabour 2017."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from torchcaps.capsules import Capsules
from torchcaps.functional import squash
from torchcaps.routing.base import Coefficient, Geometry, Routing, State, vote_limit
from torchcaps.votes import Votes

__all__ = ["Dynamic"]


@dataclass(frozen=True)
class Dynamic(Routing):
    """Dynamic routing (routing by agreement): Sabour 2017, Procedure 1.

    The logits of each child start equal. In every iteration a softmax over the parents turns them into couplings, the
    coupled votes are summed and squashed, and the logits increase by the agreement of vote and parent::

        c_i = softmax(b_i)                  line 4, eq. 3
        s_j = Σ_i c_ij v_ij                 line 5, eq. 2
        v_j = squash(s_j)                   line 6, eq. 1
        b_ij += <v_ij, v_j>                 line 7

    Args:
        iterations: number of routing iterations, 3 in the paper. With one iteration and the other defaults it equals
            `Uniform`.
        gradient: ``"full"`` differentiates through every iteration, as the authors' code does; ``"last"`` treats the
            couplings of the last iteration as constants, as many re-implementations do.
        leak: add a "none of the above" category with logit 0 and no parent to the softmax (section 7, the CIFAR-10
            net). Couplings then sum to less than 1.
        prior: learn the initial logits (section 3: "the log prior probabilities") instead of starting from 0.
        bias: add a learned bias to ``s_j``, initially 0.1 (the authors' code, not the paper).
        competition: the parents over which the softmax of eq. 3 is taken in a convolutional layer. ``"local"``: the
            parent types at one position, as most code does. ``"global"``: all parents that read the child, at any
            position. Both are equal in a dense layer.
        normalize: ``"softmax"``, eq. 3, or ``"maxmin"``, max-min normalisation as implemented here (the idea is that of
            Zhao 2019): couplings ``(b_ij - min_j b_ij) / (max_j b_ij - min_j b_ij)``, 1 if all logits are equal. They
            do not sum to 1.

    Domain: votes up to 1e10 in float32 with up to 2 iterations, 1e7 with 3 and 8e3 with 5; larger ones raise a
    ValueError, because gradients of tied parents would overflow (`torchcaps.routing.base.vote_limit`).

    Deviation: eq. 3 requires that the couplings of a child sum to 1 over all parents. With ``competition="local"``, the
    default, they sum to 1 at each position whose window contains the child, so to nine for a child that nine windows
    read; ``competition="global"`` follows eq. 3. The paper has no convolutional layer with a prior; here one prior is
    learned per slot and parent type, shared by all positions.

    >>> import torch, torchcaps
    >>> parents, trace = torchcaps.route(torch.randn(2, 6, 5, 4), Dynamic(iterations=3), trace=True)
    >>> parents.pose.shape, [tuple(coupling.shape) for coupling in trace.couplings]
    (torch.Size([2, 5, 4]), [(2, 6, 5), (2, 6, 5), (2, 6, 5)])
    """

    paper = "Sabour 2017"
    equation = "Procedure 1"

    iterations: int = 3
    gradient: Literal["full", "last"] = "full"
    leak: bool = False
    prior: bool = False
    bias: bool = False
    competition: Literal["local", "global"] = "local"
    normalize: Literal["softmax", "maxmin"] = "softmax"

    @property
    def coupling_axis(self) -> Literal["parents"] | None:  # type: ignore[override]
        """Axis over which couplings sum to 1."""
        return "parents" if self.normalize == "softmax" else None

    def unclaimed(self) -> dict[str, str]:
        """Return the invariants that the leak and max-min normalisation remove."""
        reasons = super().unclaimed()
        if self.leak:
            reasons["coupling_sums"] = "the leak takes a part of each child: its couplings sum to less than 1"
        if self.normalize == "maxmin":
            reasons["coupling_sums"] = "max-min normalisation scales couplings to 0..1 without normalising their sum"
        return reasons

    def coefficients(self, geometry: Geometry) -> dict[str, Coefficient]:
        """Return the learned prior and bias, if enabled."""
        coefficients = {}
        if self.prior:
            coefficients["prior"] = Coefficient(("I", "J"), 0.0)
        if self.bias:
            coefficients["bias"] = Coefficient(("J", "D"), 0.1)
        return coefficients

    def max_vote(self, dtype: torch.dtype) -> float | None:
        """Return the limit of votes for the number of iterations that the gradient flows through."""
        return vote_limit(dtype, self.iterations if self.gradient == "full" else 1)

    def step(self, coefficients: Mapping[str, Tensor], votes: Votes, children: Capsules, state: State, t: int) -> State:
        """Update the logits by the agreement with the previous parents, then compute the parents."""
        if self.gradient == "last" and t < self.iterations - 1:
            with torch.no_grad():
                return self._step(coefficients, votes, children, state)
        return self._step(coefficients, votes, children, state)

    def _step(self, coefficients: Mapping[str, Tensor], votes: Votes, children: Capsules, state: State) -> State:
        """Return the next state: logits by agreement with the previous parents, couplings, new parents."""
        # <v_ij, v_j> is linear in v_j, so the accumulated logits are the agreement with the sum of all previous
        # parents. State.memory accumulates the parents, which are far smaller than the logits.
        query = None if state.pose is None else state.pose if state.memory is None else state.memory + state.pose
        maxmin = self.normalize == "maxmin"
        if query is None and not self.prior:
            logits = children.pose.new_zeros(()).expand(votes.shape[:-1])
            # the coupling of equal logits
            coupling = torch.ones_like(logits) if maxmin else votes.uniform(children.pose, self.leak)
            total = votes.sum(coupling)
        elif not self.prior and not maxmin:
            assert query is not None
            total, coupling, logits = votes.attend(query, self.leak, through=self.gradient == "full")
        else:
            logits = coefficients["prior"].expand(votes.shape[:-1]) if self.prior else None
            if query is not None:
                agreement = self._agreement(votes, query)
                logits = agreement if logits is None else agreement + coefficients["prior"]
            assert logits is not None
            coupling = votes.wiring.maxmin(logits, self.leak) if maxmin else votes.softmax(logits, self.leak)
            total = votes.sum(coupling)
        if self.bias:
            total = total + coefficients["bias"]
        return State(pose=squash(total), coupling=coupling, logits=logits, memory=query)

    def _agreement(self, votes: Votes, query: Tensor) -> Tensor:
        """Return the agreement with the accumulated parents, without gradient if ``gradient="last"``."""
        if self.gradient == "last":
            with torch.no_grad():
                return votes.dot(query)
        return votes.dot(query)
