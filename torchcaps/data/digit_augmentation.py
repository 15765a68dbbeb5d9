"""Augmentation of digits in Byerly 2021 and Mazzia 2021: rotate, shift within the margins, squeeze, erase.

Both papers' code draws amounts from ``|N(0, 0.33)|``, cut at 0.9999: small changes are frequent, large ones rare.
"""

import functools
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from torchcaps._core.random import CounterRNG
from torchcaps._core.validation import check_range
from torchcaps.data.base import ImageShape
from torchcaps.data.geometry import affine_matrix, warp_affine
from torchcaps.data.transforms import Transform

__all__ = ["RandomErase", "RandomMarginShift", "RandomRotation", "RandomSqueeze"]

STD = 0.33
MAX_AMOUNT = 0.9999
LANCZOS_RADIUS = 3


@dataclass(frozen=True)
class RandomRotation(Transform):
    """Rotate a random half of the images by a normally distributed angle, bilinear, about ``(H / 2, W / 2)``.

    The center is half a pixel to the right of and below that of the image, as in the authors' code.

    Args:
        max_angle: the angle is ``max_angle`` degrees times ``N(0, 0.33)``, cut at 0.9999 in both directions.
        whole_degrees: truncate the angle to whole degrees (Mazzia 2021).
    """

    applies_to_targets: ClassVar[bool] = True

    max_angle: float = 30.0
    whole_degrees: bool = False

    def check(self) -> None:
        """Raise a ValueError if the angle is not in 0..180."""
        check_range(self, "max_angle", 0, 180)

    def __call__(self, images: Tensor, rng: CounterRNG) -> Tensor:
        """Transform images ``[B, C, H, W]``."""
        angle = self.max_angle * rng.normal(STD).clamp(-MAX_AMOUNT, MAX_AMOUNT)
        rotated = rng.bernoulli(0.5).nonzero()[:, 0]
        angle = (angle.trunc() if self.whole_degrees else angle)[rotated]
        ones, zeros = torch.ones_like(angle), torch.zeros_like(angle)
        matrix = affine_matrix(angle, zeros, ones, ones)
        # a rotation about center + 1/2 is one about the center, followed by a shift
        shift = 0.5 - 0.5 * (matrix[:, :, 0] + matrix[:, :, 1])
        result = images.clone()
        size = (images.shape[-2], images.shape[-1])
        rotated = rotated.to(images.device)
        result[rotated] = warp_affine(images[rotated], matrix, shift, size)
        return result


@dataclass(frozen=True)
class RandomMarginShift(Transform):
    """Shift by a random number of whole pixels within the empty margins of the image, so that no ink is lost.

    For each axis, with probability 1/2 to the left (or up) by ``ceil(a * margin)``, otherwise to the right (or down) by
    ``floor(a * (1 + margin))``, with ``a = |N(0, 0.33)|`` cut at 0.9999. An image without ink is not shifted.
    """

    applies_to_targets: ClassVar[bool] = True

    def __call__(self, images: Tensor, rng: CounterRNG) -> Tensor:
        """Transform images ``[B, C, H, W]``."""
        ink = (images != 0).any(1).cpu()  # [B, H, W]
        for axis, occupied in ((-2, ink.any(2)), (-1, ink.any(1))):
            side = images.shape[axis]
            before, after = _margins(occupied)
            amount = rng.normal(STD).abs().clamp(max=MAX_AMOUNT)
            shift = torch.where(rng.bernoulli(0.5), -(amount * before).ceil(), (amount * (1 + after)).floor()).long()
            source = (torch.arange(side) - shift[:, None]) % side  # [B, side]
            shape = (len(images), 1, side, 1) if axis == -2 else (len(images), 1, 1, side)
            images = images.gather(axis, source.view(shape).expand(images.shape).to(images.device))
        return images


