"""MNIST and Fashion-MNIST: IDX files, gzipped or not."""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from torchcaps.data.base import Dataset, ImageSet
from torchcaps.data.errors import DataError
from torchcaps.data.formats import check_labels, opened, rest_as_bytes, starting_bytes
from torchcaps.data.registry import register
from torchcaps.data.spec import DataSpec, Request
from torchcaps.data.storage import File

__all__ = ["MNIST", "FashionMNIST", "read_idx"]


def read_idx(path: Path, n_axes: int) -> Tensor:
    """Return the bytes of an IDX file: magic 0, 0, type, axes; then the sizes, big-endian; then the bytes.

    Args:
        path: the file, gzipped or not.
        n_axes: how many axes it must have: 3 for images, 1 for labels.
    """
    with opened(path) as file:
        zeros, kind, axes = struct.unpack(">HBB", starting_bytes(file, 4, path))
        if zeros or kind != 8 or axes != n_axes:
            what = "images" if n_axes == 3 else "labels"
            magic = (zeros << 16) + (kind << 8) + axes
            raise DataError(f"{path} is no IDX file of {what}: it starts with {magic}, not with {0x800 + n_axes}")
        shape = struct.unpack(f">{axes}I", starting_bytes(file, 4 * axes, path))
        return rest_as_bytes(file, shape, path)


@dataclass(frozen=True)
class MNIST(DataSpec):
    """MNIST (LeCun et al. 1998): 60,000 and 10,000 handwritten digits of 28x28."""

    title: ClassVar[str] = "handwritten digits"
    counts: ClassVar[dict[str, int]] = {"train": 60_000, "test": 10_000}
    shape: ClassVar[tuple[int, int, int] | None] = (1, 28, 28)
    # not the data folder itself: Fashion-MNIST's files have the same names
    folders: ClassVar[tuple[str, ...]] = ("mnist", "MNIST/raw", "mnist/raw", "MNIST")
    classes: ClassVar[tuple[str, ...]] = tuple("0123456789")
    mirrors: ClassVar[tuple[str, ...]] = (
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    )
    files: ClassVar[dict[str, tuple[str, int]]] = {
        "train-images-idx3-ubyte.gz": ("f68b3c2dcbeaaa9fbdd348bbdeb94873", 9_912_422),
        "train-labels-idx1-ubyte.gz": ("d53e105ee54ea40749a09fcbcd1e9432", 28_881),
        "t10k-images-idx3-ubyte.gz": ("9fb629c4189551a2d022fa330f9573f3", 1_648_877),
        "t10k-labels-idx1-ubyte.gz": ("ec29112dd5afa0611ce80d1b7f02629c", 4_542),
    }

    def parts(self, split: str) -> tuple[File, ...]:
        """Return the file of images and that of labels."""
        start = "train" if split == "train" else "t10k"
        found = []
        for name, (md5, size) in self.files.items():
            if name.startswith(start):
                plain = name.removesuffix(".gz")
                dotted = plain.replace("-idx", ".idx")  # as some mirrors have it
                found.append(File(name, f"md5:{md5}", self.mirrors, size, (plain, dotted, f"{dotted}.gz")))
        return tuple(found)

    def load(self, request: Request) -> Dataset:
        """Read both files."""
        place = self.place(request)
        image_file, label_file = (place.path(part) for part in self.parts(request.split))
        images, labels = read_idx(image_file, 3), read_idx(label_file, 1)
        if len(images) != len(labels):
            counts = f"{len(images):,} images and {len(labels):,} labels"
            raise DataError(f"{image_file} and {label_file.name} don't belong together: {counts}")
        check_labels(labels, len(images), len(self.classes), label_file)
        return ImageSet(request.name, request.split, images[:, None], labels.to(torch.int64), self.classes)


@dataclass(frozen=True)
class FashionMNIST(MNIST):
    """Fashion-MNIST (Xiao et al. 2017): 60,000 and 10,000 photographs of clothes, in MNIST's form."""

    title: ClassVar[str] = "photographs of clothes, in MNIST's form"
    folders: ClassVar[tuple[str, ...]] = (
        "fashion-mnist", "FashionMNIST/raw", "fashion-mnist/raw", "fashion_mnist", "FashionMNIST",
    )  # fmt: skip
    classes: ClassVar[tuple[str, ...]] = (
        "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
    )  # fmt: skip
    mirrors: ClassVar[tuple[str, ...]] = (
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
    )
    files: ClassVar[dict[str, tuple[str, int]]] = {
        "train-images-idx3-ubyte.gz": ("8d4fb7e6c68d591d4c3dfef9ec88bf0d", 26_421_880),
        "train-labels-idx1-ubyte.gz": ("25c81989df183df01b3e8a0aad5dffbe", 29_515),
        "t10k-images-idx3-ubyte.gz": ("bef4ecab320f06d8554ea6380940ec79", 4_422_102),
        "t10k-labels-idx1-ubyte.gz": ("bb300cfdad3c16e7a12a480ee83cd310", 5_148),
    }


register("mnist", MNIST())
register("fashion-mnist", FashionMNIST())
