"""Streamed votes: recomputed from children and weights for each reduction, in forward and again in backward.

Between the two passes only the children, the weights and the arguments of each reduction (couplings, poses) are kept,
which exist anyway. Votes exist one chunk at a time.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from torchcaps._core.values import is_batched
from torchcaps.capsules import disable_autocast
from torchcaps.votes import dispatch, reductions
from torchcaps.votes.base import Attended
from torchcaps.votes.cpu import kernel
from torchcaps.votes.custom_ops import reduce_votes_op, sum_votes_op
from torchcaps.votes.dense import (
    DenseVotes,
    bias_gradient,
    compute_votes,
    concat_children,
    slot_gradient,
    weight_gradient,
)
from torchcaps.votes.dispatch import ChunkPlan, folds_mix, kernel_supports
from torchcaps.votes.fused import FusedVotes
from torchcaps.votes.reductions import Reduction
from torchcaps.votes.shared_coupling import FoldedSum, SumFunction, folded_mix, folded_sum, shared_by_images
from torchcaps.votes.triton import launch
from torchcaps.votes.triton.support import triton_supports
from torchcaps.votes.wiring import Wiring

__all__ = ["StreamedVotes", "make_chunks", "reduce_gradients", "reduce_votes"]


# Reductions in chunks -------------------------------------------------------------------------------------------


class Chunk(NamedTuple):
    """A range of slots with its inputs and votes."""

    start: int
    stop: int
    slots: Tensor  # [B, *L, n, A, children_per_slot * X]
    weight: Tensor  # [n, X, J, Y] or [*L, n, X, J, Y]
    votes: Tensor  # [B, *L, n, J, D]

    def narrow(self, tensor: Tensor, axis: int = -2) -> Tensor:
        """Return this chunk's range of a tensor with a slot axis."""
        return tensor.narrow(axis, self.start, self.stop - self.start)

    def narrow_slotted(self, reduction: type[Reduction], arguments: Sequence[Tensor]) -> list[Tensor]:
        """Return the arguments of a reduction, those with a slot axis narrowed to this chunk."""
        pairs = zip(arguments, reduction.slotted, strict=True)
        return [self.narrow(argument) if slotted else argument for argument, slotted in pairs]


def make_chunks(plan: ChunkPlan, pose: Tensor, weight: Tensor, bias: Tensor | None) -> Iterator[Chunk]:
    """Yield the chunks, each with its votes."""
    padded = plan.wiring.pad(pose)
    for start, stop in plan.wiring.chunk_ranges(plan.slots_per_chunk(pose, weight)):
        slots = concat_children(list(plan.wiring.windows(padded, start, stop)), plan.rows)
        chunk_weight = weight.narrow(-4, start, stop - start)
        chunk_bias = None if bias is None else bias.narrow(-3, start, stop - start)
        yield Chunk(start, stop, slots, chunk_weight, compute_votes(slots, chunk_weight, chunk_bias))


def _limit_meta_chunks(chunks: Iterator[Chunk], pose: Tensor) -> Iterator[Chunk]:
    """Return all chunks; on the meta device only the first ones (see `dispatch.META_CHUNKS`)."""
    return itertools.islice(chunks, dispatch.META_CHUNKS) if pose.is_meta else chunks


def reduce_votes(
    reduction: type[Reduction], plan: ChunkPlan, pose: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Tensor
) -> Tensor:
    """Return the reduction of all votes, by a GPU or CPU kernel if one supports it, otherwise chunk by chunk.

    The result is allocated before the first chunk: results allocated between the temporaries of the chunks fragmented
    the heap, which grew to several times the memory in use.
    """
    if triton_supports(reduction, plan.wiring, pose, weight, bias, *arguments):
        return launch.forward_pass(reduction, plan, pose, weight, bias, *arguments)
    if kernel_supports(reduction, plan.wiring, pose, weight, bias, *arguments):
        return kernel.forward_pass(reduction, plan, pose, weight, bias, *arguments)
    total: Tensor | None = None
    if reduction.slotted_result:
        total = pose.new_empty(pose.shape[0], *plan.wiring.sites, plan.wiring.n_slots, weight.shape[-2])
    for chunk in _limit_meta_chunks(make_chunks(plan, pose, weight, bias), pose):
        result = reduction.result(chunk.votes, *chunk.narrow_slotted(reduction, arguments))
        if reduction.slotted_result:
            assert total is not None
            chunk.narrow(total).copy_(result)
        else:
            total = result if total is None else total.add_(result)
    assert total is not None
    return total


