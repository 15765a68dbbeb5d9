"""Things of a user's own, named by import path, and small enough to train in a second."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from torchcaps.data import Dataset, DataSpec, ImageSet, LoadRequest, create_dataset
from torchcaps.models import Sabour2017


@dataclass(frozen=True)
class FewDigits(DataSpec):
    """Some of the embedded digits.

    Args:
        train, test: how many.
    """

    title: ClassVar[str] = "some of the embedded digits"

    train: int = 70
    test: int = 30

    def load(self, request: LoadRequest) -> Dataset:
        whole = create_dataset("digits", request.split)
        assert isinstance(whole, ImageSet)
        count = self.train if request.split == "train" else self.test
        # Every class, and not in the order of classes.
        places = torch.arange(count) * (len(whole) // max(1, count) // 2 * 2 + 1) % len(whole)
        chosen = whole.subset(places)
        return ImageSet("few", request.split, chosen.images, chosen.labels, chosen.classes)


DATA = "tests.training.own.FewDigits"


@dataclass(frozen=True, kw_only=True)
class Narrow(Sabour2017):
    """CapsNet with next to nothing in it."""

    width: int = 4
    types: int = 2
    primary_dim: int = 4
    dim: int = 4
    hidden: tuple[int, ...] = (8,)


MODEL = "tests.training.own.Narrow"
# With dropout and batch norm: Choi 2019, narrow.
CHOI = {"width": 4, "types": 2, "primary_dim": 4, "dim": 4, "hidden": (8,)}
