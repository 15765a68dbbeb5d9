"""Streamed reductions as single operators, for compiled graphs.

A compiler that looks into the loop over pieces unrolls it into thousands of nodes, and then finds that backward
makes the same votes as forward, and stores them. As an operator with a backward of its own the loop stays a loop,
and what is kept is what `Stream` keeps.
"""

from typing import Any

import torch
from torch import Tensor

from torchcaps.votes.chunks import reduce_gradients, reduce_votes
from torchcaps.votes.dispatch import Plan
from torchcaps.votes.reductions import BY_NAME
from torchcaps.votes.shared_coupling import folded_gradients, plain_sum
from torchcaps.votes.wiring import Wiring

__all__ = ["encode", "reduce_opaquely", "sum_opaquely"]


def encode(plan: Plan) -> list[int]:
    """Write a plan as numbers, which is what an operator takes."""
    wiring = plan.wiring
    window = [*wiring.kernel, *wiring.stride, *wiring.padding]
    return [wiring.types, *(wiring.grid or (0, 0)), *window, wiring.slot_kind == "type", plan.rows, plan.size or 0]


def _decode(numbers: list[int]) -> Plan:
    types, height, width, k0, k1, s0, s1, top, bottom, left, right, by_type, rows, size = numbers
    grid = (height, width) if height else None
    slots = "type" if by_type else "capsule"
    return Plan(Wiring(types, grid, (k0, k1), (s0, s1), (top, bottom, left, right), slots), rows, size or None)


@torch.library.custom_op("torchcaps::reduce_votes", mutates_args=())
def _reduce(
    kind: str, plan: list[int], pose: Tensor, weight: Tensor, bias: Tensor | None, arguments: list[Tensor]
) -> Tensor:
    # In the strides that the fake kernels below promise: a compiler holds them to it.
    return reduce_votes(BY_NAME[kind], _decode(plan), pose, weight, bias, *arguments).contiguous()


@_reduce.register_fake
def _(kind: str, plan: list[int], pose: Tensor, weight: Tensor, bias: Tensor | None, arguments: list[Tensor]) -> Tensor:
    decoded = _decode(plan)
    n_parents, dim = weight.shape[-2], decoded.rows * weight.shape[-1]
    last = (n_parents, dim) if BY_NAME[kind].of_parents else (decoded.wiring.n_slots, n_parents)
    return pose.new_empty((pose.shape[0], *decoded.wiring.sites, *last))


@torch.library.custom_op("torchcaps::reduce_votes_backward", mutates_args=())
def _reduce_backward(
    kind: str,
    plan: list[int],
    gradient: Tensor,
    pose: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    arguments: list[Tensor],
) -> list[Tensor]:
    inputs = (pose, weight, bias, *arguments)
    found = reduce_gradients(BY_NAME[kind], _decode(plan), gradient, *inputs)
    pairs = [(of, x) for of, x in zip(found, inputs, strict=True) if x is not None]
    return [torch.zeros_like(x).contiguous() if of is None else of.contiguous() for of, x in pairs]


@_reduce_backward.register_fake
def _(
    kind: str,
    plan: list[int],
    gradient: Tensor,
    pose: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    arguments: list[Tensor],
) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in (pose, weight, bias, *arguments) if x is not None]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.kind, ctx.plan, pose, weight, bias, arguments = inputs
    ctx.save_for_backward(pose, weight, bias, *arguments)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    pose, weight, bias, *arguments = ctx.saved_tensors
    of_pose, of_weight, *rest = _reduce_backward(ctx.kind, ctx.plan, gradient, pose, weight, bias, arguments)
    of_bias = None if bias is None else rest.pop(0)
    return None, None, of_pose, of_weight, of_bias, rest


_reduce.register_autograd(_backward, setup_context=_keep)


def reduce_opaquely(
    kind: str, plan: Plan, pose: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Tensor
) -> Tensor:
    """Reduce votes by one operator of the graph."""
    return _reduce(kind, encode(plan), pose, weight, bias, list(arguments))


# Sums with couplings that all images share ---------------------------------------------------------------------


@torch.library.custom_op("torchcaps::sum_votes", mutates_args=())
def _sum(plan: list[int], pose: Tensor, weight: Tensor, coupling: Tensor) -> Tensor:
    return plain_sum(pose, weight, coupling, _decode(plan)).contiguous()


@_sum.register_fake
def _(plan: list[int], pose: Tensor, weight: Tensor, coupling: Tensor) -> Tensor:
    decoded = _decode(plan)
    return pose.new_empty((pose.shape[0], *decoded.wiring.sites, weight.shape[-2], decoded.rows * weight.shape[-1]))


@torch.library.custom_op("torchcaps::sum_votes_backward", mutates_args=())
def _sum_backward(plan: list[int], gradient: Tensor, pose: Tensor, weight: Tensor, coupling: Tensor) -> list[Tensor]:
    inputs = (pose, weight, coupling)
    found = folded_gradients(gradient, *inputs, _decode(plan), (True, True, True))
    return [
        torch.zeros_like(x).contiguous() if of is None else of.contiguous() for of, x in zip(found, inputs, strict=True)
    ]


@_sum_backward.register_fake
def _(plan: list[int], gradient: Tensor, pose: Tensor, weight: Tensor, coupling: Tensor) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in (pose, weight, coupling)]


def _keep_sum(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.plan, *tensors = inputs
    ctx.save_for_backward(*tensors)


def _backward_sum(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    return None, *_sum_backward(ctx.plan, gradient, *ctx.saved_tensors)


_sum.register_autograd(_backward_sum, setup_context=_keep_sum)


def sum_opaquely(pose: Tensor, weight: Tensor, coupling: Tensor, plan: Plan) -> Tensor:
    """Sum transformed children by one operator of the graph."""
    return _sum(encode(plan), pose, weight, coupling.contiguous())
