"""Sums with couplings that all images share: these can be multiplied into the weights, and no vote is needed.

``Σ_i c_ij p_i W_ij`` is then one matrix product over all slots, or on a grid one convolution. The first iteration of
every routing has such couplings (they are all equal), and `Trainable` and `Quadratic` never have others.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchcaps.capsules import disable_autocast
from torchcaps.votes.dispatch import Plan
from torchcaps.votes.wiring import Wiring

__all__ = ["can_fold_mix", "fold", "folded_gradients", "folded_mix", "folded_sum", "plain_sum"]

FEW_IMAGES = 4  # where a product with all windows is faster than a convolution, measured

Sum = Callable[[Tensor, Tensor, Tensor, Plan], Any]  # children, weight, coupling [I, J]


def fold(coupling: Tensor, wiring: Wiring, weight: Tensor) -> Tensor | None:
    """Return couplings ``[I, J]`` that all images and places share, or ``None`` where they don't, or weights don't."""
    n_shared = 1 + len(wiring.sites)
    if weight.dim() != 4:
        return None
    coupling = coupling.expand(*(1,) * (n_shared + 2 - coupling.dim()), *coupling.shape)
    sizes = zip(coupling.shape[:n_shared], coupling.stride()[:n_shared], strict=True)
    if any(size != 1 and step != 0 for size, step in sizes) or not coupling.numel():
        return None
    return coupling[(0,) * n_shared].expand(weight.shape[0], weight.shape[2])


def folded_sum(
    pose: Tensor, weight: Tensor, bias: Tensor | None, coupling: Tensor, plan: Plan, apply: Sum | None = None
) -> Tensor:
    """Return ``s_j = Σ_i c_ij (p_i W_ij + b_ij)``.

    ``apply``: what sums transformed children; by default `FoldedSum`.

    Shapes:
        children ``[B, I, K]`` or ``[B, *G, N, K]``, weight ``[I, X, J, Y]``, coupling ``[I, J]`` ``-> [B, *L, J, D]``
    """
    total = (apply or FoldedSum.apply)(pose, weight, coupling, plan)
    return total if bias is None else total + (bias * coupling.unsqueeze(-1)).sum(-3)


def can_fold_mix(weight: Tensor, rows: int) -> bool:
    """Return whether a mixing of votes is cheaper in the weights: fewer slots than numbers in a vote."""
    return weight.dim() == 4 and rows == 1 and weight.shape[0] <= weight.shape[-1]


def folded_mix(
    pose: Tensor, weight: Tensor, bias: Tensor | None, kernel: Tensor, plan: Plan, apply: Sum | None = None
) -> Tensor:
    """Return ``Σ_md A_jimd v_mjd``: it is linear in the votes, so the kernel can be multiplied into the weights.

    Shapes:
        as in `folded_sum`, for vectors; kernel ``[J, I, I, D]`` ``-> [B, *L, I, J]``
    """
    n_slots, n_parents = weight.shape[0], weight.shape[2]
    mixed = torch.einsum("mxjd,jimd->mxij", weight, kernel).flatten(2).unsqueeze(-1)  # [I, X, I * J, 1]
    one = weight.new_ones(()).expand(n_slots, n_slots * n_parents)
    logits = (apply or FoldedSum.apply)(pose, mixed, one, plan).unflatten(-2, (n_slots, n_parents)).squeeze(-1)
    return logits if bias is None else logits + torch.einsum("mjd,jimd->ij", bias, kernel)


class FoldedSum(torch.autograd.Function):
    """The sum of transformed children; keeps what exists anyway, not the copies that a product or convolution wants."""

    @staticmethod
    def forward(pose: Tensor, weight: Tensor, coupling: Tensor, plan: Plan) -> Tensor:  # type: ignore[override]
        """Return the sum."""
        return plain_sum(pose, weight, coupling, plan)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # type: ignore[override]
        """Keep the inputs."""
        *tensors, ctx.plan = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return the gradients of children, weight and coupling."""
        with disable_autocast(gradient):
            pose, weight, coupling = ctx.saved_tensors
            found = folded_gradients(gradient, pose, weight, coupling, ctx.plan, ctx.needs_input_grad)
            return *found, None


