"""Streamed reductions as custom operators, for ``torch.compile`` and ``torch.export``.

If traced, the loop over chunks would be unrolled into thousands of nodes, and the compiler would notice that backward
computes the same votes as forward and store them. As an operator with its own backward the loop stays opaque, and only
the inputs of the reduction are saved.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchcaps.votes.dispatch import ChunkPlan
from torchcaps.votes.reductions import BY_NAME
from torchcaps.votes.shared_coupling import folded_gradients, plain_sum
from torchcaps.votes.wiring import Wiring

__all__ = ["encode_plan", "reduce_votes_op", "sum_votes_op"]


def encode_plan(plan: ChunkPlan) -> list[int]:
    """Return a plan as a list of ints, the only form that a custom operator accepts."""
    wiring = plan.wiring
    window = [*wiring.kernel, *wiring.stride, *wiring.padding]
    return [wiring.types, *(wiring.grid or (0, 0)), *window, wiring.slot_kind == "type", plan.rows, plan.max_slots or 0]


def _decode_plan(numbers: list[int]) -> ChunkPlan:
    """Return the plan from a list of ints: inverse of `encode_plan`."""
    types, height, width, k0, k1, s0, s1, top, bottom, left, right, by_type, rows, max_slots = numbers
    grid = (height, width) if height else None
    wiring = Wiring(
        types, grid, (k0, k1), (s0, s1), (top, bottom, left, right), slot_kind="type" if by_type else "capsule"
    )
    return ChunkPlan(wiring, rows, max_slots or None)


def _select(inputs: Iterable[Tensor | None], needs: Sequence[bool]) -> list[Tensor]:
    """Return the inputs whose gradients are needed."""
    return [x for x, needed in zip(inputs, needs, strict=True) if x is not None and needed]


def _as_list(
    gradients: Iterable[Tensor | None], inputs: Iterable[Tensor | None], needs: Sequence[bool]
) -> list[Tensor]:
    """Return the needed gradients, contiguous; zeros for missing ones."""
    rows = zip(gradients, inputs, needs, strict=True)
    pairs = [(gradient, x) for gradient, x, needed in rows if x is not None and needed]
    return [torch.zeros_like(x).contiguous() if gradient is None else gradient.contiguous() for gradient, x in pairs]


def _spread(gradients: Iterable[Tensor], inputs: Iterable[Tensor | None], needs: Sequence[bool]) -> list[Tensor | None]:
    """Inverse of `_select`: return one gradient per input, ``None`` if there is none."""
    found = iter(gradients)
    pairs = zip(inputs, needs, strict=True)
    return [next(found) if x is not None and needed else None for x, needed in pairs]


# Reductions -----------------------------------------------------------------------------------------------------


@torch.library.custom_op("torchcaps::reduce_votes", mutates_args=())
def _reduce(
    kind: str, plan: list[int], pose: Tensor, weight: Tensor, bias: Tensor | None, arguments: list[Tensor]
) -> Tensor:
    """Return the reduction named ``kind`` of the votes: the operator ``torchcaps::reduce_votes``."""
    from torchcaps.votes.streaming import reduce_votes  # not at the top: streaming imports this module

    # Contiguous, because the fake implementation below promises these strides.
    return reduce_votes(BY_NAME[kind], _decode_plan(plan), pose, weight, bias, *arguments).contiguous()


@_reduce.register_fake
def _(kind: str, plan: list[int], pose: Tensor, weight: Tensor, bias: Tensor | None, arguments: list[Tensor]) -> Tensor:
    """Return an empty tensor of the result's shape, ``[B, *L, J, D]`` or ``[B, *L, I, J]``."""
    decoded = _decode_plan(plan)
    n_parents, dim = weight.shape[-2], decoded.rows * weight.shape[-1]
    last = (n_parents, dim) if BY_NAME[kind].per_parent else (decoded.wiring.n_slots, n_parents)
    return pose.new_empty((pose.shape[0], *decoded.wiring.sites, *last))