def _margins(occupied: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of empty rows before the first and after the last occupied one, 0 if all are empty: ``[B]``."""
    blank = ~occupied.any(1)
    before, after = occupied.to(torch.uint8).argmax(1), occupied.flip(1).to(torch.uint8).argmax(1)
    return before.masked_fill(blank, 0), after.masked_fill(blank, 0)


@dataclass(frozen=True)
class RandomSqueeze(Transform):
    """Squeeze images horizontally by 1 to ``W / 4`` columns, with antialiased Lanczos-3 resampling.

    An image loses ``w = floor(a W / 4 + 1)`` columns and is padded by ``floor(w / 2) + o`` columns on the left, with
    ``o = floor(2 a')``; on the right it is padded, or cut, to its original width.

    Deviation: Lanczos resampling overshoots; the result is clipped to 0..1, the range of a decoder's sigmoid. The
    authors' code does not clip.
    """

    applies_to_targets: ClassVar[bool] = True

    def output_shape(self, shape: ImageShape) -> ImageShape:
        """Return the same shape; raise a ValueError if the image is narrower than 4 columns."""
        if shape[2] < 4:
            raise ValueError(f"{self} needs images of at least 4 columns, got {shape[2]}")
        return shape

    def __call__(self, images: Tensor, rng: CounterRNG) -> Tensor:
        """Transform images ``[B, C, H, W]``."""
        width = images.shape[-1]
        lost, offset = (rng.normal(STD).abs().clamp(max=MAX_AMOUNT) for _ in range(2))
        row = 2 * (lost * (width / 4)).long() + (2 * offset).long()  # of the table, w - 1 and o
        columns, weights = (table[row].to(images.device) for table in _squeeze_table(width))  # [B, taps, W]
        result = torch.zeros_like(images)
        for tap in range(columns.shape[1]):  # elementwise, so that an image does not depend on the rest of its batch
            source = images.gather(-1, columns[:, tap, None, None].expand(images.shape))
            result += source.mul_(weights[:, tap, None, None])
        return result.clamp_(0, 1)


@functools.cache
def _squeeze_table(width: int) -> tuple[Tensor, Tensor]:
    """Return source columns and weights of each output column, ``[2 * width // 4, taps, width]``.

    Row ``2 (w - 1) + o`` is the squeeze by ``w`` columns with offset ``o``. A window of the resampling filter is cut at
    the borders of the image and its weights are normalised to 1, as in TensorFlow and Pillow.
    """
    n_taps = math.ceil(2 * LANCZOS_RADIUS * width / (width - width // 4)) + 1
    columns = torch.zeros(2 * (width // 4), n_taps, width, dtype=torch.int64)
    weights = torch.zeros(2 * (width // 4), n_taps, width, dtype=torch.float64)
    for lost in range(1, width // 4 + 1):
        scale = width / (width - lost)
        radius = LANCZOS_RADIUS * scale
        for offset in (0, 1):
            left = lost // 2 + offset
            for x in range(width - lost):
                if left + x >= width:
                    continue
                center = (x + 0.5) * scale
                first, last = math.ceil(center - radius - 0.5), math.floor(center + radius - 0.5)
                window = range(max(first, 0), min(last, width - 1) + 1)
                values = [_lanczos((column + 0.5 - center) / scale) for column in window]
                row = 2 * (lost - 1) + offset
                columns[row, : len(window), left + x] = torch.tensor(window)
                weights[row, : len(window), left + x] = torch.tensor(values, dtype=torch.float64) / sum(values)
    return columns, weights.float()


def _lanczos(x: float) -> float:
    """Return the Lanczos kernel ``sinc(x) sinc(x / 3)``, 0 outside of its radius."""
    if abs(x) >= LANCZOS_RADIUS:
        return 0.0
    if x == 0:
        return 1.0
    return LANCZOS_RADIUS * math.sin(math.pi * x) * math.sin(math.pi * x / LANCZOS_RADIUS) / (math.pi * x) ** 2


@dataclass(frozen=True)
class RandomErase(Transform):
    """Set a square at a uniformly random position to 0.

    Args:
        size: side length of the square.
        before, after: rows and columns at the top and left, and at the bottom and right, that it never covers.
    """

    applies_to_targets: ClassVar[bool] = True

    size: int = 4
    before: int = 4
    after: int = 2

    def check(self) -> None:
        """Raise a ValueError if the square is empty or a margin is negative."""
        check_range(self, "size", 1)
        check_range(self, "before", 0)
        check_range(self, "after", 0)

    def output_shape(self, shape: ImageShape) -> ImageShape:
        """Return the same shape; raise a ValueError if the square does not fit."""
        if min(shape[1:]) < self.before + self.size + self.after:
            raise ValueError(f"{self} is larger than the images of {shape[1]}x{shape[2]}")
        return shape

    def __call__(self, images: Tensor, rng: CounterRNG) -> Tensor:
        """Transform images ``[B, C, H, W]``."""
        inside = []
        for side in images.shape[-2:]:
            start = rng.integers(self.before, side - self.after - self.size)[:, None]
            positions = torch.arange(side)
            inside.append((positions >= start) & (positions < start + self.size))  # [B, side]
        mask = inside[0][:, :, None] & inside[1][:, None, :]
        return images.masked_fill(mask[:, None].to(images.device), 0)
