"""SVHN: cropped digits of house numbers, 32x32, from MATLAB files."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from torchcaps.data.base import Dataset, DataSpec, ImageSet, ImageShape, LoadRequest
from torchcaps.data.formats import check_file_labels
from torchcaps.data.mat import get_array, read_mat
from torchcaps.data.registry import register_dataset
from torchcaps.data.storage import DataError, RemoteFile

__all__ = ["SVHN"]

EXTRA_IMAGES = 531_131


@dataclass(frozen=True)
class SVHN(DataSpec):
    """SVHN (Netzer et al. 2011), cropped digits: 73,257 training and 26,032 test images, 32x32, RGB.

    Args:
        extra: add the 531,131 easier images of the "extra" file to the training set. Sabour 2017 does not use them.

    >>> SVHN(extra=True)
    SVHN(extra=True)
    """

    title: ClassVar[str] = "digits of house numbers"
    split_sizes: ClassVar[dict[str, int]] = {"train": 73_257, "test": 26_032}
    shape: ClassVar[ImageShape | None] = (3, 32, 32)
    subdirectories: ClassVar[tuple[str, ...]] = ("svhn", "SVHN", ".")
    checksums: ClassVar[dict[str, tuple[str, int]]] = {  # MD5 and size in bytes
        "train_32x32.mat": ("e26dedcc434d2e4c54c9b2d4a06d8373", 182_040_794),
        "test_32x32.mat": ("eb5a983be6a315427106f1b164d9cef3", 64_275_384),
        "extra_32x32.mat": ("a93ce644f1a588dc4d68dda5feec44a7", 1_329_278_602),
    }

    extra: bool = False

    def n_images(self, split: str) -> int | None:
        """Return the published number of images of a split."""
        return self.split_sizes[split] + (EXTRA_IMAGES if self.extra and split == "train" else 0)

    def files(self, split: str) -> tuple[RemoteFile, ...]:
        """Return the file of a split, and the extra file if enabled."""
        names = ["train_32x32.mat", "extra_32x32.mat"][: 1 + self.extra] if split == "train" else ["test_32x32.mat"]
        mirrors = ("https://ufldl.stanford.edu/housenumbers/", "http://ufldl.stanford.edu/housenumbers/")
        checksums = {name: self.checksums[name] for name in names}
        return tuple(RemoteFile(name, f"md5:{md5}", mirrors, size) for name, (md5, size) in checksums.items())

    def load(self, request: LoadRequest) -> Dataset:
        """Load a split from its one or two files."""
        directory = self.data_directory(request)
        parts = [_read(directory.fetch(file), file.checksum) for file in self.files(request.split)]
        images, labels = parts[0] if len(parts) == 1 else (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return ImageSet(request.name, request.split, images, labels, [str(digit) for digit in range(10)])


def _read(path: Path, checksum: str) -> tuple[Tensor, Tensor]:
    """Read ``X`` ``[32, 32, 3, N]`` and ``y`` ``[N]``, in which 10 is the digit 0."""
    content = read_mat(path, ["X", "y"], checksum)
    pixels, labels = (get_array(content, name, path) for name in ("X", "y"))
    if pixels.ndim == 3:  # a single image
        pixels = pixels[..., None]
    if pixels.ndim != 4 or pixels.shape[:3] != (32, 32, 3) or pixels.dtype != torch.uint8:
        actual = f"{pixels.dtype} of shape {list(pixels.shape)}"
        raise DataError(f"{path} is not an SVHN file: X must be torch.uint8 of shape [32, 32, 3, N], got {actual}")
    images = pixels.permute(3, 2, 0, 1).contiguous()  # [N, 3, 32, 32]
    class_indices = labels.reshape(-1).long()
    class_indices = torch.where(class_indices == 10, 0, class_indices)
    check_file_labels(class_indices, len(images), 10, path)
    return images, class_indices


register_dataset("svhn", SVHN())
