"""Inspection of data sets: local availability, checksums, statistics, and a page of sample images."""

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchcaps._core.optional import import_optional
from torchcaps._core.plotting import FIGURE_SUFFIXES, as_rgb, overlay_two_colors, save_figure
from torchcaps._core.progress import track
from torchcaps._core.random import permute_indices
from torchcaps.data.base import Batch, Dataset, LoadRequest
from torchcaps.data.pipelines import Pipeline
from torchcaps.data.registry import find_spec
from torchcaps.data.storage import ArchiveMember, DataError, RemoteFile, checksum_matches

__all__ = [
    "Availability",
    "DatasetStatistics",
    "FileCheck",
    "FileStatus",
    "check_availability",
    "check_files",
    "compute_statistics",
    "draw_grid",
    "try_load",
]

MAX_IMAGES_FOR_STATISTICS = 100_000
GRID_ROWS, GRID_COLUMNS = 10, 10
GRID_GAP = 2  # between images, in pixels of the images
GRID_CANDIDATES = 4000  # images that are searched for examples of each class


# Files ------------------------------------------------------------------------------------------------------


class FileStatus(enum.Enum):
    """Result of checking a file of a data set against its published checksum."""

    OK = "ok"
    MISMATCH = "mismatch"
    MISSING = "missing"
    UNVERIFIED = "unverified"  # no checksum was published for this form of the file
    ARCHIVED = "archived"  # not extracted from its archive yet


@dataclass(frozen=True)
class FileCheck:
    """A file of a data set and its status.

    Args:
        name: official name.
        path: local path (that of the archive if ``ARCHIVED``), or ``None`` if missing.
        status: result of the check.
    """

    name: str
    path: Path | None
    status: FileStatus


@dataclass(frozen=True)
class Availability:
    """Which default splits of a data set can be loaded without a download.

    Args:
        splits: splits whose files exist locally.
        missing: splits whose files do not.
        download_bytes: size of the missing files; 0 if unknown.
        directory: download directory; ``None`` if the data set has no files.
    """

    splits: tuple[str, ...]
    missing: tuple[str, ...]
    download_bytes: int
    directory: Path | None


def check_availability(name: str, root: Any = None) -> Availability:
    """Return which splits of a data set exist locally. Nothing is read or downloaded."""
    spec = find_spec(name)
    if spec.made_from:
        return check_availability(spec.made_from, root)
    if not spec.subdirectories:
        return Availability(spec.default_splits, (), 0, None)
    directory = spec.data_directory(LoadRequest(name, root=root, download=False))
    available, missing, sizes = [], [], {}
    for split in spec.default_splits:
        missing_files = [file for file in spec.select_files(split, directory) if not directory.is_available(file)]
        if missing_files:
            missing.append(split)
            downloads = [file if isinstance(file, RemoteFile) else file.archive for file in missing_files]
            sizes |= {file.name: file.size for file in downloads}
        else:
            available.append(split)
    return Availability(tuple(available), tuple(missing), sum(sizes.values()), directory.download_directory)


def check_files(name: str, split: str, root: Any = None, **options: Any) -> Iterator[FileCheck]:
    """Check each file of a split against its published checksum. Nothing is downloaded or extracted."""
    spec = find_spec(name, **options)
    if spec.made_from:
        yield from check_files(spec.made_from, split, root)
        return
    if not spec.subdirectories:
        return
    directory = spec.data_directory(LoadRequest(name, split, root, download=False))
    for file in spec.select_files(split, directory):
        path = directory.find(file)
        if path is None:
            archive = directory.find(file.archive) if isinstance(file, ArchiveMember) else None
            yield FileCheck(file.name, archive, FileStatus.ARCHIVED if archive else FileStatus.MISSING)
        elif not file.checksum or path.name != Path(file.name).name:  # a decompressed file has no published checksum
            yield FileCheck(file.name, path, FileStatus.UNVERIFIED)
        else:
            matches = checksum_matches(path, file.checksum)
            yield FileCheck(file.name, path, FileStatus.OK if matches else FileStatus.MISMATCH)


def try_load(name: str, split: str, root: Any = None, **options: Any) -> tuple[Dataset | None, str]:
    """Load a split without downloading; return it, and the message of an error or size mismatch (empty if none)."""
    spec = find_spec(name, **options)
    request = LoadRequest(name, split, root, download=False)
    try:
        dataset = spec.load(request)
    except DataError as error:
        return None, str(error)
    return dataset, spec.describe_size_mismatch(request, dataset)


