"""E-step and M-step of EM in one pass over streamed votes, by the compiled CPU kernel.

Couplings exist for a few slots at a time and are computed again in backward, so that the memory of an iteration is that
of its parents.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchcaps._core.values import is_batched
from torchcaps.capsules import disable_autocast
from torchcaps.votes.cpu.fit import Inputs, fit_backward, fit_forward
from torchcaps.votes.cpu.fused import fused_backward, fused_forward, make_call
from torchcaps.votes.dispatch import ChunkPlan, kernel_supports
from torchcaps.votes.reductions import SqDist

__all__ = ["KernelFit", "KernelFused", "fit_is_supported"]

Results = tuple[Tensor, ...]
Definition = Callable[..., Results]


def fit_is_supported(plan: ChunkPlan, inputs: Inputs) -> bool:
    """Return whether the kernel computes both steps: parents of one position compete, and it computes `SqDist`."""
    wiring, (pose, weight, bias, *arguments) = plan.wiring, inputs
    given = [tensor for tensor in arguments if tensor is not None]
    local = wiring.is_local and wiring.slot_kind == "capsule"
    return local and kernel_supports(SqDist, wiring, pose, weight, bias, *given)


class KernelFit(torch.autograd.Function):
    """Mass, total, squares and gained sum of each parent; backward computes votes and couplings again.

    Backward that is differentiated or batched uses the definition, ``define(stored, *inputs)``, with stored or streamed
    votes.
    """

    @staticmethod
    def forward(plan: ChunkPlan, masses: tuple[float, float], define: Definition, *inputs: Any) -> Results:  # type: ignore[override]
        """Return the results; inputs: children, weight, bias, activations, constant, mean, scale, gain."""
        return fit_forward(plan, *masses, inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:  # type: ignore[override]
        """Save the inputs and the parents; no couplings."""
        ctx.plan, ctx.masses, ctx.define, *tensors = inputs
        ctx.save_for_backward(*tensors, *output[:2])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradients of the inputs."""
        *inputs, mass, total = ctx.saved_tensors
        needs = ctx.needs_input_grad[3:]
        with disable_autocast(mass):
            batched = any(is_batched(tensor) for tensor in (*gradients, *ctx.saved_tensors) if tensor is not None)
            if torch.is_grad_enabled() or batched:
                define = functools.partial(ctx.define, batched)  # streamed votes can't be computed under vmap
                found = _gradients_by_definition(define, inputs, gradients)
            else:
                found = fit_backward(ctx.plan, ctx.masses, needs, gradients, (mass, total), tuple(inputs))  # type: ignore[arg-type]
        return None, None, None, *found


class KernelFused(torch.autograd.Function):
    """Sum and mass of each parent with couplings that the kernel computes in the same pass; backward as `KernelFit`."""

    @staticmethod
    def forward(  # type: ignore[override]
        kind: int, plan: ChunkPlan, names: tuple[str, ...], options: tuple[Any, ...], define: Definition, *inputs: Any
    ) -> Results:
        """Return the results; inputs: children, weight, bias and arguments, by these names of the kernel."""
        return fused_forward(make_call(kind, plan, dict(zip(names, inputs, strict=True)), *options), inputs[0])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:  # type: ignore[override]
        """Save the inputs."""
        ctx.kind, ctx.plan, ctx.names, ctx.options, ctx.define, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradients of the inputs."""
        inputs = ctx.saved_tensors
        with disable_autocast(inputs[0]):
            batched = any(is_batched(tensor) for tensor in (*gradients, *inputs) if tensor is not None)
            if torch.is_grad_enabled() or batched:
                found = _gradients_by_definition(functools.partial(ctx.define, batched), list(inputs), gradients)
            else:
                named = dict(zip(ctx.names, inputs, strict=True))
                call = make_call(ctx.kind, ctx.plan, named, *ctx.options)
                found = fused_backward(call, named, ctx.needs_input_grad[5:], *gradients)
        return None, None, None, None, None, *found


def _gradients_by_definition(
    define: Definition, inputs: list[Tensor | None], gradients: tuple[Tensor, ...]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the definition, which can be differentiated again."""
    given = [tensor for tensor in inputs if tensor is not None]

    def compute(*tensors: Tensor) -> Results:
        found = iter(tensors)
        return define(*(None if tensor is None else next(found) for tensor in inputs))

    found = iter(torch.func.vjp(compute, *given)[1](gradients))
    return tuple(None if tensor is None else next(found) for tensor in inputs)
