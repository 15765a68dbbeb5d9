"""From children to votes, and the way back for gradients: ``v_ij = p_i W_ij + b_ij``.

A child's pose is a matrix ``[A, X]`` (vector poses: one row), its weight ``[X, Y]``, the vote ``[A, Y]``. A slot
that reads several children has them side by side, so that its matrix is ``[A, reads * X]``: the product then
adds up over the window, which is what a convolution does.

Shapes:
    slots ``[B, *L, I, A, X]``, weight ``[I, X, J, Y]`` shared by all sites or ``[*L, I, X, J, Y]`` one for each,
    bias ``[I, J, D]`` or ``[*L, I, 1, D]``, votes ``[B, *L, I, J, D]`` with ``D = A * Y``.
"""

import torch
from torch import Tensor

__all__ = ["bias_gradient", "make_votes", "side_by_side", "slot_gradient", "weight_gradient"]


def side_by_side(children: list[Tensor], rows: int) -> Tensor:
    """Put the children that a slot reads side by side: ``reads * [..., K] -> [..., A, reads * X]``."""
    matrices = [child.unflatten(-1, (rows, -1)) for child in children]
    return matrices[0] if len(matrices) == 1 else torch.cat(matrices, dim=-1)


def make_votes(slots: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the votes of these slots."""
    votes = torch.einsum("b...iax,...ixjy->b...ijay", slots, weight).flatten(-2)
    return votes if bias is None else votes + bias


def slot_gradient(gradient: Tensor, weight: Tensor, rows: int) -> Tensor:
    """Return the gradient of the slots from the gradient of their votes."""
    return torch.einsum("b...ijay,...ixjy->b...iax", gradient.unflatten(-1, (rows, -1)), weight)


def weight_gradient(gradient: Tensor, slots: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of a weight, shared or not, from the gradient of the votes."""
    gradient = gradient.unflatten(-1, (slots.shape[-2], -1))
    if weight.dim() > 4:
        return torch.einsum("b...iax,b...ijay->...ixjy", slots, gradient)
    return torch.einsum("siax,sijay->ixjy", slots.flatten(0, -4), gradient.flatten(0, -5))


def bias_gradient(gradient: Tensor, bias: Tensor) -> Tensor:
    """Return the gradient of a bias from the gradient of the votes: the sum over what it was broadcast to."""
    return gradient.sum_to_size(bias.shape)
