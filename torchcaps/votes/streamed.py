"""Votes that are never stored: made from children and weights piece by piece, forward and again backward.

Between the two passes this keeps the children, the weights and the arguments of each reduction (couplings,
poses), all of which exist anyway. The votes of one piece live only while it is reduced.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from torchcaps.votes import reductions
from torchcaps.votes.base import Votes
from torchcaps.votes.transform import bias_gradient, make_votes, side_by_side, slot_gradient, weight_gradient
from torchcaps.votes.wiring import Wiring

__all__ = ["StreamedVotes", "assumed_batch"]

PIECE_BYTES = 4 * 2**20  # votes of one piece: about what a core's second-level cache holds
COMPILED_BATCH = 32  # the batch that pieces are cut for inside a compiled graph, where it may be a symbol


def assumed_batch(batch: int) -> int:
    """Return the batch size to decide by: inside a compiled graph a fixed one, so that no size is baked in."""
    return COMPILED_BATCH if torch.compiler.is_compiling() else batch


@dataclass(frozen=True)
class Plan:
    """How votes are made piece by piece.

    Args:
        wiring: which child each slot reads.
        rows: rows of a pose, ``A``.
        size: slots in a piece, at most.

    """

    wiring: Wiring
    rows: int
    size: int


class Piece(NamedTuple):
    """A range of slots: what they read, their weight, their votes."""

    start: int
    stop: int
    slots: Tensor  # [B, *L, n, A, reads * X]
    weight: Tensor  # [n, X, J, Y] or [*L, n, X, J, Y]
    votes: Tensor  # [B, *L, n, J, D]

    def cut(self, tensor: Tensor, axis: int = -2) -> Tensor:
        """Return this piece's share of a tensor with a slot axis."""
        return tensor.narrow(axis, self.start, self.stop - self.start)


def make_pieces(plan: Plan, pose: Tensor, weight: Tensor, bias: Tensor | None) -> Iterator[Piece]:
    """Make the votes, one piece after the other."""
    padded = plan.wiring.pad(pose)
    for start, stop in plan.wiring.pieces(plan.size):
        slots = side_by_side(plan.wiring.windows(padded, start, stop), plan.rows)
        part = weight.narrow(-4, start, stop - start)
        own_bias = None if bias is None else bias.narrow(-3, start, stop - start)
        yield Piece(start, stop, slots, part, make_votes(slots, part, own_bias))


class Stream(torch.autograd.Function):
    """Reduce votes piece by piece; backward makes every piece anew and takes the reduction's own gradients."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        reduction: type[reductions.Reduction],
        plan: Plan,
        pose: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *arguments: Tensor,
    ) -> Tensor:
        """Return the reduction of all votes."""
        ctx.save_for_backward(pose, weight, bias, *arguments)
        ctx.reduction, ctx.plan = reduction, plan
        total: Tensor | None = None
        results = []
        for piece in make_pieces(plan, pose, weight, bias):
            result = reduction.result(piece.votes, *_cut(reduction, piece, arguments))
            if reduction.slotted_result:
                results.append(result)
            else:
                total = result if total is None else total.add_(result)
        if reduction.slotted_result:
            return torch.cat(results, dim=-2)
        assert total is not None
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradients of children, weight, bias and the reduction's arguments."""
        reduction, plan = ctx.reduction, ctx.plan
        pose, weight, bias, *arguments = ctx.saved_tensors
        of_padded = torch.zeros_like(plan.wiring.pad(pose), memory_format=torch.contiguous_format)
        of_weight = torch.zeros_like(weight)
        of_bias = None if bias is None else torch.zeros_like(bias)
        of_arguments = [torch.zeros(a.shape, dtype=a.dtype, device=a.device) for a in arguments]
        for piece in make_pieces(plan, pose, weight, bias):
            share = piece.cut(gradient) if reduction.slotted_result else gradient
            of_votes, *parts = reduction.gradients(piece.votes, share, *_cut(reduction, piece, arguments))
            for whole, part, slotted in zip(of_arguments, parts, reduction.slotted, strict=True):
                (piece.cut(whole) if slotted else whole).add_(part)
            piece.cut(of_weight, -4).add_(weight_gradient(of_votes, piece.slots, piece.weight))
            if of_bias is not None:
                own = piece.cut(of_bias, -3)
                own.add_(bias_gradient(of_votes, own))
            of_slots = slot_gradient(of_votes, piece.weight, plan.rows)
            windows = plan.wiring.windows(of_padded, piece.start, piece.stop)
            for window, part in zip(windows, of_slots.chunk(len(windows), dim=-1), strict=True):
                window.add_(part.flatten(-2))
        return None, None, plan.wiring.unpad(of_padded), of_weight, of_bias, *of_arguments


def _cut(reduction: type[reductions.Reduction], piece: Piece, arguments: Any) -> list[Tensor]:
    """Give a piece its share of the arguments that go slot by slot, and the others whole."""
    pairs = zip(arguments, reduction.slotted, strict=True)
    return [piece.cut(argument) if slotted else argument for argument, slotted in pairs]


class StreamedVotes(Votes):
    """Votes made from children and weights whenever they are needed.

    Args:
        pose: children, ``[B, I, K]`` or ``[B, *G, N, K]``.
        weight, bias: see `torchcaps.votes.transform`.
        rows: rows of a pose, ``A``.
        wiring: which child each slot reads.
        piece: slots in a piece, at most; by default what fits into the cache.

    """

    def __init__(
        self,
        pose: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: int,
        wiring: Wiring,
        piece: int | None = None,
    ) -> None:
        n_parents, columns = weight.shape[-2:]
        super().__init__(wiring, (pose.shape[0], *wiring.sites, wiring.n_slots, n_parents, rows * columns))
        if piece is None:
            sites = assumed_batch(pose.shape[0]) * math.prod(wiring.sites)
            slot_bytes = sites * n_parents * rows * columns * pose.element_size()
            piece = max(1, min(wiring.types, PIECE_BYTES // max(1, slot_bytes)))
        self._plan = Plan(wiring, rows, piece)
        self._tensors = (pose, weight, bias)

    def _stream(self, reduction: type[reductions.Reduction], *arguments: Tensor) -> Tensor:
        return Stream.apply(reduction, self._plan, *self._tensors, *arguments)  # type: ignore[return-value]

    def _for_parents(self, tensor: Tensor) -> Tensor:
        """Broadcast to one vector for each parent of each image, ``[B, *L, J, D]``."""
        return tensor.expand(*self.shape[:-3], *self.shape[-2:])

    def sum(self, coupling: Tensor) -> Tensor:
        """Return ``s_j = Σ_i c_ij v_ij``."""
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
        return self._stream(reductions.Mix, kernel)

    def dense(self) -> Tensor:
        """Make all votes at once: ``[B, *L, I, J, D]``."""
        return torch.cat([piece.votes for piece in make_pieces(self._plan, *self._tensors)], dim=-3)

    def detach(self) -> Self:
        """Return the same votes, through which no gradient flows."""
        pose, weight, bias = (None if tensor is None else tensor.detach() for tensor in self._tensors)
        assert pose is not None
        assert weight is not None
        return type(self)(pose, weight, bias, self._plan.rows, self.wiring, self._plan.size)
