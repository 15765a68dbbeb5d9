"""Base class of data sets that are generated from the digits of another data set."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from torchcaps._core.random import CounterRNG
from torchcaps._core.validation import check_range
from torchcaps.data.base import Dataset, DataSpec, ImageSet, LoadRequest
from torchcaps.data.geometry import crop_windows
from torchcaps.data.registry import create_dataset

__all__ = ["GeneratedFromDigits", "place_on_canvas"]


@dataclass(frozen=True)
class GeneratedFromDigits(DataSpec):
    """Base class of data sets whose images are generated on access from the digits of another data set.

    Args:
        source: data set of the digits; ``"digits"`` needs no files.
        seed: seed of all random numbers.

    Attributes:
        stream: name of the random streams, a literal: renaming the class must not change the images.
    """

    stream: ClassVar[str]

    source: Literal["mnist", "fashion-mnist", "digits"] = "mnist"
    seed: int = 0

    @property
    def made_from(self) -> str:
        """Name of the data set of the digits."""
        return self.source

    def load(self, request: LoadRequest) -> Dataset:
        """Load the digits of a split; images are generated later, on access."""
        source = create_dataset(self.source, request.split, request.root, download=request.download)
        assert isinstance(source, ImageSet), "sources are held in memory"
        return self.generate(request.name, source)

    def check(self) -> None:
        """Raise a ValueError if the seed does not fit into 64 bits."""
        check_range(self, "seed", -(2**63), 2**63 - 1)

    def create_rng(self, indices: Tensor, split: str, epoch: int = 0, purpose: str = "") -> CounterRNG:
        """Return the random numbers of images; each data set, split and purpose has an independent stream."""
        return CounterRNG(self.seed, epoch, indices, f"{self.stream} {split} {purpose}")

    @abstractmethod
    def generate(self, name: str, source: ImageSet) -> Dataset:
        """Return the data set ``name``, with images generated from those of ``source``."""


def place_on_canvas(digits: Tensor, down: Tensor, right: Tensor, canvas: int, max_shift: int) -> Tensor:
    """Place digits ``[B, 1, H, W]`` on a square canvas, shifted from its center by up to ``max_shift`` pixels."""
    margin = (canvas - digits.shape[-1]) // 2
    return crop_windows(digits, max_shift - down, max_shift - right, (canvas, canvas), margin + max_shift)
