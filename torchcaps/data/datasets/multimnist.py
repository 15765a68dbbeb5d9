"""MultiMNIST and DiverseMultiMNIST: overlapping digits.

Images are generated on access from the digits of the same split of their source: training images contain training
digits only, test images test digits only.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from torchcaps._core.random import CounterRNG
from torchcaps._core.validation import check_range
from torchcaps.data.base import Batch, Dataset, ImageSet, ImageShape
from torchcaps.data.datasets.generated import GeneratedFromDigits, place_on_canvas
from torchcaps.data.registry import register_dataset

__all__ = ["DiverseMultiMNIST", "MultiMNIST"]

CANVAS = 36
N_CLASSES = 10  # of every source


@dataclass(frozen=True)
class MultiMNIST(GeneratedFromDigits):
    """MultiMNIST (Sabour 2017, section 6.1): two overlapping digits of different classes on a 36x36 canvas.

    Each digit of the source is the base of 1,000 images, each with another digit of a different class. Both are shifted
    by up to four pixels in each direction, and their bytes are added and clipped at 255. This gives 60 million training
    and 10 million test images. ``targets`` are the two shifted digits, each alone, in the order of the labels.

    The paper reports an average overlap of the bounding boxes of 80 %. This holds for the 28x28 boxes of the digits;
    the smaller bounding boxes of their ink overlap by 72 %.

    Args:
        preset: ``"paper"``, or ``"official"`` for the authors' generator: training digits are shifted by up to six
            pixels and clipped at the border, and a base has the same position in all of its images.
        max_shift: maximum shift in pixels; ``None``: 4, or 6 for the training split of ``"official"``.
        pairs_per_digit: number of images per base digit.

    Deviation: the authors' generator draws the partners of a base without replacement, here with replacement.

    >>> from torchcaps.data import LoadRequest
    >>> MultiMNIST(source="digits", pairs_per_digit=2).load(LoadRequest("pairs", "test"))
    <pairs, test: 2,000 images of 1x36x36, 10 classes>
    """

    stream: ClassVar[str] = "MultiMNIST"

    title: ClassVar[str] = "two overlapping digits on 36x36"
    shape: ClassVar[ImageShape | None] = (1, CANVAS, CANVAS)

    preset: Literal["paper", "official"] = "paper"
    max_shift: int | None = None
    pairs_per_digit: int = 1000

    def check(self) -> None:
        """Raise a ValueError if options are out of range."""
        super().check()
        check_range(self, "max_shift", 0, CANVAS)
        check_range(self, "pairs_per_digit", 1)

    def max_shift_of(self, split: str) -> int:
        """Return the maximum shift in pixels in a split."""
        if self.max_shift is not None:
            return self.max_shift
        return 6 if self.preset == "official" and split == "train" else 4

    def chance_accuracy(self) -> float:
        """Return the accuracy of a constant pair of classes."""
        return 1 / math.comb(N_CLASSES, 2)

    def generate(self, name: str, source: ImageSet) -> Dataset:
        """Return the data set ``name``, with images generated from those of ``source``."""
        return _DigitPairs(name, source, self)


@dataclass(frozen=True)
class DiverseMultiMNIST(GeneratedFromDigits):
    """DiverseMultiMNIST (Tsai 2020, appendix B.2): one digit with probability 1/6, otherwise two overlapping digits of
    different classes, on a 36x36 canvas, each shifted by up to four pixels. Labels are multi-hot.

    Training images are generated anew in each epoch, as many as the source has; test images are fixed.

    Args:
        single_probability: probability of a single digit.
        max_shift: maximum shift in pixels.

    >>> from torchcaps.data import LoadRequest
    >>> DiverseMultiMNIST(source="digits").load(LoadRequest("diverse", "test"))
    <diverse, test: 1,000 images of 1x36x36, 10 classes>
    """

    stream: ClassVar[str] = "DiverseMultiMNIST"

    title: ClassVar[str] = "one digit or two overlapping digits on 36x36"
    shape: ClassVar[ImageShape | None] = (1, CANVAS, CANVAS)

    single_probability: float = 1 / 6
    max_shift: int = 4

    def check(self) -> None:
        """Raise a ValueError if options are out of range."""
        super().check()
        check_range(self, "single_probability", 0, 1)
        check_range(self, "max_shift", 0, CANVAS)

    def chance_accuracy(self) -> float:
        """Return the accuracy of a constant set of classes: a single digit or a pair."""
        return max(self.single_probability / N_CLASSES, (1 - self.single_probability) / math.comb(N_CLASSES, 2))

    def generate(self, name: str, source: ImageSet) -> Dataset:
        """Return the data set ``name``, with images generated from those of ``source``."""
        return _OneOrTwoDigits(name, source, self)


class _DigitPairs(Dataset):
    """Images of MultiMNIST, generated on access."""

    def __init__(self, name: str, source: ImageSet, spec: MultiMNIST) -> None:
        super().__init__(name, source.split, (1, CANVAS, CANVAS), source.classes, n_objects=2)
        self.source, self.spec, self.partners = source, spec, _PartnerSampler(source)
        self.max_shift = spec.max_shift_of(source.split)

    def __len__(self) -> int:
        return len(self.source) * self.spec.pairs_per_digit

    def get_batch(self, indices: Tensor, epoch: int = 0) -> Batch:
        """Return the images at ``indices`` ``[B]`` as uint8, the same in each epoch."""
        base, rng = indices // self.spec.pairs_per_digit, self.spec.create_rng(indices, self.split)
        partner = self.partners.sample(base, rng)
        official = self.spec.preset == "official"
        base_rng = self.spec.create_rng(base, self.split, purpose="base") if official else rng
        first = _shift_randomly(self.source.images[base], base_rng, self.max_shift)
        second = _shift_randomly(self.source.images[partner], rng, self.max_shift)
        labels = torch.stack([self.source.labels[base], self.source.labels[partner]], dim=1)
        return Batch(_add_clipped(first, second), labels, torch.stack([first, second], dim=1), indices)


class _OneOrTwoDigits(Dataset):
    """Images of DiverseMultiMNIST, generated on access."""

    def __init__(self, name: str, source: ImageSet, spec: DiverseMultiMNIST) -> None:
        super().__init__(name, source.split, (1, CANVAS, CANVAS), source.classes, n_objects=None)
        self.source, self.spec, self.partners = source, spec, _PartnerSampler(source)

    def __len__(self) -> int:
        return len(self.source)

    def get_batch(self, indices: Tensor, epoch: int = 0) -> Batch:
        """Return the images at ``indices`` ``[B]`` as uint8; those of the training split depend on the epoch."""
        rng = self.spec.create_rng(indices, self.split, epoch if self.split == "train" else 0)
        single = rng.bernoulli(self.spec.single_probability)
        partner = self.partners.sample(indices, rng)
        first = _shift_randomly(self.source.images[indices], rng, self.spec.max_shift)
        second = _shift_randomly(self.source.images[partner], rng, self.spec.max_shift)
        second[single] = 0
        class_indices = torch.stack([self.source.labels[indices], self.source.labels[partner]], dim=1)
        labels = torch.zeros(len(indices), self.n_classes)
        labels.scatter_(1, class_indices[:, :1], 1.0)
        labels.scatter_(1, class_indices[:, 1:], (~single).float()[:, None])
        swapped = (class_indices[:, 0] > class_indices[:, 1]) & ~single  # targets are in the order of the classes
        targets = torch.stack([first, second], dim=1)
        targets[swapped] = targets[swapped].flip(1)
        return Batch(_add_clipped(first, second), labels, targets, indices)


class _PartnerSampler:
    """Sampler of a digit of a different class for each digit, uniform over all such digits."""

    def __init__(self, source: ImageSet) -> None:
        if len(source.labels.unique()) < 2:
            raise ValueError(f"pairs need digits of at least two classes, but {source.name} has one class only")
        self.labels = source.labels
        self.by_class = source.labels.argsort(stable=True)
        self.count = torch.bincount(source.labels, minlength=source.n_classes)
        self.start = self.count.cumsum(0) - self.count

    def sample(self, base: Tensor, rng: CounterRNG) -> Tensor:
        """Return the index of a partner for each base, ``[B]``."""
        base_class = self.labels[base]
        # a position in the list sorted by class, counted without the digits of the base's class
        position = rng.integers(0, len(self.labels) - self.count[base_class] - 1)
        before = position < self.start[base_class]
        return self.by_class[torch.where(before, position, position + self.count[base_class])]


def _shift_randomly(digits: Tensor, rng: CounterRNG, max_shift: int) -> Tensor:
    down, right = rng.integers(-max_shift, max_shift), rng.integers(-max_shift, max_shift)
    return place_on_canvas(digits, down, right, CANVAS, max_shift)


def _add_clipped(first: Tensor, second: Tensor) -> Tensor:
    """Return the sum of bytes, clipped at 255."""
    return first + torch.minimum(second, 255 - first)


register_dataset("multimnist", MultiMNIST())
register_dataset("multimnist-official", MultiMNIST(preset="official"))
register_dataset("diverse-multimnist", DiverseMultiMNIST())
