"""Both steps of EM in one pass of the compiled CPU kernel, forward and backward; see `torchcaps.votes.fitting`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchcaps.votes.cpu.kernel import KernelCall
from torchcaps.votes.dispatch import ChunkPlan

__all__ = ["fit_backward", "fit_forward"]

FIT = 5  # in the enum Kind of kernel.cpp

Inputs = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
NAMES = ("pose", "weight", "bias", "activation", "constant", "first", "second")  # of the kernel


def _make_call(plan: ChunkPlan, inputs: Inputs) -> KernelCall:
    """Return the call of the kernel for these inputs."""
    pose, weight, bias, *arguments = inputs
    named = {name: tensor for name, tensor in zip(NAMES[3:], arguments, strict=True) if tensor is not None}
    return KernelCall((FIT, False), plan, pose, weight, bias, named)


def fit_forward(plan: ChunkPlan, least_mass: float, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return mass, total and squares of each parent: see `torchcaps.votes.base.Votes.fit`."""
    pose = inputs[0]
    call = _make_call(plan, inputs)
    total = pose.new_empty(pose.shape[0], *plan.wiring.sites, call.args.parents, call.dim)
    mass, squares = total.new_empty(total.shape[:-1]), torch.empty_like(total)
    if pose.is_meta:
        return mass, total, squares
    call.set_pointers(result=total, mass=mass, squares=squares)
    call.forward()
    weight = mass.unsqueeze(-1)
    exact = torch.where(weight > 0, total / weight, 0)  # the mean of the kernel
    squares += weight * (exact - total / weight.clamp_min(least_mass)) ** 2
    return mass, total, squares


def fit_backward(
    plan: ChunkPlan,
    least_mass: float,
    needs: Sequence[bool],
    gradients: tuple[Tensor, Tensor, Tensor],
    results: tuple[Tensor, Tensor],
    inputs: Inputs,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the inputs; ``None`` if not in ``needs``.

    Args:
        plan: the wiring.
        least_mass: see `torchcaps.votes.base.Votes.fit`.
        needs: a bool for each input.
        gradients: of mass, total and squares.
        results: mass and total.
        inputs: as in `fit_forward`.
    """
    pose, bias = inputs[0], inputs[2]
    mass, total = results
    mass_gradient, total_gradient, squares_gradient = gradients
    divisor = mass.clamp_min(least_mass).unsqueeze(-1)
    center = total / divisor
    # Squares depend on the sum also by the mean. Σ_i c_ij (v_ij - mean) is 0 unless the divisor is not the mass.
    residual = torch.where(mass.unsqueeze(-1) < least_mass, total - mass.unsqueeze(-1) * center, 0)
    total_gradient = total_gradient - 2 * squares_gradient * residual / divisor
    call = _make_call(plan, inputs)
    by_name = dict(zip(NAMES, inputs, strict=True))
    needed = {name: by_name[name] for name, need in zip(NAMES, needs, strict=True) if need}
    grads: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    for name, tensor in needed.items():
        if tensor is None:
            continue
        if name == "bias":
            grads[name] = pose.new_zeros(call.args.slots, call.args.parents, call.dim)
        elif name in ("pose", "weight", "activation"):
            grads[name] = pose.new_zeros(tensor.shape)
        else:  # summed over child types, hence over threads
            buffers[name] = pose.new_zeros(call.n_threads, *tensor.shape)
    if not pose.is_meta:
        call.set_pointers(gradient=total_gradient, mass_gradient=mass_gradient)
        call.set_pointers(squares_gradient=squares_gradient, center=center)
        call.set_pointers(**{f"{name}_grad": tensor for name, tensor in grads.items()})
        call.backward({f"{name}_grad": tensor for name, tensor in buffers.items()})
    grads |= {name: tensor.sum(0) for name, tensor in buffers.items()}
    if "bias" in grads and bias is not None:
        grads["bias"] = grads["bias"].sum_to_size(bias.shape[-3:]).view(bias.shape)
    return tuple(grads.get(name) for name in NAMES)
