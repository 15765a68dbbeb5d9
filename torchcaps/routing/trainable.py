"""Couplings that are learned like any weight."""

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
    """Trainable couplings: Chen 2019 (G-CapsNets), eq. 1 to 4.

    ``v_j = Σ_i c_ij v_ij``, then ``v' = (1 - exp(-|v|)) v / |v|``, with couplings that are free parameters: any
    sign, any sum, the same for every image. A dense layer has one for each pair; a convolution one for each
    pair of slot and parent type *at every output position*, while its matrices are shared, so the layer must
    know its grid.

    Nothing stands between transform and coupling, so in a dense layer ``c_ij W_ij`` is one linear map: the
    couplings change how it is learned, not what it can be.

    Args:
        relu: where the ReLU stands: ``"before"`` the squash (the authors' nets with one capsule layer),
            ``"after"`` it (their multi-layer net), or ``"none"``. The paper says only that there is one.
    """

    paper = "Chen 2019"
    equation = "eq. 1 to 4"
    couples = None

    relu: Literal["before", "after", "none"] = "before"

    def coefficients(self, geometry: Geometry) -> dict[str, Coefficient]:
        """Own the couplings, drawn as Caffe's Xavier filler does."""
        bound = (3 / geometry.slots) ** 0.5
        return {"coupling": Coefficient(("L", "I", "J"), lambda c: c.uniform_(-bound, bound))}

    def init_weight(self, weight: Tensor, geometry: Geometry) -> None:
        """Draw as Caffe's Xavier filler does: a dense weight counts all parents into its fan in, a kernel one."""
        fan_in = geometry.columns * weight.shape[-1] * (geometry.parents if geometry.sites == () else 1)
        bound = (3 / fan_in) ** 0.5
        weight.uniform_(-bound, bound)

    def step(self, p: Mapping[str, Tensor], votes: Votes, children: Capsules, state: State, t: int) -> State:
        """Sum with the learned couplings; ReLU and squash in the order asked for."""
        coupling = p["coupling"].expand(votes.shape[:-1])
        pose = votes.sum(coupling)
        if self.relu == "before":
            pose = pose.relu()
        pose = exp_squash(pose)
        if self.relu == "after":
            pose = pose.relu()
        return State(pose=pose, coupling=coupling)
