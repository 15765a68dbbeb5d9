"""EM routing (routing by expectation maximisation): Hinton 2018."""

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
from torchcaps.routing.gaussian import (
    COSTS,
    MIN_MASS,
    check_coordinates,
    coordinate_offset,
    effective_activations,
    gaussian_of,
    inverse_temperature,
)
from torchcaps.votes import Votes, Wiring
from torchcaps.votes.base import Density

__all__ = ["EM"]


@dataclass(frozen=True)
class EM(Routing):
    """EM routing: Hinton 2018, Procedure 1. Each parent is a Gaussian fitted to the votes assigned to it.

    M-step for each parent, with uniform ``R_ij`` in the first iteration::

        S_j      = Σ_i R_ij a_i
        mu_jh    = Σ_i R_ij a_i v_ijh / S_j
        var_jh   = Σ_i R_ij a_i (v_ijh - mu_jh)² / S_j + floor
        cost_jh  = (beta_u + log sigma_jh) S_j
        a_j      = sigmoid(lambda_t (beta_a - Σ_h cost_jh))

    E-step for each child, between two M-steps::

        R_i = softmax_j(log a_j + log N(v_ij; mu_j, var_j))

    Computed in log space: ``log a_j`` is a log-sigmoid, and densities are never exponentiated. The gradient flows
    through all iterations (the authors, on OpenReview). Children without activations have activation 1.

    Domain: votes up to 1e10 in float32 and 1e90 in float64 with up to 2 iterations, less with more
    (`torchcaps.routing.base.vote_limit`); larger ones raise a ValueError, because gradients would overflow. Activations
    below 1e-12 count as 0.

    Args:
        iterations: number of M-steps; Tsai 2020 found 2 to be best.
        competition: ``"local"`` normalises R over the parent types of one receptive field, as most code and the
            baseline of Tsai 2020 do; ``"global"`` over all parents of a child at any position, as in the paper.
        inverse_temperature, annealing: ``lambda_t = inverse_temperature * (1 - annealing^(t+1))``; the values
            are the authors' on OpenReview. ``annealing=0`` keeps it constant.
        variance_floor: added to every variance; without it, a parent with a single child would have variance 0. At
            0 variances are at least the square of the machine epsilon.
        coordinates: add each child's grid position, scaled to 0..1, to the first two entries of the right-hand column
            of its votes (section 4, "Coordinate Addition": the class layer). Matrix poses on a grid only.

    >>> import torch, torchcaps
    >>> parents = torchcaps.route(torch.randn(2, 6, 5, 4), EM(iterations=2), activation=torch.rand(2, 6))
    >>> parents.pose.shape, parents.activation.shape
    (torch.Size([2, 5, 4]), torch.Size([2, 5]))
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
        if not 0 <= self.annealing < 1:
            raise ValueError(f"EM: annealing must be at least 0 and below 1, got {self.annealing}")
        check_range(self, "variance_floor", 0, 1e9)

    def check(self, geometry: Geometry) -> None:
        """Raise a ValueError if coordinates are enabled without matrix poses or without a grid."""
        if self.coordinates:
            check_coordinates("EM", geometry)

    def coefficients(self, geometry: Geometry) -> dict[str, Coefficient]:
        """Return the two learned costs, one of each per parent type."""
        return COSTS

    def init_weight(self, weight: Tensor, geometry: Geometry) -> None:
        """Initialise so that votes have the scale of the poses; the paper gives no value, and public code differs."""
        weight.normal_(0, geometry.columns**-0.5)

    def vote_offset(self, geometry: Geometry, wiring: Wiring, like: Tensor) -> Tensor | None:
        """Return the scaled position of each slot's child, in the right-hand column of the first two rows."""
        return coordinate_offset(wiring.centers(like), geometry) if self.coordinates else None

    def step(self, coefficients: Mapping[str, Tensor], votes: Votes, children: Capsules, state: State, t: int) -> State:
        """Run the E-step (except in the first iteration), then the M-step."""
        density = None if state.memory is None else self._log_density(state)
        moments = votes.fit(effective_activations(children), density, MIN_MASS)
        temperature = inverse_temperature(t, self.inverse_temperature, self.annealing)
        fit = gaussian_of(coefficients, moments, temperature, self.variance_floor)
        return State(
            pose=fit.mean,
            activation=fit.activation_logit.sigmoid(),
            coupling=moments.coupling,
            logits=moments.logits,
            memory=(fit.variance, F.logsigmoid(fit.activation_logit)),
        )

    def pack(self, state: State) -> tuple[Tensor, ...]:
        """Return mean, variance and log activation of each parent."""
        assert state.pose is not None
        return (state.pose, *state.memory)

    def unpack(self, tensors: tuple[Tensor, ...]) -> State:
        """Return the state of these Gaussians."""
        mean, variance, log_activation = tensors
        return State(mean, log_activation.exp(), memory=(variance, log_activation))

    @staticmethod
    def _log_density(state: State) -> Density:
        """Return ``log a_j + log N(v_ij; mu_j, var_j)`` as a function of the vote."""
        variance, log_activation = state.memory
        assert state.pose is not None
        constant = log_activation - 0.5 * torch.log(2 * math.pi * variance).sum(-1)  # [B, *L, J]
        return Density(constant, state.pose, 0.5 / variance)
