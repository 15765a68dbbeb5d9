"""What data sets share that are made here, of the digits of another."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal

from torchcaps.data.dataset import Dataset, ImageSet
from torchcaps.data.registry import create_dataset
from torchcaps.data.spec import DataSpec, Request

__all__ = ["MadeOfDigits"]


@dataclass(frozen=True)
class MadeOfDigits(DataSpec):
    """A data set that is made of the digits of another.

    Args:
        source: what the digits are taken from; ``"digits"`` needs no file.
        seed: of everything that is left to chance.
    """

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

    @abstractmethod
    def make(self, name: str, source: ImageSet) -> Dataset:
        """Return the data set over its digits."""
