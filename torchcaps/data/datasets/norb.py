"""smallNORB: stereo photographs of toys, in the binary matrix format of its site."""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from torchcaps.data.base import Dataset, ImageSet
from torchcaps.data.errors import DataError
from torchcaps.data.formats import check_labels, opened, rest_as_bytes, starting_bytes
from torchcaps.data.registry import register
from torchcaps.data.spec import DataSpec, Request
from torchcaps.data.storage import File

__all__ = ["SmallNORB", "read_matrix"]

_BYTES, _INTEGERS = 0x1E3D4C55, 0x1E3D4C54


def read_matrix(path: Path) -> Tensor:
    """Return a matrix of bytes or integers: magic, number of axes, their sizes (three at least), then the values.

    All of it is little-endian; the site's ``.mat`` files are not MATLAB's.
    """
    with opened(path) as file:
        magic, n_axes = struct.unpack("<II", starting_bytes(file, 8, path))
        if magic not in (_BYTES, _INTEGERS) or not 1 <= n_axes <= 4:
            known = f"{_BYTES:#x} (bytes) or {_INTEGERS:#x} (integers)"
            raise DataError(f"{path} is no matrix of smallNORB's: it starts with {magic:#x}, not with {known}")
        n_sizes = max(3, n_axes)
        sizes = struct.unpack(f"<{n_sizes}I", starting_bytes(file, 4 * n_sizes, path))[:n_axes]
        if magic == _BYTES:
            return rest_as_bytes(file, sizes, path)
        data = rest_as_bytes(file, (math.prod(sizes), 4), path).long()
        values = data[:, 0] | data[:, 1] << 8 | data[:, 2] << 16 | data[:, 3] << 24
        return torch.where(values >= 1 << 31, values - (1 << 32), values).view(sizes)


