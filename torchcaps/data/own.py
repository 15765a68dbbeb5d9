"""Data of your own: tensors, torch data sets and DataLoaders, as data sets and batches of the training engine.

Images are bytes (uint8, scaled to 0..1) or floating-point numbers, which the network gets unchanged. Labels are class
indices. Everything that can be known without loading all images is checked on construction.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset
from torch.utils.data import Dataset as TorchDataset

from torchcaps._core.labels import INTEGER_DTYPES
from torchcaps.data.base import Batch, Dataset, ImageShape
from torchcaps.data.pipelines import Pipeline
from torchcaps.data.storage import DataError

__all__ = ["DataLoaderBatches", "DataLoaderImages", "TensorImages", "TorchImages", "as_dataset", "class_names_of"]

MAX_CLASSES = 100_000  # a larger label is not a class index


class TensorImages(Dataset):
    """Images and labels in memory.

    Args:
        images: ``[N, C, H, W]``, uint8 or floating-point.
        labels: class indices, ``[N]``.
        classes: names of the classes.
        name: name of the data, for messages.
        split: name of the split.

    >>> TensorImages(torch.rand(6, 1, 28, 28), torch.arange(6) % 3, ["a", "b", "c"])
    <tensors, train: 6 images of 1x28x28, 3 classes>
    """

    def __init__(
        self, images: Tensor, labels: Tensor, classes: Sequence[str], name: str = "tensors", split: str = "train"
    ) -> None:
        check_images(images, f"{split} images")
        check_labels(labels, len(images), len(classes), f"{split} labels")
        super().__init__(name, split, _shape_of(images), classes)
        self.images, self.labels = images.detach(), labels.long()  # a graph would be freed by the first step

    def __len__(self) -> int:
        return len(self.images)

    def get_batch(self, indices: Tensor, epoch: int = 0) -> Batch:
        """Return the images at ``indices`` ``[B]``."""
        images = self.images[indices]
        return Batch(images, self.labels[indices], images, indices)

    def subset(self, indices: Sequence[int] | Tensor, split: str | None = None) -> "TensorImages":
        """Return a data set with some of the images; see `Dataset.subset`."""
        selected, split = self._as_indices(indices), self.split if split is None else split
        return TensorImages(self.images[selected], self.labels[selected], self.classes, self.name, split)


class TorchImages(Dataset):
    """A map-style torch data set whose items are pairs of image ``[C, H, W]`` and class index.

    Args:
        dataset: the data set. For exact resume, ``dataset[i]`` must not depend on random numbers.
        classes: names of the classes.
        split: name of the split.
    """

    def __init__(self, dataset: TorchDataset[Any], classes: Sequence[str], split: str = "train") -> None:
        image, _ = _read_item(dataset, 0, split)
        super().__init__(type(dataset).__name__, split, _shape_of(image[None]), classes)
        self.dataset, self._size = dataset, len(dataset)  # type: ignore[arg-type]
        self._dtype = image.dtype

    def __len__(self) -> int:
        return self._size

    def get_batch(self, indices: Tensor, epoch: int = 0) -> Batch:
        """Return the images at ``indices`` ``[B]``."""
        items = [_read_item(self.dataset, index, self.split) for index in indices.tolist()]
        for index, (image, label) in zip(indices.tolist(), items, strict=True):
            if tuple(image.shape) != self.shape or image.dtype != self._dtype:
                raise DataError(
                    f"item {index} of the {self.split} data must be an image of shape {list(self.shape)} and "
                    f"{self._dtype} like the first one, got {list(image.shape)} and {image.dtype}"
                )
            if not 0 <= label < self.n_classes:
                raise DataError(
                    f"item {index} of the {self.split} data must have a label in 0..{self.n_classes - 1}, got {label}"
                )
        if not items:
            empty = torch.empty(0, *self.shape, dtype=self._dtype)
            return Batch(empty, indices.new_empty(0), empty, indices)
        images = torch.stack([image for image, _ in items])
        return Batch(images, torch.tensor([label for _, label in items]), images, indices)


class DataLoaderImages(Dataset):
    """The images of a DataLoader, which decides about their order and batches; see `DataLoaderBatches`.

    Args:
        loader: the DataLoader, with batches of images ``[B, C, H, W]`` and class indices ``[B]``.
        classes: names of the classes.
        split: name of the split.
    """

    def __init__(self, loader: DataLoader[Any], classes: Sequence[str], split: str = "train") -> None:
        images, _ = read_batch(next(iter(loader)), 0, split)
        super().__init__("DataLoader", split, _shape_of(images), classes)
        self.loader, self.batch_size, self._size = loader, loader.batch_size or len(images), _count_images(loader)

    def __len__(self) -> int:
        return self._size

    def batches(self) -> Iterator[Batch]:
        """Yield the batches of one pass; the index of an image is its position in this pass."""
        start = 0
        for number, batch in enumerate(self.loader):
            images, labels = read_batch(batch, number, self.split)
            if _shape_of(images) != self.shape:
                raise DataError(
                    f"batch {number} of the {self.split} data must have images of shape {list(self.shape)} like the "
                    f"first one, got {list(images.shape[1:])}"
                )
            check_labels(labels, len(images), self.n_classes, f"labels in batch {number} of the {self.split} data")
            yield Batch(images, labels.long(), images, torch.arange(start, start + len(images)))
            start += len(images)

    def get_batch(self, indices: Tensor, epoch: int = 0) -> Batch:
        """Return the images at ``indices`` ``[B]`` of one pass; loads all batches."""
        parts = []
        for batch in self.batches():
            inside = torch.isin(batch.indices, indices)
            parts.append((batch.images[inside], batch.labels[inside], batch.indices[inside]))
        images, labels, found = (torch.cat(part) for part in zip(*parts, strict=True))
        order = torch.searchsorted(found, indices)  # positions in a pass ascend
        return Batch(images[order], labels[order], images[order], indices)

    def subset(self, indices: Sequence[int] | Tensor, split: str | None = None) -> TensorImages:
        """Return some images of one pass as tensors; loads all batches."""
        batch = self.get_batch(self._as_indices(indices))
        return TensorImages(batch.images, batch.labels, self.classes, self.name, self.split if split is None else split)


class DataLoaderBatches:
    """Batches of a DataLoader with the interface of `torchcaps.data.Loader`, for one process.

    A run that is resumed in the middle of an epoch skips as many batches as it has seen. The DataLoader draws its order
    anew, so the result is not bit-equal to that of an uninterrupted run.

    Args:
        dataset: the images of the DataLoader.
        pipeline: transforms.
        train: apply the pipeline's training transforms.
        seed: seed of the transforms.
        device: device of the batches.
    """

    def __init__(
        self,
        dataset: DataLoaderImages,
        pipeline: Pipeline,
        train: bool,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.dataset, self.pipeline, self.train, self.seed = dataset, pipeline, train, seed
        self.device, self.batch_size = torch.device(device), dataset.batch_size
        self.shape: ImageShape = pipeline.output_shape(dataset.shape, train)

    def __len__(self) -> int:
        """Number of batches per epoch."""
        return len(self.dataset.loader)

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches per epoch."""
        return len(self)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Iterate over the batches of an epoch, starting with batch ``start``."""
        count = 0
        for batch in self.dataset.batches():
            if start <= count < len(self):
                yield self.pipeline(batch.to(self.device), self.seed, epoch, self.train)
            count += 1
        if count < len(self):
            raise DataError(
                f"the DataLoader of the {self.dataset.split} data must yield len(loader) = {len(self)} batches, "
                f"got {count}"
            )

    def batch(self, epoch: int, batch_index: int) -> Batch:
        """Return one batch of an epoch."""
        return next(self.epoch(epoch, batch_index))


# Conversion ---------------------------------------------------------------------------------------------------------


def as_dataset(value: Any, split: str, classes: Sequence[str]) -> Dataset:
    """Return tensors ``(images, labels)``, a torch data set or a DataLoader as a data set.

    Args:
        value: the data.
        split: name of the split, for messages.
        classes: names of the classes.
    """
    if isinstance(value, Dataset):
        return value
    if isinstance(value, DataLoader):
        return DataLoaderImages(value, classes, split)
    if isinstance(value, TensorDataset):
        value = value.tensors
    if isinstance(value, TorchDataset):
        return TorchImages(value, classes, split)
    images, labels = _as_pair(value, split)
    return TensorImages(images, labels, classes, split=split)


def class_names_of(value: Any, split: str, n_classes: int | None = None) -> tuple[str, ...]:
    """Return the names of the classes of training data, or their indices if it has no names.

    Args:
        value: as for `as_dataset`.
        split: name of the split, for messages.
        n_classes: number of classes; default: that of the names, otherwise the largest label plus 1. To know it, all
            items of a data set without ``targets`` are loaded once.
    """
    if isinstance(value, Dataset):
        return value.classes
    check_not_empty(value, split)
    names = _known_names(value)
    if n_classes is None:
        n_classes = len(names) if names else _count_classes(value, split)
    return names if len(names) == n_classes else tuple(map(str, range(n_classes)))


def check_not_empty(value: Any, split: str) -> None:
    """Raise if data has no length or no items, or is not data at all."""
    if isinstance(value, DataLoader | TorchDataset):
        kind = type(value).__name__
        iterable = isinstance(value.dataset if isinstance(value, DataLoader) else value, IterableDataset)
        if iterable or not hasattr(value, "__len__"):
            raise TypeError(
                f"{split} must have a length, which an iterable data set has not, got {kind}: use a map-style data set "
                "with __len__ and __getitem__"
            )
        if not len(value):  # type: ignore[arg-type]
            raise ValueError(f"{split} must contain at least one image, got an empty {kind}")
    else:
        images, _ = _as_pair(value, split)
        if not len(images):
            raise ValueError(f"{split} must contain at least one image, got tensors of length 0")


def check_images(images: Tensor, name: str) -> None:
    """Raise if images are not ``[N, C, H, W]``, of another dtype than uint8 or floats, or not finite."""
    if images.ndim != 4:
        hint = ": add the channel axis by images.unsqueeze(1)" if images.ndim == 3 else ""
        raise ValueError(f"{name} must be [N, C, H, W], got {list(images.shape)}{hint}")
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise TypeError(f"{name} must be torch.uint8 or floating-point, got {images.dtype}")
    if 0 in images.shape[1:]:
        raise ValueError(f"{name} must have at least one channel and pixel, got {list(images.shape)}")
    if images.shape[-1] in (1, 3) and images.shape[1] > 4:
        raise ValueError(
            f"{name} must be [N, C, H, W] with the channels first, got {list(images.shape)}: use "
            "images.permute(0, 3, 1, 2)"
        )
    if images.is_floating_point() and not bool(torch.isfinite(images).all()):
        n_bad = int((~torch.isfinite(images)).sum())
        raise ValueError(f"{name} must be finite, got {n_bad:,} NaN or infinite of {images.numel():,} values")


def check_labels(labels: Tensor, n_images: int, n_classes: int, name: str) -> None:
    """Raise if labels are not one class index in ``0..n_classes - 1`` for each image."""
    if labels.ndim == 2:
        raise ValueError(f"{name} must be class indices [N], got {list(labels.shape)}: for one-hot rows use .argmax(1)")
    if labels.ndim != 1 or len(labels) != n_images:
        raise ValueError(f"{name} must be one class index for each of {n_images:,} images, got {list(labels.shape)}")
    if labels.dtype not in INTEGER_DTYPES:
        raise TypeError(f"{name} must be integers (torch.int64), got {labels.dtype}")
    if len(labels):
        low, high = int(labels.min()), int(labels.max())
        if low < 0:
            raise ValueError(f"{name} must be class indices, at least 0, got {low}")
        if high >= n_classes:
            raise ValueError(f"{name} must be class indices in 0..{n_classes - 1}, got {high}")


def read_batch(batch: Any, number: int, split: str) -> tuple[Tensor, Tensor]:
    """Return images and labels of a batch of a DataLoader; raise if it is not such a pair."""
    is_pair = isinstance(batch, tuple | list) and len(batch) == 2
    if not is_pair or not all(isinstance(part, Tensor) for part in batch):
        raise TypeError(
            f"batch {number} of the {split} data must be a pair of tensors (images, labels), got {_describe(batch)}"
        )
    images, labels = batch
    check_images(images, f"images in batch {number} of the {split} data")
    return images.detach(), labels


def _as_pair(value: Any, split: str) -> tuple[Tensor, Tensor]:
    """Return a pair of tensors or arrays as tensors."""
    is_pair = isinstance(value, tuple | list) and len(value) == 2
    if not is_pair or not all(isinstance(part, Tensor) or hasattr(part, "__array__") for part in value):
        raise TypeError(
            f"{split} must be tensors (images, labels), a torch Dataset, a DataLoader, or a data set of torchcaps (a "
            f"name or spec), got {_describe(value)}"
        )
    images, labels = (torch.as_tensor(part) for part in value)
    return images, labels


def _read_item(dataset: TorchDataset[Any], index: int, split: str) -> tuple[Tensor, int]:
    """Return image and label of an item; raise if it is not such a pair."""
    item = dataset[index]
    if not isinstance(item, tuple | list) or len(item) != 2 or not isinstance(item[0], Tensor):
        hint = "" if not isinstance(item, tuple | list) or len(item) != 2 else ": convert images to tensors"
        raise TypeError(
            f"item {index} of the {split} data must be a pair of an image tensor [C, H, W] and a class index, got "
            f"{_describe(item)}{hint}"
        )
    image, label = item
    check_images(image[None] if image.ndim else image, f"item {index} of the {split} data, with the axis N,")
    if isinstance(label, bool) or not hasattr(label, "__index__"):
        raise TypeError(f"item {index} of the {split} data must have an int as label, got {_describe(label)}")
    return image.detach(), int(label)


def _labels_of(value: Any, split: str) -> Iterable[Any]:
    """Return or yield the labels of data, from its attributes or, if it has none, from all of its items."""
    if isinstance(value, DataLoader):
        names = (name for name in ("targets", "labels", "tensors") if hasattr(value.dataset, name))
        if isinstance(value.dataset, TensorDataset | Subset) or next(names, None):
            return _labels_of(value.dataset, split)
        return (label for n, batch in enumerate(value) for label in read_batch(batch, n, split)[1].tolist())
    if isinstance(value, Subset):
        labels = _labels_of(value.dataset, split)
        known = labels if isinstance(labels, Tensor | list) else list(labels)
        return torch.as_tensor(known)[torch.as_tensor(value.indices)]
    if isinstance(value, TensorDataset):
        return _as_pair(value.tensors, split)[1]
    if isinstance(value, TorchDataset):
        for name in ("targets", "labels"):
            labels = getattr(value, name, None)
            if isinstance(labels, Tensor | list | tuple) or hasattr(labels, "__array__"):
                return torch.as_tensor(labels)
        return (_read_item(value, index, split)[1] for index in range(len(value)))  # type: ignore[arg-type]
    return _as_pair(value, split)[1]


def _count_classes(value: Any, split: str) -> int:
    """Return the largest label plus 1, at least 2."""
    found = _labels_of(value, split)
    labels = found if isinstance(found, Tensor) else torch.tensor(list(found))
    check_labels(labels, len(labels), MAX_CLASSES, f"{split} labels")
    return max(2, int(labels.max()) + 1)


def _known_names(value: Any) -> tuple[str, ...]:
    """Return the class names of a torchvision-style data set, its attribute ``classes``; empty without it."""
    while isinstance(value, DataLoader | Subset):
        value = value.dataset
    names = getattr(value, "classes", None)
    return tuple(names) if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names) else ()


def _count_images(loader: DataLoader[Any]) -> int:
    """Return the number of images of one pass; loads all batches if a sampler of batches decides about it."""
    if loader.batch_size is None or not hasattr(loader.sampler, "__len__"):
        return sum(len(batch[1]) for batch in loader)
    n_images = len(loader.sampler)  # type: ignore[arg-type]
    return n_images // loader.batch_size * loader.batch_size if loader.drop_last else n_images


def _shape_of(images: Tensor) -> ImageShape:
    """Return channels, height and width of images ``[B, C, H, W]``."""
    channels, height, width = images.shape[1:]
    return channels, height, width


def _describe(value: Any) -> str:
    """Describe a value by its type, shape, or the types of its parts."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    if isinstance(value, tuple | list) and 0 < len(value) <= 4:
        return f"{type(value).__name__} of {', '.join(type(part).__name__ for part in value)}"
    if isinstance(value, float) and math.isfinite(value):
        return repr(value)
    return type(value).__name__
