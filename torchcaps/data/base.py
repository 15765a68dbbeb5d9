"""What a data set is: bytes and labels by index."""

import operator
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from torchcaps.data.batch import Batch

__all__ = ["Dataset", "ImageSet"]


class Dataset(TorchDataset[tuple[Tensor, ...]]):
    """Images by index, in bytes; subclasses say which.

    Args:
        name, split: what it was made by.
        shape: channels, height and width of an image.
        classes: the names of the classes.
        n_objects: objects in an image; ``None``: any number, and labels are zeros and ones.

    It is an ordinary map-style data set too: ``dataset[i]`` is ``(image, label)`` with the image in 0..1, and for
    several objects ``(image, labels, targets)``, so that torch's own ``DataLoader`` takes it. That one knows nothing of
    epochs: images that are made anew in every epoch are those of epoch 0.
    """

    def __init__(
        self, name: str, split: str, shape: tuple[int, int, int], classes: Sequence[str], n_objects: int | None = 1
    ) -> None:
        self.name, self.split, self.shape, self.n_objects = name, split, shape, n_objects
        self.classes = tuple(classes)

    @property
    def n_classes(self) -> int:
        """How many classes there are."""
        return len(self.classes)

    def __len__(self) -> int:
        raise TypeError(f"{type(self).__name__} does not say how long it is")

    def examples(self, index: Tensor, epoch: int = 0) -> Batch:
        """Return images in bytes; sets that are made anew in every epoch look at it, the others don't."""
        raise TypeError(f"{type(self).__name__} does not say what its images are")

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        try:
            index = operator.index(index)
        except TypeError as error:
            raise TypeError(
                f"index must be a whole number, got {index!r}; examples(indices) returns several"
            ) from error
        if not -len(self) <= index < len(self):
            raise IndexError(f"{self.name} has {len(self):,} images, got index {index}")
        batch = self.examples(torch.tensor([index % len(self)]))
        image, label = batch.images[0] / 255, batch.labels[0]
        return (image, label) if self.n_objects == 1 else (image, label, batch.targets[0] / 255)

    def subset(self, indices: Sequence[int] | Tensor, split: str | None = None) -> "Dataset":
        """Return the images at some places as a data set of their own, under another split's name if you like.

        Args:
            indices: whole numbers, or a truth value for each image.
            split: the name.
        """
        return _Subset(self, self._places(indices), self.split if split is None else split)

    def _places(self, indices: Sequence[int] | Tensor) -> Tensor:
        """Return which images are meant, ``[N]``."""
        places = torch.as_tensor(indices if isinstance(indices, Tensor) else list(indices))
        if places.dtype == torch.bool and places.shape == (len(self),):
            places = places.nonzero()[:, 0]
        whole = places.dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
        if places.ndim != 1 or (len(places) and not whole):
            found = f"{places.dtype} of {list(places.shape)}"
            raise ValueError(f"indices must be a list of whole numbers, or a truth value for each image, got {found}")
        if len(places) and not 0 <= int(places.min()) <= int(places.max()) < len(self):
            raise ValueError(f"indices must lie in 0..{len(self) - 1}, the images of {self.name}")
        return places.long()

    def __repr__(self) -> str:
        size = "x".join(map(str, self.shape))
        return f"<{self.name}, {self.split}: {len(self):,} images of {size}, {self.n_classes} classes>"


class ImageSet(Dataset):
    """Images that are stored: one byte a pixel and channel, as in the files.

    Args:
        images: ``[N, C, H, W]``, uint8.
        labels: ``[N]``, class numbers.
        info: what else is known of each image, such as its azimuth, ``[N]`` each.
    """

    def __init__(
        self,
        name: str,
        split: str,
        images: Tensor,
        labels: Tensor,
        classes: Sequence[str],
        info: Mapping[str, Tensor] | None = None,
    ) -> None:
        if images.dtype != torch.uint8 or images.ndim != 4:
            found = f"{images.dtype} of {list(images.shape)}"
            raise ValueError(f"{name}: images must be bytes (torch.uint8) of [N, C, H, W], got {found}")
        if labels.shape != images.shape[:1]:
            raise ValueError(
                f"{name}: labels must be one number for each of {len(images):,} images, got {list(labels.shape)}"
            )
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(classes):
            found = f"{int(labels.min())} to {int(labels.max())}"
            raise ValueError(f"{name}: labels must be 0 to {len(classes) - 1}, one for each class, got {found}")
        channels, height, width = images.shape[1:]
        super().__init__(name, split, (channels, height, width), classes)
        self.images, self.labels = images, labels.long()
        self.info = dict(info or {})

    def __len__(self) -> int:
        return len(self.images)

    def examples(self, index: Tensor, epoch: int = 0) -> Batch:
        """Return images in bytes."""
        images = self.images[index]
        return Batch(images, self.labels[index], images, index)

    def subset(self, indices: Sequence[int] | Tensor, split: str | None = None) -> "ImageSet":
        """Return the images at some places, with their labels and what else is known of them."""
        places = self._places(indices)
        info = {key: values[places] for key, values in self.info.items()}
        split = self.split if split is None else split
        return ImageSet(self.name, split, self.images[places], self.labels[places], self.classes, info)


class _Subset(Dataset):
    """Some images of a data set."""

    def __init__(self, whole: Dataset, indices: Tensor, split: str) -> None:
        super().__init__(whole.name, split, whole.shape, whole.classes, whole.n_objects)
        self.whole, self.chosen = whole, indices

    def __len__(self) -> int:
        return len(self.chosen)

    def examples(self, index: Tensor, epoch: int = 0) -> Batch:
        """Return images in bytes."""
        return self.whole.examples(self.chosen[index], epoch)._replace(indices=index)