def folded_gradients(
    gradient: Tensor, pose: Tensor, weight: Tensor, coupling: Tensor, plan: Plan, wanted: Sequence[bool]
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """Return the gradients of children, weight and coupling, the first and the last where they are wanted."""
    of_pose = None
    n_parents, outs = weight.shape[-2:]
    matrix, factor = _multiplied(weight, coupling)
    gradient = gradient if factor is None else gradient * factor
    parts = gradient.unflatten(-1, (plan.rows, outs)).transpose(-3, -2).flatten(-2)  # [B, *L, A, J * Y]
    if plan.wiring.grid is None:
        slots = _as_rows(pose, plan.rows)
        flat = matrix.flatten(2).flatten(0, 1)
        if wanted[0]:
            of_slots = (parts @ flat.T).unflatten(-1, weight.shape[:2])  # [B, A, I, X]
            of_pose = of_slots.transpose(1, 2).flatten(-2)
        of_matrix = (slots.flatten(0, 1).T @ parts.flatten(0, 1)).view_as(weight)
    else:
        images, kernel = _as_images(pose, plan), _as_kernel(matrix, plan.wiring)
        maps = _channels_first(parts)  # [B * A, J * Y, *L]
        mask = [bool(wanted[0]), True, False]
        of_images, of_kernel, _ = torch.ops.aten.convolution_backward(
            maps, images, kernel, None, plan.wiring.stride, [0, 0], [1, 1], False, [0, 0], 1, mask
        )
        of_matrix = _from_kernel(of_kernel, plan.wiring, n_parents)
        if of_images is not None:
            of_pose = _from_images(of_images, plan)
    if factor is not None:
        return of_pose, of_matrix, None
    of_coupling = (of_matrix * weight).sum((1, 3)) if wanted[2] else None
    return of_pose, of_matrix * coupling[:, None, :, None], of_coupling


def _multiplied(weight: Tensor, coupling: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return weights with the couplings in them; where these are one number that nothing learns, both as they are."""
    if coupling.stride() == (0, 0) and not coupling.requires_grad:
        return weight, coupling[0, 0]
    return weight * coupling[:, None, :, None], None


def plain_sum(pose: Tensor, weight: Tensor, coupling: Tensor, plan: Plan) -> Tensor:
    """Return ``Σ_i c_ij p_i W_ij``."""
    n_parents, outs = weight.shape[-2:]
    matrix, factor = _multiplied(weight, coupling)
    if plan.wiring.grid is None:
        parts = _as_rows(pose, plan.rows) @ matrix.flatten(2).flatten(0, 1)  # [B, A, J * Y]
    elif not torch.compiler.is_compiling() and pose.shape[0] <= FEW_IMAGES:
        parts = _as_windows(pose, plan) @ matrix.flatten(2).flatten(0, 1)  # [B, *L, A, J * Y]
    else:
        maps = F.conv2d(_as_images(pose, plan), _as_kernel(matrix, plan.wiring), stride=plan.wiring.stride)
        parts = _channels_last(maps, plan.rows)  # [B, *L, A, J * Y]
    total = parts.unflatten(-1, (n_parents, outs)).transpose(-3, -2).flatten(-2)
    return total if factor is None else total * factor


# How a product or a convolution sees a layer, and the way back -------------------------------------------------


def _as_rows(pose: Tensor, rows: int) -> Tensor:
    """Put what all slots read into one row for each row of a pose: ``[B, I, K] -> [B, A, I * X]``."""
    return pose.unflatten(-1, (rows, -1)).transpose(1, 2).flatten(2)


def _as_windows(pose: Tensor, plan: Plan) -> Tensor:
    """Put what all slots of a place read into one row for each row of a pose: ``[B, *L, A, I * X]``.

    For a few images this and one product take less than a convolution, which would first bring the weights into order.
    """
    wiring = plan.wiring
    windows = (
        wiring.pad(pose).unfold(1, wiring.kernel[0], wiring.stride[0]).unfold(2, wiring.kernel[1], wiring.stride[1])
    )
    matrices = windows.unflatten(4, (plan.rows, -1))  # [B, *L, N, A, X, *kernel]
    order = (0, 1, 2, 4, 3, 6, 7, 5) if wiring.slot_kind == "type" else (0, 1, 2, 4, 6, 7, 3, 5)
    return matrices.permute(order).flatten(4)


def _as_images(pose: Tensor, plan: Plan) -> Tensor:
    """Take the rows of a pose for images of their own, types and columns for channels: ``[B * A, N * X, H, W]``.

    Channels last in memory, as capsules are: nothing is copied where a pose has one row.
    """
    padded = plan.wiring.pad(pose).unflatten(-1, (plan.rows, -1))  # [B, H, W, N, A, X]
    rows = padded.permute(0, 4, 1, 2, 3, 5).contiguous()  # in one copy, or in none
    return rows.flatten(4).flatten(0, 1).permute(0, 3, 1, 2)


def _from_images(images: Tensor, plan: Plan) -> Tensor:
    padded = _channels_last(images, plan.rows).unflatten(-1, (plan.wiring.types, -1))  # [B, H, W, A, N, X]
    return plan.wiring.unpad(padded.transpose(3, 4).flatten(-2))


def _channels_first(tensor: Tensor) -> Tensor:
    """Read ``[B, H, W, A, C]`` as images, ``[B * A, C, H, W]``."""
    return tensor.permute(0, 3, 1, 2, 4).contiguous().flatten(0, 1).permute(0, 3, 1, 2)


def _channels_last(images: Tensor, rows: int) -> Tensor:
    return images.permute(0, 2, 3, 1).unflatten(0, (-1, rows)).permute(0, 2, 3, 1, 4)


def _as_kernel(matrix: Tensor, wiring: Wiring) -> Tensor:
    """Write the matrices of all slots as a kernel, ``[J * Y, N * X, *kernel]``, channels last in memory."""
    if wiring.slot_kind == "type":  # [N, cells * X, J, Y]
        cells = matrix.unflatten(1, (wiring.cells, -1)).permute(3, 4, 1, 0, 2)
    else:  # [cells * N, X, J, Y]
        cells = matrix.unflatten(0, (wiring.cells, -1)).permute(3, 4, 0, 1, 2)
    return cells.flatten(3).flatten(0, 1).unflatten(1, wiring.kernel).permute(0, 3, 1, 2)


def _from_kernel(kernel: Tensor, wiring: Wiring, n_parents: int) -> Tensor:
    cells = kernel.permute(0, 2, 3, 1).flatten(1, 2).unflatten(-1, (wiring.types, -1))  # [J * Y, cells, N, X]
    cells = cells.unflatten(0, (n_parents, -1))
    if wiring.slot_kind == "type":
        return cells.permute(3, 2, 4, 0, 1).flatten(1, 2)
    return cells.permute(2, 3, 4, 0, 1).flatten(0, 1)
