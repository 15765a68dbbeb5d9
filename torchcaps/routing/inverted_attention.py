"""Inverted dot-product attention routing."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from torchcaps.capsules import Capsules
from torchcaps.routing.base import Coefficient, Geometry, Routing, State
from torchcaps.routing.gaussian import COSTS, child_activations, fit_gaussian, inverse_temperature
from torchcaps.votes import Votes

__all__ = ["InvertedAttention"]


@dataclass(frozen=True)
class InvertedAttention(Routing):
    """Inverted dot-product attention: Tsai 2020, Procedure 1. Parents attend to children and compete for them.

    With the parents ``q`` of the step before::

        a_ij = <q_j, v_ij> / sqrt(D)        eq. 2
        r_i  = softmax_j(a_i)               eq. 3: over the parents, where attention has it over the children
        q_j  = LayerNorm(Σ_i r_ij v_ij)     eq. 4

    One LayerNorm for the layer, shared by all parents, places and iterations. A stack of such layers is run by
    `torchcaps.nn.CapsuleStack`, concurrently (Procedure 2) or layer by layer (ablation B).

    Args:
        iterations: the paper reports the best of 1 to 5; 2 in most of its tables.
        scale: divide the agreement by ``sqrt(D)``: the authors' code does, the paper's equation does not.
        normalize: the LayerNorm. ``False`` is ablation A, which the paper reports to diverge.
        activations: activations in capsules, as EM routing has them: ablation C.
        initial: the parents to start from: ``"zero"``, ``"random"`` (drawn once, when the layer is built) or
            ``"learned"``. Zero makes the first couplings equal.

    Deviation: the paper leaves ablation C open. Here ``r_ij a_i`` weighs the votes, and
    ``a_j = sigmoid(lambda_t (beta_a - Σ_h (beta_u + log sigma_jh) Σ_i r_ij a_i))`` as in `EM`, with its schedule
    of lambda.
    """

    paper = "Tsai 2020"
    equation = "Procedure 1, eq. 1 to 4"
    presence = None  # every pose has the length that LayerNorm gives it

    iterations: int = 2
    scale: bool = True
    normalize: bool = True
    activations: bool = False
    initial: Literal["zero", "random", "learned"] = "zero"

    def coefficients(self, geometry: Geometry) -> dict[str, Coefficient]:
        """Own the LayerNorm, the parents to start from, and the costs of activations."""
        owned = {}
        if self.normalize:
            owned["gamma"] = Coefficient(("D",), 1.0)
            owned["beta"] = Coefficient(("D",), 0.0)
        if self.initial != "zero":
            owned["initial"] = Coefficient(("J", "D"), Tensor.normal_, learned=self.initial == "learned")
        if self.activations:
            owned |= COSTS
        return owned

    def init_weight(self, weight: Tensor, geometry: Geometry) -> None:
        """Draw from ``N(0, J / (X I))``: the authors' code, with X the rows of a matrix and I the window's slots."""
        weight.normal_(0, (geometry.parents / (geometry.columns * geometry.slots)) ** 0.5)

    def init(self, p: Mapping[str, Tensor], votes: Votes, children: Capsules) -> State:
        """Start from zero (said by no pose at all, which costs nothing) or from the layer's own parents."""
        if self.initial == "zero":
            return State()
        return State(pose=p["initial"].expand(*votes.shape[:-3], *votes.shape[-2:]))

    def step(self, p: Mapping[str, Tensor], votes: Votes, children: Capsules, state: State, t: int) -> State:
        """Attend with the last parents."""
        query = None if state.pose is None else state.pose * (votes.shape[-1] ** -0.5 if self.scale else 1.0)
        activation = None
        if self.activations:
            total, activation, coupling, logits = self._weighed(p, votes, children, query, t)
        elif query is None:
            logits = children.pose.new_zeros(()).expand(votes.shape[:-1])
            coupling = votes.uniform(children.pose)
            total = votes.sum(coupling)
        else:
            total, coupling, logits = votes.attend(query)
        pose = F.layer_norm(total, total.shape[-1:], p["gamma"], p["beta"]) if self.normalize else total
        return State(pose=pose, activation=activation, coupling=coupling, logits=logits)

    @staticmethod
    def _weighed(
        p: Mapping[str, Tensor], votes: Votes, children: Capsules, query: Tensor | None, t: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Attend with activations: return the sum, the parents' activations, couplings and logits."""
        if query is None:
            logits, coupling = children.pose.new_zeros(()).expand(votes.shape[:-1]), votes.uniform(children.pose)
        else:
            logits = votes.dot(query)
            coupling = votes.softmax(logits)
        weight = coupling * child_activations(votes, children).unsqueeze(-1)
        fit = fit_gaussian(p, votes, weight, inverse_temperature(t))
        return fit.total, fit.evidence.sigmoid(), coupling, logits
