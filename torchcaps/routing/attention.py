"""Attention routing: Choi 2019 (AR CapsNet)."""

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
    """Attention routing: Choi 2019 (AR CapsNet), eq. 4 to 9. One pass of learned attention over the child channels.

    A slot is a child *channel* ``m``, not a single capsule. Its vote is a convolution of that channel with a kernel
    and a bias for each pair of child and parent channel (the convolutional transform)::

        v_mn = Conv_mn(u_m)                  eq. 5
        s_n = Σ_m c_nm v_mn                  eq. 6
        beta_nm = Σ_m'd A_nmm'd v_m'nd       eq. 7: one logit per child channel, computed from all child channels
        c_n = softmax_m(beta_n)              eq. 8: over the children, at the same position
        u_n = tanh(K_n s_n + k_n)            eq. 9 (and 4): the capsule activation
        u_n = tanh(u_n' + K_n s_n + k_n)     with residual, u' the children

    A convolution whose kernel covers the grid is the paper's fully convolutional class layer.

    Args:
        residual: add the children before the tanh. They must have the parents' shape.
        dropout: probability of zeroing single elements of the input capsules before the transform, in training only:
            the initial ``p`` of the layer's module ``dropout``, a `torch.nn.Dropout`.

    Deviation: the text gives the attention one vector per parent; the published parameter counts and the authors'
    code have the kernel ``A`` above, with as many output as input channels. The class layer of the authors' code
    scrambles its capsules by a reshape; here class ``n`` is channel ``n``, as in the text.

    >>> import torch
    >>> from torchcaps.nn import DenseCapsules
    >>> layer = DenseCapsules(32, 8, 10, 16, routing=Attention())
    >>> layer(torch.randn(2, 32, 8)).pose.shape, [name.split(".")[-1] for name, _ in layer.named_parameters()]
    (torch.Size([2, 10, 16]), ['weight', 'bias', 'attention', 'matrix', 'offset'])
    """

    paper = "Choi 2019"
    equation = "eq. 4 to 9"
    coupling_axis = "children"
    slot_kind = "type"
    vote_bias = True
    presence = "normalized"

    residual: bool = False
    dropout: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.dropout < 1:
            raise ValueError(f"Attention: dropout must be at least 0 and below 1, got {self.dropout}")

    def check(self, geometry: Geometry) -> None:
        """Raise a ValueError if the residual is enabled and children and parents differ in number or size."""
        children, parents = (geometry.types, geometry.child_dim), (geometry.parents, geometry.dim)
        if self.residual and children != parents:
            raise ValueError(
                f"Attention(residual=True) adds the children to the parents, so both must have the same number and "
                f"size, got {children[0]} children of size {children[1]} and {parents[0]} parents of size {parents[1]}"
            )

    def coefficients(self, geometry: Geometry) -> dict[str, Coefficient]:
        """Return the attention kernel and, for each parent, matrix and offset of the capsule activation."""
        fan = geometry.dim * geometry.slots
        return {
            "attention": Coefficient(("J", "I", "I", "D"), _GlorotUniform(fan, fan)),
            "matrix": Coefficient(("J", "D", "D"), _GlorotUniform(geometry.dim, geometry.dim)),
            "offset": Coefficient(("J", "D"), 0.0),
        }

    def init_weight(self, weight: Tensor, geometry: Geometry) -> None:
        """Initialise by Keras' Glorot uniform for one kernel that computes all votes, hence the large fan-out."""
        fan_out = geometry.children_per_slot * geometry.slots * geometry.parents * weight.shape[-1]
        _GlorotUniform(geometry.columns, fan_out)(weight)

    def step(self, coefficients: Mapping[str, Tensor], votes: Votes, children: Capsules, state: State, t: int) -> State:
        """Compute the attention, the coupled sum and the capsule activation."""
        logits = votes.mix(coefficients["attention"])
        coupling = logits.softmax(-2)
        total = votes.sum(coupling)
        pose = torch.einsum("sjd,jde->sje", total.flatten(0, -3), coefficients["matrix"])
        pose = pose.unflatten(0, total.shape[:-2]) + coefficients["offset"]
        if self.residual:
            if children.pose.shape != pose.shape:
                raise ValueError(
                    f"Attention(residual=True) adds the children to the parents, so the grid must stay the same, "
                    f"got children {list(children.pose.shape[1:-2])} and parents {list(pose.shape[1:-2])}: "
                    f"use stride=1 and padding='same'"
                )
            pose = pose + children.pose
        return State(pose=pose.tanh(), coupling=coupling, logits=logits)


@dataclass(frozen=True)
class _GlorotUniform:
    """Initialiser: uniform within ``sqrt(6 / (fan_in + fan_out))``, the default of Keras."""

    fan_in: int
    fan_out: int

    def __call__(self, tensor: Tensor) -> None:
        bound = (6 / (self.fan_in + self.fan_out)) ** 0.5
        tensor.uniform_(-bound, bound)
