"""Data set classes: batches, map-style data sets, data set specifications and load requests."""

import operator
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from torchcaps._core.validation import check_fields
from torchcaps.data.storage import ArchiveMember, DataDirectory, RemoteFile, checksum_matches, data_root

__all__ = ["Batch", "DataSpec", "Dataset", "ImageSet", "ImageShape", "LoadRequest"]

ImageShape = tuple[int, int, int]  # channels, height, width
INDEX_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Batch(NamedTuple):
    """A batch of images with their labels and reconstruction targets.

    Args:
        images: ``[B, C, H, W]``; uint8 from a `Dataset`, float32 as the network sees them from a `Loader`.
        labels: class indices, ``[B]`` or ``[B, objects]``; multi-hot ``[B, classes]`` if the number of objects varies.
        targets: reconstruction targets of a decoder, in 0..1: the images after geometric transforms and before color
            transforms. With several objects per image ``[B, objects, C, H, W]``, each object alone, in the order of
            ``labels`` (multi-hot: in the order of the classes, blank if absent).
        indices: index of each image in its data set, ``[B]``.

    >>> import torch
    >>> images = torch.rand(2, 1, 28, 28)
    >>> batch = Batch(images, torch.tensor([3, 7]), images, torch.arange(2))
    >>> batch.to("cpu").labels
    tensor([3, 7])
    """

    images: Tensor
    labels: Tensor
    targets: Tensor
    indices: Tensor

    def to(self, device: torch.device | str) -> "Batch":
        """Return the batch on a device.

        If ``targets is images``, this stays so. ``indices`` are used by the host only and are not moved.
        """
        images = self.images.to(device)
        targets = images if self.targets is self.images else self.targets.to(device)
        return Batch(images, self.labels.to(device), targets, self.indices)


class Dataset(TorchDataset[tuple[Tensor, ...]]):
    """Base class of data sets: uint8 images by index. Subclasses define ``__len__`` and `get_batch`.

    Args:
        name: name of the data set.
        split: name of the split, such as ``"train"``.
        shape: channels, height and width of an image.
        classes: names of the classes.
        n_objects: number of objects per image; ``None`` if it varies, with multi-hot labels.

    Attributes:
        note: remark for the log of a training, such as the resizing of photographs; empty if there is none.

    This is also a map-style data set for torch's ``DataLoader``: ``dataset[i]`` is ``(image, label)`` with the image in
    0..1, and with several objects ``(image, labels, targets)``. It has no argument for the epoch: images that are
    generated anew in each epoch are those of epoch 0.

    >>> from torchcaps.data import create_dataset
    >>> digits = create_dataset("digits", "test")
    >>> isinstance(digits, Dataset), len(digits), digits[0][0].shape
    (True, 1000, torch.Size([1, 28, 28]))
    """

    def __init__(
        self, name: str, split: str, shape: ImageShape, classes: Sequence[str], n_objects: int | None = 1
    ) -> None:
        self.name = name
        self.split = split
        self.shape = shape
        self.n_objects = n_objects
        self.classes: tuple[str, ...] = tuple(classes)
        self.note = ""

    @property
    def n_classes(self) -> int:
        """Number of classes."""
        return len(self.classes)

    def __len__(self) -> int:
        raise NotImplementedError(f"{type(self).__name__} must define __len__")

    def get_batch(self, indices: Tensor, epoch: int = 0) -> Batch:
        """Return the images at ``indices`` ``[B]`` as uint8; ``epoch`` matters only if images are generated anew."""
        raise NotImplementedError(f"{type(self).__name__} must define get_batch")

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        try:
            index = operator.index(index)
        except TypeError as error:
            raise TypeError(f"index must be an int, got {index!r}; for several images use get_batch") from error
        if not -len(self) <= index < len(self):
            raise IndexError(f"index must be below {len(self):,}, the number of images of {self.name}, got {index}")
        batch = self.get_batch(torch.tensor([index % len(self)]))
        image, label = batch.images[0] / 255, batch.labels[0]
        return (image, label) if self.n_objects == 1 else (image, label, batch.targets[0] / 255)

    def subset(self, indices: Sequence[int] | Tensor, split: str | None = None) -> "Dataset":
        """Return a data set with some of the images.

        Args:
            indices: ints, or one bool per image.
            split: split name of the result; by default that of this data set.
        """
        return _Subset(self, self._as_indices(indices), self.split if split is None else split)

    def _as_indices(self, indices: Sequence[int] | Tensor) -> Tensor:
        """Return indices or a bool mask as an int64 tensor of valid indices, ``[N]``."""
        selected = torch.as_tensor(indices if isinstance(indices, Tensor) else list(indices))
        if selected.dtype == torch.bool and selected.shape == (len(self),):
            selected = selected.nonzero()[:, 0]
        if selected.ndim != 1 or (len(selected) and selected.dtype not in INDEX_DTYPES):
            raise ValueError(
                f"indices must be a list of ints or one bool for each of {len(self):,} images, "
                f"got {selected.dtype} of shape {list(selected.shape)}"
            )
        if len(selected) and not 0 <= int(selected.min()) <= int(selected.max()) < len(self):
            bounds = f"{int(selected.min())} to {int(selected.max())}"
            raise ValueError(f"indices of {self.name} must be in 0..{len(self) - 1}, got {bounds}")
        return selected.long()

    def __repr__(self) -> str:
        size = "x".join(map(str, self.shape))
        return f"<{self.name}, {self.split}: {len(self):,} images of {size}, {self.n_classes} classes>"


