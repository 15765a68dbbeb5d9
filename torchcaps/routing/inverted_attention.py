"""Inverted dot-product attention routing: Tsai 2020."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from torchcaps.capsules import Capsules
from torchcaps.routing.base import Coefficient, Geometry, Routing, State, vote_limit
from torchcaps.routing.gaussian import COSTS, child_activations, fit_gaussian, inverse_temperature
from torchcaps.votes import Votes

__all__ = ["InvertedAttention"]

LAYER_NORM_GAIN = 1e-5**-0.5  # largest derivative of a LayerNorm with gain 1: that of a constant vector


@dataclass(frozen=True)
class InvertedAttention(Routing):
    """Inverted dot-product attention: Tsai 2020, Procedure 1. Parents attend to children and compete for them.

    With the parents ``q`` of the previous iteration::

        a_ij = <q_j, v_ij> / sqrt(D)        eq. 2
        r_i  = softmax_j(a_i)               eq. 3: over the parents; ordinary attention normalises over the children
        q_j  = LayerNorm(Σ_i r_ij v_ij)     eq. 4

    There is one LayerNorm per layer, shared by all parents, positions and iterations. A stack of such layers is run by
    `torchcaps.nn.CapsuleStack`, concurrently (Procedure 2) or layer by layer (ablation B).

    Args:
        iterations: number of routing iterations; the paper reports the best of 1 to 5, which is 2 in most tables.
        scale: divide the agreement by ``sqrt(D)``, as in the authors' code; the paper's equation does not.
        normalize: apply the LayerNorm. ``False`` is ablation A, which the paper reports to diverge.
        activations: give the capsules activations as in EM routing: ablation C.
        initial: parents before the first iteration: ``"zero"``, ``"random"`` (drawn once, when the layer is built) or
            ``"learned"``. Zero makes the first couplings uniform.

    Domain: votes up to 1e9 in float32 with 2 iterations, 3e5 with 3 and 4e3 with 4; larger ones raise a ValueError,
    because gradients would overflow (`torchcaps.routing.base.vote_limit`): a LayerNorm multiplies them by up to 316.

    Deviation: the paper does not specify ablation C. Here ``r_ij a_i`` weights the votes, and
    ``a_j = sigmoid(lambda_t (beta_a - Σ_h (beta_u + log sigma_jh) Σ_i r_ij a_i))`` as in `EM`, with the same schedule
    of lambda.

    >>> import torch, torchcaps
    >>> parents, trace = torchcaps.route(torch.randn(2, 6, 5, 4), InvertedAttention(), trace=True)
    >>> parents.pose.shape, torch.allclose(trace.couplings[-1].sum(-1), torch.ones(2, 6))
    (torch.Size([2, 5, 4]), True)
    """

    paper = "Tsai 2020"
    equation = "Procedure 1, eq. 1 to 4"
    presence = None  # the LayerNorm fixes the length of every pose, so it carries no information

    iterations: int = 2
    scale: bool = True
    normalize: bool = True
    activations: bool = False
    initial: Literal["zero", "random", "learned"] = "zero"

    def coefficients(self, geometry: Geometry) -> dict[str, Coefficient]:
        """Return gain and bias of the LayerNorm, the initial parents and the costs of activations, as enabled."""
        coefficients = {}
        if self.normalize:
            coefficients["gamma"] = Coefficient(("D",), 1.0)
            coefficients["beta"] = Coefficient(("D",), 0.0)
        if self.initial != "zero":
            coefficients["initial"] = Coefficient(("J", "D"), Tensor.normal_, learned=self.initial == "learned")
        if self.activations:
            coefficients |= COSTS
        return coefficients

    def max_vote(self, dtype: torch.dtype) -> float | None:
        """Return the limit of votes; given initial parents take part in one more agreement."""
        iterations = self.iterations + (self.initial != "zero")
        return vote_limit(dtype, iterations, LAYER_NORM_GAIN if self.normalize else 1.0)

    def init_weight(self, weight: Tensor, geometry: Geometry) -> None:
        """Initialise from ``N(0, J / (X I))`` as in the authors' code: X rows of a matrix, I slots of the window."""
        weight.normal_(0, (geometry.parents / (geometry.columns * geometry.slots)) ** 0.5)

    def init(self, coefficients: Mapping[str, Tensor], votes: Votes, children: Capsules) -> State:
        """Return the initial parents; zero parents are represented by an empty state, which costs nothing."""
        if self.initial == "zero":
            return State()
        return State(pose=coefficients["initial"].expand(*votes.shape[:-3], *votes.shape[-2:]))

    def step(self, coefficients: Mapping[str, Tensor], votes: Votes, children: Capsules, state: State, t: int) -> State:
        """Attend to the votes with the previous parents as queries."""
        query = None if state.pose is None else state.pose * (votes.shape[-1] ** -0.5 if self.scale else 1.0)
        activation = None
        if self.activations:
            total, activation, coupling, logits = self._attend_weighted(coefficients, votes, children, query, t)
        elif query is None:
            logits = children.pose.new_zeros(()).expand(votes.shape[:-1])
            coupling = votes.uniform(children.pose)
            total = votes.sum(coupling)
        else:
            total, coupling, logits = votes.attend(query)
        pose = total
        if self.normalize:
            pose = F.layer_norm(total, total.shape[-1:], coefficients["gamma"], coefficients["beta"])
        return State(pose=pose, activation=activation, coupling=coupling, logits=logits)

    def check_fixed_point(self) -> None:
        """Raise a ValueError if activations are enabled, whose temperature depends on the iteration."""
        if self.activations:
            raise ValueError("Equilibrium can't solve for InvertedAttention(activations=True): use EM")

    def pack(self, state: State) -> tuple[Tensor, ...]:
        """Return the parents."""
        assert state.pose is not None
        return (state.pose,)

    def unpack(self, tensors: tuple[Tensor, ...]) -> State:
        """Return the state of these parents."""
        return State(pose=tensors[0])

    @staticmethod
    def _attend_weighted(
        coefficients: Mapping[str, Tensor], votes: Votes, children: Capsules, query: Tensor | None, t: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Attend with votes weighted by activations; return the sum, the parents' activations, couplings and logits."""
        if query is None:
            logits, coupling = children.pose.new_zeros(()).expand(votes.shape[:-1]), votes.uniform(children.pose)
        else:
            logits = votes.dot(query)
            coupling = votes.softmax(logits)
        weight = coupling * child_activations(votes, children).unsqueeze(-1)
        fit = fit_gaussian(coefficients, votes, weight, inverse_temperature(t))
        return fit.total, fit.activation_logit.sigmoid(), coupling, logits