def reduce_gradients(
    reduction: type[Reduction],
    plan: ChunkPlan,
    needs: Sequence[bool],
    gradient: Tensor,
    pose: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *arguments: Tensor,
) -> tuple[Tensor | None, ...]:
    """Recompute the votes; return the gradients of children, weight, bias and the reduction's arguments.

    ``needs`` has a bool for each of these: the other gradients are ``None``, and are not computed if that saves time.

    If gradients are enabled (double backward), torch computes them, so that they can be differentiated again. For
    gradients inside ``vmap`` (``torch.func.jacrev``) all votes are computed at once.
    """
    if is_batched(gradient):
        return _gradients_of_stored_votes(reduction, plan, gradient, pose, weight, bias, *arguments)
    if not torch.is_grad_enabled():
        if triton_supports(reduction, plan.wiring, pose, weight, bias, gradient, *arguments):
            return launch.backward_pass(reduction, plan, needs, gradient, pose, weight, bias, *arguments)
        if kernel_supports(reduction, plan.wiring, pose, weight, bias, gradient, *arguments):
            return kernel.backward_pass(reduction, plan, needs, gradient, pose, weight, bias, *arguments)
    padded_grad = torch.zeros_like(plan.wiring.pad(pose), memory_format=torch.contiguous_format) if needs[0] else None
    weight_grad = torch.zeros_like(weight) if needs[1] else None
    bias_grad = torch.zeros_like(bias) if bias is not None and needs[2] else None
    argument_grads = [torch.zeros(a.shape, dtype=a.dtype, device=a.device) for a in arguments]
    for chunk in _limit_meta_chunks(make_chunks(plan, pose, weight, bias), pose):
        result_grad = chunk.narrow(gradient) if reduction.slotted_result else gradient
        votes_grad, *parts = reduction.gradients(chunk.votes, result_grad, *chunk.narrow_slotted(reduction, arguments))
        for total, part, slotted in zip(argument_grads, parts, reduction.slotted, strict=True):
            (chunk.narrow(total) if slotted else total).add_(part)
        if weight_grad is not None:
            chunk.narrow(weight_grad, -4).add_(weight_gradient(votes_grad, chunk.slots, chunk.weight))
        if bias_grad is not None:
            chunk_bias_grad = chunk.narrow(bias_grad, -3)
            chunk_bias_grad.add_(bias_gradient(votes_grad, chunk_bias_grad))
        if padded_grad is None:
            continue
        slots_grad = slot_gradient(votes_grad, chunk.weight, plan.rows)
        windows = plan.wiring.windows(padded_grad, chunk.start, chunk.stop)
        for window, part in zip(windows, slots_grad.chunk(plan.wiring.children_per_slot, dim=-1), strict=True):
            window.add_(part.flatten(-2))
    pose_grad = None if padded_grad is None else plan.wiring.unpad(padded_grad)
    of_arguments = (grad if needed else None for grad, needed in zip(argument_grads, needs[3:], strict=True))
    return pose_grad, weight_grad, bias_grad, *of_arguments