@dataclass(frozen=True)
class SmallNORB(DataSpec):
    """smallNORB (LeCun et al. 2004): 24,300 and 24,300 stereo pairs of 96x96 of toys, from 162 viewpoints under six
    lights; instance, elevation, azimuth and lighting of each are in ``dataset.info``.

    Args:
        size: height and width to which images are reduced; 48 in Sabour 2017 and Hinton 2018, 96 leaves them alone.
        resize: ``"bilinear"``, between the centres of pixels, which for 48 is the mean of each 2x2; or ``"official"``,
            as TensorFlow 1 did it for Sabour's code: every second pixel.
        viewpoints: ``"all"``; or, as Hinton 2018, section 5.1, does to test on viewpoints never seen, train on a third
            of them: ``"azimuth"``, the six from 300 through 0 to 40 degrees, or ``"elevation"``, the three lowest.
        view: both images of a pair as channels, or one of them; Hinton 2018 does not say, and its counts fit one.
        familiar: test on the viewpoints of training where those are a third, not on the others.
    """

    title: ClassVar[str] = "stereo photographs of toys, viewpoints known"
    counts: ClassVar[dict[str, int]] = {"train": 24_300, "test": 24_300}
    n_classes: ClassVar[int | None] = 5
    folders: ClassVar[tuple[str, ...]] = ("smallnorb", "smallNORB", "smallnorb/raw", "SmallNORB/raw", "norb", ".")
    classes: ClassVar[tuple[str, ...]] = ("animal", "human", "airplane", "truck", "car")
    known: ClassVar[tuple[str, ...]] = ("instance", "elevation", "azimuth", "lighting")
    files: ClassVar[dict[str, dict[str, str]]] = {
        "train": {
            "smallnorb-5x46789x9x18x6x2x96x96-training-dat.mat.gz": "66054832f9accfe74a0f4c36a75bc0a2",
            "smallnorb-5x46789x9x18x6x2x96x96-training-cat.mat.gz": "23c8b86101fbf0904a000b43d3ed2fd9",
            "smallnorb-5x46789x9x18x6x2x96x96-training-info.mat.gz": "51dee1210a742582ff607dfd94e332e3",
        },
        "test": {
            "smallnorb-5x01235x9x18x6x2x96x96-testing-dat.mat.gz": "e4ad715691ed5a3a5f138751a4ceb071",
            "smallnorb-5x01235x9x18x6x2x96x96-testing-cat.mat.gz": "5aa791cd7e6016cf957ce9bdb93b8603",
            "smallnorb-5x01235x9x18x6x2x96x96-testing-info.mat.gz": "a9454f3864d7fd4bb3ea7fc3eb84924e",
        },
    }

    size: int = 48
    resize: Literal["bilinear", "official"] = "bilinear"
    viewpoints: Literal["all", "azimuth", "elevation"] = "all"
    view: Literal["both", "left", "right"] = "both"
    familiar: bool = False

    def check(self) -> None:
        """Refuse sizes that are none, or that TensorFlow 1's way has no pixels for."""
        if not 1 <= self.size <= 96:
            raise ValueError(f"smallnorb: size must lie in 1..96, got {self.size}")
        if self.resize == "official" and 96 % self.size:
            raise ValueError(
                f"smallnorb: resize='official' takes every so many pixels, and 96 is no multiple of {self.size}"
            )

    @property
    def image(self) -> tuple[int, int, int]:
        """Channels, height and width of its images."""
        return 2 if self.view == "both" else 1, self.size, self.size

    def length(self, split: str) -> int | None:
        """Return how many images a part has by the book."""
        third = self.viewpoints != "all" and (split == "train" or self.familiar)
        share = 3 if self.viewpoints == "all" else 1 if third else 2
        return self.counts[split] * share // 3

    def parts(self, split: str) -> tuple[File, ...]:
        """Return the files of images, of categories, and of what else is known."""
        mirrors = ("https://cs.nyu.edu/~ylclab/data/norb-v1.0-small/",)
        files = self.files[split].items()
        return tuple(File(name, f"md5:{md5}", mirrors, also=(name.removesuffix(".gz"),)) for name, md5 in files)

    def load(self, request: Request) -> Dataset:
        """Read the three files of a part."""
        place = self.place(request)
        image_file, label_file, info_file = (place.path(part) for part in self.parts(request.split))
        images, labels, info = (read_matrix(path) for path in (image_file, label_file, info_file))
        if images.ndim != 4 or images.shape[1:] != (2, 96, 96) or images.dtype != torch.uint8:
            raise DataError(f"{image_file} is not smallNORB's: it must hold Nx2x96x96 bytes, got {list(images.shape)}")
        if labels.shape != images.shape[:1] or info.shape != (len(images), 4):
            others = f"{label_file.name} and {info_file.name} have {len(labels):,} and {len(info):,} rows"
            raise DataError(f"{image_file} does not belong to the others: {len(images):,} pairs, {others}")
        check_labels(labels, len(images), 5, label_file)
        kept = self._kept(request.split, info)
        channels = {"both": slice(0, 2), "left": slice(0, 1), "right": slice(1, 2)}[self.view]
        # in pieces: a second copy of all of it would be 450 MB
        reduced = torch.cat([self._reduced(images[some, channels]) for some in kept.split(500)])
        columns: dict[str, Tensor] = dict(zip(self.known, info[kept].unbind(1), strict=True))
        return ImageSet(request.name, request.split, reduced, labels[kept], self.classes, columns)

    def _kept(self, split: str, info: Tensor) -> Tensor:
        """Return the places of the pairs whose viewpoints are wanted.

        Elevations are numbers 0 to 8 (30 to 70 degrees), azimuths even numbers 0 to 34, tens of degrees.
        """
        if self.viewpoints == "all":
            return torch.arange(len(info))
        if self.viewpoints == "azimuth":
            seen = torch.isin(info[:, 2], torch.tensor([30, 32, 34, 0, 2, 4]))
        else:
            seen = info[:, 1] < 3
        return (seen if split == "train" or self.familiar else ~seen).nonzero()[:, 0]

    def _reduced(self, images: Tensor) -> Tensor:
        if self.size == 96:
            return images
        if self.resize == "official":
            step = 96 // self.size
            return images[..., ::step, ::step].contiguous()
        size = (self.size, self.size)
        return F.interpolate(images.float(), size, mode="bilinear").round().to(torch.uint8)


register("smallnorb", SmallNORB())
register("smallnorb-left", SmallNORB(view="left"))
