"""What data sets share that are made here, of the digits of another."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from torchcaps._core.random import CounterRNG
from torchcaps._core.validation import check_range
from torchcaps.data.base import Dataset, ImageSet
from torchcaps.data.geometry import windows
from torchcaps.data.registry import create_dataset
from torchcaps.data.spec import DataSpec, Request

__all__ = ["GeneratedFromDigits", "placed"]


@dataclass(frozen=True)
class GeneratedFromDigits(DataSpec):
    """A data set that is made of the digits of another.

    Args:
        source: what the digits are taken from; ``"digits"`` needs no file.
        seed: of everything that is left to chance.
    """

    stream: ClassVar[str]  # literal name of the random streams: renaming the class must not change the images

    source: Literal["mnist", "fashion-mnist", "digits"] = "mnist"
    seed: int = 0

    @property
    def made_from(self) -> str:
        """The name of the data set whose images these are."""
        return self.source

    def load(self, request: Request) -> Dataset:
        """Read the digits; nothing is made of them yet."""
        source = create_dataset(self.source, request.split, request.root, download=request.download)
        assert isinstance(source, ImageSet), "sources are stored"
        return self.make(request.name, source)

    def check(self) -> None:
        """Refuse seeds that are too long."""
        check_range(self, "seed", -(2**63), 2**63 - 1)

    def draws(self, index: Tensor, split: str, epoch: int = 0, use: str = "") -> CounterRNG:
        """Return the chance of images: another one for each kind of data set, split, and thing that is drawn."""
        return CounterRNG(self.seed, epoch, index, f"{self.stream} {split} {use}")

    @abstractmethod
    def make(self, name: str, source: ImageSet) -> Dataset:
        """Return the data set over its digits."""


def placed(digits: Tensor, down: Tensor, right: Tensor, canvas: int, most: int) -> Tensor:
    """Return digits ``[B, 1, H, W]`` on a larger canvas, moved from its middle by up to ``most`` pixels."""
    margin = (canvas - digits.shape[-1]) // 2
    padding = margin + most
    return windows(digits, most - down, most - right, (canvas, canvas), padding)
