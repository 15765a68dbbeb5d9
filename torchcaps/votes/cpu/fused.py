"""Calls of the compiled CPU kernel that compute couplings and sums of votes in one pass, and their gradients."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from torchcaps.votes.cpu.kernel import KernelCall
from torchcaps.votes.dispatch import ChunkPlan

__all__ = ["ATTEND", "CHOOSE", "RESEMBLE", "fused_backward", "fused_forward", "gradients_of", "make_call"]

ATTEND, CHOOSE, RESEMBLE = 4, 6, 7  # in the enum Kind of kernel.cpp
SUMMED = ("constant", "first", "second")  # gradients that are summed over child types, hence over threads

Inputs = Mapping[str, Tensor | None]  # by the names of the kernel


def make_call(kind: int, plan: ChunkPlan, inputs: Inputs, similarity: int = 0, least: float = 0.0) -> KernelCall:
    """Return the call of the kernel for these inputs; ``similarity`` and ``least`` are options of RESEMBLE."""
    pose, weight, bias = inputs["pose"], inputs["weight"], inputs["bias"]
    assert pose is not None
    assert weight is not None
    given = {name: tensor for name, tensor in inputs.items() if tensor is not None}
    arguments = {name: tensor for name, tensor in given.items() if name not in ("pose", "weight", "bias")}
    call = KernelCall((kind, False), plan, pose, weight, bias, arguments)
    call.args.through, call.args.similarity, call.args.least = True, similarity, least
    return call


def fused_forward(call: KernelCall, pose: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of votes of each parent, ``[B, *L, J, D]``, and its mass (CHOOSE only, otherwise empty)."""
    args, sites = call.args, call.plan.wiring.sites
    total = pose.new_empty(pose.shape[0], *sites, args.parents, call.dim)
    mass = pose.new_empty(total.shape[:-1] if args.kind == CHOOSE else (0,))
    if not pose.is_meta:
        call.set_pointers(result=total, mass=mass)
        call.forward()
    return total, mass


def fused_backward(
    call: KernelCall, inputs: Inputs, needs: Sequence[bool], gradient: Tensor, mass_gradient: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the inputs; ``None`` if not in ``needs``."""
    call.set_pointers(gradient=gradient)
    if call.args.kind == CHOOSE:
        call.set_pointers(mass_gradient=mass_gradient)
    return gradients_of(call, inputs, needs)


def gradients_of(call: KernelCall, inputs: Inputs, needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Run the backward pass; return the gradients of the inputs, ``None`` if not in ``needs``."""
    pose, bias = inputs["pose"], inputs["bias"]
    assert pose is not None
    needed = {name: inputs[name] for name, need in zip(inputs, needs, strict=True) if need}
    grads: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    for name, tensor in needed.items():
        if tensor is None:
            continue
        if name == "bias":
            grads[name] = pose.new_zeros(call.args.slots, call.args.parents, call.dim)
        elif name in SUMMED:
            buffers[name] = pose.new_zeros(call.n_threads, *tensor.shape)
        else:
            grads[name] = pose.new_zeros(tensor.shape)
    if not pose.is_meta:
        call.set_pointers(**{f"{name}_grad": tensor for name, tensor in grads.items()})
        call.backward({f"{name}_grad": tensor for name, tensor in buffers.items()})
    grads |= {name: tensor.sum(0) for name, tensor in buffers.items()}
    if "bias" in grads and bias is not None:
        grads["bias"] = grads["bias"].sum_to_size(bias.shape[-3:]).view(bias.shape)
    return tuple(grads.get(name) for name in inputs)
