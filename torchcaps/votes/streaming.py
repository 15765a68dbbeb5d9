"""Votes that are never stored: made from children and weights when they are reduced, forward and again backward.

Between the two passes this keeps the children, the weights and the arguments of each reduction (couplings,
poses), all of which exist anyway. The votes of one piece live only while it is reduced.
"""

from typing import Any, Self

import torch
from torch import Tensor

from torchcaps.capsules import disable_autocast
from torchcaps.votes import reductions
from torchcaps.votes.base import Attended, Votes
from torchcaps.votes.chunks import make_pieces, reduce_gradients, reduce_votes
from torchcaps.votes.custom_ops import reduce_opaquely, sum_opaquely
from torchcaps.votes.dispatch import Plan
from torchcaps.votes.shared_coupling import Sum, can_fold_mix, fold, folded_mix, folded_sum
from torchcaps.votes.wiring import Wiring

__all__ = ["StreamedVotes"]


class Stream(torch.autograd.Function):
    """Reduce votes piece by piece; backward makes every piece anew. Can be differentiated again."""

    @staticmethod
    def forward(reduction: type[reductions.Reduction], plan: Plan, *tensors: Tensor) -> Tensor:  # type: ignore[override]
        """Return the reduction of all votes; tensors: children, weight, bias or None, the reduction's arguments."""
        return reduce_votes(reduction, plan, *tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # type: ignore[override]
        """Keep what exists anyway."""
        ctx.reduction, ctx.plan, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradients of children, weight, bias and the reduction's arguments."""
        with disable_autocast(gradient):
            return None, None, *reduce_gradients(ctx.reduction, ctx.plan, gradient, *ctx.saved_tensors)


def _summing() -> Sum | None:
    """Return what sums transformed children: in a compiled graph an operator."""
    return sum_opaquely if torch.compiler.is_dynamo_compiling() else None


class StreamedVotes(Votes):
    """Votes made from children and weights whenever they are needed.

    Args:
        pose: children, ``[B, I, K]`` or ``[B, *G, N, K]``.
        weight, bias: see `torchcaps.votes.transform`.
        rows: rows of a pose, ``A``.
        wiring: which child each slot reads.
        piece: slots in a piece, at most; by default what fits into the cache.
        couplings: whether `attend` is to tell couplings and logits, which it need not make otherwise.
    """

    def __init__(
        self,
        pose: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: int,
        wiring: Wiring,
        piece: int | None = None,
        couplings: bool = False,
    ) -> None:
        n_parents, columns = weight.shape[-2:]
        super().__init__(wiring, (pose.shape[0], *wiring.sites, wiring.n_slots, n_parents, rows * columns))
        self._plan = Plan(wiring, rows, piece)
        self._tensors = (pose, weight, bias)
        self._couplings = couplings

    def _stream(self, reduction: type[reductions.Reduction], *arguments: Tensor) -> Tensor:
        with disable_autocast(self._tensors[0]):
            if torch.compiler.is_dynamo_compiling():
                return reduce_opaquely(reduction.__name__, self._plan, *self._tensors, *arguments)
            return Stream.apply(reduction, self._plan, *self._tensors, *arguments)  # type: ignore[return-value]

    def _for_parents(self, tensor: Tensor) -> Tensor:
        """Broadcast to one vector for each parent of each image, ``[B, *L, J, D]``."""
        return tensor.expand(*self.shape[:-3], *self.shape[-2:])

    def sum(self, coupling: Tensor) -> Tensor:
        """Return ``s_j = Σ_i c_ij v_ij``; couplings that all images and places share are a matter of the weights."""
        shared = fold(coupling, self.wiring, self._tensors[1])
        if shared is not None:
            with disable_autocast(self._tensors[0]):
                return folded_sum(*self._tensors, shared, self._plan, _summing())
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
        if can_fold_mix(weight, self._plan.rows):
            with disable_autocast(pose):
                return folded_mix(pose, weight, bias, kernel, self._plan, _summing())
        return self._stream(reductions.Mix, kernel)

    def attend(self, query: Tensor, leak: bool = False, through: bool = True) -> Attended:
        """Return the sum of the votes that parents attend to: in one pass where a child's parents are of one place."""
        if self._couplings or self.wiring.competition != "local":
            return super().attend(query, leak, through)
        total = self._stream(reductions.ATTENDING[leak, through], self._for_parents(query))
        return Attended(total, None, None)

    def dense(self) -> Tensor:
        """Make all votes at once: ``[B, *L, I, J, D]``."""
        with disable_autocast(self._tensors[0]):
            return torch.cat([piece.votes for piece in make_pieces(self._plan, *self._tensors)], dim=-3)

    def detach(self) -> Self:
        """Return the same votes, through which no gradient flows."""
        pose, weight, bias = (None if tensor is None else tensor.detach() for tensor in self._tensors)
        assert pose is not None
        assert weight is not None
        return type(self)(pose, weight, bias, self._plan.rows, self.wiring, self._plan.size, self._couplings)
