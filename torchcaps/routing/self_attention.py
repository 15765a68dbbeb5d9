"""Self-attention routing: Mazzia 2021 (Efficient-CapsNet)."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from torchcaps.capsules import Capsules
from torchcaps.functional import exp_squash
from torchcaps.routing.base import Coefficient, Geometry, Routing, State
from torchcaps.votes import Votes

__all__ = ["SelfAttention"]

TRUNCATED_STD = 0.87962566103423978  # of a standard normal distribution truncated at two standard deviations


@dataclass(frozen=True)
class SelfAttention(Routing):
    """Self-attention routing: Mazzia 2021 (Efficient-CapsNet), after the authors' code. One pass, no iterations.

    The agreement of a vote with all votes for the same parent, its own included, decides the coupling::

        a_ij = <v_ij, Σ_k v_kj> / sqrt(D)
        c_i  = softmax_j(a_i)                   over the parents
        s_j  = Σ_i (c_ij + b_ij) v_ij           b: learned priors, added after the softmax
        v_j  = (1 - exp(-|s_j|)) s_j / |s_j|

    ``a_ij`` is a row sum of the Gram matrix of the votes for parent ``j``. The sum over ``k`` is computed first, so
    the cost is linear in the number of children. The total couplings ``c_ij + b_ij`` neither sum to 1 nor need be
    positive.

    Deviation: the authors add 1e-20 to norms in the squash, which float32 rounds to nothing, so that the gradient at 0
    is NaN; here it is finite. The authors have no convolutional layer with this routing; here the children of one
    window attend to each other, and the priors are shared by all positions.

    >>> import torch
    >>> from torchcaps.nn import DenseCapsules
    >>> layer = DenseCapsules(32, 8, 10, 16, routing=SelfAttention())
    >>> layer(torch.randn(2, 32, 8)).pose.shape, [name for name, _ in layer.named_parameters()]
    (torch.Size([2, 10, 16]), ['weight', 'coefficients.prior'])
    """

    paper = "Mazzia 2021"
    equation = "self-attention routing, from the authors' code"
    coupling_axis = None

    def coefficients(self, geometry: Geometry) -> dict[str, Coefficient]:
        """Return the learned priors, initially 0."""
        return {"prior": Coefficient(("I", "J"), 0.0)}

    def init_weight(self, weight: Tensor, geometry: Geometry) -> None:
        """Initialise by Keras' ``he_normal`` of the shape ``[J, I, X, Y]``, whose fan-in is ``J * I * X``."""
        std = (2 / (geometry.parents * geometry.slots * geometry.columns)) ** 0.5 / TRUNCATED_STD
        nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)

    def step(self, coefficients: Mapping[str, Tensor], votes: Votes, children: Capsules, state: State, t: int) -> State:
        """Attend to the votes with their own sum as query."""
        ones = children.pose.new_ones(()).expand(votes.shape[:-1])
        query = votes.sum(ones) * votes.shape[-1] ** -0.5
        total, coupling, logits = votes.attend_with_prior(query, coefficients["prior"])
        return State(pose=exp_squash(total), coupling=coupling, logits=logits)
