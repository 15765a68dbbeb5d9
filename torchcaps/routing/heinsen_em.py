"""Heinsen routing of 2019: EM with the reward and cost of using and ignoring data."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from torchcaps.capsules import Capsules
from torchcaps.routing.base import Coefficient, Geometry, Routing, State, vote_limit
from torchcaps.routing.gaussian import effective_activations
from torchcaps.votes import Votes
from torchcaps.votes.base import Density

__all__ = ["HeinsenEM"]

EPS = 1e-5  # of the authors' code


@dataclass(frozen=True)
class HeinsenEM(Routing):
    """Heinsen routing of 2019, after the authors' code ("generative matrix routing").

    A Gaussian per parent as in `EM`, but the score of a parent is the net benefit of using the data of its children,
    less that of ignoring them. With child activations ``f_i`` and votes ``v_ij = mu_i W_ij + B_ij``::

        r_i  = softmax_j(log sigmoid(a_j) - Σ_d (v_ijd - mu_jd)² / (2 var_jd) - Σ_d log(var_jd) / 2)      E-step
        u_ij = f_i r_ij,  g_ij = f_i - u_ij                                                             D-step
        a_j  = Σ_i (beta_use_ij u_ij - beta_ign_ij g_ij)                                                M-step
        w_ij = u_ij / (Σ_i u_ij + 1e-5),  mu_j = Σ_i w_ij v_ij,  var_j = Σ_i w_ij (v_ij - mu_j)² + 1e-5

    ``r`` is uniform in the first iteration. The code passes scores (logits) between layers and applies the sigmoid on
    entry; here it is applied on output, so that activations are in 0..1 as in all layers.

    Args:
        iterations: number of iterations.
        activation: activations of the parents: ``"sigmoid"`` of the scores ``a_j``, or ``"logit"``, the scores
            themselves, for a class layer followed by a cross-entropy.

    Domain: votes up to `torchcaps.routing.base.vote_limit`; larger ones raise a ValueError.

    Deviation: with both ``beta`` at their initial value 0, all scores are 0.

    >>> import torch
    >>> from torchcaps.nn import DenseCapsules
    >>> layer = DenseCapsules(32, 8, 10, 16, routing=HeinsenEM())
    >>> capsules = layer(torch.randn(2, 32, 8))
    >>> capsules.pose.shape, capsules.activation.shape
    (torch.Size([2, 10, 16]), torch.Size([2, 10]))
    """

    paper = "Heinsen 2019"
    equation = "generative matrix routing, from the authors' code"
    presence = "activation"
    vote_bias = True

    iterations: int = 3
    activation: Literal["sigmoid", "logit"] = "sigmoid"

    def coefficients(self, geometry: Geometry) -> dict[str, Coefficient]:
        """Return the benefit of using and the cost of ignoring each child; of all children alike, if they share."""
        axes = ("J",) if geometry.shared else ("I", "J")
        return {"beta_use": Coefficient(axes, 0.0), "beta_ign": Coefficient(axes, 0.0)}

    def max_vote(self, dtype: torch.dtype) -> float | None:
        """Return the limit of votes; a mean changes by 1/EPS per vote if the mass of a parent is far below EPS."""
        return vote_limit(dtype, self.iterations, 1 / EPS)

    def init_weight(self, weight: Tensor, geometry: Geometry) -> None:
        """Initialise from ``N(0, 1) / X``."""
        weight.normal_(0, 1 / geometry.columns)

    def step(self, coefficients: Mapping[str, Tensor], votes: Votes, children: Capsules, state: State, t: int) -> State:
        """Run the E-step (except in the first iteration), then the D-step and the M-step."""
        if state.memory is None:
            density = None
        else:
            variance, score = state.memory
            assert state.pose is not None
            constant = F.logsigmoid(score) - 0.5 * variance.log().sum(-1)  # [B, *L, J]
            density = Density(constant, state.pose, 0.5 / variance)
        activation = effective_activations(children)
        shape = votes.shape[-3:-1]  # [I, J]
        # Σ_i beta_use u - beta_ign (f - u), with fewer products
        gain = coefficients["beta_use"] + coefficients["beta_ign"]
        moments = votes.fit(activation, density, 0.0, more_mass=EPS, gain=gain.expand(shape))
        assert moments.gained is not None
        score = moments.gained - torch.matmul(votes.wiring.gather(activation), coefficients["beta_ign"].expand(shape))
        variance = moments.squares / (moments.mass + EPS).unsqueeze(-1) + EPS
        found = self.unpack((moments.mean, variance, score))
        return found._replace(coupling=moments.coupling, logits=moments.logits)

    def pack(self, state: State) -> tuple[Tensor, ...]:
        """Return mean, variance and score of each parent."""
        assert state.pose is not None
        return (state.pose, *state.memory)

    def unpack(self, tensors: tuple[Tensor, ...]) -> State:
        """Return the state of these parents."""
        mean, variance, score = tensors
        activation = score.sigmoid() if self.activation == "sigmoid" else score
        return State(mean, activation, memory=(variance, score))
