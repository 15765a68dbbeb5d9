"""A page of a data set to look at: images with their labels."""

from pathlib import Path

import torch
from torch import Tensor

from torchcaps._core.optional import import_optional
from torchcaps._core.plotting import FIGURE_SUFFIXES, as_rgb, overlay_two_colors, save_figure
from torchcaps._core.random import permute_indices
from torchcaps.data.base import Dataset
from torchcaps.data.batch import Batch
from torchcaps.data.errors import DataError
from torchcaps.data.pipelines import Pipeline

__all__ = ["draw_grid"]

COLUMNS = 10
ROWS = 10
GAP = 2  # pixels of the images between them
CANDIDATES = 4000  # images that are looked through for some of each class


def draw_grid(
    dataset: Dataset, out: Path, pipeline: Pipeline | None = None, title: str = "", page: int = 0, train: bool = True
) -> None:
    """Draw images of a data set into a file.

    Images with one label stand in a row for each class, those with several above their digits, each in a colour of its
    own. With a pipeline each row is one image, as it is and as the network would see it in some epochs.

    Args:
        dataset: what to draw from.
        out: the file: ``.png``, ``.svg`` or ``.pdf``.
        pipeline: what is done to the images.
        title: what stands above, after the data set's name.
        page: which images: another number, others.
        train: whether the pipeline's steps are those for training.
    """
    if out.suffix.lower() not in FIGURE_SUFFIXES:
        raise DataError(f"{out} must end in one of {', '.join(FIGURE_SUFFIXES)}: it is a picture")
    if pipeline is not None:
        rows, labels, cell_labels = _augmented(dataset, pipeline, page, train)
    elif dataset.n_objects == 1:
        rows, labels, cell_labels = _by_class(dataset, page)
    else:
        rows, labels, cell_labels = _overlapping(dataset, page)
    size = "x".join(map(str, dataset.shape))
    heading = f"{dataset.name}, {dataset.split}: {len(dataset):,} images of {size}, {dataset.n_classes} classes"
    _write(rows, labels, cell_labels, "\n".join([heading, title]) if title else heading, out)


def _some(dataset: Dataset, start: int, count: int) -> Batch:
    """Return images in a random order, from some place of it on."""
    positions = (torch.arange(min(count, len(dataset))) + start % len(dataset)) % len(dataset)
    return dataset.examples(permute_indices(positions, len(dataset), seed=0, epoch=0))


def _by_class(dataset: Dataset, page: int) -> tuple[list[list[Tensor]], list[str], list[list[str]]]:
    """Return a row of images for each class; of many classes ten, the next ten on the next page."""
    n_classes = dataset.n_classes
    first = page * ROWS % n_classes if n_classes > ROWS else 0
    chosen = [(first + number) % n_classes for number in range(min(ROWS, n_classes))]
    batch = _some(dataset, 0 if n_classes > ROWS else page * COLUMNS * n_classes, CANDIDATES)
    rows = [[as_rgb(image) for image in batch.images[batch.labels == number][:COLUMNS]] for number in chosen]
    names = [dataset.classes[number] for number, row in zip(chosen, rows, strict=True) if row]
    return [row for row in rows if row], names, []


def _overlapping(dataset: Dataset, page: int) -> tuple[list[list[Tensor]], list[str], list[list[str]]]:
    """Return images above their digits in two colours."""
    batch = _some(dataset, page * 4 * COLUMNS, 4 * COLUMNS)
    rows, words = [], []
    for start in range(0, len(batch.images), COLUMNS):
        part = slice(start, start + COLUMNS)
        rows.append([as_rgb(image) for image in batch.images[part]])
        rows.append([overlay_two_colors(*pair) for pair in batch.targets[part]])
        words.append([_named(dataset, label) for label in batch.labels[part]])
        words.append([""] * len(words[-1]))
    return rows, [""] * len(rows), words


def _named(dataset: Dataset, label: Tensor) -> str:
    """Return the classes of an image with several labels."""
    numbers = label.nonzero()[:, 0] if dataset.n_objects is None else label
    return " + ".join(dataset.classes[int(number)] for number in numbers)


def _augmented(
    dataset: Dataset, pipeline: Pipeline, page: int, train: bool
) -> tuple[list[list[Tensor]], list[str], list[list[str]]]:
    """Return each image as it is and, at its right, as the network sees it in the first epochs."""
    batch = _some(dataset, page * ROWS, ROWS)
    epochs = range(COLUMNS - 1) if train else range(1)
    seen = [pipeline(batch, 0, epoch, train).images for epoch in epochs]
    rows = [[as_rgb(image), *(as_rgb(images[n]) for images in seen)] for n, image in enumerate(batch.images)]
    many = dataset.n_objects != 1
    names = [_named(dataset, label) if many else dataset.classes[int(label)] for label in batch.labels]
    heads = ["as it is", *(f"epoch {epoch}" for epoch in epochs)]
    return rows, names, [heads, *[[""] * len(heads)] * (len(rows) - 1)]


def _write(rows: list[list[Tensor]], names: list[str], words: list[list[str]], title: str, out: Path) -> None:
    """Set the images into one picture, with names at the left and words above, and write it whole."""
    figures = import_optional("matplotlib.figure", "drawing")
    height = max(image.shape[1] for row in rows for image in row)
    width = max(image.shape[2] for row in rows for image in row)
    above = max(4, height // 4) if any(any(line) for line in words) else 0  # room for words
    tall = [height + GAP + (above if words and any(words[number]) else 0) for number in range(len(rows))]
    columns = max(len(row) for row in rows)
    picture = torch.ones(3, sum(tall) + GAP, columns * (width + GAP) + GAP)
    scale = max(1, round(64 / max(height, width)))  # pixels of the picture for one of an image
    left = 0.13 * max([len(name) for name in names] + [0]) + 0.15  # inches, for the names
    inches = [side * scale / 100 for side in picture.shape[1:]]
    room = 0.25 + 0.17 * (1 + title.count("\n"))  # inches, for the title
    wide = max(left + inches[1] + 0.1, 0.2 + 0.09 * max(map(len, title.split("\n"))))
    figure = figures.Figure(figsize=(wide, inches[0] + room), dpi=100)
    whole_width, whole_height = figure.get_size_inches()
    axes = figure.add_axes((left / whole_width, 0.05 / whole_height, inches[1] / whole_width, inches[0] / whole_height))
    top = 0
    for number, row in enumerate(rows):
        bottom = top + tall[number]
        for column, image in enumerate(row):
            x, y = GAP + column * (width + GAP), bottom - image.shape[1]
            picture[:, y : y + image.shape[1], x : x + image.shape[2]] = image
            if words and words[number][column]:
                axes.text(x + width / 2, bottom - height - 1, words[number][column], ha="center", va="bottom", size=8)
        axes.text(-2, bottom - height / 2, names[number], ha="right", va="center", size=9)
        top = bottom
    axes.imshow(picture.permute(1, 2, 0).numpy(), interpolation="nearest", aspect="auto")
    axes.set_axis_off()
    figure.text(0.1 / whole_width, 1 - 0.1 / whole_height, title, ha="left", va="top", size=10)
    save_figure(figure, out)
