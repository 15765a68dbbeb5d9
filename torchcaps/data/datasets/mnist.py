"""MNIST and Fashion-MNIST, from IDX files, gzipped or not."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from torchcaps.data.base import Dataset, DataSpec, ImageSet, ImageShape, LoadRequest
from torchcaps.data.formats import check_file_labels, read_idx
from torchcaps.data.registry import create_dataset, register_dataset
from torchcaps.data.storage import DataError, RemoteFile

__all__ = ["MNIST", "FashionMNIST"]

N_DIGITS = 1000  # test images of the data set "digits"


@dataclass(frozen=True)
class IDXSpec(DataSpec):
    """Base class of data sets in MNIST's format: a file of images and a file of labels for each split."""

    split_sizes: ClassVar[dict[str, int]] = {"train": 60_000, "test": 10_000}
    shape: ClassVar[ImageShape | None] = (1, 28, 28)
    classes: ClassVar[tuple[str, ...]] = ()
    mirrors: ClassVar[tuple[str, ...]] = ()
    checksums: ClassVar[dict[str, tuple[str, int]]] = {}  # MD5 and size in bytes

    def files(self, split: str) -> tuple[RemoteFile, ...]:
        """Return the file of images and the file of labels."""
        prefix = "train" if split == "train" else "t10k"
        files = []
        for name, (md5, size) in self.checksums.items():
            if name.startswith(prefix):
                plain = name.removesuffix(".gz")
                dotted = plain.replace("-idx", ".idx")  # the name on some mirrors
                files.append(RemoteFile(name, f"md5:{md5}", self.mirrors, size, (plain, dotted, f"{dotted}.gz")))
        return tuple(files)

    def load(self, request: LoadRequest) -> Dataset:
        """Load a split from its two files."""
        directory = self.data_directory(request)
        image_path, label_path = (directory.fetch(file) for file in self.files(request.split))
        images, labels = read_idx(image_path, 3), read_idx(label_path, 1)
        if len(images) != len(labels):
            counts = f"{len(images):,} images and {len(labels):,} labels"
            raise DataError(f"{image_path} and {label_path.name} do not belong together: {counts}")
        check_file_labels(labels, len(images), len(self.classes), label_path)
        return ImageSet(request.name, request.split, images[:, None], labels.to(torch.int64), self.classes)


@dataclass(frozen=True)
class MNIST(IDXSpec):
    """MNIST (LeCun et al. 1998): 60,000 training and 10,000 test images of handwritten digits, 28x28.

    Args:
        exclude_digits: leave the 1,000 test images of the data set ``digits`` out of the training split, which contains
            them, so that a model can be tested on them. They are found by their pixels.

    >>> MNIST(exclude_digits=True)
    MNIST(exclude_digits=True)
    """

    exclude_digits: bool = False

    title: ClassVar[str] = "handwritten digits"
    # without the data directory itself: Fashion-MNIST's files have the same names
    subdirectories: ClassVar[tuple[str, ...]] = ("mnist", "MNIST/raw", "mnist/raw", "MNIST")
    classes: ClassVar[tuple[str, ...]] = tuple("0123456789")
    mirrors: ClassVar[tuple[str, ...]] = (
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    )
    checksums: ClassVar[dict[str, tuple[str, int]]] = {  # MD5 and size in bytes
        "train-images-idx3-ubyte.gz": ("f68b3c2dcbeaaa9fbdd348bbdeb94873", 9_912_422),
        "train-labels-idx1-ubyte.gz": ("d53e105ee54ea40749a09fcbcd1e9432", 28_881),
        "t10k-images-idx3-ubyte.gz": ("9fb629c4189551a2d022fa330f9573f3", 1_648_877),
        "t10k-labels-idx1-ubyte.gz": ("ec29112dd5afa0611ce80d1b7f02629c", 4_542),
    }

    def load(self, request: LoadRequest) -> Dataset:
        """Load a split from its two files; leave out the excluded images."""
        dataset = super().load(request)
        if not self.exclude_digits or request.split != "train":
            return dataset
        excluded = create_dataset("digits", "test")
        assert isinstance(dataset, ImageSet)
        assert isinstance(excluded, ImageSet)
        seen = {image.numpy().tobytes() for image in excluded.images}
        return dataset.subset(torch.tensor([image.numpy().tobytes() not in seen for image in dataset.images]))

    def n_images(self, split: str) -> int | None:
        """Return the number of images of a split, 59,000 training images without those of ``digits``."""
        count = super().n_images(split)
        return count - N_DIGITS if count is not None and self.exclude_digits and split == "train" else count


@dataclass(frozen=True)
class FashionMNIST(IDXSpec):
    """Fashion-MNIST (Xiao et al. 2017): 60,000 training and 10,000 test images of clothes, in MNIST's format.

    >>> FashionMNIST()
    FashionMNIST()
    """

    title: ClassVar[str] = "photographs of clothes, in MNIST's format"
    subdirectories: ClassVar[tuple[str, ...]] = (
        "fashion-mnist", "FashionMNIST/raw", "fashion-mnist/raw", "fashion_mnist", "FashionMNIST",
    )  # fmt: skip
    classes: ClassVar[tuple[str, ...]] = (
        "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
    )  # fmt: skip
    mirrors: ClassVar[tuple[str, ...]] = (
        "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    )
    checksums: ClassVar[dict[str, tuple[str, int]]] = {  # MD5 and size in bytes
        "train-images-idx3-ubyte.gz": ("8d4fb7e6c68d591d4c3dfef9ec88bf0d", 26_421_880),
        "train-labels-idx1-ubyte.gz": ("25c81989df183df01b3e8a0aad5dffbe", 29_515),
        "t10k-images-idx3-ubyte.gz": ("bef4ecab320f06d8554ea6380940ec79", 4_422_102),
        "t10k-labels-idx1-ubyte.gz": ("bb300cfdad3c16e7a12a480ee83cd310", 5_148),
    }


register_dataset("mnist", MNIST())
register_dataset("fashion-mnist", FashionMNIST())