def _gradients_of_stored_votes(
    reduction: type[Reduction],
    plan: ChunkPlan,
    gradient: Tensor,
    pose: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *arguments: Tensor,
) -> tuple[Tensor | None, ...]:
    """Return the same as `reduce_gradients`, without in-place operations, which ``vmap`` does not have."""

    def compute(pose: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return DenseVotes.make(pose, weight, bias, plan.rows, plan.wiring).dense()

    inputs = [pose, weight] if bias is None else [pose, weight, bias]
    votes, vjp = torch.func.vjp(compute, *inputs)[:2]
    votes_grad, *argument_grads = reduction.gradients(votes, gradient, *arguments)
    pose_grad, weight_grad, *bias_grads = vjp(votes_grad)
    return pose_grad, weight_grad, *(bias_grads or [None]), *argument_grads


class StreamedReduction(torch.autograd.Function):
    """A reduction in chunks whose backward recomputes every chunk. Supports double backward."""

    @staticmethod
    def forward(reduction: type[Reduction], plan: ChunkPlan, *tensors: Tensor) -> Tensor:  # type: ignore[override]
        """Return the reduction; tensors: children, weight, bias or None, the reduction's arguments."""
        return reduce_votes(reduction, plan, *tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # type: ignore[override]
        """Save the inputs; no votes."""
        ctx.reduction, ctx.plan, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradients of children, weight, bias and the reduction's arguments."""
        with disable_autocast(gradient):
            needs = ctx.needs_input_grad[2:]
            return None, None, *reduce_gradients(ctx.reduction, ctx.plan, needs, gradient, *ctx.saved_tensors)


# Votes ----------------------------------------------------------------------------------------------------------


class StreamedVotes(FusedVotes):
    """Votes that are recomputed from children and weights for each reduction.

    Args:
        pose: children, ``[B, I, K]`` or ``[B, *G, N, K]``.
        weight, bias: see `torchcaps.votes.dense`.
        rows: rows of a pose, ``A``.
        wiring: the child that each slot reads.
        max_slots: largest number of slots per chunk; default: as many as fit into the cache.
        couplings: whether `attend` returns couplings and logits, which it otherwise does not need to store.

    >>> import torch
    >>> children, weight = torch.randn(2, 6, 8), torch.randn(6, 8, 5, 4)  # [B, I, K], [I, X, J, Y]
    >>> votes = StreamedVotes(children, weight, None, rows=1, wiring=Wiring(6))
    >>> stored = DenseVotes.make(children, weight, None, rows=1, wiring=Wiring(6))
    >>> coupling = torch.rand(2, 6, 5)
    >>> torch.allclose(votes.sum(coupling), stored.sum(coupling), atol=1e-5)
    True
    """

    def __init__(
        self,
        pose: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: int,
        wiring: Wiring,
        max_slots: int | None = None,
        couplings: bool = False,
    ) -> None:
        n_parents, columns = weight.shape[-2:]
        shape = (pose.shape[0], *wiring.sites, wiring.n_slots, n_parents, rows * columns)
        super().__init__(wiring, shape, ChunkPlan(wiring, rows, max_slots), (pose, weight, bias), couplings)

    def _stream(self, reduction: type[Reduction], *arguments: Tensor) -> Tensor:
        """Return a reduction of the votes, computed chunk by chunk."""
        with disable_autocast(self._tensors[0]):
            if torch.compiler.is_compiling():
                return reduce_votes_op(reduction.__name__, self._plan, *self._tensors, *arguments)
            return StreamedReduction.apply(reduction, self._plan, *self._tensors, *arguments)  # type: ignore[return-value]

    def sum(self, coupling: Tensor) -> Tensor:
        """Return ``s_j = Σ_i c_ij v_ij``; couplings that all images and positions share are folded into the weights."""
        shared = shared_by_images(coupling, self.wiring, self._tensors[1])
        if shared is not None:
            with disable_autocast(self._tensors[0]):
                return folded_sum(*self._tensors, shared, self._plan, _sum_function())
        return self._stream(reductions.Sum, coupling.expand(self.shape[:-1]))

    def dot(self, query: Tensor) -> Tensor:
        """Return ``a_ij = <q_j, v_ij>``."""
        return self._stream(reductions.Dot, self._for_parents(query))

    def sqsum(self, coupling: Tensor, mean: Tensor) -> Tensor:
        """Return ``Σ_i c_ij (v_ij - mu_j)²``."""
        return self._stream(reductions.SqSum, coupling.expand(self.shape[:-1]), self._for_parents(mean))

    def sqdist(self, mean: Tensor, scale: Tensor) -> Tensor:
        """Return ``Σ_d w_jd (v_ijd - mu_jd)²``."""
        return self._stream(reductions.SqDist, self._for_parents(mean), self._for_parents(scale))

    def mix(self, kernel: Tensor) -> Tensor:
        """Return ``Σ_md A_jimd v_mjd``."""
        pose, weight, bias = self._tensors
        if folds_mix(weight, self._plan.rows):
            with disable_autocast(pose):
                return folded_mix(pose, weight, bias, kernel, self._plan, _sum_function())
        return self._stream(reductions.Mix, kernel)

    def attend(self, query: Tensor, leak: bool = False, through: bool = True) -> Attended:
        """Return the sum of the votes that parents attend to, in one pass if only parents of one position compete."""
        if self._couplings or not self.wiring.is_local:
            return super().attend(query, leak, through)
        total = self._stream(reductions.ATTEND_VARIANTS[leak, through], self._for_parents(query))
        return Attended(total, None, None)

    def dense(self) -> Tensor:
        """Compute all votes, ``[B, *L, I, J, D]``."""
        with disable_autocast(self._tensors[0]):
            return torch.cat([chunk.votes for chunk in make_chunks(self._plan, *self._tensors)], dim=-3)

    def detach(self) -> Self:
        """Return the same votes without gradients."""
        pose, weight, bias = (None if tensor is None else tensor.detach() for tensor in self._tensors)
        assert pose is not None
        assert weight is not None
        return type(self)(pose, weight, bias, self._plan.rows, self.wiring, self._plan.max_slots, self._couplings)


def _sum_function() -> SumFunction:
    """Return the function that sums transformed children: inside a compiled graph a custom operator."""
    return sum_votes_op if torch.compiler.is_compiling() else FoldedSum.apply
