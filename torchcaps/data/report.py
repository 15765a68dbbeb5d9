"""What is there of a data set, whether it is whole, and what its images are like."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchcaps._core.progress import track
from torchcaps._core.random import permute_indices
from torchcaps.data.base import Dataset
from torchcaps.data.errors import DataError
from torchcaps.data.registry import find_spec
from torchcaps.data.spec import Request
from torchcaps.data.storage import File, Member, checksum_matches

__all__ = ["FileState", "Numbers", "Presence", "check_files", "measure", "presence", "whole_problem"]

MEASURED = 100_000  # images that are looked at, at most


@dataclass(frozen=True)
class FileState:
    """One file of a data set.

    Args:
        name: its official name.
        path: where it lies, or ``None``.
        state: ``"right"``, ``"wrong"`` (another checksum), ``"missing"``, ``"unknown"`` (none was published for it) or
            ``"packed"`` (still in its archive).
    """

    name: str
    path: Path | None
    state: str


@dataclass(frozen=True)
class Presence:
    """What is there of a data set.

    Args:
        splits: the parts whose files are there.
        missing: the parts whose files are not.
        bytes: what there is to fetch; 0 where it is not known.
        home: where files are, or would go.
    """

    splits: tuple[str, ...]
    missing: tuple[str, ...]
    bytes: int
    home: Path | None


def presence(name: str, root: Any = None) -> Presence:
    """Look which files of a data set are there; nothing is read or fetched."""
    spec = find_spec(name)
    if spec.made_from:
        return presence(spec.made_from, root)
    if not spec.folders:
        return Presence(spec.fetched, (), 0, None)
    place = spec.place(Request(name, root=root, download=False))
    there, missing, wanted = [], [], {}
    for split in spec.fetched:
        lacking = [part for part in spec.chosen(split, place) if not place.has(part)]
        if lacking:
            missing.append(split)
            archives = [part if isinstance(part, File) else part.archive for part in lacking]
            wanted |= {file.name: file.size for file in archives}
        else:
            there.append(split)
    return Presence(tuple(there), tuple(missing), sum(wanted.values()), place.home)


def check_files(name: str, split: str, root: Any = None, **options: Any) -> Iterator[FileState]:
    """Hold the files of a part against their published checksums."""
    spec = find_spec(name, **options)
    if spec.made_from:
        yield from check_files(spec.made_from, split, root)
        return
    if not spec.folders:
        return
    place = spec.place(Request(name, split, root, download=False))
    for part in spec.chosen(split, place):
        path = place.find(part)
        if path is None:
            archive = place.find(part.archive) if isinstance(part, Member) else None
            yield FileState(part.name, archive, "packed" if archive else "missing")
        elif not part.checksum or path.name != Path(part.name).name:  # an unpacked file has no published checksum
            yield FileState(part.name, path, "unknown")
        else:
            yield FileState(part.name, path, "right" if checksum_matches(path, part.checksum) else "wrong")


@dataclass(frozen=True)
class Numbers:
    """What the images of a data set are like.

    Args:
        length: how many there are.
        looked_at: how many of them the other numbers are of.
        mean, deviation: of the pixels of each channel, in 0..1.
        histogram: how many images show each class.
    """

    length: int
    looked_at: int
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    histogram: tuple[int, ...]


def measure(dataset: Dataset, most: int = MEASURED) -> Numbers:
    """Look at the images of a data set: at all of them, or at so many at random."""
    count = min(len(dataset), most)
    positions = torch.arange(count)
    index = positions if count == len(dataset) else permute_indices(positions, len(dataset), 0, 0)
    channels = dataset.shape[0]
    total, squares = torch.zeros(channels, dtype=torch.int64), torch.zeros(channels, dtype=torch.int64)
    histogram = torch.zeros(dataset.n_classes, dtype=torch.int64)
    for some in track(index.split(1000), f"looking at {dataset.name}"):
        batch = dataset.examples(some)
        pixels = batch.images.long()  # sums of whole numbers are exact
        total += pixels.sum((0, 2, 3))
        squares += (pixels * pixels).sum((0, 2, 3))
        if dataset.n_objects is None:
            histogram += batch.labels.sum(0).long()
        else:
            histogram += torch.bincount(batch.labels.flatten(), minlength=dataset.n_classes)
    n_pixels = count * dataset.shape[1] * dataset.shape[2]
    mean = total.double() / n_pixels
    deviation = (squares.double() / n_pixels - mean * mean).clamp(min=0).sqrt()
    return Numbers(
        len(dataset),
        count,
        tuple((mean / 255).tolist()),
        tuple((deviation / 255).tolist()),
        tuple(histogram.tolist()),
    )


def whole_problem(name: str, split: str, root: Any = None, **options: Any) -> tuple[Dataset | None, str]:
    """Read a part; return it, and what is wrong with it: nothing, or one sentence."""
    spec = find_spec(name, **options)
    request = Request(name, split, root, download=False)
    try:
        dataset = spec.load(request)
    except DataError as error:
        return None, str(error)
    return dataset, spec.count_problem(request, dataset)