class ImageSet(Dataset):
    """A data set held in memory as a uint8 tensor.

    Args:
        name, split, classes: see `Dataset`.
        images: ``[N, C, H, W]``, uint8.
        labels: class indices, ``[N]``.
        metadata: further values per image, such as the azimuth, ``[N]`` each.

    >>> import torch
    >>> images = torch.randint(0, 256, (6, 1, 28, 28), dtype=torch.uint8)
    >>> ImageSet("shapes", "train", images, torch.arange(6) % 2, ["circle", "square"])
    <shapes, train: 6 images of 1x28x28, 2 classes>
    """

    def __init__(
        self,
        name: str,
        split: str,
        images: Tensor,
        labels: Tensor,
        classes: Sequence[str],
        metadata: Mapping[str, Tensor] | None = None,
    ) -> None:
        if images.dtype != torch.uint8 or images.ndim != 4:
            actual = f"{images.dtype} of shape {list(images.shape)}"
            raise ValueError(f"{name}: images must be torch.uint8 of shape [N, C, H, W], got {actual}")
        if labels.shape != images.shape[:1]:
            expected = f"one class index for each of {len(images):,} images"
            raise ValueError(f"{name}: labels must be {expected}, got shape {list(labels.shape)}")
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(classes):
            actual = f"{int(labels.min())} to {int(labels.max())}"
            raise ValueError(f"{name}: labels must be class indices 0 to {len(classes) - 1}, got {actual}")
        channels, height, width = images.shape[1:]
        super().__init__(name, split, (channels, height, width), classes)
        self.images = images
        self.labels: Tensor = labels.long()
        self.metadata: dict[str, Tensor] = dict(metadata or {})

    def __len__(self) -> int:
        return len(self.images)

    def get_batch(self, indices: Tensor, epoch: int = 0) -> Batch:
        """Return the images at ``indices`` ``[B]`` as uint8."""
        images = self.images[indices]
        return Batch(images, self.labels[indices], images, indices)

    def subset(self, indices: Sequence[int] | Tensor, split: str | None = None) -> "ImageSet":
        """Return a data set with some of the images, their labels and metadata; see `Dataset.subset`."""
        selected = self._as_indices(indices)
        metadata = {key: values[selected] for key, values in self.metadata.items()}
        split = self.split if split is None else split
        subset = ImageSet(self.name, split, self.images[selected], self.labels[selected], self.classes, metadata)
        subset.note = self.note
        return subset


class _Subset(Dataset):
    """Some images of a data set that is not held in memory."""

    def __init__(self, parent: Dataset, indices: Tensor, split: str) -> None:
        super().__init__(parent.name, split, parent.shape, parent.classes, parent.n_objects)
        self.parent, self.selected = parent, indices

    def __len__(self) -> int:
        return len(self.selected)

    def get_batch(self, indices: Tensor, epoch: int = 0) -> Batch:
        """Return the images at ``indices`` ``[B]`` of the subset as uint8."""
        return self.parent.get_batch(self.selected[indices], epoch)._replace(indices=indices)


@dataclass(frozen=True)
class LoadRequest:
    """Arguments of `DataSpec.load`.

    Args:
        name: name under which the data set was requested.
        split: which split to load.
        root: the data directory; ``None`` for the default, see `data_root`.
        download: download missing files.

    >>> from torchcaps.data import Digits
    >>> Digits().load(LoadRequest("digits", "test"))
    <digits, test: 1,000 images of 1x28x28, 10 classes>
    """

    name: str
    split: str = "train"
    root: str | os.PathLike[str] | None = None
    download: bool = True