# Statistics -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DatasetStatistics:
    """Statistics of the images of a data set.

    Args:
        n_images: number of images.
        n_sampled: number of images from which the other values were computed.
        mean, std: mean and standard deviation of each channel, in 0..1.
        class_counts: number of sampled images of each class.
    """

    n_images: int
    n_sampled: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    class_counts: tuple[int, ...]


def compute_statistics(dataset: Dataset, max_images: int = MAX_IMAGES_FOR_STATISTICS) -> DatasetStatistics:
    """Compute statistics over all images of a data set, or over a random sample if it has more than ``max_images``."""
    count = min(len(dataset), max_images)
    positions = torch.arange(count)
    indices = positions if count == len(dataset) else permute_indices(positions, len(dataset), 0, 0)
    channels = dataset.shape[0]
    total, squares = torch.zeros(channels, dtype=torch.int64), torch.zeros(channels, dtype=torch.int64)
    class_counts = torch.zeros(dataset.n_classes, dtype=torch.int64)
    for chunk in track(indices.split(1000), f"statistics of {dataset.name}"):
        batch = dataset.get_batch(chunk)
        pixels = batch.images.long()  # integer sums are exact
        total += pixels.sum((0, 2, 3))
        squares += (pixels * pixels).sum((0, 2, 3))
        if dataset.n_objects is None:
            class_counts += batch.labels.sum(0).long()
        else:
            class_counts += torch.bincount(batch.labels.flatten(), minlength=dataset.n_classes)
    n_pixels = count * dataset.shape[1] * dataset.shape[2]
    mean = total.double() / n_pixels
    std = (squares.double() / n_pixels - mean * mean).clamp(min=0).sqrt()
    return DatasetStatistics(
        len(dataset), count, tuple((mean / 255).tolist()), tuple((std / 255).tolist()), tuple(class_counts.tolist())
    )


# Grid of samples --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Grid:
    """Rows of RGB images ``[3, H, W]``, a label to the left of each row, and captions above images (or none)."""

    rows: list[list[Tensor]]
    row_labels: list[str]
    captions: list[list[str]]


def draw_grid(
    dataset: Dataset, out: Path, pipeline: Pipeline | None = None, title: str = "", page: int = 0, train: bool = True
) -> None:
    """Draw sample images of a data set to a file.

    Data sets with one label per image get one row per class; with several labels, each image above its objects in
    different colors. With a pipeline, each row has one image and its transformed versions in the first epochs.

    Args:
        dataset: the data set.
        out: target file, ``.png``, ``.svg`` or ``.pdf``.
        pipeline: transforms to show.
        title: second line of the title, below the name of the data set.
        page: page number; each page has other images.
        train: apply the pipeline's training transforms.
    """
    if out.suffix.lower() not in FIGURE_SUFFIXES:
        raise DataError(f"the figure file must end in {', '.join(FIGURE_SUFFIXES)}, got {out}")
    if pipeline is not None:
        grid = _augmentation_grid(dataset, pipeline, page, train)
    elif dataset.n_objects == 1:
        grid = _class_grid(dataset, page)
    else:
        grid = _object_grid(dataset, page)
    size = "x".join(map(str, dataset.shape))
    heading = f"{dataset.name}, {dataset.split}: {len(dataset):,} images of {size}, {dataset.n_classes} classes"
    _draw(grid, f"{heading}\n{title}" if title else heading, out)


def _sample_images(dataset: Dataset, start: int, count: int) -> Batch:
    """Return images in a fixed random order, from position ``start`` on."""
    positions = (torch.arange(min(count, len(dataset))) + start % len(dataset)) % len(dataset)
    return dataset.get_batch(permute_indices(positions, len(dataset), seed=0, epoch=0))


def _class_grid(dataset: Dataset, page: int) -> _Grid:
    """Return one row per class; if there are more than ten classes, ten per page."""
    n_classes = dataset.n_classes
    first = page * GRID_ROWS % n_classes if n_classes > GRID_ROWS else 0
    class_indices = [(first + offset) % n_classes for offset in range(min(GRID_ROWS, n_classes))]
    batch = _sample_images(dataset, 0 if n_classes > GRID_ROWS else page * GRID_COLUMNS * n_classes, GRID_CANDIDATES)
    class_indices = [index for index in class_indices if bool((batch.labels == index).any())]
    rows = [[as_rgb(image) for image in batch.images[batch.labels == i][:GRID_COLUMNS]] for i in class_indices]
    return _Grid(rows, [dataset.classes[index] for index in class_indices], [])


