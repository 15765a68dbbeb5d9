"""Parts that routings with Gaussian parents share: the M-step of EM, coordinates, activations. Not a routing."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchcaps.capsules import Capsules
from torchcaps.routing.base import Coefficient, Geometry
from torchcaps.votes import Votes
from torchcaps.votes.base import Moments

__all__ = [
    "COSTS",
    "MIN_MASS",
    "Gaussian",
    "check_coordinates",
    "child_activations",
    "coordinate_offset",
    "effective_activations",
    "fit_gaussian",
    "gaussian_of",
    "inverse_temperature",
]

MIN_MASS = 1e-10  # lower bound of the divisor, for a parent that no child is assigned to
MIN_ACTIVATION = 1e-12  # smaller ones count as 0: each iteration multiplies gradients by MIN_MASS / activation

# The two learned costs of Hinton 2018, one of each per parent type.
COSTS = {"beta_u": Coefficient(("J",), 0.0), "beta_a": Coefficient(("J",), 0.0)}


class Gaussian(NamedTuple):
    """The Gaussian of each parent, one per position and parent type.

    Shapes:
        total (the weighted sum of votes), mean, variance ``[B, *L, J, D]``; activation_logit ``[B, *L, J]``.
    """

    total: Tensor
    mean: Tensor
    variance: Tensor
    activation_logit: Tensor


def inverse_temperature(t: int, final: float = 0.01, annealing: float = 0.95) -> float:
    """Return ``lambda_t = final * (1 - annealing^(t+1))``: the authors of Hinton 2018, on OpenReview.

    >>> [round(inverse_temperature(t), 6) for t in range(3)]
    [0.0005, 0.000975, 0.001426]
    """
    return final * (1 - annealing ** (t + 1))


def fit_gaussian(
    coefficients: Mapping[str, Tensor], votes: Votes, weight: Tensor, temperature: float, floor: float = 1e-4
) -> Gaussian:
    """Fit a Gaussian to the weighted votes of each parent: Hinton 2018, Procedure 1, M-step.

    Args:
        coefficients: ``beta_u`` and ``beta_a``.
        votes: the votes.
        weight: ``R_ij a_i``, ``[B, *L, I, J]``.
        temperature: ``lambda_t``.
        floor: added to every variance. Variances are at least the square of the machine epsilon, so that their
            logarithm and inverse are finite for a single child.
    """
    mass = weight.sum(-2)  # S_j: [B, *L, J]
    total = votes.sum(weight)
    mean = total / mass.clamp_min(MIN_MASS).unsqueeze(-1)
    moments = Moments(mass, total, mean, votes.sqsum(weight, mean), None, None)
    return gaussian_of(coefficients, moments, temperature, floor)


def gaussian_of(
    coefficients: Mapping[str, Tensor], moments: Moments, temperature: float, floor: float = 1e-4
) -> Gaussian:
    """Return the Gaussians with these sums over votes; arguments as in `fit_gaussian`."""
    mass, total, mean, squares, *_ = moments
    variance = squares / mass.clamp_min(MIN_MASS).unsqueeze(-1) + floor
    least = torch.finfo(variance.dtype).eps ** 2
    if floor < least:
        variance = variance.clamp_min(least)
    cost = (coefficients["beta_u"].unsqueeze(-1) + 0.5 * variance.log()).sum(-1) * mass
    return Gaussian(total, mean, variance, temperature * (coefficients["beta_a"] - cost))


def check_coordinates(name: str, geometry: Geometry) -> None:
    """Raise a ValueError if ``coordinates=True`` of the routing ``name`` lacks matrix poses or a grid."""
    if geometry.rows < 2:
        raise ValueError(
            f"{name}(coordinates=True) needs matrix poses with at least two rows: row and column are added to the "
            f"right-hand column of the vote; got {geometry.rows} row"
        )
    if geometry.sites == ():
        raise ValueError(
            f"{name}(coordinates=True) needs children on a grid; a dense layer has none: use "
            "ConvCapsules with kernel_size equal to the grid"
        )


def coordinate_offset(centers: Tensor, geometry: Geometry) -> Tensor:
    """Return an offset of the votes with row and column in the right-hand column of the first two rows.

    Shapes:
        ``[*L, I, 2] -> [*L, I, 1, D]``
    """
    columns = geometry.dim // geometry.rows
    column = F.pad(centers, (0, geometry.rows - 2))  # [*L, I, A]
    offset = F.pad(column.unsqueeze(-1), (columns - 1, 0))  # [*L, I, A, Y]
    return offset.flatten(-2).unsqueeze(-2)


def child_activations(votes: Votes, children: Capsules) -> Tensor:
    """Return the activation of each slot's child: 1 if the children have no activations, 0 for padding.

    Shapes:
        ``-> [B, *L, I]``
    """
    return votes.wiring.gather(effective_activations(children))


def effective_activations(children: Capsules) -> Tensor:
    """Return the activations of the children, 1 if they have none; those below `MIN_ACTIVATION` count as 0.

    Shapes:
        ``-> [B, I]`` or ``[B, *G, N]``
    """
    if children.activation is None:
        return children.pose.new_ones(()).expand(children.pose.shape[:-1])
    return F.threshold(children.activation, MIN_ACTIVATION, 0.0)
