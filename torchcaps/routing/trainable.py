"""Trainable couplings, learned like any weight: Chen 2019 (G-CapsNets)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from torchcaps.capsules import Capsules
from torchcaps.functional import exp_squash
from torchcaps.routing.base import Coefficient, Geometry, Routing, State
from torchcaps.votes import Votes

__all__ = ["Trainable"]


@dataclass(frozen=True)
class Trainable(Routing):
    """Trainable couplings: Chen 2019 (G-CapsNets); the paper does not number these equations.

    ``v_j = Σ_i c_ij v_ij``, then ``v' = (1 - exp(-|v|)) v / |v|``, with couplings that are free parameters: any sign,
    any sum, the same for every image. A dense layer has one per pair of child and parent. A convolution has one per
    slot and parent type *at every output position*, while its transformation matrices are shared over positions, so
    the layer must know its grid.

    Transform and coupling have no nonlinearity between them, so in a dense layer ``c_ij W_ij`` is one linear map: the
    couplings change the optimisation, not the set of functions.

    Args:
        relu: position of the ReLU: ``"before"`` the squash (the authors' nets with one capsule layer), ``"after"`` it
            (their multi-layer net), or ``"none"``. The paper only states that there is one.

    >>> import torch
    >>> from torchcaps.nn import DenseCapsules
    >>> layer = DenseCapsules(32, 8, 10, 16, routing=Trainable())
    >>> layer(torch.randn(2, 32, 8)).pose.shape, [name for name, _ in layer.named_parameters()]
    (torch.Size([2, 10, 16]), ['weight', 'coefficients.coupling'])
    """

    paper = "Chen 2019"
    equation = "generalised routing, not numbered"
    coupling_axis = None

    relu: Literal["before", "after", "none"] = "before"

    def coefficients(self, geometry: Geometry) -> dict[str, Coefficient]:
        """Return the couplings, initialised by Caffe's Xavier filler."""
        bound = (3 / geometry.slots) ** 0.5
        return {"coupling": Coefficient(("L", "I", "J"), lambda c: c.uniform_(-bound, bound))}

    def init_weight(self, weight: Tensor, geometry: Geometry) -> None:
        """Initialise by Caffe's Xavier filler; its fan-in of a dense weight includes all parents, of a kernel one."""
        fan_in = geometry.columns * weight.shape[-1] * (geometry.parents if geometry.sites == () else 1)
        bound = (3 / fan_in) ** 0.5
        weight.uniform_(-bound, bound)

    def step(self, coefficients: Mapping[str, Tensor], votes: Votes, children: Capsules, state: State, t: int) -> State:
        """Sum the votes with the learned couplings; apply ReLU and squash in the configured order."""
        coupling = coefficients["coupling"].expand(votes.shape[:-1])
        pose = votes.sum(coupling)
        if self.relu == "before":
            pose = pose.relu()
        pose = exp_squash(pose)
        if self.relu == "after":
            pose = pose.relu()
        return State(pose=pose, coupling=coupling)
