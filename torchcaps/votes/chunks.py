"""Making and reducing votes piece by piece, forward and backward: what streaming does."""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchcaps.votes import cpu
from torchcaps.votes.dispatch import Plan
from torchcaps.votes.reductions import Reduction
from torchcaps.votes.transform import bias_gradient, make_votes, side_by_side, slot_gradient, weight_gradient

__all__ = ["make_pieces", "reduce_gradients", "reduce_votes"]


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

    def cut_slotted(self, reduction: type[Reduction], arguments: Sequence[Tensor]) -> list[Tensor]:
        """Return this piece's share of the arguments that go slot by slot, and the others whole."""
        pairs = zip(arguments, reduction.slotted, strict=True)
        return [self.cut(argument) if slotted else argument for argument, slotted in pairs]


def make_pieces(plan: Plan, pose: Tensor, weight: Tensor, bias: Tensor | None) -> Iterator[Piece]:
    """Make the votes, one piece after the other."""
    padded = plan.wiring.pad(pose)
    for start, stop in plan.wiring.pieces(plan.slots_in_a_piece(pose, weight)):
        slots = side_by_side(list(plan.wiring.windows(padded, start, stop)), plan.rows)
        part = weight.narrow(-4, start, stop - start)
        own_bias = None if bias is None else bias.narrow(-3, start, stop - start)
        yield Piece(start, stop, slots, part, make_votes(slots, part, own_bias))


def _worth_making(pieces: Iterator[Piece], pose: Tensor) -> Iterator[Piece]:
    """Return all pieces; on the meta device two, since all others have the same shapes and nothing is added up."""
    return itertools.islice(pieces, 2) if pose.is_meta else pieces


def reduce_votes(
    reduction: type[Reduction], plan: Plan, pose: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Tensor
) -> Tensor:
    """Return the reduction of all votes: by the compiled kernel where it can, else piece by piece.

    What lasts is there before the first piece: results kept between the temporaries of the pieces would leave holes
    in the heap that nothing fits into, and it grew to several times what was in use.
    """
    if cpu.can_take(reduction, plan, pose, weight, bias, *arguments):  # on the meta device too, for its shapes
        return cpu.reduce_votes(reduction, plan, pose, weight, bias, *arguments)
    total: Tensor | None = None
    if reduction.slotted_result:
        total = pose.new_empty(pose.shape[0], *plan.wiring.sites, plan.wiring.n_slots, weight.shape[-2])
    for piece in _worth_making(make_pieces(plan, pose, weight, bias), pose):
        result = reduction.result(piece.votes, *piece.cut_slotted(reduction, arguments))
        if reduction.slotted_result:
            assert total is not None
            piece.cut(total).copy_(result)
        else:
            total = result if total is None else total.add_(result)
    assert total is not None
    return total


def reduce_gradients(
    reduction: type[Reduction],
    plan: Plan,
    gradient: Tensor,
    pose: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *arguments: Tensor,
) -> tuple[Tensor | None, ...]:
    """Make the votes anew; return the gradients of children, weight, bias and the reduction's arguments.

    Where these are to be differentiated again, they are made by torch, which takes note of how.
    """
    if not torch.is_grad_enabled() and cpu.can_take(reduction, plan, pose, weight, bias, gradient, *arguments):
        return cpu.reduce_gradients(reduction, plan, gradient, pose, weight, bias, *arguments)
    of_padded = torch.zeros_like(plan.wiring.pad(pose), memory_format=torch.contiguous_format)
    of_weight = torch.zeros_like(weight)
    of_bias = None if bias is None else torch.zeros_like(bias)
    of_arguments = [torch.zeros(a.shape, dtype=a.dtype, device=a.device) for a in arguments]
    for piece in _worth_making(make_pieces(plan, pose, weight, bias), pose):
        share = piece.cut(gradient) if reduction.slotted_result else gradient
        of_votes, *parts = reduction.gradients(piece.votes, share, *piece.cut_slotted(reduction, arguments))
        for whole, part, slotted in zip(of_arguments, parts, reduction.slotted, strict=True):
            (piece.cut(whole) if slotted else whole).add_(part)
        piece.cut(of_weight, -4).add_(weight_gradient(of_votes, piece.slots, piece.weight))
        if of_bias is not None:
            own = piece.cut(of_bias, -3)
            own.add_(bias_gradient(of_votes, own))
        of_slots = slot_gradient(of_votes, piece.weight, plan.rows)
        windows = plan.wiring.windows(of_padded, piece.start, piece.stop)
        for window, part in zip(windows, of_slots.chunk(plan.wiring.children_per_slot, dim=-1), strict=True):
            window.add_(part.flatten(-2))
    return plan.wiring.unpad(of_padded), of_weight, of_bias, *of_arguments