@torch.library.custom_op("torchcaps::reduce_votes_backward", mutates_args=())
def _reduce_backward(
    kind: str,
    plan: list[int],
    needs: list[bool],
    gradient: Tensor,
    pose: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    arguments: list[Tensor],
) -> list[Tensor]:
    """Return the gradients of children, weight, bias and arguments, those that are needed."""
    from torchcaps.votes.streaming import reduce_gradients

    inputs = (pose, weight, bias, *arguments)
    return _as_list(reduce_gradients(BY_NAME[kind], _decode_plan(plan), needs, gradient, *inputs), inputs, needs)


@_reduce_backward.register_fake
def _(
    kind: str,
    plan: list[int],
    needs: list[bool],
    gradient: Tensor,
    pose: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    arguments: list[Tensor],
) -> list[Tensor]:
    """Return empty tensors of the shapes of the needed gradients."""
    return [x.new_empty(x.shape) for x in _select((pose, weight, bias, *arguments), needs)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.kind, ctx.plan, pose, weight, bias, arguments = inputs
    ctx.save_for_backward(pose, weight, bias, *arguments)


def _reduce_backward_formula(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    """Return the gradients of the inputs of `_reduce`; ``None`` for ``kind``, ``plan`` and those not needed."""
    pose, weight, bias, *arguments = ctx.saved_tensors
    *of_tensors, of_arguments = ctx.needs_input_grad[2:]
    needs = [*of_tensors, *of_arguments]
    found = _reduce_backward(ctx.kind, ctx.plan, needs, gradient, pose, weight, bias, arguments)
    pose_grad, weight_grad, bias_grad, *rest = _spread(found, ctx.saved_tensors, needs)
    return None, None, pose_grad, weight_grad, bias_grad, rest


_reduce.register_autograd(_reduce_backward_formula, setup_context=_save)


def reduce_votes_op(
    kind: str, plan: ChunkPlan, pose: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Tensor
) -> Tensor:
    """Return a reduction of the votes as the operator ``torchcaps::reduce_votes``."""
    return _reduce(kind, encode_plan(plan), pose, weight, bias, list(arguments))


# Sums with couplings that all images share ---------------------------------------------------------------------


@torch.library.custom_op("torchcaps::sum_votes", mutates_args=())
def _sum(plan: list[int], pose: Tensor, weight: Tensor, coupling: Tensor) -> Tensor:
    return plain_sum(pose, weight, coupling, _decode_plan(plan)).contiguous()


@_sum.register_fake
def _(plan: list[int], pose: Tensor, weight: Tensor, coupling: Tensor) -> Tensor:
    decoded = _decode_plan(plan)
    return pose.new_empty((pose.shape[0], *decoded.wiring.sites, weight.shape[-2], decoded.rows * weight.shape[-1]))


@torch.library.custom_op("torchcaps::sum_votes_backward", mutates_args=())
def _sum_backward(
    plan: list[int], needs: list[bool], gradient: Tensor, pose: Tensor, weight: Tensor, coupling: Tensor
) -> list[Tensor]:
    """Return the gradients of children, weight and coupling, those that are needed."""
    inputs = (pose, weight, coupling)
    return _as_list(folded_gradients(gradient, *inputs, _decode_plan(plan), needs), inputs, needs)


@_sum_backward.register_fake
def _(
    plan: list[int], needs: list[bool], gradient: Tensor, pose: Tensor, weight: Tensor, coupling: Tensor
) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in _select((pose, weight, coupling), needs)]


def _save_sum(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.plan, *tensors = inputs
    ctx.save_for_backward(*tensors)


def _sum_backward_formula(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    needs = list(ctx.needs_input_grad[1:])
    return None, *_spread(_sum_backward(ctx.plan, needs, gradient, *ctx.saved_tensors), ctx.saved_tensors, needs)


_sum.register_autograd(_sum_backward_formula, setup_context=_save_sum)


def sum_votes_op(pose: Tensor, weight: Tensor, coupling: Tensor, plan: ChunkPlan) -> Tensor:
    """Return the sum of transformed children as the operator ``torchcaps::sum_votes``."""
    return _sum(encode_plan(plan), pose, weight, coupling.contiguous())
