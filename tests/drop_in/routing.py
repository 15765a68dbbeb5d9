"""Scaled mean of the votes."""

from dataclasses import dataclass

from torchcaps.functional import squash
from torchcaps.routing.base import Coefficient, Routing, State


@dataclass(frozen=True)
class DropIn(Routing):
    """Uniform couplings and a learned gain for each parent."""

    paper = "an example"
    equation = "none"

    gain: bool = True

    def coefficients(self, geometry):
        return {"gain": Coefficient(("J",), 1.0)} if self.gain else {}

    def step(self, coefficients, votes, children, state, t):
        coupling = votes.uniform(children.pose)
        total = votes.sum(coupling)
        if self.gain:
            total = total * coefficients["gain"].unsqueeze(-1)
        return State(pose=squash(total), coupling=coupling)
