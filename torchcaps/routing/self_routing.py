"""Self-routing: Hahn 2019."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from torchcaps.capsules import Capsules
from torchcaps.routing.base import Coefficient, Geometry, Routing, State
from torchcaps.routing.gaussian import MIN_MASS, effective_activations
from torchcaps.votes import Votes

__all__ = ["SelfRouting"]


@dataclass(frozen=True)
class SelfRouting(Routing):
    """Self-routing: Hahn 2019, after the authors' code. Each child has a small classifier that chooses its parents.

    With poses ``u``, activations ``a`` and votes ``v_ij = W1_ij u_i``::

        c_i = softmax_j(W2_i u_i + beta_i)
        a_j = Σ_i a_i c_ij / Σ_i a_i
        u_j = Σ_i a_i c_ij v_ij / Σ_i a_i c_ij

    There are no iterations, and the parents do not influence the couplings. Couplings start uniform, since ``W2`` and
    ``beta`` are initially 0. The activations of the parents sum to 1, so that their logarithms are class
    log-probabilities. Children without activations have activation 1.

    In a convolutional layer the classifiers are shared by all positions, the softmax is over the parent types of one
    position, and the padding has activation 0.

    >>> import torch
    >>> from torchcaps.nn import DenseCapsules
    >>> layer = DenseCapsules(32, 8, 10, 16, routing=SelfRouting())
    >>> capsules = layer(torch.randn(2, 32, 8))
    >>> torch.allclose(capsules.activation.sum(-1), torch.ones(2))
    True
    """

    paper = "Hahn 2019"
    equation = "self-routing, from the authors' code"
    reads_children = True
    presence = "activation"

    def coefficients(self, geometry: Geometry) -> dict[str, Coefficient]:
        """Return weight and bias of the classifiers, one per child."""
        return {"classifier": Coefficient(("I", "J", "K"), 0.0), "offset": Coefficient(("I", "J"), 0.0)}

    def init_weight(self, weight: Tensor, geometry: Geometry) -> None:
        """Initialise as ``kaiming_uniform_`` of the shape ``[I, J * Y, X]``, whose fan-in is ``J * Y * X``."""
        bound = (6 / (geometry.parents * weight.shape[-1] * geometry.columns)) ** 0.5
        weight.uniform_(-bound, bound)

    def step(self, coefficients: Mapping[str, Tensor], votes: Votes, children: Capsules, state: State, t: int) -> State:
        """Choose the parents of each child, then average its votes."""
        activation = effective_activations(children)
        total, mass, coupling, logits = votes.choose(
            children.pose, activation, coefficients["classifier"], coefficients["offset"]
        )
        available = votes.wiring.gather(activation).sum(-1, keepdim=True)  # [B, *L, 1]
        return State(
            pose=total / mass.clamp_min(MIN_MASS).unsqueeze(-1),
            activation=mass / available.clamp_min(MIN_MASS),
            coupling=coupling,
            logits=logits,
        )
