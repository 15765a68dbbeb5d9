"""Attention routing."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from torchcaps.capsules import Capsules
from torchcaps.routing.base import Coefficient, Geometry, Routing, State
from torchcaps.votes import Votes

__all__ = ["Attention"]


@dataclass(frozen=True)
class Attention(Routing):
    """Attention routing: Choi 2019, eq. 4 to 9. Each parent weighs the child channels, once, by learned attention.

    A slot is a child *channel* ``m``, not a single capsule: its vote is a convolution of that channel with a
    kernel and a bias of the pair's own (eq. 4, the convolutional transform)::

        v_mn = Conv_mn(u_m)
        beta_nm = Σ_m'd A_nmm'd v_m'nd       eq. 5: one logit for each child channel, out of all of them
        c_n = softmax_m(beta_n)              eq. 6: over the children, at the same place
        s_n = Σ_m c_nm v_mn                  eq. 7
        u_n = tanh(K_n s_n + k_n)            eq. 8: the capsule activation
        u_n = tanh(u_n' + K_n s_n + k_n)     with residual, u' the children

    A convolution over the whole grid is the paper's fully convolutional class layer.

    Args:
        residual: add the children before the tanh. They must have the parents' shape.
        dropout: of single numbers of the input capsules, before the transform; in training only.

    Deviation: the text gives the attention one vector for each parent; the parameter counts and the authors'
    code have the kernel ``A`` above, with as many output as input channels. The class layer of the authors' code
    scrambles its capsules by a reshape; here class ``n`` is channel ``n``, as in the text.
    """

    paper = "Choi 2019"
    equation = "eq. 4 to 9"
    couples = "children"
    slots = "type"
    vote_bias = True
    presence = "normalized"

    residual: bool = False
    dropout: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.dropout < 1:
            raise ValueError(f"Attention: dropout must be at least 0 and below 1, got {self.dropout}")

    def check(self, geometry: Geometry) -> None:
        """A residual adds children to parents."""
        children, parents = (geometry.types, geometry.child_dim), (geometry.parents, geometry.dim)
        if self.residual and children != parents:
            raise ValueError(
                f"Attention(residual=True) adds the children to the parents, so both must have the same number and "
                f"size, got {children[0]} children of size {children[1]} and {parents[0]} parents of size {parents[1]}"
            )

    def coefficients(self, geometry: Geometry) -> dict[str, Coefficient]:
        """Own the attention and, for each parent, the affine map of its activation."""
        reach = geometry.dim * geometry.slots
        return {
            "attention": Coefficient(("J", "I", "I", "D"), _Glorot(reach, reach)),
            "matrix": Coefficient(("J", "D", "D"), _Glorot(geometry.dim, geometry.dim)),
            "offset": Coefficient(("J", "D"), 0.0),
        }

    def init_weight(self, weight: Tensor, geometry: Geometry) -> None:
        """Draw as Keras' Glorot uniform does for one kernel that makes all votes: its fan out is large."""
        fan_out = geometry.reads * geometry.slots * geometry.parents * weight.shape[-1]
        _Glorot(geometry.columns, fan_out)(weight)

    def step(self, p: Mapping[str, Tensor], votes: Votes, children: Capsules, state: State, t: int) -> State:
        """Attend, sum, activate."""
        logits = votes.mix(p["attention"])
        coupling = logits.softmax(-2)
        total = votes.sum(coupling)
        pose = torch.einsum("b...jd,jde->b...je", total, p["matrix"]) + p["offset"]
        if self.residual:
            if children.pose.shape != pose.shape:
                raise ValueError(
                    f"Attention(residual=True) adds the children to the parents, so the grid must stay the same, "
                    f"got children {list(children.pose.shape[1:-2])} and parents {list(pose.shape[1:-2])}: "
                    f"take stride=1 and padding='same'"
                )
            pose = pose + children.pose
        return State(pose=pose.tanh(), coupling=coupling, logits=logits)


@dataclass(frozen=True)
class _Glorot:
    """Fill uniformly within ``sqrt(6 / (fan_in + fan_out))``: Keras' default."""

    fan_in: int
    fan_out: int

    def __call__(self, tensor: Tensor) -> None:
        bound = (6 / (self.fan_in + self.fan_out)) ** 0.5
        tensor.uniform_(-bound, bound)
