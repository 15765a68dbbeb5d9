"""SVHN: house numbers cut out of street views, 32x32, as .mat files."""

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
from torchcaps.data.storage import File

__all__ = ["SVHN"]


@dataclass(frozen=True)
class SVHN(DataSpec):
    """SVHN (Netzer et al. 2011), cropped digits: 73,257 to train with and 26,032 to test with, 32x32 in colour.

    Args:
        extra: add the 531,131 easier images of the third file to the training set, which Sabour 2017 does not.
    """

    title: ClassVar[str] = "digits of house numbers"
    counts: ClassVar[dict[str, int]] = {"train": 73_257, "test": 26_032}
    shape: ClassVar[tuple[int, int, int] | None] = (3, 32, 32)
    folders: ClassVar[tuple[str, ...]] = ("svhn", "SVHN", ".")
    files: ClassVar[dict[str, tuple[str, int]]] = {
        "train_32x32.mat": ("e26dedcc434d2e4c54c9b2d4a06d8373", 182_040_794),
        "test_32x32.mat": ("eb5a983be6a315427106f1b164d9cef3", 64_275_384),
        "extra_32x32.mat": ("a93ce644f1a588dc4d68dda5feec44a7", 1_329_278_602),
    }

    extra: bool = False

    def length(self, split: str) -> int | None:
        """Return how many images a part has by the book."""
        return self.counts[split] + (531_131 if self.extra and split == "train" else 0)

    def parts(self, split: str) -> tuple[File, ...]:
        """Return the file of a part, and the extra one."""
        names = ["train_32x32.mat", "extra_32x32.mat"][: 1 + self.extra] if split == "train" else ["test_32x32.mat"]
        mirrors = ("http://ufldl.stanford.edu/housenumbers/",)
        return tuple(File(name, f"md5:{self.files[name][0]}", mirrors, self.files[name][1]) for name in names)

    def load(self, request: Request) -> Dataset:
        """Read the files."""
        place = self.place(request)
        read = [_read(place.path(part)) for part in self.parts(request.split)]
        images, labels = read[0] if len(read) == 1 else (torch.cat(tensors) for tensors in zip(*read, strict=True))
        return ImageSet(request.name, request.split, images, labels, [str(digit) for digit in range(10)])


def _read(path: Path) -> tuple[Tensor, Tensor]:
    """Read ``X`` [32, 32, 3, N] and ``y`` [N], where 10 stands for the digit 0."""
    pixels, labels = (as_tensor(read_mat(path, name), path, name) for name in ("X", "y"))
    if pixels.ndim == 3:  # a single image
        pixels = pixels[..., None]
    if pixels.ndim != 4 or pixels.shape[:3] != (32, 32, 3) or pixels.dtype != torch.uint8:
        found = f"{pixels.dtype} of {list(pixels.shape)}"
        raise DataError(f"{path} is not SVHN's: X must be bytes of 32x32x3xN, got {found}")
    images = pixels.permute(3, 2, 0, 1).contiguous()  # [N, 3, 32, 32]
    numbers = labels.reshape(-1).long()
    numbers = torch.where(numbers == 10, 0, numbers)
    check_labels(numbers, len(images), 10, path)
    return images, numbers


register("svhn", SVHN())
