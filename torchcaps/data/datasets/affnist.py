"""affNIST, from its official files, and affNIST-style: small affine transformations of digits, generated on access."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from torchcaps._core.validation import check_range
from torchcaps.data.base import Batch, Dataset, DataSpec, ImageSet, ImageShape, LoadRequest
from torchcaps.data.datasets.generated import GeneratedFromDigits
from torchcaps.data.formats import check_file_labels
from torchcaps.data.geometry import affine_matrix, warp_affine
from torchcaps.data.mat import get_array, read_mat
from torchcaps.data.registry import register_dataset
from torchcaps.data.storage import ArchiveMember, DataError, RemoteFile

__all__ = ["AffNIST", "AffNISTStyle"]

CANVAS = 40
SITE = "https://www.cs.toronto.edu/~tijmen/affNIST/32x/transformed/"
N_FILES = 32
OFFICIAL_SPLIT_NAMES = {"train": "training", "val": "validation", "test": "test"}


@dataclass(frozen=True)
class AffNIST(DataSpec):
    """affNIST (Tieleman 2013): 32 affine transformations of each MNIST digit on a 40x40 canvas, from MATLAB files.

    The test split is made from MNIST's test digits, training and validation splits from its training digits. No
    checksums were published: the CRCs of the archives' members are checked instead, and the SHA-256 of a downloaded
    archive is recorded next to it.

    >>> AffNIST()
    AffNIST()
    """

    title: ClassVar[str] = "MNIST under affine transformations, the official files"
    splits: ClassVar[tuple[str, ...]] = ("train", "val", "test")
    split_sizes: ClassVar[dict[str, int]] = {"train": 1_600_000, "val": 320_000, "test": 320_000}
    shape: ClassVar[ImageShape | None] = (1, CANVAS, CANVAS)
    subdirectories: ClassVar[tuple[str, ...]] = (
        "affnist", "affNIST", "affnist/transformed", "affNIST/transformed", ".",
    )  # fmt: skip
    default_splits: ClassVar[tuple[str, ...]] = ("test",)

    def files(self, split: str) -> tuple[ArchiveMember, ...]:
        """Return the 32 files of a split."""
        directory = f"{OFFICIAL_SPLIT_NAMES[split]}_batches"
        archive = RemoteFile(f"{directory}.zip", "", (SITE,))
        return tuple(ArchiveMember(f"{directory}/{number}.mat", archive) for number in range(1, N_FILES + 1))

    def alternative_files(self, split: str) -> tuple[tuple[ArchiveMember, ...], ...]:
        """Return the single file with all images of a split, and the 32 files."""
        name = f"{OFFICIAL_SPLIT_NAMES[split]}.mat"
        return (ArchiveMember(name, RemoteFile(f"{name}.zip", "", (SITE,))),), self.files(split)

    def load(self, request: LoadRequest) -> Dataset:
        """Load a split from its single file if that exists, else from the 32 files."""
        directory = self.data_directory(request)
        parts = [_read(directory.fetch(file)) for file in self.select_files(request.split, directory)]
        images, labels = parts[0] if len(parts) == 1 else (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return ImageSet(request.name, request.split, images, labels, [str(digit) for digit in range(10)])


def _read(path: Path) -> tuple[Tensor, Tensor]:
    """Read ``affNISTdata.image`` ``[1600, N]``, each column an image row by row, and ``label_int`` ``[N]``."""
    content = read_mat(path, ["affNISTdata"])
    if not {"affNISTdata.image", "affNISTdata.label_int"} <= set(content):
        raise DataError(f"{path} is not an affNIST file: affNISTdata must have the fields image and label_int")
    pixels = get_array(content, "affNISTdata.image", path)
    pixels = pixels[:, None] if pixels.ndim == 1 else pixels
    if pixels.ndim != 2 or len(pixels) != CANVAS**2 or pixels.dtype != torch.uint8:
        actual = f"{pixels.dtype} of shape {list(pixels.shape)}"
        raise DataError(f"{path} is not an affNIST file: image must be torch.uint8 of shape [1600, N], got {actual}")
    images = pixels.T.contiguous().view(-1, 1, CANVAS, CANVAS)
    class_indices = get_array(content, "affNISTdata.label_int", path).reshape(-1).long()
    check_file_labels(class_indices, len(images), 10, path)
    return images, class_indices


@dataclass(frozen=True)
class AffNISTStyle(GeneratedFromDigits):
    """Small random affine transformations of digits on a 40x40 canvas, 32 per digit. A substitute for affNIST.

    Each digit is scaled, sheared and rotated by amounts that are uniform in the ranges below, and placed at a random
    position at which all of its ink is on the canvas, or at the center if there is none (clothes fill more of their
    images than digits do). The ranges are those stated on affNIST's site; the images differ from affNIST.

    Args:
        rotation: maximum angle in degrees, in both directions.
        shear: maximum shear, in both directions.
        scale: maximum relative change of height and width, drawn independently.
        variants: number of images per digit.

    >>> from torchcaps.data import LoadRequest
    >>> AffNISTStyle(source="digits", rotation=10.0).load(LoadRequest("turned", "test"))
    <turned, test: 32,000 images of 1x40x40, 10 classes>
    """

    stream: ClassVar[str] = "AffNISTStyle"

    title: ClassVar[str] = "MNIST under affine transformations, generated"
    shape: ClassVar[ImageShape | None] = (1, CANVAS, CANVAS)

    rotation: float = 20.0
    shear: float = 0.2
    scale: float = 0.2
    variants: int = 32

    def check(self) -> None:
        """Raise a ValueError if options are out of range."""
        super().check()
        check_range(self, "rotation", 0, 180)
        check_range(self, "shear", 0, 1)
        check_range(self, "scale", 0, 0.9)
        check_range(self, "variants", 1)

    def generate(self, name: str, source: ImageSet) -> Dataset:
        """Return the data set ``name``, with images generated from those of ``source``."""
        return _TransformedDigits(name, source, self)


class _TransformedDigits(Dataset):
    """Affine transformations of digits, generated on access."""

    def __init__(self, name: str, source: ImageSet, spec: AffNISTStyle) -> None:
        super().__init__(name, source.split, (1, CANVAS, CANVAS), source.classes)
        self.source, self.spec = source, spec

    def __len__(self) -> int:
        return len(self.source) * self.spec.variants

    def get_batch(self, indices: Tensor, epoch: int = 0) -> Batch:
        """Return the images at ``indices`` ``[B]`` as uint8, the same in each epoch."""
        spec, digits = self.spec, indices // self.spec.variants
        pixels = self.source.images[digits].float()
        rng = self.spec.create_rng(indices, self.split)
        angle, shear = rng.uniform(-spec.rotation, spec.rotation), rng.uniform(-spec.shear, spec.shear)
        scale_y, scale_x = (rng.uniform(1 - spec.scale, 1 + spec.scale) for _ in "yx")
        matrix = affine_matrix(angle, shear, scale_y, scale_x)
        low, high = _shift_range(pixels, matrix)
        fraction = torch.stack([rng.unit(), rng.unit()], dim=1)
        warped = warp_affine(pixels, matrix, low + (high - low) * fraction, (CANVAS, CANVAS))
        images = warped.round().clamp(0, 255).to(torch.uint8)
        return Batch(images, self.source.labels[digits], images, indices)


def _shift_range(pixels: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and largest shifts ``[B, 2]`` that keep the bounding box of the ink on the canvas."""
    ink = pixels[:, 0] > 0  # [B, H, W]
    sides = []
    for axis, other in ((1, 2), (2, 1)):
        line = ink.any(other).to(torch.uint8)  # [B, H] or [B, W]
        first, last = line.argmax(1), line.shape[1] - 1 - line.flip(1).argmax(1)
        middle = (ink.shape[axis] - 1) / 2
        sides.append((first.double() - middle, last.double() - middle))
    corners = torch.stack([torch.stack([r, c], dim=1) for r in sides[0] for c in sides[1]], dim=1)  # [B, 4, 2]
    rows, columns = corners.unbind(2)
    mapped = [line[:, 0, None] * rows + line[:, 1, None] * columns for line in matrix.unbind(1)]  # [B, 4] each
    half = (CANVAS - 1) / 2 - 1  # one pixel less, since bilinear resampling blurs
    low = torch.stack([-half - coordinate.amin(1) for coordinate in mapped], dim=1)
    high = torch.stack([half - coordinate.amax(1) for coordinate in mapped], dim=1)
    center = (low + high) / 2
    return torch.minimum(low, center), torch.maximum(high, center)


register_dataset("affnist", AffNIST())
register_dataset("affnist-style", AffNISTStyle())
