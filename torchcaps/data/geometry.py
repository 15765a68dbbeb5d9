"""Steps that move images: shifts, crops, flips, and rotation, scale and shear in one resampling."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from torchcaps._core.random import CounterRNG
from torchcaps._core.validation import check_range
from torchcaps.data.transforms import Shape, Step

__all__ = ["Affine", "CenterCrop", "Flip", "PadTo", "RandomCrop", "Shift", "resampled", "turned", "windows"]


@dataclass(frozen=True)
class Shift(Step):
    """Move by whole pixels, zeros coming in.

    Args:
        most: up to so many pixels up or down, and as many left or right, all places alike likely.
    """

    targets_too: ClassVar[bool] = True

    most: int = 2

    def check(self) -> None:
        """Refuse a negative distance."""
        check_range(self, "most", 0)

    def __call__(self, images: Tensor, draws: CounterRNG) -> Tensor:
        """Return the images moved."""
        down, right = draws.integers(-self.most, self.most), draws.integers(-self.most, self.most)
        height, width = images.shape[-2:]
        return windows(images, self.most - down, self.most - right, (height, width), self.most)


@dataclass(frozen=True)
class RandomCrop(Step):
    """A window at a random place, all places alike likely.

    Args:
        size: height and width of the window.
        padding: zeros that are put around the image first.
    """

    targets_too: ClassVar[bool] = True

    size: int = 32
    padding: int = 0

    def check(self) -> None:
        """Refuse windows without pixels."""
        check_range(self, "size", 1)
        check_range(self, "padding", 0)

    def shape(self, shape: Shape) -> Shape:
        """Return the shape of the window."""
        return _cropped(self, shape, self.size, self.padding)

    def __call__(self, images: Tensor, draws: CounterRNG) -> Tensor:
        """Return the windows."""
        height, width = (side + 2 * self.padding - self.size for side in images.shape[-2:])
        top, left = draws.integers(0, height), draws.integers(0, width)
        return windows(images, top, left, (self.size, self.size), self.padding)


@dataclass(frozen=True)
class CenterCrop(Step):
    """The window in the middle.

    Args:
        size: height and width of the window.
    """

    targets_too: ClassVar[bool] = True

    size: int = 32

    def check(self) -> None:
        """Refuse windows without pixels."""
        check_range(self, "size", 1)

    def shape(self, shape: Shape) -> Shape:
        """Return the shape of the window."""
        return _cropped(self, shape, self.size, 0)

    def __call__(self, images: Tensor, draws: CounterRNG) -> Tensor:
        """Return the windows."""
        top, left = ((side - self.size) // 2 for side in images.shape[-2:])
        return images[..., top : top + self.size, left : left + self.size]


def _cropped(step: Step, shape: Shape, size: int, padding: int) -> Shape:
    channels, height, width = shape
    if min(height, width) + 2 * padding < size:
        raise ValueError(f"{step} does not fit into images of {height}x{width}")
    return channels, size, size


@dataclass(frozen=True)
class PadTo(Step):
    """Zeros on all sides up to a size; images that have it, or more, stay as they are.

    Args:
        size: height and width.
    """

    targets_too: ClassVar[bool] = True

    size: int = 40

    def shape(self, shape: Shape) -> Shape:
        """Return the padded shape."""
        channels, height, width = shape
        return channels, max(height, self.size), max(width, self.size)

    def __call__(self, images: Tensor, draws: CounterRNG) -> Tensor:
        """Return the images with zeros around them."""
        missing = [max(self.size - side, 0) for side in images.shape[-2:]]
        top, left = (side // 2 for side in missing)
        return F.pad(images, (left, missing[1] - left, top, missing[0] - top))


@dataclass(frozen=True)
class Flip(Step):
    """Left and right exchanged, in half of the images.

    Args:
        probability: of an exchange.
    """

    targets_too: ClassVar[bool] = True

    probability: float = 0.5

    def check(self) -> None:
        """Refuse what is no probability."""
        check_range(self, "probability", 0, 1)

    def __call__(self, images: Tensor, draws: CounterRNG) -> Tensor:
        """Return the images, some of them mirrored."""
        chosen = draws.bernoulli(self.probability).to(images.device)[:, None, None, None]
        return torch.where(chosen, images.flip(-1), images)


@dataclass(frozen=True)
class Affine(Step):
    """Rotation, scale, shear and shift in one bilinear resampling, as Keras' ``ImageDataGenerator`` does it.

    Args:
        rotation: up to so many degrees either way.
        shift: up to this share of height and width, in fractions of a pixel.
        scale: height and width by up to this more or less, each by itself: 0.2 is 0.8 to 1.2.
        shear: rows are moved by up to this share of their distance from the middle.
        fill: what comes in: ``"zero"``, or the ``"nearest"`` pixel, as is Keras' default.

    Deviation: the image turns about its middle, (H - 1) / 2; the Keras of those years turned it about H / 2 + 1/2, one
    pixel off in each direction, which later versions mended.
    """

    targets_too: ClassVar[bool] = True

    rotation: float = 0.0
    shift: float = 0.0
    scale: float = 0.0
    shear: float = 0.0
    fill: Literal["zero", "nearest"] = "zero"

    def check(self) -> None:
        """Refuse what turns an image into nothing."""
        check_range(self, "rotation", 0, 180)
        check_range(self, "shift", 0, 1)
        check_range(self, "scale", 0, 0.99)
        check_range(self, "shear", 0, 10)

    def __call__(self, images: Tensor, draws: CounterRNG) -> Tensor:
        """Return the images resampled."""
        angle = draws.uniform(-self.rotation, self.rotation)
        tall, wide = (draws.uniform(1 - self.scale, 1 + self.scale) for _ in "yx")
        matrix = turned(angle, draws.uniform(-self.shear, self.shear), tall, wide)
        height, width = images.shape[-2:]
        moved = [side * draws.uniform(-self.shift, self.shift) for side in (height, width)]
        return resampled(images, matrix, torch.stack(moved, dim=1), (height, width), self.fill)


def windows(images: Tensor, top: Tensor, left: Tensor, size: tuple[int, int], padding: int) -> Tensor:
    """Return a window of each image, at a place of its own.

    Shapes:
        images ``[B, C, H, W]``, top and left ``[B]``, counted from the corner after ``padding`` zeros have been put
        around it -> ``[B, C, *size]``
    """
    padded = F.pad(images, (padding,) * 4) if padding else images
    places = padded.unfold(2, size[0], 1).unfold(3, size[1], 1)  # [B, C, tops, lefts, *size], a view
    batch = torch.arange(len(images), device=images.device)
    return places[batch, :, top.to(images.device), left.to(images.device)]


def turned(angle: Tensor, shear: Tensor, tall: Tensor, wide: Tensor) -> Tensor:
    """Return matrices ``[B, 2, 2]`` on (row, column) that scale, then shear, then turn counter-clockwise by degrees."""
    # math, not torch: vectorised sines may differ in the last bit with an image's place in the batch
    radians = [math.radians(degrees) for degrees in angle.tolist()]
    cos = torch.tensor([math.cos(r) for r in radians], dtype=torch.float64)
    sin = torch.tensor([math.sin(r) for r in radians], dtype=torch.float64)
    # [cos -sin; sin cos] of (row, column), rows counted downwards, times [1 0; shear 1], times [tall 0; 0 wide]
    rows = ((cos - sin * shear) * tall, -sin * wide, (sin + cos * shear) * tall, cos * wide)
    return torch.stack(rows, dim=1).view(-1, 2, 2)


def resampled(images: Tensor, matrix: Tensor, shift: Tensor, size: tuple[int, int], fill: str = "zero") -> Tensor:
    """Return images under affine maps about their middle, bilinearly resampled.

    A pixel at ``p`` from the middle of the image comes to ``matrix @ p + shift`` from the middle of the result.

    Shapes:
        images ``[B, C, H, W]``, matrix ``[B, 2, 2]`` and shift ``[B, 2]`` on (row, column) -> ``[B, C, *size]``
    """
    a, b, c, d = matrix.flatten(1).unbind(1)
    determinant = a * d - b * c
    inverse = torch.stack([d, -b, -c, a], dim=1) / determinant[:, None]
    numbers = torch.cat([inverse, shift], dim=1).float().to(images.device)
    a, b, c, d, down, right = (column[:, None, None] for column in numbers.unbind(1))
    rows, columns = (torch.arange(side, device=images.device) - (side - 1) / 2 for side in size)
    row, column = rows[None, :, None] - down, columns[None, None, :] - right  # [B, H, 1], [B, 1, W]
    height, width = images.shape[-2:]
    # grid_sample counts from -1 to 1, over the pixels' outer edges
    grid = torch.stack([(c * row + d * column) * (2 / width), (a * row + b * column) * (2 / height)], dim=-1)
    padding = "border" if fill == "nearest" else "zeros"
    return F.grid_sample(images, grid, mode="bilinear", padding_mode=padding, align_corners=False)
