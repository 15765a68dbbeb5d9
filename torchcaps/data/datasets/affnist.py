"""affNIST: MNIST digits under small affine transformations, the official files."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from torchcaps.data.base import Dataset, ImageSet
from torchcaps.data.errors import DataError
from torchcaps.data.formats import check_labels
from torchcaps.data.matlab import as_tensor, read_mat
from torchcaps.data.registry import register
from torchcaps.data.spec import DataSpec, Request
from torchcaps.data.storage import File, Member

__all__ = ["AffNIST"]

CANVAS = 40
SITE = "https://www.cs.toronto.edu/~tijmen/affNIST/32x/transformed/"


@dataclass(frozen=True)
class AffNIST(DataSpec):
    """affNIST (Tieleman 2013): MNIST digits in 32 affine variants each, on 40x40, in MATLAB's .mat files.

    The test part is made of MNIST's test digits, training and validation of its training digits. No checksums were
    published; an archive's own (a CRC of each file) are looked at when it is unpacked.
    """

    title: ClassVar[str] = "MNIST under affine transformations, the official files"
    splits: ClassVar[tuple[str, ...]] = ("train", "val", "test")
    counts: ClassVar[dict[str, int]] = {"train": 1_600_000, "val": 320_000, "test": 320_000}
    shape: ClassVar[tuple[int, int, int] | None] = (1, CANVAS, CANVAS)
    folders: ClassVar[tuple[str, ...]] = ("affnist", "affNIST", "affnist/transformed", "affNIST/transformed", ".")
    fetched: ClassVar[tuple[str, ...]] = ("test",)
    _NAMES: ClassVar[dict[str, str]] = {"train": "training", "val": "validation", "test": "test"}

    def parts(self, split: str) -> tuple[Member, ...]:
        """Return the 32 files of a part."""
        folder = f"{self._NAMES[split]}_batches"
        archive = File(f"{folder}.zip", "", (SITE,))
        return tuple(Member(f"{folder}/{number}.mat", archive) for number in range(1, 33))

    def forms(self, split: str) -> tuple[tuple[Member, ...], ...]:
        """Return the file that has all images of a part, before the 32."""
        name = f"{self._NAMES[split]}.mat"
        return (Member(name, File(f"{name}.zip", "", (SITE,))),), self.parts(split)

    def load(self, request: Request) -> Dataset:
        """Read the files of a part: one of all its images where there is one, else the 32."""
        place = self.place(request)
        read = [_read(place.path(part)) for part in self.chosen(request.split, place)]
        images, labels = read[0] if len(read) == 1 else (torch.cat(tensors) for tensors in zip(*read, strict=True))
        return ImageSet(request.name, request.split, images, labels, [str(digit) for digit in range(10)])


def _read(path: Path) -> tuple[Tensor, Tensor]:
    """Read ``affNISTdata.image`` [1600, N], whose columns are images row by row, and ``label_int`` [N]."""
    content = read_mat(path, "affNISTdata")
    if not hasattr(content, "image") or not hasattr(content, "label_int"):
        raise DataError(f"{path} is not affNIST's: affNISTdata must have image and label_int")
    pixels = as_tensor(content.image, path, "image")
    pixels = pixels[:, None] if pixels.ndim == 1 else pixels
    if pixels.ndim != 2 or len(pixels) != CANVAS**2 or pixels.dtype != torch.uint8:
        found = f"{pixels.dtype} of {list(pixels.shape)}"
        raise DataError(f"{path} is not affNIST's: image must be bytes of 1600xN, got {found}")
    images = pixels.T.contiguous().view(-1, 1, CANVAS, CANVAS)
    numbers = as_tensor(content.label_int, path, "label_int").reshape(-1).long()
    check_labels(numbers, len(images), 10, path)
    return images, numbers


register("affnist", AffNIST())
