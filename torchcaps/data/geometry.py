"""Geometric transforms of image batches: shifts, crops, flips, padding and affine maps."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from torchcaps._core.random import CounterRNG
from torchcaps._core.validation import check_range
from torchcaps.data.base import ImageShape
from torchcaps.data.transforms import Transform

__all__ = [
    "CenterCrop",
    "PadTo",
    "RandomAffine",
    "RandomCrop",
    "RandomHorizontalFlip",
    "RandomRelativeShift",
    "RandomShift",
    "affine_matrix",
    "crop_windows",
    "warp_affine",
]


@dataclass(frozen=True)
class RandomShift(Transform):
    """Shift by a random integer number of pixels; zeros are shifted in.

    Args:
        max_shift: vertical and horizontal shift are uniform in ``-max_shift..max_shift``.

    >>> from torchcaps.data import Loader, Pipeline, create_dataset
    >>> loader = Loader(create_dataset("digits"), 4, pipeline=Pipeline([RandomShift(2)]))
    >>> next(loader.epoch(0)).images.shape
    torch.Size([4, 1, 28, 28])
    """

    applies_to_targets: ClassVar[bool] = True

    max_shift: int = 2

    def check(self) -> None:
        """Raise a ValueError if the range is negative."""
        check_range(self, "max_shift", 0)

    def __call__(self, images: Tensor, rng: CounterRNG) -> Tensor:
        """Transform images ``[B, C, H, W]``."""
        down, right = rng.integers(-self.max_shift, self.max_shift), rng.integers(-self.max_shift, self.max_shift)
        height, width = images.shape[-2:]
        return crop_windows(images, self.max_shift - down, self.max_shift - right, (height, width), self.max_shift)


@dataclass(frozen=True)
class RandomRelativeShift(Transform):
    """Shift by a random integer number of pixels, up to a fraction of the image; zeros are shifted in.

    Args:
        fraction: the shifts are those of `RandomShift` for this fraction of the shorter side, rounded down.

    >>> from torchcaps.data import Loader, Pipeline, create_dataset
    >>> loader = Loader(create_dataset("digits"), 4, pipeline=Pipeline([RandomRelativeShift(0.1)]))
    >>> next(loader.epoch(0)).images.shape
    torch.Size([4, 1, 28, 28])
    """

    applies_to_targets: ClassVar[bool] = True

    fraction: float = 1 / 8

    def check(self) -> None:
        """Raise a ValueError if the fraction is negative or above 1."""
        check_range(self, "fraction", 0, 1)

    def __call__(self, images: Tensor, rng: CounterRNG) -> Tensor:
        """Transform images ``[B, C, H, W]``."""
        return RandomShift(int(self.fraction * min(images.shape[-2:])))(images, rng)


@dataclass(frozen=True)
class RandomCrop(Transform):
    """Crop a square window at a uniformly random position.

    Args:
        size: height and width of the window.
        padding: number of pixels added on each side first.
        fill: their value: ``"zero"``, or that of the ``"nearest"`` pixel of the image.

    >>> from torchcaps.data import Pipeline
    >>> Pipeline([RandomCrop(24)]).output_shape((1, 28, 28), train=True)
    (1, 24, 24)
    """

    applies_to_targets: ClassVar[bool] = True

    size: int = 32
    padding: int = 0
    fill: Literal["zero", "nearest"] = "zero"

    def check(self) -> None:
        """Raise a ValueError if the window is empty."""
        check_range(self, "size", 1)
        check_range(self, "padding", 0)

    def output_shape(self, shape: ImageShape) -> ImageShape:
        """Return the shape of the window; raise a ValueError if it is larger than the padded image."""
        return _cropped_shape(self, shape, self.size, self.padding)

    def __call__(self, images: Tensor, rng: CounterRNG) -> Tensor:
        """Transform images ``[B, C, H, W]``."""
        height, width = (side + 2 * self.padding - self.size for side in images.shape[-2:])
        top, left = rng.integers(0, height), rng.integers(0, width)
        padding = self.padding
        if padding and self.fill == "nearest":
            images, padding = F.pad(images, (padding,) * 4, mode="replicate"), 0
        return crop_windows(images, top, left, (self.size, self.size), padding)


@dataclass(frozen=True)
class CenterCrop(Transform):
    """Crop a square window at the center.

    Args:
        size: height and width of the window.

    >>> from torchcaps.data import Pipeline
    >>> Pipeline([CenterCrop(24)]).output_shape((1, 28, 28), train=True)
    (1, 24, 24)
    """

    applies_to_targets: ClassVar[bool] = True

    size: int = 32

    def check(self) -> None:
        """Raise a ValueError if the window is empty."""
        check_range(self, "size", 1)

    def output_shape(self, shape: ImageShape) -> ImageShape:
        """Return the shape of the window; raise a ValueError if it is larger than the image."""
        return _cropped_shape(self, shape, self.size, 0)

    def __call__(self, images: Tensor, rng: CounterRNG) -> Tensor:
        """Transform images ``[B, C, H, W]``."""
        top, left = ((side - self.size) // 2 for side in images.shape[-2:])
        return images[..., top : top + self.size, left : left + self.size]


def _cropped_shape(transform: Transform, shape: ImageShape, size: int, padding: int) -> ImageShape:
    """Return the shape of a square window; raise a ValueError if it is larger than the padded images."""
    channels, height, width = shape
    if min(height, width) + 2 * padding < size:
        raise ValueError(f"{transform} is larger than the images of {height}x{width}")
    return channels, size, size


@dataclass(frozen=True)
class PadTo(Transform):
    """Pad with zeros on all sides to a minimum size; larger images are unchanged.

    Args:
        size: minimum height and width.

    >>> from torchcaps.data import Pipeline
    >>> Pipeline([PadTo(40)]).output_shape((1, 28, 28), train=True)
    (1, 40, 40)
    """

    applies_to_targets: ClassVar[bool] = True

    size: int = 40

    def output_shape(self, shape: ImageShape) -> ImageShape:
        """Return the padded shape."""
        channels, height, width = shape
        return channels, max(height, self.size), max(width, self.size)

    def __call__(self, images: Tensor, rng: CounterRNG) -> Tensor:
        """Transform images ``[B, C, H, W]``."""
        missing = [max(self.size - side, 0) for side in images.shape[-2:]]
        top, left = (side // 2 for side in missing)
        return F.pad(images, (left, missing[1] - left, top, missing[0] - top))


@dataclass(frozen=True)
class RandomHorizontalFlip(Transform):
    """Mirror images left to right at random.

    Args:
        probability: fraction of the images that are mirrored.

    >>> from torchcaps.data import Loader, Pipeline, create_dataset
    >>> loader = Loader(create_dataset("digits"), 4, pipeline=Pipeline([RandomHorizontalFlip()]))
    >>> next(loader.epoch(0)).images.shape
    torch.Size([4, 1, 28, 28])
    """

    applies_to_targets: ClassVar[bool] = True

    probability: float = 0.5

    def check(self) -> None:
        """Raise a ValueError if the probability is not in 0..1."""
        check_range(self, "probability", 0, 1)

    def __call__(self, images: Tensor, rng: CounterRNG) -> Tensor:
        """Transform images ``[B, C, H, W]``."""
        flipped = rng.bernoulli(self.probability).to(images.device)[:, None, None, None]
        return torch.where(flipped, images.flip(-1), images)


@dataclass(frozen=True)
class RandomAffine(Transform):
    """Random rotation, scale, shear and shift in one bilinear resampling, as Keras' ``ImageDataGenerator``.

    Args:
        rotation: maximum angle in degrees, in both directions.
        shift: maximum shift as a fraction of height and width, not rounded to whole pixels.
        scale: maximum relative change of height and width, drawn independently: 0.2 is 0.8 to 1.2.
        shear: maximum horizontal shift of a row as a fraction of its distance from the center.
        fill: value outside of the image: ``"zero"``, or the ``"nearest"`` pixel, Keras' default.

    Deviation: the center of rotation is that of the image, (H - 1) / 2. Keras versions of that time used H / 2 + 1/2,
    one pixel off in each direction, which later versions fixed.

    >>> from torchcaps.data import Loader, Pipeline, create_dataset
    >>> loader = Loader(create_dataset("digits"), 4, pipeline=Pipeline([RandomAffine(rotation=20.0, scale=0.2)]))
    >>> next(loader.epoch(0)).images.shape
    torch.Size([4, 1, 28, 28])
    """

    applies_to_targets: ClassVar[bool] = True

    rotation: float = 0.0
    shift: float = 0.0
    scale: float = 0.0
    shear: float = 0.0
    fill: Literal["zero", "nearest"] = "zero"

    def check(self) -> None:
        """Raise a ValueError if a range is negative or leaves nothing of an image."""
        check_range(self, "rotation", 0, 180)
        check_range(self, "shift", 0, 1)
        check_range(self, "scale", 0, 0.99)
        check_range(self, "shear", 0, 10)

    def __call__(self, images: Tensor, rng: CounterRNG) -> Tensor:
        """Transform images ``[B, C, H, W]``."""
        angle = rng.uniform(-self.rotation, self.rotation)
        scale_y, scale_x = (rng.uniform(1 - self.scale, 1 + self.scale) for _ in "yx")
        matrix = affine_matrix(angle, rng.uniform(-self.shear, self.shear), scale_y, scale_x)
        height, width = images.shape[-2:]
        shift = [side * rng.uniform(-self.shift, self.shift) for side in (height, width)]
        return warp_affine(images, matrix, torch.stack(shift, dim=1), (height, width), self.fill)


def crop_windows(images: Tensor, top: Tensor, left: Tensor, size: tuple[int, int], padding: int) -> Tensor:
    """Crop a window of each image, each at its own position.

    Shapes:
        images ``[B, C, H, W]``, top and left ``[B]``, relative to the corner after adding ``padding`` zeros on each
        side -> ``[B, C, *size]``
    """
    padded = F.pad(images, (padding,) * 4) if padding else images
    windows = padded.unfold(2, size[0], 1).unfold(3, size[1], 1)  # [B, C, tops, lefts, *size], a view
    batch = torch.arange(len(images), device=images.device)
    return windows[batch, :, top.to(images.device), left.to(images.device)]


def affine_matrix(angle: Tensor, shear: Tensor, scale_y: Tensor, scale_x: Tensor) -> Tensor:
    """Return matrices ``[B, 2, 2]`` on (row, column) that scale, shear, and rotate counter-clockwise by degrees."""
    # math, not torch: the last bit of vectorised sines can depend on the position in the batch.
    radians = [math.radians(degrees) for degrees in angle.tolist()]
    cos = torch.tensor([math.cos(r) for r in radians], dtype=torch.float64)
    sin = torch.tensor([math.sin(r) for r in radians], dtype=torch.float64)
    # [cos -sin; sin cos] of (row, column), rows counted downwards, times [1 0; shear 1], times [scale_y 0; 0 scale_x]
    entries = ((cos - sin * shear) * scale_y, -sin * scale_x, (sin + cos * shear) * scale_y, cos * scale_x)
    return torch.stack(entries, dim=1).view(-1, 2, 2)


def warp_affine(images: Tensor, matrix: Tensor, shift: Tensor, size: tuple[int, int], fill: str = "zero") -> Tensor:
    """Apply affine maps about the image center, with bilinear resampling.

    A pixel at offset ``p`` from the center of the image is mapped to offset ``matrix @ p + shift`` from the center of
    the result.

    Shapes:
        images ``[B, C, H, W]``, matrix ``[B, 2, 2]`` and shift ``[B, 2]`` on (row, column) -> ``[B, C, *size]``
    """
    a, b, c, d = matrix.flatten(1).unbind(1)
    determinant = a * d - b * c
    inverse = torch.stack([d, -b, -c, a], dim=1) / determinant[:, None]
    parameters = torch.cat([inverse, shift], dim=1).float().to(images.device)
    a, b, c, d, down, right = (column[:, None, None] for column in parameters.unbind(1))
    rows, columns = (torch.arange(side, device=images.device) - (side - 1) / 2 for side in size)
    row, column = rows[None, :, None] - down, columns[None, None, :] - right  # [B, H, 1], [B, 1, W]
    height, width = images.shape[-2:]
    # grid_sample's coordinates are -1 to 1 between the outer edges of the pixels
    grid = torch.stack([(c * row + d * column) * (2 / width), (a * row + b * column) * (2 / height)], dim=-1)
    padding = "border" if fill == "nearest" else "zeros"
    return F.grid_sample(images, grid, mode="bilinear", padding_mode=padding, align_corners=False)
