"""What one chooses when choosing a data set."""

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torchcaps._core.validation import check_fields
from torchcaps.data.base import Dataset
from torchcaps.data.storage import File, Member, Place, data_root

__all__ = ["DataSpec", "Request"]


@dataclass(frozen=True)
class Request:
    """Which data set is wanted, and from where.

    Args:
        name: what it was asked for by.
        split: which part of it.
        root: the data folder, or ``None`` for the usual one.
        download: whether missing files are fetched.
    """

    name: str
    split: str = "train"
    root: str | os.PathLike[str] | None = None
    download: bool = True


@dataclass(frozen=True)
class DataSpec(ABC):
    """A data set that can be chosen; subclasses are data sets, their fields its options.

    Attributes:
        title: what it is, in a few words.
        splits: its parts.
        counts: how many images each part has by the book.
        shape: channels, height and width, where they are always the same.
        n_classes: how many classes, where it is always the same.
        folders: where its files lie below the data folder, as their site, or another library, puts them.
        fetched: the parts that are fetched when none is named.
    """

    title: ClassVar[str] = ""
    splits: ClassVar[tuple[str, ...]] = ("train", "test")
    counts: ClassVar[Mapping[str, int]] = {}
    shape: ClassVar[tuple[int, int, int] | None] = None
    n_classes: ClassVar[int | None] = 10
    folders: ClassVar[tuple[str, ...]] = ()
    fetched: ClassVar[tuple[str, ...]] = ("train", "test")

    def __post_init__(self) -> None:
        check_fields(self)
        self.check()

    def check(self) -> None:  # noqa: B027, most have nothing to refuse
        """Refuse options that make no sense."""

    @property
    def image(self) -> tuple[int, int, int] | None:
        """Channels, height and width of its images, where the files need not be read to know."""
        return self.shape

    @property
    def made_from(self) -> str:
        """The name of the data set whose images this one is made of; empty for those with files of their own."""
        return ""

    def length(self, split: str) -> int | None:
        """Return how many images a part has by the book."""
        return self.counts.get(split)

    def count_problem(self, request: Request, dataset: Dataset) -> str:
        """Return what is wrong with the number of images that were read: nothing, or a sentence."""
        wanted = self.length(request.split)
        if wanted is None or len(dataset) == wanted:
            return ""
        counts = f"{len(dataset):,} images, it should have {wanted:,}"
        return f"{request.name}: the split {request.split!r} has {counts}"

    def parts(self, split: str) -> tuple[File | Member, ...]:
        """Return the files that a part needs, in the form in which they are fetched."""
        return ()

    def forms(self, split: str) -> tuple[tuple[File | Member, ...], ...]:
        """Return the forms that a part can be read from, the one that is preferred first."""
        return (self.parts(split),)

    def chosen(self, split: str, place: Place) -> tuple[File | Member, ...]:
        """Return the files to read: those of the first form that is there, else those that are to be fetched."""
        forms = self.forms(split)
        unpacked = [form for form in forms if all(place.find(part) is not None for part in form)]
        packed = [form for form in forms if all(place.has(part) for part in form)]
        return next(iter(unpacked + packed), self.parts(split))

    def place(self, request: Request) -> Place:
        """Return where its files lie."""
        return Place(request.name, data_root(request.root), self.folders, request.download)

    @abstractmethod
    def load(self, request: Request) -> Dataset:
        """Read it."""