@dataclass(frozen=True)
class DataSpec(ABC):
    """Specification of a data set. Subclasses define `load`; their fields are the options of the data set.

    Attributes:
        title: description in a few words, for tables.
        splits: names of the splits.
        split_sizes: published number of images of each split.
        shape: channels, height and width, if they do not depend on options or files.
        n_classes: number of classes, if it does not depend on options or files.
        subdirectories: directories below the data directory that may contain the files, as the official site and
            other libraries name them; downloads go to the first. Empty if the data set has no files of its own.
        default_splits: the splits that are downloaded and checked if none is named.

    >>> from torchcaps.data import MNIST
    >>> isinstance(MNIST(), DataSpec), MNIST(exclude_digits=True) == MNIST()
    (True, False)
    """

    title: ClassVar[str] = ""
    splits: ClassVar[tuple[str, ...]] = ("train", "test")
    split_sizes: ClassVar[Mapping[str, int]] = {}
    shape: ClassVar[ImageShape | None] = None
    n_classes: ClassVar[int | None] = 10
    subdirectories: ClassVar[tuple[str, ...]] = ()
    default_splits: ClassVar[tuple[str, ...]] = ("train", "test")

    def __post_init__(self) -> None:
        check_fields(self)
        self.check()

    def check(self) -> None:  # noqa: B027, most data sets need no checks beyond the annotations
        """Raise a ValueError if options are out of range or contradict each other."""

    @property
    def image_shape(self) -> ImageShape | None:
        """Channels, height and width of the images; ``None`` if files must be read to know."""
        return self.shape

    @property
    def made_from(self) -> str:
        """Name of the data set from whose images this one is generated; empty if it has files of its own."""
        return ""

    def n_images(self, split: str) -> int | None:
        """Return the published number of images of a split; ``None`` if there is none."""
        return self.split_sizes.get(split)

    def chance_accuracy(self) -> float | None:
        """Return the accuracy of a constant prediction if the classes are balanced; ``None`` if their number varies."""
        return None if self.n_classes is None else 1 / self.n_classes

    def describe_size_mismatch(self, request: LoadRequest, dataset: Dataset) -> str:
        """Return a message if the number of images differs from the published one, else an empty string."""
        expected = self.n_images(request.split)
        if expected is None or len(dataset) == expected:
            return ""
        return f"{request.name}: split {request.split!r} has {len(dataset):,} images, expected {expected:,}"

    def describe_checksum_mismatch(self, request: LoadRequest) -> str:
        """Return a message if a file of a split differs from the published one, else an empty string."""
        if not self.subdirectories or self.made_from:
            return ""
        directory = self.data_directory(request)
        for file in self.select_files(request.split, directory):
            path = directory.find(file)
            if path is None or path.name != PurePath(file.name).name:  # decompressed
                continue
            if file.checksum and not checksum_matches(path, file.checksum):
                return f"{request.name}: {path} differs from the published file: it has another checksum"
        return ""

    def files(self, split: str) -> tuple[RemoteFile | ArchiveMember, ...]:
        """Return the files of a split, in the format that is downloaded."""
        return ()

    def alternative_files(self, split: str) -> tuple[tuple[RemoteFile | ArchiveMember, ...], ...]:
        """Return sets of files, each of which is sufficient to load a split; preferred ones first."""
        return (self.files(split),)

    def select_files(self, split: str, directory: DataDirectory) -> tuple[RemoteFile | ArchiveMember, ...]:
        """Return the set of files to read: the first that exists (extracted before archived), else `files`."""
        alternatives = self.alternative_files(split)
        extracted = [files for files in alternatives if all(directory.find(file) is not None for file in files)]
        available = [files for files in alternatives if all(directory.is_available(file) for file in files)]
        return next(iter(extracted + available), self.files(split))

    def data_directory(self, request: LoadRequest) -> DataDirectory:
        """Return the directories that contain, or will contain, the files."""
        alternatives = (files for split in self.splits for files in self.alternative_files(split))
        members = (file for files in alternatives for file in files if isinstance(file, ArchiveMember))
        checksums = {member.name: member.checksum for member in members if member.checksum}
        return DataDirectory(request.name, data_root(request.root), self.subdirectories, request.download, checksums)

    @abstractmethod
    def load(self, request: LoadRequest) -> Dataset:
        """Load a split."""
