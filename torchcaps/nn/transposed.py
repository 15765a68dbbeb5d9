"""Transposed convolutional capsule layer: the adjoint geometry of `ConvCapsules`, for larger grids."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from torchcaps.capsules import Capsules
from torchcaps.nn.layers import ConvCapsules
from torchcaps.nn.sizes import Pair, as_pair
from torchcaps.votes import Wiring

__all__ = ["TransposedConvCapsules"]


class TransposedConvCapsules(ConvCapsules):
    """Transposed convolutional capsule layer (capsule deconvolution, as in the code of Chen 2019), with any routing.

    The child at position ``h`` votes for the parents at ``h * stride + k - padding`` with the matrix of cell ``k``:
    those that it would read in a `ConvCapsules` of the other direction, as in `torch.nn.ConvTranspose2d`.

    It is computed as a convolution of stride 1 over the children's grid with ``stride - 1`` empty rows and columns
    between its positions. As in padding, empty positions hold capsules of zeros with activation 0.

    Args:
        child_types, child_dim, parent_types, parent_dim: as in `ConvCapsules`.
        kernel_size, stride: size and stride of the window, on the grid of the parents.
        padding: rows and columns that are cut from each side of the result, less than ``kernel_size``.
        output_padding: rows and columns added at the bottom and right, less than ``stride``, to choose among the grids
            that a strided convolution would map to the children's grid.
        grid: the children's grid, as in `ConvCapsules`.
        options: ``routing``, ``pose``, ``streamed``, ``weights``, ``init``, ``device``, ``dtype`` as in `ConvCapsules`.

    Shapes:
        pose ``[B, H, W, N, K] -> [B, (H - 1) * stride - 2 * padding + kernel_size + output_padding, ..., J, D]``

    >>> import torch
    >>> layer = TransposedConvCapsules(4, 8, 3, 8, kernel_size=4, stride=2, padding=1, routing="dynamic")
    >>> layer(torch.randn(2, 5, 5, 4, 8)).pose.shape
    torch.Size([2, 10, 10, 3, 8])
    """

    def __init__(
        self,
        child_types: int,
        child_dim: int,
        parent_types: int,
        parent_dim: int,
        kernel_size: int | Pair,
        stride: int | Pair = 1,
        padding: int | Pair = 0,
        output_padding: int | Pair = 0,
        *,
        grid: int | Pair | None = None,
        **options: Any,
    ) -> None:
        kernel = as_pair(kernel_size, "kernel_size")
        self.upsampling: Pair = as_pair(stride, "stride")
        self.cut: Pair = as_pair(padding, "padding", least=0)
        self.output_padding: Pair = as_pair(output_padding, "output_padding", least=0)
        if self.cut[0] >= kernel[0] or self.cut[1] >= kernel[1]:
            raise ValueError(f"padding must be less than kernel_size {kernel}, got {self.cut}")
        if self.output_padding[0] >= self.upsampling[0] or self.output_padding[1] >= self.upsampling[1]:
            raise ValueError(f"output_padding must be less than stride {self.upsampling}, got {self.output_padding}")
        self.child_grid: Pair | None = None if grid is None else as_pair(grid, "grid")
        inner = (kernel[0] - 1 - self.cut[0], kernel[1] - 1 - self.cut[1])
        spread = None if self.child_grid is None else self._spread_grid(self.child_grid)
        sizes = (child_types, child_dim, parent_types, parent_dim)
        super().__init__(*sizes, kernel, 1, inner, grid=spread, **options)

    def _spread_grid(self, grid: Pair) -> Pair:
        """Return the size of the children's grid with the empty positions."""
        rows, columns = (
            (size - 1) * step + 1 + extra
            for size, step, extra in zip(grid, self.upsampling, self.output_padding, strict=True)
        )
        return rows, columns

    def _check_shape(self, children: Capsules) -> Capsules:
        """Return the children with empty positions between them; raise a ValueError for another grid, types or size."""
        pose, activation = children
        if pose.dim() == 5 and self.child_grid is not None and tuple(pose.shape[1:3]) != self.child_grid:
            raise ValueError(
                f"capsules.pose must be on the grid {list(self.child_grid)} of the layer, got {list(pose.shape[1:3])}"
            )
        if pose.dim() == 5:
            if activation is None:
                activation = pose.new_ones(()).expand(pose.shape[:-1])
            grid = self._spread_grid((pose.shape[1], pose.shape[2]))
            children = Capsules(self._spread(pose, grid), self._spread(activation, grid))
        return super()._check_shape(children)

    def _spread(self, x: Tensor, grid: Pair) -> Tensor:
        """Insert zeros between the positions: ``[B, H, W, ...] -> [B, *grid, ...]``."""
        rest = (0, 0) * (x.dim() - 3)
        (rows, columns), (height, width) = self.upsampling, grid
        x = F.pad(x.unsqueeze(3).unsqueeze(2), (*rest, 0, columns - 1, 0, 0, 0, rows - 1))
        x = x.flatten(3, 4).flatten(1, 2)  # [B, H * rows, W * columns, ...]
        missing = (max(height - x.shape[1], 0), max(width - x.shape[2], 0))
        return F.pad(x, (*rest, 0, missing[1], 0, missing[0]))[:, :height, :width]

    def _slot_weight(self, wiring: Wiring) -> Tensor:
        """Return the weights with one matrix per vote slot and parent."""
        if self.weights == "type":
            return super()._slot_weight(wiring)
        # Cell k of the kernel is the one at which a child reads its parent, so the window is reversed.
        axis = 1 if self.routing.slot_kind == "type" else 0
        axis += self.weight.dim() - 4  # matrices of their own for every position
        inner = (*self.kernel_size, -1)
        return self.weight.unflatten(axis, inner).flip(axis, axis + 1).flatten(axis, axis + 2)

    def extra_repr(self) -> str:
        """Return the sizes for ``repr``."""
        g = self.geometry
        parts = [f"{g.types} x {g.child_dim} -> {g.parents} x {g.dim}", f"kernel_size={self.kernel_size}"]
        parts += [f"stride={self.upsampling}", f"padding={self.cut}", f"output_padding={self.output_padding}"]
        parts += [f"rows={g.rows}", str(self.routing), f"streamed={self.streamed}", f"weights={self.weights!r}"]
        return ", ".join(parts)
