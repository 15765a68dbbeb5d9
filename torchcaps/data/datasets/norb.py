"""smallNORB: stereo photographs of toys, from the binary matrix files of its site."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from torchcaps._core.validation import check_range
from torchcaps.data.base import Dataset, DataSpec, ImageSet, ImageShape, LoadRequest
from torchcaps.data.formats import check_file_labels, read_norb_matrix
from torchcaps.data.registry import register_dataset
from torchcaps.data.storage import DataError, RemoteFile

__all__ = ["SmallNORB"]

FULL_SIZE = 96
RESIZE_CHUNK = 500  # images; a float copy of all would take 1.8 GB
METADATA = ("instance", "elevation", "azimuth", "lighting")
TRAIN_AZIMUTHS = (30, 32, 34, 0, 2, 4)  # tens of degrees
N_TRAIN_ELEVATIONS = 3


@dataclass(frozen=True)
class SmallNORB(DataSpec):
    """smallNORB (LeCun et al. 2004): 24,300 training and 24,300 test stereo pairs of toys, 96x96, from 162 viewpoints
    under six lightings. ``dataset.metadata`` has instance, elevation, azimuth and lighting of each pair.

    Args:
        size: height and width to which images are downsampled; 48 in Sabour 2017 and Hinton 2018, 96 keeps them.
        resize: ``"bilinear"`` interpolates between pixel centers, which for 48 is the mean of 2x2 pixels;
            ``"official"`` takes every second pixel (for 48), as TensorFlow 1 did in Sabour's code.
        viewpoints: ``"all"``, or train on a third of the viewpoints and test on the others (Hinton 2018, section 5.1):
            ``"azimuth"`` trains on 300, 320, 340, 0, 20 and 40 degrees, ``"elevation"`` on the three lowest.
        view: ``"both"`` images of a pair as channels, or one of them. Hinton 2018 does not state it; its parameter
            counts fit one.
        familiar: test on the viewpoints of the training set instead of the novel ones, if ``viewpoints`` is not
            ``"all"``.

    >>> SmallNORB(size=32).viewpoints
    'all'
    """

    title: ClassVar[str] = "stereo photographs of toys, viewpoints known"
    split_sizes: ClassVar[dict[str, int]] = {"train": 24_300, "test": 24_300}
    n_classes: ClassVar[int | None] = 5
    subdirectories: ClassVar[tuple[str, ...]] = (
        "smallnorb",
        "smallNORB",
        "smallnorb/raw",
        "SmallNORB/raw",
        "norb",
        ".",
    )
    classes: ClassVar[tuple[str, ...]] = ("animal", "human", "airplane", "truck", "car")
    checksums: ClassVar[dict[str, dict[str, str]]] = {  # MD5
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
        """Raise a ValueError if the size is out of range, or not a divisor of 96 for ``resize="official"``."""
        check_range(self, "size", 1, FULL_SIZE)
        if self.resize == "official" and FULL_SIZE % self.size:
            raise ValueError(f"SmallNORB: size must divide {FULL_SIZE} if resize is 'official', got {self.size}")

    @property
    def image_shape(self) -> ImageShape:
        """Channels, height and width of the images."""
        return 2 if self.view == "both" else 1, self.size, self.size

    def n_images(self, split: str) -> int | None:
        """Return the published number of pairs of a split with the chosen viewpoints."""
        if self.viewpoints == "all":
            return self.split_sizes[split]
        thirds = 1 if split == "train" or self.familiar else 2
        return self.split_sizes[split] * thirds // 3

    def files(self, split: str) -> tuple[RemoteFile, ...]:
        """Return the files of images, labels and metadata."""
        mirrors = ("https://cs.nyu.edu/~ylclab/data/norb-v1.0-small/",)
        return tuple(
            RemoteFile(name, f"md5:{md5}", mirrors, aliases=(name.removesuffix(".gz"),))
            for name, md5 in self.checksums[split].items()
        )

    def load(self, request: LoadRequest) -> Dataset:
        """Load a split from its three files."""
        directory = self.data_directory(request)
        image_path, label_path, info_path = (directory.fetch(file) for file in self.files(request.split))
        images, labels, info = (read_norb_matrix(path) for path in (image_path, label_path, info_path))
        if images.ndim != 4 or images.shape[1:] != (2, FULL_SIZE, FULL_SIZE) or images.dtype != torch.uint8:
            actual = f"{images.dtype} of shape {list(images.shape)}"
            raise DataError(f"{image_path} must contain torch.uint8 of shape [N, 2, 96, 96], got {actual}")
        if labels.shape != images.shape[:1] or info.shape != (len(images), len(METADATA)):
            others = f"{label_path.name} has shape {list(labels.shape)} and {info_path.name} {list(info.shape)}"
            raise DataError(f"{image_path} has {len(images):,} pairs, but {others}: the files do not belong together")
        check_file_labels(labels, len(images), len(self.classes), label_path)
        selected = self._select_viewpoints(request.split, info)
        channels = {"both": slice(0, 2), "left": slice(0, 1), "right": slice(1, 2)}[self.view]
        resized = torch.cat([self._resize(images[chunk, channels]) for chunk in selected.split(RESIZE_CHUNK)])
        metadata: dict[str, Tensor] = dict(zip(METADATA, info[selected].unbind(1), strict=True))
        return ImageSet(request.name, request.split, resized, labels[selected], self.classes, metadata)

    def _select_viewpoints(self, split: str, info: Tensor) -> Tensor:
        """Return the indices of the pairs with the viewpoints of a split, ``[N]``.

        Column 1 of ``info`` is the elevation index 0 to 8 (30 to 70 degrees), column 2 the azimuth in tens of degrees,
        even numbers 0 to 34.
        """
        if self.viewpoints == "all":
            return torch.arange(len(info))
        if self.viewpoints == "azimuth":
            familiar = torch.isin(info[:, 2], torch.tensor(TRAIN_AZIMUTHS))
        else:
            familiar = info[:, 1] < N_TRAIN_ELEVATIONS
        return (familiar if split == "train" or self.familiar else ~familiar).nonzero()[:, 0]

    def _resize(self, images: Tensor) -> Tensor:
        """Downsample images to ``size``."""
        if self.size == FULL_SIZE:
            return images
        if self.resize == "official":
            step = FULL_SIZE // self.size
            return images[..., ::step, ::step].contiguous()
        return F.interpolate(images.float(), (self.size, self.size), mode="bilinear").round().to(torch.uint8)


register_dataset("smallnorb", SmallNORB())
register_dataset("smallnorb-left", SmallNORB(view="left"))
register_dataset("smallnorb-64", SmallNORB(size=64))
register_dataset("smallnorb-96", SmallNORB(size=96))
