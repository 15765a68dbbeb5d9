"""affNIST: MNIST digits under small affine transformations, the official files and digits made in their manner."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor

from torchcaps.data.batch import Batch
from torchcaps.data.dataset import Dataset, ImageSet
from torchcaps.data.draws import Draws
from torchcaps.data.errors import DataError
from torchcaps.data.geometry import resampled, turned
from torchcaps.data.matlab import read_mat
from torchcaps.data.place import File, Member
from torchcaps.data.registry import create_dataset, register
from torchcaps.data.spec import DataSpec, Request, check_labels
from torchcaps.fields import check_range

__all__ = ["AffNIST", "AffNISTStyle"]

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


@dataclass(frozen=True)
class AffNISTStyle(DataSpec):
    """Digits under random small affine transformations on 40x40, 32 variants of each: made here, and not affNIST.

    Each is scaled, sheared and turned by amounts that are uniform in the ranges below, and then put anywhere where no
    ink leaves the canvas. The ranges are those that affNIST's site states; its images differ.

    Args:
        rotation: up to so many degrees either way.
        shear: up to so much either way.
        scale: height and width by up to this more or less, each by itself.
        source: what the digits are taken from: its training part for training, its test part for testing.
        variants: how many of each digit.
        seed: of the transformations.
    """

    title: ClassVar[str] = "MNIST under affine transformations, made here"
    shape: ClassVar[tuple[int, int, int] | None] = (1, CANVAS, CANVAS)

    rotation: float = 20.0
    shear: float = 0.2
    scale: float = 0.2
    source: Literal["mnist", "fashion-mnist", "digits"] = "mnist"
    variants: int = VARIANTS
    seed: int = 0

    def check(self) -> None:
        """Refuse what turns a digit into nothing."""
        check_range(self, "rotation", 0, 180)
        check_range(self, "shear", 0, 1)
        check_range(self, "scale", 0, 0.9)
        check_range(self, "variants", 1)

    @property
    def made_from(self) -> str:
        """The name of the data set whose images these are."""
        return self.source

    def load(self, request: Request) -> Dataset:
        """Return the digits under their transformations."""
        source = create_dataset(self.source, request.split, request.root, download=request.download)
        assert isinstance(source, ImageSet), "sources are stored"
        return Transformed(request.name, source, self)


class Transformed(Dataset):
    """Digits under affine transformations, made when they are asked for.

    Args:
        name: what it was asked for by.
        source: the digits.
        spec: the ranges.
    """

    def __init__(self, name: str, source: ImageSet, spec: AffNISTStyle) -> None:
        super().__init__(name, source.split, (1, CANVAS, CANVAS), source.classes)
        self.source, self.spec = source, spec

    def __len__(self) -> int:
        return len(self.source) * self.spec.variants

    def examples(self, index: Tensor, epoch: int = 0) -> Batch:
        """Return digits: that of an index is the same in every epoch."""
        spec, chosen = self.spec, index // self.spec.variants
        pixels = self.source.images[chosen].float()
        draws = Draws(spec.seed, 0, index)
        angle, shear = draws.uniform(-spec.rotation, spec.rotation), draws.uniform(-spec.shear, spec.shear)
        tall, wide = (draws.uniform(1 - spec.scale, 1 + spec.scale) for _ in "yx")
        matrix = turned(angle, shear, tall, wide)
        low, high = _room(pixels, matrix)
        share = torch.stack([draws.unit(), draws.unit()], dim=1)
        moved = resampled(pixels, matrix, low + (high - low) * share, (CANVAS, CANVAS))
        images = moved.round().clamp(0, 255).to(torch.uint8)
        return Batch(images, self.source.labels[chosen], images, index)


def _room(pixels: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the least and the greatest shift ``[B, 2]`` that keep all ink on the canvas, by the corners of its box."""
    ink = pixels[:, 0] > 0  # [B, H, W]
    sides = []
    for axis, other in ((1, 2), (2, 1)):
        line = ink.any(other).to(torch.uint8)  # [B, H] or [B, W]
        first, last = line.argmax(1), line.shape[1] - 1 - line.flip(1).argmax(1)
        middle = (ink.shape[axis] - 1) / 2
        sides.append((first.double() - middle, last.double() - middle))
    corners = torch.stack([torch.stack([r, c], dim=1) for r in sides[0] for c in sides[1]], dim=1)  # [B, 4, 2]
    rows, columns = corners.unbind(2)
    moved = [line[:, 0, None] * rows + line[:, 1, None] * columns for line in matrix.unbind(1)]  # [B, 4] each
    half = (CANVAS - 1) / 2 - 1  # a pixel for what bilinear resampling smears
    low = torch.stack([-half - corner.amin(1) for corner in moved], dim=1)
    high = torch.stack([half - corner.amax(1) for corner in moved], dim=1)
    return torch.minimum(low, high), torch.maximum(low, high)


register("affnist", AffNIST())
register("affnist-style", AffNISTStyle())
