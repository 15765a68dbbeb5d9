"""Which child each vote slot reads: all that tells a dense capsule layer from a convolutional one."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Padding", "Wiring", "same_padding"]

Padding = tuple[int, int, int, int]  # top, bottom, left, right


def same_padding(size: int, kernel: int, stride: int) -> tuple[int, int]:
    """Pad one axis as TensorFlow's SAME does: the odd pixel goes behind, where torch would put it in front.

    >>> same_padding(28, kernel=3, stride=2)
    (0, 1)
    """
    total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
    return total // 2, total - total // 2


@dataclass(frozen=True)
class Wiring:
    """The slots of a capsule layer and the children that they read.

    Without a grid (dense layer) slot ``i`` reads child ``i``. On a grid, the parents at one place of ``L``
    read a window of ``kernel`` places; the slots of that window are in the order (row, column, type).

    Args:
        types: children of a dense layer, or child types at each place of the grid.
        grid: the children's grid ``(H, W)``, or ``None``.
        kernel, stride, padding: the window. Slots outside the grid read a capsule of zeros.
        slot_kind: ``"capsule"``: every capsule of the window is a slot. ``"type"``: every child type is one
            slot, which reads its whole window (Choi 2019, whose votes are convolutions).
        competition: who competes for a child. ``"local"``: the parents of one receptive field (Tsai 2020).
            ``"global"``: all parents that read the child, wherever they stand (Hinton 2018).
    """

    types: int
    grid: tuple[int, int] | None = None
    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: Padding = (0, 0, 0, 0)
    slot_kind: Literal["capsule", "type"] = "capsule"
    competition: Literal["local", "global"] = "local"

    def __post_init__(self) -> None:
        if self.grid is None:
            return
        padded = self.padded_grid
        if self.kernel[0] > padded[0] or self.kernel[1] > padded[1]:
            raise ValueError(
                f"kernel_size must fit into the children's grid, got {self.kernel[0]}x{self.kernel[1]} for a grid "
                f"of {self.grid[0]}x{self.grid[1]} padded to {padded[0]}x{padded[1]}"
            )

    @property
    def padded_grid(self) -> tuple[int, int]:
        """The children's grid with its border of zeros."""
        assert self.grid is not None
        top, bottom, left, right = self.padding
        return self.grid[0] + top + bottom, self.grid[1] + left + right

    @property
    def sites(self) -> tuple[int, ...]:
        """The parents' grid ``*L``; empty for a dense layer."""
        if self.grid is None:
            return ()
        sizes = zip(self.padded_grid, self.kernel, self.stride, strict=True)
        return tuple((size - kernel) // stride + 1 for size, kernel, stride in sizes)

    @property
    def cells(self) -> int:
        """Places in one window."""
        return self.kernel[0] * self.kernel[1]

    @property
    def n_slots(self) -> int:
        """Slots of one site, ``I``."""
        return self.types if self.slot_kind == "type" else self.cells * self.types

    @property
    def children_per_slot(self) -> int:
        """Children that one slot reads."""
        return self.cells if self.slot_kind == "type" else 1

    # The definition: an index of children ------------------------------------------------------------------

    def index(self, device: torch.device | str | None = None) -> Tensor:
        """Name the child that each slot reads: its number in the order (row, column, type), or -1 for padding.

        Shapes:
            ``[I]`` dense, ``[*L, I]`` on a grid; with ``slot_kind="type"`` a last axis of the window's places.
        """
        if self.grid is None:
            child = torch.arange(self.types, device=device)
            return child if self.slot_kind == "capsule" else child.unsqueeze(-1)
        rows = self._positions(0, device)  # [L0, k0]
        columns = self._positions(1, device)  # [L1, k1]
        row, column = rows[:, None, :, None], columns[None, :, None, :]
        inside = (row >= 0) & (row < self.grid[0]) & (column >= 0) & (column < self.grid[1])
        place = (row * self.grid[1] + column).flatten(2)  # [*L, cells]
        inside = inside.flatten(2)
        types = torch.arange(self.types, device=device)
        if self.slot_kind == "type":
            child = place[..., None, :] * self.types + types[:, None]
            return torch.where(inside[..., None, :], child, -1)
        child = place[..., None] * self.types + types
        return torch.where(inside[..., None], child, -1).flatten(2)

    def _positions(self, axis: int, device: torch.device | str | None) -> Tensor:
        """Return the row (or column) that each site reads with each cell of its window; out of range in padding."""
        start = torch.arange(self.sites[axis], device=device) * self.stride[axis] - self.padding[2 * axis]
        return start[:, None] + torch.arange(self.kernel[axis], device=device)

    def gather(self, x: Tensor) -> Tensor:
        """Give every slot what it reads, by the index; zeros where it reads padding.

        Shapes:
            ``[B, I, ...]`` or ``[B, *G, N, ...] -> [B, *L, I, ...]``, with ``slot_kind="type"`` one more axis,
            ``[B, *L, I, reads, ...]``.
        """
        if self.grid is None:
            return x if self.slot_kind == "capsule" else x.unsqueeze(2)
        flat = x.flatten(1, 3)
        zero = flat.new_zeros((flat.shape[0], 1, *flat.shape[2:]))
        index = self.index(x.device)
        index = torch.where(index < 0, flat.shape[1], index)
        slots = torch.cat([flat, zero], dim=1).index_select(1, index.flatten())
        return slots.unflatten(1, index.shape)

    def centers(self, like: Tensor) -> Tensor:
        """Return where the child of each slot stands, as (row, column) scaled to 0..1: ``(h + 0.5) / H``.

        In the dtype and on the device of ``like``.

        Shapes:
            ``[*L, I, 2]``
        """
        if self.grid is None or self.slot_kind == "type":
            raise ValueError("coordinates need children on a grid, each with a slot of its own")
        rows = (self._positions(0, like.device).to(like.dtype) + 0.5) / self.grid[0]
        columns = (self._positions(1, like.device).to(like.dtype) + 0.5) / self.grid[1]
        shape = (*self.sites, *self.kernel, self.types)
        row = rows[:, None, :, None, None].expand(shape)
        column = columns[None, :, None, :, None].expand(shape)
        return torch.stack([row, column], dim=-1).flatten(2, 4)

    # The fast way: strided pieces, nothing copied ----------------------------------------------------------

    def pieces(self, size: int) -> Iterator[tuple[int, int]]:
        """Cut the slots into ranges of at most ``size`` that `windows` can serve: none crosses a cell's border."""
        for cell in range(self.n_slots // self.types):
            for start in range(0, self.types, size):
                yield cell * self.types + start, cell * self.types + min(start + size, self.types)

    def pad(self, x: Tensor) -> Tensor:
        """Put the border of zeros around children on a grid."""
        if self.grid is None or not any(self.padding):
            return x
        top, bottom, left, right = self.padding
        return F.pad(x, (0, 0) * (x.dim() - 3) + (left, right, top, bottom))

    def unpad(self, x: Tensor) -> Tensor:
        """Cut the border off again: the adjoint of `pad`."""
        if self.grid is None or not any(self.padding):
            return x
        top, _, left, _ = self.padding
        return x[:, top : top + self.grid[0], left : left + self.grid[1]]

    def windows(self, padded: Tensor, start: int, stop: int) -> Iterator[Tensor]:
        """Make views of padded children, one for each read: what the slots from ``start`` to ``stop`` read.

        Views, so that the gradient can be added through them; one after the other, so that each sees what was
        added through the last.

        Shapes:
            ``[B, *G + padding, N, ...] -> reads * [B, *L, stop - start, ...]``
        """
        if self.grid is None:
            yield padded[:, start:stop]
            return
        if self.slot_kind == "type":
            cells, types = range(self.cells), slice(start, stop)
        else:
            cell = start // self.types
            cells, types = range(cell, cell + 1), slice(start - cell * self.types, stop - cell * self.types)
        for cell in cells:
            row, column = divmod(cell, self.kernel[1])
            rows = slice(row, row + (self.sites[0] - 1) * self.stride[0] + 1, self.stride[0])
            columns = slice(column, column + (self.sites[1] - 1) * self.stride[1] + 1, self.stride[1])
            yield padded[:, rows, columns, types]
