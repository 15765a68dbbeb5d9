"""Uniform couplings: the baseline without routing."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from torchcaps.capsules import Capsules
from torchcaps.functional import squash
from torchcaps.routing.base import Routing, State
from torchcaps.votes import Votes

__all__ = ["Uniform"]


@dataclass(frozen=True)
class Uniform(Routing):
    """Uniform couplings: the first iteration of Sabour 2017, Procedure 1.

    ``c_ij = 1/J``, ``v_j = squash(Σ_i c_ij v_ij)``

    The layer is linear followed by a squash, so it is the baseline that a routing algorithm has to beat.

    Args:
        over: ``"parents"``: couplings ``1/J``, as above. ``"children"``: ``1/I``, the mean of the votes, as in Gu 2020
            (Aff-CapsNet) together with ``DenseCapsules(shared=True)``, as implemented here.

    >>> import torch, torchcaps
    >>> parents, trace = torchcaps.route(torch.randn(2, 6, 5, 4), Uniform(), trace=True)
    >>> trace.couplings[0].unique()
    tensor([0.2000])
    """

    paper = "Sabour 2017"
    equation = "eq. 1 and 2 with c = 1/J"

    over: Literal["parents", "children"] = "parents"

    @property
    def coupling_axis(self) -> Literal["parents", "children"]:  # type: ignore[override]
        """Axis over which couplings sum to 1."""
        return self.over

    def step(self, coefficients: Mapping[str, Tensor], votes: Votes, children: Capsules, state: State, t: int) -> State:
        """Sum the votes with equal couplings and squash."""
        if self.over == "parents":
            coupling = votes.uniform(children.pose)
        else:
            coupling = children.pose.new_full((), 1 / votes.shape[-3]).expand(votes.shape[:-1])
        return State(pose=squash(votes.sum(coupling)), coupling=coupling)
