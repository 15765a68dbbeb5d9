"""Routing by expectation maximisation."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from torchcaps._core.validation import check_range
from torchcaps.capsules import Capsules
from torchcaps.routing.base import Coefficient, Geometry, Routing, State
from torchcaps.routing.gaussian import COSTS, child_activations, fit_gaussian, inverse_temperature
from torchcaps.votes import Votes, Wiring

__all__ = ["EM"]


@dataclass(frozen=True)
class EM(Routing):
    """EM routing: Hinton 2018, Procedure 1. Each parent is a Gaussian that explains some of the votes.

    M-step, for each parent, with ``R_ij`` at first equal::

        S_j      = Σ_i R_ij a_i
        mu_jh    = Σ_i R_ij a_i v_ijh / S_j
        var_jh   = Σ_i R_ij a_i (v_ijh - mu_jh)² / S_j + floor
        cost_jh  = (beta_u + log sigma_jh) S_j
        a_j      = sigmoid(lambda_t (beta_a - Σ_h cost_jh))

    E-step, between two M-steps, for each child::

        R_i = softmax_j(log a_j + log N(v_ij; mu_j, var_j))

    in log space throughout: ``log a_j`` is a log-sigmoid, densities are never exponentiated. The gradient flows
    through all of it (the authors, on OpenReview). Children without activations count as fully active.

    Args:
        iterations: M-steps; Tsai 2020 found 2 the best.
        competition: ``"local"`` normalises R over the parent types of one receptive field, as most code and the
            baseline of Tsai 2020 do; ``"global"`` over all parents of a child, wherever they stand, as the paper.
        inverse_temperature, annealing: ``lambda_t = inverse_temperature * (1 - annealing^(t+1))``; the values
            are the authors' on OpenReview. ``annealing=0`` keeps it constant.
        variance_floor: added to every variance; a parent that a single child speaks for has none of its own.
        coordinates: add each child's place, scaled to 0..1, to the first two entries of the right-hand column
            of its votes (section 4.1, "coordinate addition": the class layer). Matrix poses on a grid only.
    """

    paper = "Hinton 2018"
    equation = "Procedure 1"
    presence = "activation"

    iterations: int = 2
    competition: Literal["local", "global"] = "local"
    inverse_temperature: float = 0.01
    annealing: float = 0.95
    variance_floor: float = 1e-4
    coordinates: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "inverse_temperature", 0, 1e9, strict=True)
        check_range(self, "annealing", 0, 1 - 1e-9)
        check_range(self, "variance_floor", 0, 1e9)

    def check(self, geometry: Geometry) -> None:
        """Coordinates go into the right-hand column of a vote matrix, and come from a grid."""
        if self.coordinates and geometry.rows < 2:
            raise ValueError(
                "EM(coordinates=True) needs matrix poses of two rows or more: it adds row and column to the "
                "right-hand column of the vote; got vectors"
            )
        if self.coordinates and geometry.sites == ():
            raise ValueError(
                "EM(coordinates=True) needs children on a grid, and a dense layer has none: take "
                "ConvCapsules with the whole grid as kernel_size"
            )

    def coefficients(self, geometry: Geometry) -> dict[str, Coefficient]:
        """Own the two learned costs, one of each for a parent type."""
        return COSTS

    def init_weight(self, weight: Tensor, geometry: Geometry) -> None:
        """Keep the size of poses: the paper does not say, and the public codes differ."""
        weight.normal_(0, geometry.columns**-0.5)

    def vote_offset(self, geometry: Geometry, wiring: Wiring, like: Tensor) -> Tensor | None:
        """Return the scaled place of each slot's child, in the right-hand column of the first two rows."""
        if not self.coordinates:
            return None
        centers = wiring.centers(like)  # [*L, I, 2]
        columns = geometry.dim // geometry.rows
        column = F.pad(centers, (0, geometry.rows - 2))  # [*L, I, A]
        offset = F.pad(column.unsqueeze(-1), (columns - 1, 0))  # [*L, I, A, Y]
        return offset.flatten(-2).unsqueeze(-2)

    def step(self, p: Mapping[str, Tensor], votes: Votes, children: Capsules, state: State, t: int) -> State:
        """Take an E-step but at the start, then an M-step."""
        if t == 0:
            logits, coupling = None, votes.uniform(children.pose)
        else:
            logits = self._log_density(votes, state)
            coupling = votes.softmax(logits)
        weight = coupling * child_activations(votes, children).unsqueeze(-1)  # [B, *L, I, J]
        temperature = inverse_temperature(t, self.inverse_temperature, self.annealing)
        fit = fit_gaussian(p, votes, weight, temperature, self.variance_floor)
        return State(
            pose=fit.mean,
            activation=fit.evidence.sigmoid(),
            coupling=coupling,
            logits=logits,
            memory=(fit.variance, F.logsigmoid(fit.evidence)),
        )

    @staticmethod
    def _log_density(votes: Votes, state: State) -> Tensor:
        """Return ``log a_j + log N(v_ij; mu_j, var_j)``."""
        variance, log_activation = state.memory
        assert state.pose is not None
        constant = log_activation - 0.5 * torch.log(2 * math.pi * variance).sum(-1)  # [B, *L, J]
        return constant.unsqueeze(-2) - votes.sqdist(state.pose, 0.5 / variance)
