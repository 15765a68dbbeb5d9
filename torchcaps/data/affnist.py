"""affNIST: MNIST digits under small affine transformations, the official files."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from torchcaps.data.dataset import Dataset, ImageSet
from torchcaps.data.errors import DataError
from torchcaps.data.matlab import read_mat
from torchcaps.data.place import File, Member
from torchcaps.data.registry import register
from torchcaps.data.spec import DataSpec, Request, check_labels

__all__ = ["AffNIST"]

CANVAS = 40
VARIANTS = 32  # of each digit


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

    def parts(self, split: str) -> tuple[Member, ...]:
        """Return the 32 files of a part."""
        folder = {"train": "training", "val": "validation", "test": "test"}[split] + "_batches"
        mirrors = ("https://www.cs.toronto.edu/~tijmen/affNIST/32x/transformed/",)
        archive = File(f"{folder}.zip", "", mirrors, 0)
        return tuple(Member(f"{folder}/{number}.mat", archive) for number in range(1, VARIANTS + 1))

    def other_forms(self, split: str) -> tuple[tuple[File, ...], ...]:
        """Return the file that has all images of a part."""
        name = {"train": "training", "val": "validation", "test": "test"}[split]
        return ((File(f"{name}.mat", "", (), 0),),)

    def load(self, request: Request) -> Dataset:
        """Read the files of a part: one of all its images where there is one, else the 32."""
        place = self.place(request)
        ((whole,),) = self.other_forms(request.split)
        parts = (whole,) if place.find(whole) else self.parts(request.split)
        read = [_read(place.path(part)) for part in parts]
        images, labels = (torch.cat(tensors) for tensors in zip(*read, strict=True))
        return ImageSet(request.name, request.split, images, labels, [str(digit) for digit in range(10)])


def _read(path: Path) -> tuple[Tensor, Tensor]:
    """Read ``affNISTdata.image`` [1600, N], whose columns are images row by row, and ``label_int`` [N]."""
    content = read_mat(path, "affNISTdata")
    pixels, labels = getattr(content, "image", None), getattr(content, "label_int", None)
    if pixels is None or labels is None:
        raise DataError(f"{path} is not affNIST's: affNISTdata must have image and label_int")
    pixels = pixels[:, None] if pixels.ndim == 1 else pixels
    if pixels.shape[0] != CANVAS**2 or str(pixels.dtype) != "uint8":
        raise DataError(f"{path} is not affNIST's: image must be bytes of 1600xN, got {pixels.dtype} of {pixels.shape}")
    images = torch.from_numpy(pixels.T.copy()).view(-1, 1, CANVAS, CANVAS)
    numbers = torch.as_tensor(labels).reshape(-1).long()
    if len(numbers) != len(images):
        raise DataError(f"{path} has {len(images):,} images and {len(numbers):,} labels: it is broken")
    check_labels(int(numbers.min()), int(numbers.max()), 10, path)
    return images, numbers


register("affnist", AffNIST())
