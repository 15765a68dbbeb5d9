"""Sums with couplings that all images share: the couplings are multiplied into the weights, without computing votes.

``Σ_i c_ij p_i W_ij`` is then one matrix product over all slots, or one convolution on a grid. The couplings of the
first iteration of every routing are shared (they are uniform), and those of `Trainable` and `Quadratic` always are.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchcaps.capsules import disable_autocast
from torchcaps.votes.dispatch import ChunkPlan, uses_window_product
from torchcaps.votes.wiring import Wiring

__all__ = ["FoldedSum", "SumFunction", "folded_gradients", "folded_mix", "folded_sum", "plain_sum", "shared_by_images"]

SumFunction = Callable[[Tensor, Tensor, Tensor, ChunkPlan], Any]  # children, weight, coupling [I, J], plan


def shared_by_images(coupling: Tensor, wiring: Wiring, weight: Tensor) -> Tensor | None:
    """Return the couplings ``[I, J]`` if all images and positions share them and the weights, otherwise ``None``.

    Shared means an expanded or singleton axis; values are not compared.
    """
    n_shared = 1 + len(wiring.sites)
    if weight.dim() != 4:
        return None
    coupling = coupling.expand(*(1,) * (n_shared + 2 - coupling.dim()), *coupling.shape)
    sizes = zip(coupling.shape[:n_shared], coupling.stride()[:n_shared], strict=True)
    if any(size != 1 and step != 0 for size, step in sizes) or not coupling.numel():
        return None
    return coupling[(0,) * n_shared].expand(weight.shape[0], weight.shape[2])


def folded_sum(
    pose: Tensor, weight: Tensor, bias: Tensor | None, coupling: Tensor, plan: ChunkPlan, sum_children: SumFunction
) -> Tensor:
    """Return ``s_j = Σ_i c_ij (p_i W_ij + b_ij)``.

    ``sum_children`` computes the sum without the bias, e.g. ``FoldedSum.apply``.

    Shapes:
        children ``[B, I, K]`` or ``[B, *G, N, K]``, weight ``[I, X, J, Y]``, coupling ``[I, J]`` ``-> [B, *L, J, D]``
    """
    total = sum_children(pose, weight, coupling, plan)
    return total if bias is None else total + (bias * coupling.unsqueeze(-1)).sum(-3)


def folded_mix(
    pose: Tensor, weight: Tensor, bias: Tensor | None, kernel: Tensor, plan: ChunkPlan, sum_children: SumFunction
) -> Tensor:
    """Return ``Σ_md A_jimd v_mjd`` with the kernel multiplied into the weights: the result is linear in the votes.

    Shapes:
        as in `folded_sum`, vector poses only; kernel ``[J, I, I, D]`` ``-> [B, *L, I, J]``
    """
    n_slots, n_parents = weight.shape[0], weight.shape[2]
    mixed = torch.einsum("mxjd,jimd->mxij", weight, kernel).flatten(2).unsqueeze(-1)  # [I, X, I * J, 1]
    one = weight.new_ones(()).expand(n_slots, n_slots * n_parents)
    logits = sum_children(pose, mixed, one, plan).unflatten(-2, (n_slots, n_parents)).squeeze(-1)
    return logits if bias is None else logits + torch.einsum("mjd,jimd->ij", bias, kernel)


class FoldedSum(torch.autograd.Function):
    """Sum of transformed children. Saves its inputs for backward, not the copies that a convolution makes of them."""

    @staticmethod
    def forward(pose: Tensor, weight: Tensor, coupling: Tensor, plan: ChunkPlan) -> Tensor:  # type: ignore[override]
        """Return the sum."""
        return plain_sum(pose, weight, coupling, plan)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # type: ignore[override]
        """Save the inputs."""
        *tensors, ctx.plan = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradients of children, weight and coupling."""
        with disable_autocast(gradient):
            pose, weight, coupling = ctx.saved_tensors
            return *folded_gradients(gradient, pose, weight, coupling, ctx.plan, ctx.needs_input_grad), None


