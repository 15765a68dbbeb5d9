"""Digits over digits: MultiMNIST and DiverseMultiMNIST.

Both are made when they are asked for, any image by its index, from the digits of one part of their source: training
images show training digits only, test images test digits only.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from torchcaps._core.random import CounterRNG
from torchcaps._core.validation import check_range
from torchcaps.data.base import Dataset, ImageSet
from torchcaps.data.batch import Batch
from torchcaps.data.datasets.generated import GeneratedFromDigits, placed
from torchcaps.data.registry import register

__all__ = ["DiverseMultiMNIST", "MultiMNIST"]


@dataclass(frozen=True)
class MultiMNIST(GeneratedFromDigits):
    """MultiMNIST (Sabour 2017, section 6): two digits of different classes over each other on 36x36.

    Every digit of the source is the base of 1,000 images, each with a partner of another class; both are moved by up
    to four pixels each way, and their bytes added, at most 255. So there are 60 million training and 10 million test
    images, any of them by its index; ``targets`` are the two moved digits, each alone, in the order of the labels. That
    boxes overlap by 80 % on average, as the paper says, follows for the digits' 28x28 boxes; those of their ink, which
    are smaller, overlap by 72 %.

    Args:
        preset: ``"official"`` is the authors' generator: training digits are moved by up to six pixels, and cut off at
            the edge, and a base has one place in all of its images.
        shift: up to so many pixels; ``None``: what the preset says, 4, and in training ``"official"`` 6.
        pairs: images of each base.

    Deviation: the authors' generator draws the partners of one base without putting them back, here they are drawn
    anew each time.
    """

    stream: ClassVar[str] = "MultiMNIST"

    title: ClassVar[str] = "two digits over each other on 36x36"
    shape: ClassVar[tuple[int, int, int] | None] = (1, 36, 36)

    preset: Literal["paper", "official"] = "paper"
    shift: int | None = None
    pairs: int = 1000

    def check(self) -> None:
        """Refuse what makes no images."""
        super().check()
        check_range(self, "shift", 0, 36)
        check_range(self, "pairs", 1)

    def shift_of(self, split: str) -> int:
        """Return how far digits are moved at most."""
        if self.shift is not None:
            return self.shift
        return 6 if self.preset == "official" and split == "train" else 4

    def make(self, name: str, source: ImageSet) -> Dataset:
        """Return the pairs."""
        return _Pairs(name, source, self)


@dataclass(frozen=True)
class DiverseMultiMNIST(GeneratedFromDigits):
    """DiverseMultiMNIST (Tsai 2020, appendix A.3): one digit with probability 1/6, else two of different classes over
    each other, on 36x36, each moved by up to four pixels; labels are zeros and ones.

    Training images are made anew in every epoch, as many as the source has; test images are always the same.

    Args:
        single: the probability of one digit.
        shift: up to so many pixels.
    """

    stream: ClassVar[str] = "DiverseMultiMNIST"

    title: ClassVar[str] = "one digit, or two over each other, on 36x36"
    shape: ClassVar[tuple[int, int, int] | None] = (1, 36, 36)

    single: float = 1 / 6
    shift: int = 4

    def check(self) -> None:
        """Refuse what is no probability."""
        super().check()
        check_range(self, "single", 0, 1)
        check_range(self, "shift", 0, 36)

    def make(self, name: str, source: ImageSet) -> Dataset:
        """Return the images."""
        return _Diverse(name, source, self)


class _Pairs(Dataset):
    def __init__(self, name: str, source: ImageSet, spec: MultiMNIST) -> None:
        super().__init__(name, source.split, (1, 36, 36), source.classes, n_objects=2)
        self.source, self.spec, self.partners = source, spec, _Partners(source)
        self.shift = spec.shift_of(source.split)

    def __len__(self) -> int:
        return len(self.source) * self.spec.pairs

    def examples(self, index: Tensor, epoch: int = 0) -> Batch:
        """Return pairs: that of an index is the same in every epoch."""
        base, draws = index // self.spec.pairs, self.spec.draws(index, self.split)
        top = self.partners.draw(base, draws)
        own = self.spec.draws(base, self.split, use="base") if self.spec.preset == "official" else draws
        first = _moved(self.source.images[base], own, self.shift)
        second = _moved(self.source.images[top], draws, self.shift)
        labels = torch.stack([self.source.labels[base], self.source.labels[top]], dim=1)
        return Batch(_merged(first, second), labels, torch.stack([first, second], dim=1), index)


class _Diverse(Dataset):
    def __init__(self, name: str, source: ImageSet, spec: DiverseMultiMNIST) -> None:
        super().__init__(name, source.split, (1, 36, 36), source.classes, n_objects=None)
        self.source, self.spec, self.partners = source, spec, _Partners(source)

    def __len__(self) -> int:
        return len(self.source)

    def examples(self, index: Tensor, epoch: int = 0) -> Batch:
        """Return images with one or two digits."""
        draws = self.spec.draws(index, self.split, epoch if self.split == "train" else 0)
        alone = draws.bernoulli(self.spec.single)
        top = self.partners.draw(index, draws)
        first = _moved(self.source.images[index], draws, self.spec.shift)
        second = _moved(self.source.images[top], draws, self.spec.shift)
        second[alone] = 0
        numbers = torch.stack([self.source.labels[index], self.source.labels[top]], dim=1)
        labels = torch.zeros(len(index), self.n_classes)
        labels.scatter_(1, numbers[:, :1], 1.0)
        labels.scatter_(1, numbers[:, 1:], (~alone).float()[:, None])
        swapped = (numbers[:, 0] > numbers[:, 1]) & ~alone  # targets stand in the order of the classes
        targets = torch.stack([first, second], dim=1)
        targets[swapped] = targets[swapped].flip(1)
        return Batch(_merged(first, second), labels, targets, index)


class _Partners:
    """For each digit another one of a different class, all of them alike likely."""

    def __init__(self, source: ImageSet) -> None:
        if len(source.labels.unique()) < 2:
            raise ValueError(f"{source.name} has digits of one class only, and pairs need two")
        self.labels = source.labels
        self.by_class = source.labels.argsort(stable=True)
        self.count = torch.bincount(source.labels, minlength=source.n_classes)
        self.start = self.count.cumsum(0) - self.count

    def draw(self, base: Tensor, draws: CounterRNG) -> Tensor:
        """Return a partner for each base: one of those that are left when its own class is skipped."""
        own = self.labels[base]
        place = draws.integers(0, len(self.labels) - self.count[own] - 1)
        return self.by_class[torch.where(place < self.start[own], place, place + self.count[own])]


def _moved(digits: Tensor, draws: CounterRNG, most: int) -> Tensor:
    return placed(digits, draws.integers(-most, most), draws.integers(-most, most), 36, most)


def _merged(first: Tensor, second: Tensor) -> Tensor:
    """Return the sum of bytes, at most 255."""
    return first + torch.minimum(second, 255 - first)


register("multimnist", MultiMNIST())
register("multimnist-official", MultiMNIST(preset="official"))
register("diverse-multimnist", DiverseMultiMNIST())
