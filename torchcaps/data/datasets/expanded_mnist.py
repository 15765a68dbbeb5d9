"""Digits at random places of a larger canvas."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from torchcaps.data.base import Dataset, ImageSet
from torchcaps.data.batch import Batch
from torchcaps.data.datasets.generated import GeneratedFromDigits, placed
from torchcaps.data.registry import register

__all__ = ["ExpandedMNIST"]


@dataclass(frozen=True)
class ExpandedMNIST(GeneratedFromDigits):
    """MNIST digits at random places of 40x40: what Sabour 2017, section 5.2, trains on to test on affNIST.

    Args:
        places: ``"random"``, one place for each digit, another in every training epoch; ``"all"``, each digit at each
            of its 169 places, as the authors' code writes them.
    """

    stream: ClassVar[str] = "ExpandedMNIST"

    title: ClassVar[str] = "MNIST at random places of 40x40"
    shape: ClassVar[tuple[int, int, int] | None] = (1, 40, 40)

    places: Literal["random", "all"] = "random"

    def make(self, name: str, source: ImageSet) -> Dataset:
        """Return the digits at their places."""
        return _Expanded(name, source, self)


class _Expanded(Dataset):
    def __init__(self, name: str, source: ImageSet, spec: ExpandedMNIST) -> None:
        super().__init__(name, source.split, (1, 40, 40), source.classes)
        self.source, self.spec = source, spec
        self.n_places = 13 if spec.places == "all" else 1  # each way

    def __len__(self) -> int:
        return len(self.source) * self.n_places**2

    def examples(self, index: Tensor, epoch: int = 0) -> Batch:
        """Return digits at their places."""
        chosen, place = index // self.n_places**2, index % self.n_places**2
        if self.spec.places == "all":
            down, right = place // self.n_places - 6, place % self.n_places - 6
        else:
            draws = self.spec.draws(index, self.split, epoch if self.split == "train" else 0)
            down, right = draws.integers(-6, 6), draws.integers(-6, 6)
        images = placed(self.source.images[chosen], down, right, 40, 6)
        return Batch(images, self.source.labels[chosen], images, index)


register("expanded-mnist", ExpandedMNIST())
