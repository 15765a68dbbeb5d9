"""Both steps of EM in one pass of the compiled CPU kernel, forward and backward; see `torchcaps.votes.fitting`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchcaps.votes.cpu.fused import gradients_of, make_call
from torchcaps.votes.dispatch import ChunkPlan

__all__ = ["fit_backward", "fit_forward"]

FIT = 5  # in the enum Kind of kernel.cpp

Inputs = tuple[Tensor, Tensor, *tuple[Tensor | None, ...]]  # see NAMES
NAMES = ("pose", "weight", "bias", "activation", "constant", "first", "second", "shared")  # of the kernel


def fit_forward(
    plan: ChunkPlan, least_mass: float, more_mass: float, inputs: Inputs
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return mass, total, squares and gained sum of each parent: see `torchcaps.votes.base.Votes.fit`."""
    call = make_call(FIT, plan, dict(zip(NAMES, inputs, strict=True)))
    pose = inputs[0]
    total = pose.new_empty(pose.shape[0], *plan.wiring.sites, call.args.parents, call.dim)
    mass, squares = total.new_empty(total.shape[:-1]), torch.empty_like(total)
    gained = torch.empty_like(mass) if inputs[7] is not None else torch.zeros_like(mass)
    if pose.is_meta:
        return mass, total, squares, gained
    call.set_pointers(result=total, mass=mass, squares=squares, score=None if inputs[7] is None else gained)
    call.forward()
    weight = mass.unsqueeze(-1)
    exact = torch.where(weight > 0, total / weight, 0)  # the mean of the kernel
    squares += weight * (exact - total / (weight.clamp_min(least_mass) + more_mass)) ** 2
    return mass, total, squares, gained


def fit_backward(
    plan: ChunkPlan,
    masses: tuple[float, float],
    needs: Sequence[bool],
    gradients: tuple[Tensor, Tensor, Tensor, Tensor],
    results: tuple[Tensor, Tensor],
    inputs: Inputs,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the inputs; ``None`` if not in ``needs``.

    Args:
        plan: the wiring.
        masses: ``least_mass`` and ``more_mass``, see `torchcaps.votes.base.Votes.fit`.
        needs: a bool for each input.
        gradients: of mass, total, squares and gained.
        results: mass and total.
        inputs: as in `fit_forward`.
    """
    least_mass, more_mass = masses
    mass, total = results
    mass_gradient, total_gradient, squares_gradient, gained_gradient = gradients
    divisor = mass.clamp_min(least_mass).unsqueeze(-1) + more_mass
    center = total / divisor
    # Squares depend on mass and sum also by the mean. Σ_i c_ij (v_ij - mean) is 0 unless the divisor is not the mass.
    small = mass.unsqueeze(-1) < least_mass
    residual = torch.where(small, total - mass.unsqueeze(-1) * center, center * more_mass)
    through_mean = -2 * squares_gradient * residual / divisor
    total_gradient = total_gradient + through_mean
    if more_mass:
        mass_gradient = mass_gradient - torch.where(small, 0, through_mean * center).sum(-1)
    by_name: dict[str, Tensor | None] = dict(zip(NAMES, inputs, strict=True))
    call = make_call(FIT, plan, by_name)
    call.set_pointers(gradient=total_gradient, mass_gradient=mass_gradient, squares_gradient=squares_gradient)
    call.set_pointers(center=center, score_gradient=None if by_name["shared"] is None else gained_gradient)
    return gradients_of(call, by_name, needs)
