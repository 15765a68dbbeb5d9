"""Digits under small affine transformations, made here in the manner of affNIST."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from torchcaps._core.validation import check_range
from torchcaps.data.base import Dataset, ImageSet
from torchcaps.data.batch import Batch
from torchcaps.data.datasets.generated import GeneratedFromDigits
from torchcaps.data.geometry import resampled, turned
from torchcaps.data.registry import register

__all__ = ["AffNISTStyle"]

CANVAS = 40


@dataclass(frozen=True)
class AffNISTStyle(GeneratedFromDigits):
    """Digits under random small affine transformations on 40x40, 32 variants of each: made here, and not affNIST.

    Each is scaled, sheared and turned by amounts that are uniform in the ranges below, and then put anywhere where no
    ink leaves the canvas, or in its middle where that can't be (clothes fill their images more than digits do). The
    ranges are those that affNIST's site states; its images differ.

    Args:
        rotation: up to so many degrees either way.
        shear: up to so much either way.
        scale: height and width by up to this more or less, each by itself.
        variants: how many of each digit.
    """

    stream: ClassVar[str] = "AffNISTStyle"

    title: ClassVar[str] = "MNIST under affine transformations, made here"
    shape: ClassVar[tuple[int, int, int] | None] = (1, CANVAS, CANVAS)

    rotation: float = 20.0
    shear: float = 0.2
    scale: float = 0.2
    variants: int = 32

    def check(self) -> None:
        """Refuse what turns a digit into nothing."""
        super().check()
        check_range(self, "rotation", 0, 180)
        check_range(self, "shear", 0, 1)
        check_range(self, "scale", 0, 0.9)
        check_range(self, "variants", 1)

    def make(self, name: str, source: ImageSet) -> Dataset:
        """Return the digits under their transformations."""
        return _Transformed(name, source, self)


class _Transformed(Dataset):
    """Digits under affine transformations, made when they are asked for.

    Args:
        name: what it was asked for by.
        source: the digits.
        spec: the ranges.
    """

    def __init__(self, name: str, source: ImageSet, spec: AffNISTStyle) -> None:
        super().__init__(name, source.split, (1, CANVAS, CANVAS), source.classes)
        self.source, self.spec = source, spec

    def __len__(self) -> int:
        return len(self.source) * self.spec.variants

    def examples(self, index: Tensor, epoch: int = 0) -> Batch:
        """Return digits: that of an index is the same in every epoch."""
        spec, chosen = self.spec, index // self.spec.variants
        pixels = self.source.images[chosen].float()
        draws = self.spec.draws(index, self.split)
        angle, shear = draws.uniform(-spec.rotation, spec.rotation), draws.uniform(-spec.shear, spec.shear)
        tall, wide = (draws.uniform(1 - spec.scale, 1 + spec.scale) for _ in "yx")
        matrix = turned(angle, shear, tall, wide)
        low, high = _room(pixels, matrix)
        share = torch.stack([draws.unit(), draws.unit()], dim=1)
        moved = resampled(pixels, matrix, low + (high - low) * share, (CANVAS, CANVAS))
        images = moved.round().clamp(0, 255).to(torch.uint8)
        return Batch(images, self.source.labels[chosen], images, index)


def _room(pixels: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the least and the greatest shift ``[B, 2]`` that keep all ink on the canvas, by the corners of its box."""
    ink = pixels[:, 0] > 0  # [B, H, W]
    sides = []
    for axis, other in ((1, 2), (2, 1)):
        line = ink.any(other).to(torch.uint8)  # [B, H] or [B, W]
        first, last = line.argmax(1), line.shape[1] - 1 - line.flip(1).argmax(1)
        middle = (ink.shape[axis] - 1) / 2
        sides.append((first.double() - middle, last.double() - middle))
    corners = torch.stack([torch.stack([r, c], dim=1) for r in sides[0] for c in sides[1]], dim=1)  # [B, 4, 2]
    rows, columns = corners.unbind(2)
    moved = [line[:, 0, None] * rows + line[:, 1, None] * columns for line in matrix.unbind(1)]  # [B, 4] each
    half = (CANVAS - 1) / 2 - 1  # a pixel for what bilinear resampling smears
    low = torch.stack([-half - corner.amin(1) for corner in moved], dim=1)
    high = torch.stack([half - corner.amax(1) for corner in moved], dim=1)
    middle = (low + high) / 2
    return torch.minimum(low, middle), torch.maximum(high, middle)


register("affnist-style", AffNISTStyle())
