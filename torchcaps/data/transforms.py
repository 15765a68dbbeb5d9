"""Transforms of image batches: the base class, conversion of bytes to floats, and color transforms.

Geometric transforms are in `torchcaps.data.geometry`. All randomness comes from a `CounterRNG`.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch
from torch import Tensor

from torchcaps._core.progress import track
from torchcaps._core.random import CounterRNG, permute_indices
from torchcaps._core.validation import check_fields, check_range
from torchcaps.data.base import Dataset, ImageShape

__all__ = [
    "Normalize",
    "RandomBrightness",
    "RandomContrast",
    "ScalePixels",
    "Standardize",
    "SubtractMeanImage",
    "Transform",
    "pixel_sum",
]

MAX_IMAGES_FOR_MEAN = 1_000_000  # generated data sets can have more


@dataclass(frozen=True)
class Transform:
    """Base class of transforms of a batch of images.

    An image must not depend on the rest of its batch: use elementwise arithmetic, and `pixel_sum` instead of other
    reductions, whose last bit can depend on batch size and number of threads.

    Attributes:
        applies_to_targets: also transform the reconstruction targets of a decoder. True for geometric transforms, false
            for color transforms.

    >>> from torchcaps.data import Loader, Pipeline, create_dataset
    >>> class Invert(Transform):
    ...     def __call__(self, images, rng):
    ...         return 1 - images
    ...
    >>> loader = Loader(create_dataset("digits"), 4, pipeline=Pipeline([Invert()]))
    >>> next(loader.epoch(0)).images.mean() > 0.5
    tensor(True)
    """

    applies_to_targets: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Check the types of the fields, then their values by `check`."""
        check_fields(self)
        self.check()

    def check(self) -> None:
        """Raise a ValueError if fields are out of range."""

    def output_shape(self, shape: ImageShape) -> ImageShape:
        """Return the shape of transformed images; raise a ValueError if the transform can't be applied."""
        return shape

    @property
    def is_fitted(self) -> bool:
        """Whether all statistics of the training set that the transform needs are known."""
        return True

    def fit(self, dataset: Dataset, scale: int) -> Self:
        """Return the transform with statistics of a training set whose bytes are divided by ``scale``."""
        return self

    def __call__(self, images: Tensor, rng: CounterRNG) -> Tensor:
        """Transform images ``[B, C, H, W]``."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__")


@dataclass(frozen=True)
class ScalePixels(Transform):
    """Convert bytes to float32 and divide by ``scale``. A pipeline without it starts with ``ScalePixels(255)``.

    Images that are floating-point numbers already are not divided.

    Args:
        scale: divisor; Chen 2019 uses 256.

    >>> from torchcaps.data import Loader, Pipeline, create_dataset
    >>> loader = Loader(create_dataset("digits"), 4, pipeline=Pipeline([ScalePixels(256)]))
    >>> next(loader.epoch(0)).images.max() < 1
    tensor(True)
    """

    applies_to_targets: ClassVar[bool] = True

    scale: int = 255

    def check(self) -> None:
        """Raise a ValueError if the scale is not positive."""
        check_range(self, "scale", 1)

    def __call__(self, images: Tensor, rng: CounterRNG) -> Tensor:
        """Transform images ``[B, C, H, W]``."""
        return images.float() if images.is_floating_point() else images.float().div_(self.scale)


def pixel_sum(images: Tensor) -> Tensor:
    """Sum over all axes but the first by pairwise halving: bit-equal for any batch size, thread count and device.

    >>> import torch
    >>> pixel_sum(torch.ones(2, 3, 5, 5)).tolist()
    [75.0, 75.0]
    """
    values = images.flatten(1)
    while (length := values.shape[1]) > 1:
        half = length // 2
        added = values[:, :half] + values[:, half : 2 * half]
        if length % 2:
            added[:, 0] += values[:, -1]
        values = added
    return values[:, 0]


# Color transforms -------------------------------------------------------------------------------------------
# Images are in 0..1; results are not clipped to it.


@dataclass(frozen=True)
class RandomBrightness(Transform):
    """Add one random number to all pixels of an image, as ``tf.image.random_brightness``.

    Args:
        max_delta: the number is uniform in ``[-max_delta, max_delta)``.

    >>> from torchcaps.data import Loader, Pipeline, create_dataset
    >>> loader = Loader(create_dataset("digits"), 4, pipeline=Pipeline([RandomBrightness(0.2)]))
    >>> next(loader.epoch(0)).images.shape
    torch.Size([4, 1, 28, 28])
    """

    max_delta: float = 63 / 255

    def check(self) -> None:
        """Raise a ValueError if the range is negative."""
        check_range(self, "max_delta", 0)

    def __call__(self, images: Tensor, rng: CounterRNG) -> Tensor:
        """Transform images ``[B, C, H, W]``."""
        return images + _per_image(rng.uniform(-self.max_delta, self.max_delta), images)


@dataclass(frozen=True)
class RandomContrast(Transform):
    """Multiply the distance from the mean of each channel by a random factor, as ``tf.image.random_contrast``.

    Args:
        low, high: the factor is uniform in ``[low, high)``.

    >>> from torchcaps.data import Loader, Pipeline, create_dataset
    >>> loader = Loader(create_dataset("digits"), 4, pipeline=Pipeline([RandomContrast(0.8, 1.2)]))
    >>> next(loader.epoch(0)).images.shape
    torch.Size([4, 1, 28, 28])
    """

    low: float = 0.2
    high: float = 1.8

    def check(self) -> None:
        """Raise a ValueError if the range is empty or negative."""
        check_range(self, "low", 0)
        check_range(self, "high", self.low)

    def __call__(self, images: Tensor, rng: CounterRNG) -> Tensor:
        """Transform images ``[B, C, H, W]``."""
        factor = _per_image(rng.uniform(self.low, self.high), images)
        n_images, n_channels, height, width = images.shape
        mean = pixel_sum(images.flatten(0, 1)).view(n_images, n_channels, 1, 1) / (height * width)
        return (images - mean) * factor + mean


@dataclass(frozen=True)
class Standardize(Transform):
    """Scale each image to mean 0 and standard deviation 1 over all channels, as ``tf.image.per_image_standardization``.

    The standard deviation is at least ``1 / sqrt(N)`` gray levels, for N pixels: a constant image becomes zeros.

    >>> from torchcaps.data import Loader, Pipeline, create_dataset
    >>> loader = Loader(create_dataset("digits"), 4, pipeline=Pipeline([Standardize()]))
    >>> next(loader.epoch(0)).images.shape
    torch.Size([4, 1, 28, 28])
    """

    def __call__(self, images: Tensor, rng: CounterRNG) -> Tensor:
        """Transform images ``[B, C, H, W]``."""
        n_pixels = images[0].numel() if len(images) else 1
        centered = images - _per_image(pixel_sum(images) / n_pixels, images)
        std = (pixel_sum(centered * centered) / n_pixels).sqrt().clamp(min=n_pixels**-0.5 / 255)
        return centered / _per_image(std, images)


@dataclass(frozen=True)
class Normalize(Transform):
    """Subtract a constant mean from each channel and divide by a constant standard deviation.

    Args:
        mean, std: one number per channel, in 0..1.

    >>> from torchcaps.data import Loader, Pipeline, create_dataset
    >>> loader = Loader(create_dataset("digits"), 4, pipeline=Pipeline([Normalize((0.13,), (0.31,))]))
    >>> next(loader.epoch(0)).images.shape
    torch.Size([4, 1, 28, 28])
    """

    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)

    def check(self) -> None:
        """Raise a ValueError if mean and std have different lengths."""
        if len(self.mean) != len(self.std):
            raise ValueError(
                f"Normalize: mean and std must have one number per channel, got {self.mean} and {self.std}"
            )

    def output_shape(self, shape: ImageShape) -> ImageShape:
        """Return the same shape; raise a ValueError if the number of channels differs from that of ``mean``."""
        if shape[0] != len(self.mean):
            raise ValueError(f"{self} needs images with {len(self.mean)} channels, got {shape[0]}")
        return shape

    def __call__(self, images: Tensor, rng: CounterRNG) -> Tensor:
        """Transform images ``[B, C, H, W]``."""
        mean, std = (torch.tensor(x, device=images.device)[:, None, None] for x in (self.mean, self.std))
        return (images - mean) / std


@dataclass(frozen=True)
class SubtractMeanImage(Transform):
    """Subtract the mean image of the training set, pixel by pixel, as Caffe does.

    Args:
        mean: the mean image ``[C, H, W]``, in the scale of the pipeline's `ScalePixels`; `Pipeline.fit` computes it.

    >>> SubtractMeanImage().is_fitted  # a loader fits it to the training set
    False
    """

    mean: Tensor | None = field(default=None, repr=False, compare=False)

    @property
    def is_fitted(self) -> bool:
        """Whether the mean image is known."""
        return self.mean is not None

    def fit(self, dataset: Dataset, scale: int) -> Self:
        """Return the transform with the mean image of a training set."""
        total = torch.zeros(dataset.shape, dtype=torch.int64)  # a sum of bytes, so exact
        count = min(len(dataset), MAX_IMAGES_FOR_MEAN)
        indices = permute_indices(torch.arange(count), len(dataset), seed=0, epoch=0)
        for chunk in track(indices.split(1000), "mean image"):
            total += dataset.get_batch(chunk).images.long().sum(0)
        return type(self)((total.double() / count / scale).float())

    def output_shape(self, shape: ImageShape) -> ImageShape:
        """Return the same shape; raise a ValueError if it differs from that of the mean image."""
        if self.mean is not None and self.mean.shape != shape:
            expected = list(self.mean.shape)
            raise ValueError(f"SubtractMeanImage was fitted to images of shape {expected}, got {list(shape)}")
        return shape

    def __call__(self, images: Tensor, rng: CounterRNG) -> Tensor:
        """Transform images ``[B, C, H, W]``."""
        if self.mean is None:
            raise ValueError("SubtractMeanImage is not fitted: call fit(training_set) of its pipeline first")
        return images - self.mean.to(images.device)


def _per_image(values: Tensor, images: Tensor) -> Tensor:
    """Return values ``[B]`` as ``[B, 1, 1, 1]``, in the type and on the device of the images."""
    return values.to(images.dtype).to(images.device)[:, None, None, None]