def _object_grid(dataset: Dataset, page: int) -> _Grid:
    """Return rows of images, each followed by a row with the objects of these images in two colors."""
    batch = _sample_images(dataset, page * 4 * GRID_COLUMNS, 4 * GRID_COLUMNS)
    rows, captions = [], []
    for start in range(0, len(batch.images), GRID_COLUMNS):
        part = slice(start, start + GRID_COLUMNS)
        rows.append([as_rgb(image) for image in batch.images[part]])
        rows.append([overlay_two_colors(*objects) for objects in batch.targets[part]])
        captions.append([_join_class_names(dataset, label) for label in batch.labels[part]])
        captions.append([""] * len(captions[-1]))
    return _Grid(rows, [""] * len(rows), captions)


def _join_class_names(dataset: Dataset, label: Tensor) -> str:
    """Return the class names of a label: one class index, several, or multi-hot."""
    class_indices = label.nonzero()[:, 0] if dataset.n_objects is None else label.reshape(-1)
    return " + ".join(dataset.classes[int(index)] for index in class_indices)


def _augmentation_grid(dataset: Dataset, pipeline: Pipeline, page: int, train: bool) -> _Grid:
    """Return rows with one image and, to its right, its transformed versions in the first epochs."""
    batch = _sample_images(dataset, page * GRID_ROWS, GRID_ROWS)
    epochs = range(GRID_COLUMNS - 1) if train else range(1)
    transformed = [pipeline(batch, 0, epoch, train).images for epoch in epochs]
    rows = [[as_rgb(image), *(as_rgb(images[n]) for images in transformed)] for n, image in enumerate(batch.images)]
    row_labels = [_join_class_names(dataset, label) for label in batch.labels]
    header = ["original", *(f"epoch {epoch}" for epoch in epochs)]
    return _Grid(rows, row_labels, [header, *[[""] * len(header)] * (len(rows) - 1)])


def _draw(grid: _Grid, title: str, out: Path) -> None:
    """Draw a grid with its labels and captions into one figure and save it."""
    matplotlib_figure = import_optional("matplotlib.figure", "drawing")
    rows, captions = grid.rows, grid.captions
    height = max(image.shape[1] for row in rows for image in row)
    width = max(image.shape[2] for row in rows for image in row)
    caption_height = max(4, height // 4) if any(any(line) for line in captions) else 0
    row_heights = [
        height + GRID_GAP + (caption_height if captions and any(captions[row]) else 0) for row in range(len(rows))
    ]
    n_columns = max(len(row) for row in rows)
    canvas = torch.ones(3, sum(row_heights) + GRID_GAP, n_columns * (width + GRID_GAP) + GRID_GAP)
    scale = max(1, round(64 / max(height, width)))  # pixels of the figure per pixel of an image
    label_inches = 0.13 * max([len(label) for label in grid.row_labels] + [0]) + 0.15
    canvas_inches = [side * scale / 100 for side in canvas.shape[1:]]
    title_inches = 0.25 + 0.17 * (1 + title.count("\n"))
    figure_width = max(label_inches + canvas_inches[1] + 0.1, 0.2 + 0.09 * max(map(len, title.split("\n"))))
    figure_height = canvas_inches[0] + title_inches
    figure = matplotlib_figure.Figure(figsize=(figure_width, figure_height), dpi=100)
    figure_width, figure_height = figure.get_size_inches()
    left, bottom = label_inches / figure_width, 0.05 / figure_height
    axes = figure.add_axes((left, bottom, canvas_inches[1] / figure_width, canvas_inches[0] / figure_height))
    top = 0
    for row, images in enumerate(rows):
        row_end = top + row_heights[row]
        for column, image in enumerate(images):
            x, y = GRID_GAP + column * (width + GRID_GAP), row_end - image.shape[1]
            canvas[:, y : y + image.shape[1], x : x + image.shape[2]] = image
            if captions and captions[row][column]:
                axes.text(x + width / 2, row_end - height - 1, captions[row][column], ha="center", va="bottom", size=8)
        axes.text(-2, row_end - height / 2, grid.row_labels[row], ha="right", va="center", size=9)
        top = row_end
    axes.imshow(canvas.permute(1, 2, 0).numpy(), interpolation="nearest", aspect="auto")
    axes.set_axis_off()
    figure.text(0.1 / figure_width, 1 - 0.1 / figure_height, title, ha="left", va="top", size=10)
    save_figure(figure, out)
