"""Variational Bayes routing: Ribeiro 2020."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from torchcaps.capsules import Capsules
from torchcaps.routing.base import Coefficient, Geometry, Routing, State
from torchcaps.routing.gaussian import check_coordinates, coordinate_offset, effective_activations
from torchcaps.votes import Votes, Wiring
from torchcaps.votes.base import Density

__all__ = ["VariationalBayes"]


@dataclass(frozen=True)
class VariationalBayes(Routing):
    """Variational Bayes routing: Ribeiro 2020 with diagonal covariances, after the authors' code.

    The votes are a mixture of Gaussians with one component per parent, whose parameters have prior distributions:
    Dirichlet (``alpha0 = 1``), and Gaussian-Wishart (``kappa0 = 1``, ``m0 = 0``, ``Psi0 = I``, ``nu0 = D + 1``). With
    child activations ``a``::

        R_j    = Σ_i r_ij a_i
        mu_j   = Σ_i r_ij a_i v_ij / R_j
        alpha_j = alpha0 + R_j,  kappa_j = kappa0 + R_j,  nu_j = nu0 + R_j,  m_j = R_j mu_j / kappa_j
        psi_jd = 1 + Σ_i r_ij a_i (v_ijd - mu_jd)² + R_j / kappa_j mu_jd²
        lnpi_j = digamma(alpha_j) - digamma(Σ_k alpha_k)
        lnL_j  = Σ_d digamma((nu_j - d) / 2) + D ln 2 - Σ_d ln psi_jd,  d = 0 .. D - 1
        r_i    = softmax_j(lnpi_j + lnL_j / 2 - D / (2 kappa_j) - nu_j / 2 Σ_d (v_ijd - m_jd)² / psi_jd)
        H_j    = D ln(2 pi e) / 2 - lnL_j / 2
        a_j    = sigmoid(beta_a_j - (exp(lnpi_j) H_j + beta_u_j)),  pose m_j

    ``r`` starts uniform and is computed in log space. The authors normalise poses and activation logits over the batch
    after the routing, which is not part of it.

    Args:
        iterations: number of updates of the parents.
        competition: ``"global"`` normalises ``r`` over all parents that read a child, at any position, as the authors'
            code does; ``"local"`` over the parent types of one position.
        activation: ``"sigmoid"``, or ``"logit"``: return activations before the sigmoid, for a batch normalisation.
        coordinates: add ``(row + 1) / (10 H)`` and ``(column + 1) / (10 W)`` of each child to the first two entries of
            the right-hand column of its votes (the class layer). Matrix poses on a grid only.

    Domain: votes up to `torchcaps.routing.base.vote_limit`; larger ones raise a ValueError.

    >>> import torch
    >>> from torchcaps.nn import DenseCapsules
    >>> layer = DenseCapsules(32, 8, 10, 16, routing=VariationalBayes())
    >>> capsules = layer(torch.randn(2, 32, 8))
    >>> capsules.pose.shape, capsules.activation.shape
    (torch.Size([2, 10, 16]), torch.Size([2, 10]))
    """

    paper = "Ribeiro 2020"
    equation = "variational routing, from the authors' code"
    presence = "activation"

    iterations: int = 3
    competition: Literal["local", "global"] = "global"
    activation: Literal["sigmoid", "logit"] = "sigmoid"
    coordinates: bool = False

    def check(self, geometry: Geometry) -> None:
        """Raise a ValueError if coordinates are enabled without matrix poses or without a grid."""
        if self.coordinates:
            check_coordinates("VariationalBayes", geometry)

    def coefficients(self, geometry: Geometry) -> dict[str, Coefficient]:
        """Return the two learned costs, one of each per parent type."""
        return {"beta_u": Coefficient(("J",), 0.0), "beta_a": Coefficient(("J",), 0.0)}

    def init_weight(self, weight: Tensor, geometry: Geometry) -> None:
        """Initialise as the authors: Glorot uniform with the fans ``I * X * Y`` and ``J * cells * X * Y``."""
        cells = max(geometry.slots // geometry.types, 1) if geometry.sites != () else 1
        fan = geometry.columns * weight.shape[-1] * (geometry.slots + geometry.parents * cells)
        bound = (6 / fan) ** 0.5
        weight.uniform_(-bound, bound)

    def vote_offset(self, geometry: Geometry, wiring: Wiring, like: Tensor) -> Tensor | None:
        """Return the scaled position of each slot's child, in the right-hand column of the first two rows."""
        if not self.coordinates:
            return None
        assert wiring.grid is not None
        grid = torch.tensor(wiring.grid, dtype=like.dtype, device=like.device)
        return coordinate_offset(wiring.centers(like) / 10 + 0.05 / grid, geometry)  # (h + 0.5) / 10 H + 0.5 / 10 H

    def step(self, coefficients: Mapping[str, Tensor], votes: Votes, children: Capsules, state: State, t: int) -> State:
        """Update the responsibilities (except in the first iteration), then the parents."""
        dim = votes.shape[-1]
        if state.memory is None:
            density = None
        else:
            constant, precision, _ = state.memory
            assert state.pose is not None
            density = Density(constant, state.pose, 0.5 * precision)
        # the mean of this fit is m = Σ_i r a v / kappa, from which the deviations of the next iteration are taken
        moments = votes.fit(effective_activations(children), density, 0.0, more_mass=1.0)
        mass, pose = moments.mass, moments.mean  # R_j: [B, *L, J]
        kappa, nu = 1 + mass, dim + 1 + mass
        psi = 1 + moments.squares + pose * pose  # equals 1 + Σ_i r a (v - mu)² + R / kappa mu²
        alpha = 1 + mass
        log_pi = torch.digamma(alpha) - torch.digamma(alpha.sum(-1, keepdim=True))
        log_det = _multivariate_digamma(nu, dim) + dim * math.log(2) - psi.log().sum(-1)
        entropy = 0.5 * dim * math.log(2 * math.pi * math.e) - 0.5 * log_det
        activation = coefficients["beta_a"] - (log_pi.exp() * entropy + coefficients["beta_u"])
        if self.activation == "sigmoid":
            activation = activation.sigmoid()
        memory = (log_pi + 0.5 * log_det - 0.5 * dim / kappa, nu.unsqueeze(-1) / psi, activation)
        return State(pose, activation, moments.coupling, moments.logits, memory)

    def pack(self, state: State) -> tuple[Tensor, ...]:
        """Return mean, constant of the log density, precision and activation of each parent."""
        assert state.pose is not None
        return (state.pose, *state.memory)

    def unpack(self, tensors: tuple[Tensor, ...]) -> State:
        """Return the state of these parents."""
        return State(tensors[0], tensors[-1], memory=tensors[1:])


def _multivariate_digamma(nu: Tensor, dim: int) -> Tensor:
    """Return ``Σ_d digamma((nu - d) / 2)``, ``d = 0 .. D - 1``, for ``nu > D - 1``, by at most two digammas.

    Two terms are ``digamma(x / 2) + digamma((x - 1) / 2) = 2 digamma(x - 1) - 2 ln 2`` (duplication), and
    ``digamma(nu - 1 - 2k)`` is ``digamma(nu - 1)`` minus the sum of ``1 / (nu - m)``, ``m = 2 .. 2k + 1`` (recurrence).

    >>> _multivariate_digamma(torch.tensor(5.0), 3) - sum(torch.digamma((torch.tensor(5.0) - d) / 2) for d in range(3))
    tensor(0.)
    """
    even = dim - dim % 2
    result = even * (torch.digamma(nu - 1) - math.log(2)) if even else torch.zeros_like(nu)
    if even > 2:
        index = torch.arange(2, even, dtype=nu.dtype, device=nu.device)
        count = even - 2 * torch.div(index, 2, rounding_mode="floor")
        result = result - (count / (nu.unsqueeze(-1) - index)).sum(-1)
    if dim % 2:
        result = result + torch.digamma((nu - even) / 2)
    return result
