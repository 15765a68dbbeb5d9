"""Expanded MNIST: digits at random positions of a larger canvas."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from torchcaps.data.base import Batch, Dataset, ImageSet, ImageShape
from torchcaps.data.datasets.generated import GeneratedFromDigits, place_on_canvas
from torchcaps.data.registry import register_dataset

__all__ = ["ExpandedMNIST"]

CANVAS = 40
MAX_SHIFT = 6


@dataclass(frozen=True)
class ExpandedMNIST(GeneratedFromDigits):
    """MNIST digits at random positions of a 40x40 canvas, the training set for affNIST in Sabour 2017, section 5.2.

    Args:
        positions: ``"random"``: one position per digit, in the training split another one in each epoch; ``"all"``:
            each digit at each of its 169 positions, as the authors' code does.

    >>> ExpandedMNIST(positions="all")
    ExpandedMNIST(source='mnist', seed=0, positions='all')
    """

    stream: ClassVar[str] = "ExpandedMNIST"

    title: ClassVar[str] = "MNIST at random positions of 40x40"
    shape: ClassVar[ImageShape | None] = (1, CANVAS, CANVAS)

    positions: Literal["random", "all"] = "random"

    def generate(self, name: str, source: ImageSet) -> Dataset:
        """Return the data set ``name``, with images generated from those of ``source``."""
        return _ExpandedDigits(name, source, self)


class _ExpandedDigits(Dataset):
    """Digits on a larger canvas, generated on access."""

    def __init__(self, name: str, source: ImageSet, spec: ExpandedMNIST) -> None:
        super().__init__(name, source.split, (1, CANVAS, CANVAS), source.classes)
        self.source, self.spec = source, spec
        self.side = 2 * MAX_SHIFT + 1 if spec.positions == "all" else 1  # positions along each axis

    def __len__(self) -> int:
        return len(self.source) * self.side**2

    def get_batch(self, indices: Tensor, epoch: int = 0) -> Batch:
        """Return the images at ``indices`` ``[B]`` as uint8."""
        digits, positions = indices // self.side**2, indices % self.side**2
        if self.spec.positions == "all":
            down, right = positions // self.side - MAX_SHIFT, positions % self.side - MAX_SHIFT
        else:
            rng = self.spec.create_rng(indices, self.split, epoch if self.split == "train" else 0)
            down, right = rng.integers(-MAX_SHIFT, MAX_SHIFT), rng.integers(-MAX_SHIFT, MAX_SHIFT)
        images = place_on_canvas(self.source.images[digits], down, right, CANVAS, MAX_SHIFT)
        return Batch(images, self.source.labels[digits], images, indices)


register_dataset("expanded-mnist", ExpandedMNIST())
