"""What a data set is: bytes and labels by index."""

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
        if not isinstance(index, int):
            raise TypeError(f"index must be a whole number, got {index!r}; examples(indices) returns several")
        if not -len(self) <= index < len(self):
            raise IndexError(f"{self.name} has {len(self):,} images, got index {index}")
        batch = self.examples(torch.tensor([index % len(self)]))
        image, label = batch.images[0] / 255, batch.labels[0]
        return (image, label) if self.n_objects == 1 else (image, label, batch.targets[0] / 255)

    def subset(self, indices: Tensor, split: str | None = None) -> "Dataset":
        """Return the images at some places as a data set of their own, under another split's name if you like."""
        return _Subset(self, indices, self.split if split is None else split)

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


class _Subset(Dataset):
    """Some images of a data set."""

    def __init__(self, whole: Dataset, indices: Tensor, split: str) -> None:
        super().__init__(whole.name, split, whole.shape, whole.classes, whole.n_objects)
        if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < len(whole):
            raise ValueError(f"indices must lie in 0..{len(whole) - 1}, the images of {whole.name}")
        self.whole, self.chosen = whole, indices

    def __len__(self) -> int:
        return len(self.chosen)

    def examples(self, index: Tensor, epoch: int = 0) -> Batch:
        """Return images in bytes."""
        return self.whole.examples(self.chosen[index], epoch)._replace(indices=index)
