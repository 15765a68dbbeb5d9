"""What every step of a pipeline is: a batch of images in, one out, chance from `CounterRNG` alone."""

from dataclasses import dataclass
from typing import ClassVar, Self

from torch import Tensor

from torchcaps._core.random import CounterRNG
from torchcaps._core.validation import check_fields, check_range
from torchcaps.data.base import Dataset

__all__ = ["Pixels", "Step", "pixel_sum"]

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Step:
    """One step. It must treat every image alike whatever the rest of the batch: elementwise arithmetic, no reductions
    but `pixel_sum`, or results would differ in the last bit from one batch size or number of threads to another.

    Attributes:
        targets_too: whether what a decoder is to reconstruct goes through it as well; changes of colour leave it alone.
    """

    targets_too: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_fields(self)
        self.check()

    def check(self) -> None:
        """Refuse fields that make no sense."""

    def shape(self, shape: Shape) -> Shape:
        """Return the shape of the images that come out of it."""
        return shape

    @property
    def fitted(self) -> bool:
        """Whether it knows all that it has to know of the training set."""
        return True

    def fit(self, dataset: Dataset, scale: int) -> Self:
        """Return the step with what it has to know of a training set whose bytes are divided by ``scale``."""
        return self

    def __call__(self, images: Tensor, draws: CounterRNG) -> Tensor:
        """Return the images changed."""
        raise TypeError(f"{type(self).__name__} does not say what it does")


@dataclass(frozen=True)
class Pixels(Step):
    """Bytes as numbers: divided by ``scale``. A pipeline that does not name it begins with ``Pixels(255)``.

    Args:
        scale: 255; Chen 2019 multiplies by 1/256.
    """

    targets_too: ClassVar[bool] = True

    scale: int = 255

    def check(self) -> None:
        """Refuse to divide by nothing."""
        check_range(self, "scale", 1)

    def __call__(self, images: Tensor, draws: CounterRNG) -> Tensor:
        """Return the bytes over the scale."""
        return images.float().div_(self.scale)


def pixel_sum(images: Tensor) -> Tensor:
    """Return the sum over all axes but the first, by halving: the same bits for any batch, thread count or device.

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
