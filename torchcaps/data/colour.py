"""Steps that change colours and leave every pixel where it is. Images are in 0..1 and are not cut off there."""

from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from torchcaps._core.progress import track
from torchcaps._core.random import CounterRNG, permute_indices
from torchcaps._core.validation import check_range
from torchcaps.data.base import Dataset
from torchcaps.data.transforms import Shape, Step, pixel_sum

ENOUGH = 1_000_000  # images for a mean; sets that are made here can have more

__all__ = ["Brightness", "Contrast", "MeanImage", "Normalize", "Standardize"]


@dataclass(frozen=True)
class Brightness(Step):
    """A number added to every pixel, as ``tf.image.random_brightness`` does.

    Args:
        most: it lies between minus and plus this.
    """

    most: float = 63 / 255

    def check(self) -> None:
        """Refuse a negative number."""
        check_range(self, "most", 0)

    def __call__(self, images: Tensor, draws: CounterRNG) -> Tensor:
        """Return the images brighter or darker."""
        return images + _per_image(draws.uniform(-self.most, self.most), images)


@dataclass(frozen=True)
class Contrast(Step):
    """Distances from a channel's mean multiplied, as ``tf.image.random_contrast`` does.

    Args:
        low, high: between which the factor lies.
    """

    low: float = 0.2
    high: float = 1.8

    def check(self) -> None:
        """Refuse an empty range."""
        check_range(self, "low", 0)
        check_range(self, "high", self.low)

    def __call__(self, images: Tensor, draws: CounterRNG) -> Tensor:
        """Return the images with more or less contrast."""
        factor = _per_image(draws.uniform(self.low, self.high), images)
        n_images, n_channels, height, width = images.shape
        mean = pixel_sum(images.flatten(0, 1)).view(n_images, n_channels, 1, 1) / (height * width)
        return (images - mean) * factor + mean


@dataclass(frozen=True)
class Standardize(Step):
    """Each image to mean 0 and deviation 1, all channels together, as ``tf.image.per_image_standardization`` does.

    The deviation counts as 1/√N of a grey level, for N pixels, where it is less: an image of one colour becomes zeros.
    """

    def __call__(self, images: Tensor, draws: CounterRNG) -> Tensor:
        """Return the images standardised."""
        n_pixels = images[0].numel() if len(images) else 1
        apart = images - _per_image(pixel_sum(images) / n_pixels, images)
        deviation = (pixel_sum(apart * apart) / n_pixels).sqrt().clamp(min=n_pixels**-0.5 / 255)
        return apart / _per_image(deviation, images)


@dataclass(frozen=True)
class Normalize(Step):
    """Channels less their mean, over their deviation: fixed numbers, the same for all images.

    Args:
        mean, deviation: one for each channel, in 0..1.
    """

    mean: tuple[float, ...] = (0.5,)
    deviation: tuple[float, ...] = (0.5,)

    def check(self) -> None:
        """Refuse lists of different lengths."""
        if len(self.mean) != len(self.deviation):
            raise ValueError(f"Normalize: mean and deviation must have one number a channel, got {self}")

    def shape(self, shape: Shape) -> Shape:
        """Return the same shape, after its channels were counted."""
        if shape[0] != len(self.mean):
            raise ValueError(f"{self} is for {len(self.mean)} channels, got images with {shape[0]}")
        return shape

    def __call__(self, images: Tensor, draws: CounterRNG) -> Tensor:
        """Return the images normalised."""
        mean, deviation = (torch.tensor(x, device=images.device)[:, None, None] for x in (self.mean, self.deviation))
        return (images - mean) / deviation


@dataclass(frozen=True)
class MeanImage(Step):
    """The mean of all training images taken off, pixel by pixel, as Caffe does.

    Args:
        mean: the mean image, in the scale of the pipeline's `Pixels`; `Pipeline.fit` works it out.
    """

    mean: Tensor | None = field(default=None, repr=False, compare=False)

    @property
    def fitted(self) -> bool:
        """Whether the mean image is known."""
        return self.mean is not None

    def fit(self, dataset: Dataset, scale: int) -> Self:
        """Return the step with the mean image of a training set."""
        total = torch.zeros(dataset.shape, dtype=torch.int64)  # of bytes, so exact
        count = min(len(dataset), ENOUGH)
        index = permute_indices(torch.arange(count), len(dataset), seed=0, epoch=0)
        for some in track(index.split(1000), "the mean image"):
            total += dataset.examples(some).images.long().sum(0)
        return type(self)((total.double() / count / scale).float())

    def shape(self, shape: Shape) -> Shape:
        """Return the same shape, after it was seen to be that of the mean image."""
        if self.mean is not None and self.mean.shape != shape:
            raise ValueError(f"MeanImage is of images of another shape, {list(self.mean.shape)}, got {list(shape)}")
        return shape

    def __call__(self, images: Tensor, draws: CounterRNG) -> Tensor:
        """Return the images less the mean."""
        if self.mean is None:
            raise ValueError("MeanImage does not know the mean image yet: call fit(training_set) of its pipeline")
        return images - self.mean.to(images.device)


def _per_image(values: Tensor, images: Tensor) -> Tensor:
    return values.to(images.dtype).to(images.device)[:, None, None, None]