def folded_gradients(
    gradient: Tensor, pose: Tensor, weight: Tensor, coupling: Tensor, plan: ChunkPlan, needs_grad: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of children, weight and coupling; ``None`` for those that are not needed."""
    pose_grad, matrix_grad = None, None
    needs_matrix = bool(needs_grad[1] or needs_grad[2])
    n_parents, outs = weight.shape[-2:]
    matrix, factor = _multiply_coupling(weight, coupling)
    gradient = gradient if factor is None else gradient * factor
    parts = gradient.unflatten(-1, (plan.rows, outs)).transpose(-3, -2).flatten(-2)  # [B, *L, A, J * Y]
    if plan.wiring.grid is None:
        slots = _as_rows(pose, plan.rows)
        flat = matrix.flatten(2).flatten(0, 1)
        if needs_grad[0]:
            slots_grad = (parts @ flat.T).unflatten(-1, weight.shape[:2])  # [B, A, I, X]
            pose_grad = slots_grad.transpose(1, 2).flatten(-2)
        if needs_matrix:
            matrix_grad = (slots.flatten(0, 1).T @ parts.flatten(0, 1)).view_as(weight)
    else:
        images, kernel = _as_images(pose, plan), _as_kernel(matrix, plan.wiring)
        maps = _channels_first(parts)  # [B * A, J * Y, *L]
        mask = [bool(needs_grad[0]), needs_matrix, False]
        images_grad, kernel_grad, _ = torch.ops.aten.convolution_backward(
            maps, images, kernel, None, plan.wiring.stride, [0, 0], [1, 1], False, [0, 0], 1, mask
        )
        if needs_matrix:
            matrix_grad = _from_kernel(kernel_grad, plan.wiring, n_parents)
        if images_grad is not None:
            pose_grad = _from_images(images_grad, plan)
    if factor is not None or matrix_grad is None:
        return pose_grad, matrix_grad, None
    coupling_grad = (matrix_grad * weight).sum((1, 3)) if needs_grad[2] else None
    weight_grad = matrix_grad * coupling[:, None, :, None] if needs_grad[1] else None
    return pose_grad, weight_grad, coupling_grad


def _multiply_coupling(weight: Tensor, coupling: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return weights times couplings and ``None``; if all couplings are one constant, the weights and that factor."""
    if coupling.stride() == (0, 0) and not coupling.requires_grad:
        return weight, coupling[0, 0]
    return weight * coupling[:, None, :, None], None


def plain_sum(pose: Tensor, weight: Tensor, coupling: Tensor, plan: ChunkPlan) -> Tensor:
    """Return ``Σ_i c_ij p_i W_ij``."""
    n_parents, outs = weight.shape[-2:]
    matrix, factor = _multiply_coupling(weight, coupling)
    if plan.wiring.grid is None:
        parts = _as_rows(pose, plan.rows) @ matrix.flatten(2).flatten(0, 1)  # [B, A, J * Y]
    elif uses_window_product(pose.shape[0]):
        parts = _as_windows(pose, plan) @ matrix.flatten(2).flatten(0, 1)  # [B, *L, A, J * Y]
    else:
        maps = F.conv2d(_as_images(pose, plan), _as_kernel(matrix, plan.wiring), stride=plan.wiring.stride)
        parts = _channels_last(maps, plan.rows)  # [B, *L, A, J * Y]
    total = parts.unflatten(-1, (n_parents, outs)).transpose(-3, -2).flatten(-2)
    return total if factor is None else total * factor


# Layouts of a layer as a matrix product or a convolution, and their inverses ------------------------------------


def _as_rows(pose: Tensor, rows: int) -> Tensor:
    """Concatenate the inputs of all slots per row of a pose: ``[B, I, K] -> [B, A, I * X]``."""
    return pose.unflatten(-1, (rows, -1)).transpose(1, 2).flatten(2)


def _as_windows(pose: Tensor, plan: ChunkPlan) -> Tensor:
    """Concatenate the inputs of all slots of an output position per row of a pose: ``[B, *L, A, I * X]``.

    For few images this and one matrix product are faster than a convolution, which would first reorder the weights.
    """
    wiring = plan.wiring
    windows = (
        wiring.pad(pose).unfold(1, wiring.kernel[0], wiring.stride[0]).unfold(2, wiring.kernel[1], wiring.stride[1])
    )
    matrices = windows.unflatten(4, (plan.rows, -1))  # [B, *L, N, A, X, *kernel]
    order = (0, 1, 2, 4, 3, 6, 7, 5) if wiring.slot_kind == "type" else (0, 1, 2, 4, 6, 7, 3, 5)
    return matrices.permute(order).flatten(4)


def _as_images(pose: Tensor, plan: ChunkPlan) -> Tensor:
    """Return the rows of a pose as separate images, with types and columns as channels: ``[B * A, N * X, H, W]``.

    In channels-last memory format, as capsules are; vector poses are not copied.
    """
    padded = plan.wiring.pad(pose).unflatten(-1, (plan.rows, -1))  # [B, H, W, N, A, X]
    rows = padded.permute(0, 4, 1, 2, 3, 5).contiguous()  # one copy, or none
    return rows.flatten(4).flatten(0, 1).permute(0, 3, 1, 2)


def _from_images(images: Tensor, plan: ChunkPlan) -> Tensor:
    """Inverse of `_as_images`, without padding."""
    padded = _channels_last(images, plan.rows).unflatten(-1, (plan.wiring.types, -1))  # [B, H, W, A, N, X]
    return plan.wiring.unpad(padded.transpose(3, 4).flatten(-2))


def _channels_first(tensor: Tensor) -> Tensor:
    """Return ``[B, H, W, A, C]`` as images, ``[B * A, C, H, W]``."""
    return tensor.permute(0, 3, 1, 2, 4).contiguous().flatten(0, 1).permute(0, 3, 1, 2)


def _channels_last(images: Tensor, rows: int) -> Tensor:
    """Inverse of `_channels_first`."""
    return images.permute(0, 2, 3, 1).unflatten(0, (-1, rows)).permute(0, 2, 3, 1, 4)


def _as_kernel(matrix: Tensor, wiring: Wiring) -> Tensor:
    """Return the matrices of all slots as a convolution kernel, ``[J * Y, N * X, *kernel]``, channels last."""
    if wiring.slot_kind == "type":  # [N, cells * X, J, Y]
        cells = matrix.unflatten(1, (wiring.cells, -1)).permute(3, 4, 1, 0, 2)
    else:  # [cells * N, X, J, Y]
        cells = matrix.unflatten(0, (wiring.cells, -1)).permute(3, 4, 0, 1, 2)
    return cells.flatten(3).flatten(0, 1).unflatten(1, wiring.kernel).permute(0, 3, 1, 2)


def _from_kernel(kernel: Tensor, wiring: Wiring, n_parents: int) -> Tensor:
    """Return the matrices ``[I, X, J, Y]`` in a kernel ``[J * Y, N * X, *kernel]``: the inverse of `_as_kernel`."""
    cells = kernel.permute(0, 2, 3, 1).flatten(1, 2).unflatten(-1, (wiring.types, -1))  # [J * Y, cells, N, X]
    cells = cells.unflatten(0, (n_parents, -1))
    if wiring.slot_kind == "type":
        return cells.permute(3, 2, 4, 0, 1).flatten(1, 2)
    return cells.permute(2, 3, 4, 0, 1).flatten(0, 1)
