"""Wiring: the child that each vote slot reads, and the parents that compete for a child.

It is the only difference between a fully-connected and a convolutional capsule layer.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from torchcaps.votes.softmax import softmax_over_parents

__all__ = ["Padding", "Wiring", "same_padding"]

Padding = tuple[int, int, int, int]  # top, bottom, left, right


def same_padding(size: int, kernel: int, stride: int) -> tuple[int, int]:
    """Return the padding (before, after) of one axis as TensorFlow's SAME: an odd pixel is added after the data.

    >>> same_padding(28, kernel=3, stride=2)
    (0, 1)
    """
    total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
    return total // 2, total - total // 2


@dataclass(frozen=True)
class Wiring:
    """Slots of a capsule layer and the children that they read.

    Without a grid (dense layer) slot ``i`` reads child ``i``. On a grid, the parents at one output position of ``L``
    read a window of ``kernel`` positions; the slots of that window are in the order (row, column, type).

    Args:
        types: number of children of a dense layer, or of child types per position of the grid.
        grid: the children's grid ``(H, W)``; ``None`` for a dense layer.
        kernel, stride, padding: the window. Slots outside of the grid read a capsule of zeros.
        slot_kind: ``"capsule"``: every capsule of the window is a slot. ``"type"``: every child type is one slot, which
            reads its whole window (Choi 2019, whose votes are convolutions).
        competition: the parents that compete for a child. ``"local"``: those of one receptive field (Tsai 2020).
            ``"global"``: all parents that read the child, at any position (Hinton 2018).

    >>> wiring = Wiring(types=8, grid=(6, 6), kernel=(3, 3))
    >>> wiring.n_slots, wiring.sites
    (72, (4, 4))
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
        """Size of the children's grid including padding."""
        assert self.grid is not None
        top, bottom, left, right = self.padding
        return self.grid[0] + top + bottom, self.grid[1] + left + right

    @property
    def sites(self) -> tuple[int, ...]:
        """Output positions: the parents' grid ``*L``; empty for a dense layer."""
        if self.grid is None:
            return ()
        sizes = zip(self.padded_grid, self.kernel, self.stride, strict=True)
        return tuple((size - kernel) // stride + 1 for size, kernel, stride in sizes)

    @property
    def cells(self) -> int:
        """Number of positions in one window."""
        return self.kernel[0] * self.kernel[1]

    @property
    def n_slots(self) -> int:
        """Number of slots per output position, ``I``."""
        return self.types if self.slot_kind == "type" else self.cells * self.types

    @property
    def children_per_slot(self) -> int:
        """Number of children that one slot reads."""
        return self.cells if self.slot_kind == "type" else 1

    @property
    def is_local(self) -> bool:
        """Whether only the parents of one position compete: also if there is one position, which reads a child once."""
        is_single = self.sites in ((), (1, 1)) and not any(self.padding)
        return self.competition == "local" or is_single

    # Definition: an index of children ----------------------------------------------------------------------

    def index(self, device: torch.device | str | None = None) -> Tensor:
        """Return the index of the child that each slot reads, in the order (row, column, type); -1 for padding.

        Shapes:
            ``[I]`` dense, ``[*L, I]`` on a grid; with ``slot_kind="type"`` a last axis of the window's positions.
        """
        if self.grid is None:
            child = torch.arange(self.types, device=device)
            return child if self.slot_kind == "capsule" else child.unsqueeze(-1)
        rows = self._positions(0, device)  # [L0, k0]
        columns = self._positions(1, device)  # [L1, k1]
        row, column = rows[:, None, :, None], columns[None, :, None, :]
        inside = (row >= 0) & (row < self.grid[0]) & (column >= 0) & (column < self.grid[1])
        position = (row * self.grid[1] + column).flatten(2)  # [*L, cells]
        inside = inside.flatten(2)
        types = torch.arange(self.types, device=device)
        if self.slot_kind == "type":
            child = position[..., None, :] * self.types + types[:, None]
            return torch.where(inside[..., None, :], child, -1)
        child = position[..., None] * self.types + types
        return torch.where(inside[..., None], child, -1).flatten(2)

    def _positions(self, axis: int, device: torch.device | str | None) -> Tensor:
        """Return the row (or column) of each cell of each window; out of range for padding."""
        start = torch.arange(self.sites[axis], device=device) * self.stride[axis] - self.padding[2 * axis]
        return start[:, None] + torch.arange(self.kernel[axis], device=device)

    def gather(self, x: Tensor) -> Tensor:
        """Return what every slot reads; zeros for padding.

        Shapes:
            ``[B, I, ...]`` or ``[B, *G, N, ...] -> [B, *L, I, ...]``, with ``slot_kind="type"`` one more axis,
            ``[B, *L, I, children_per_slot, ...]``.
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
        """Return the centre of the child of each slot, as (row, column) scaled to 0..1: ``(h + 0.5) / H``.

        The result has the dtype and device of ``like``.

        Shapes:
            ``[*L, I, 2]``
        """
        if self.grid is None or self.slot_kind == "type":
            raise ValueError(
                "coordinates require children on a grid and slot_kind='capsule', got "
                f"grid={self.grid} and slot_kind={self.slot_kind!r}"
            )
        rows = (self._positions(0, like.device).to(like.dtype) + 0.5) / self.grid[0]
        columns = (self._positions(1, like.device).to(like.dtype) + 0.5) / self.grid[1]
        shape = (*self.sites, *self.kernel, self.types)
        row = rows[:, None, :, None, None].expand(shape)
        column = columns[None, :, None, :, None].expand(shape)
        return torch.stack([row, column], dim=-1).flatten(2, 4)

    # Fast access: strided views without copies -------------------------------------------------------------

    def chunk_ranges(self, size: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of at most ``size`` slots within one cell, as `windows` requires."""
        for cell in range(self.n_slots // self.types):
            for start in range(0, self.types, size):
                yield cell * self.types + start, cell * self.types + min(start + size, self.types)

    def pad(self, x: Tensor) -> Tensor:
        """Pad children on a grid with zeros."""
        if self.grid is None or not any(self.padding):
            return x
        top, bottom, left, right = self.padding
        return F.pad(x, (0, 0) * (x.dim() - 3) + (left, right, top, bottom))

    def unpad(self, x: Tensor) -> Tensor:
        """Remove the padding: the adjoint of `pad`."""
        if self.grid is None or not any(self.padding):
            return x
        top, _, left, _ = self.padding
        return x[:, top : top + self.grid[0], left : left + self.grid[1]]

    def windows(self, padded: Tensor, start: int, stop: int) -> Iterator[Tensor]:
        """Yield views of padded children that the slots from ``start`` to ``stop`` read, one per child of a slot.

        They are views, so that gradients can be accumulated through them, and are yielded one after the other, so that
        each includes what was added through the previous one.

        Shapes:
            ``[B, *G + padding, N, ...] -> children_per_slot * [B, *L, stop - start, ...]``
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

    # Competition of parents for a child --------------------------------------------------------------------

    def softmax(self, logits: Tensor, leak: bool = False) -> Tensor:
        """Normalise ``[B, *L, I, J]`` over the parents that compete for a child.

        Args:
            logits: local competition is over ``J`` alone; global over ``J`` at every position that reads the child.
            leak: add a competitor with logit 0 and no parent, so that the couplings of a child sum to less than 1
                (Sabour 2017, section 7: "none of the above").
        """
        if self.is_local:
            if not leak:
                return softmax_over_parents(logits)
            zero = torch.zeros_like(logits[..., :1])
            return softmax_over_parents(torch.cat([zero, logits], dim=-1))[..., 1:]
        child, n_children = self._child_of_slot(logits.device)
        flat = logits.flatten(1, -2)  # [B, L * I, J]
        # Shift by the child's largest logit. No gradient: the result does not depend on the shift.
        largest = flat.detach().amax(-1)
        floor = 0.0 if leak else -torch.inf
        shift = largest.new_full((largest.shape[0], n_children), floor)
        shift = shift.scatter_reduce(1, child.expand(largest.shape), largest, "amax")
        power = (flat - shift[:, child].unsqueeze(-1)).exp()
        total = torch.exp(-shift) if leak else torch.zeros_like(shift)
        total = total.index_add(1, child, power.sum(-1))
        return (power / total[:, child].unsqueeze(-1)).view_as(logits)

    def maxmin(self, logits: Tensor, leak: bool = False) -> Tensor:
        """Map ``[B, *L, I, J]`` linearly to 0..1, the smallest logit of a child to 0 and the largest to 1.

        If all logits of a child are equal, the result is 1.

        Args:
            logits: as in `softmax`.
            leak: add a competitor with logit 0 and no parent.
        """
        if self.is_local:
            least, largest = logits.amin(-1, keepdim=True), logits.amax(-1, keepdim=True)
        else:
            child, n_children = self._child_of_slot(logits.device)
            index = child.expand(logits.shape[0], -1)  # [B, L * I]
            ends = []
            for sign in (-1, 1):
                own = (sign * logits).amax(-1).flatten(1)
                start = own.new_full((len(own), n_children), -torch.inf)
                ends.append(sign * start.scatter_reduce(1, index, own, "amax").gather(1, index))
            least, largest = (end.view(*logits.shape[:-1], 1) for end in ends)
        if leak:
            least, largest = least.clamp_max(0), largest.clamp_min(0)
        extent = largest - least
        distinct = extent >= torch.finfo(extent.dtype).tiny  # otherwise equal up to rounding
        return torch.where(distinct, (logits - least) / torch.where(distinct, extent, 1), 1)

    def uniform_coupling(self, n_parents: int, like: Tensor, leak: bool = False) -> Tensor:
        """Return the `softmax` of equal logits, in a shape that broadcasts to ``[B, *L, I, J]``."""
        if self.is_local:
            return like.new_full((), 1 / (n_parents + leak))
        child, n_children = self._child_of_slot(like.device)
        n_readers = like.new_zeros(n_children).index_add(0, child, like.new_ones(()).expand(child.shape))
        fraction = 1 / (n_readers * n_parents + leak)  # [children]
        return fraction[child].view(*self.sites, self.n_slots, 1)

    def _child_of_slot(self, device: torch.device) -> tuple[Tensor, int]:
        """Return the child index of each slot, ``[L * I]``, and the number of children; padding is one more child."""
        n_children = self.types if self.grid is None else self.grid[0] * self.grid[1] * self.types
        index = self.index(device).flatten()
        return torch.where(index < 0, n_children, index), n_children + 1
