"""What the kinds of ``torchcaps analyze`` are given, and what they give back."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from torchcaps.analysis import PixelNetwork
from torchcaps.cli.images import chosen_images
from torchcaps.data import Batch, Dataset, Loader
from torchcaps.metrics import wilson_interval
from torchcaps.training.inference import Trained
from torchcaps.training.setup import some_of

__all__ = [
    "PIECE",
    "Columns",
    "Found",
    "Job",
    "Kind",
    "between",
    "decimal",
    "drawn",
    "gathered",
    "interval",
    "pieces",
    "whole",
]

PIECE = 100  # images at a time, whatever the kind: the bar then knows how far it is
Columns = dict[str, tuple[str, Callable[[Any], str]]]


@dataclass(frozen=True)
class Job:
    """What is asked for.

    Args:
        runs: by the names to show.
        dataset: the images.
        options: of the command.
        bar: shows how far it is.
    """

    runs: dict[str, Trained]
    dataset: Dataset
    options: Any
    bar: Progress

    @property
    def one(self) -> Trained:
        """The run, where there is but one."""
        return next(iter(self.runs.values()))

    @property
    def model(self) -> Any:
        """Its model: the analysis itself refuses one without capsules."""
        return self.one.model

    @property
    def title(self) -> str:
        """What stands over a figure: the name of the run, or nothing where the figure names several."""
        return next(iter(self.runs)) if len(self.runs) == 1 else ""

    def batch(self, run: Trained) -> Batch:
        """Return all images, as a run takes them."""
        return gathered(run.loader(self.dataset))

    def network(self, run: Trained) -> PixelNetwork:
        """Return a network that takes pixels in 0..1; refuse a run that the images do not fit."""
        run.loader(self.dataset)
        return PixelNetwork(run.model, run.pipeline, self.dataset.shape)

    def pixels(self, network: PixelNetwork, dataset: Dataset | None = None) -> Batch:
        """Return all images, or those of another data set, as pixels in 0..1."""
        return gathered(Loader(dataset or self.dataset, PIECE, pipeline=network.pipeline, train=False))

    def training_set(self, run: Trained, most: int | None = None) -> Dataset:
        """Return images to learn from: at most so many."""
        dataset = some_of(chosen_images(run, self.options, "train"), most)
        run.loader(dataset)  # refuses those that do not fit
        return dataset

    def tick(self, name: str, total: float | None) -> Callable[[], None]:
        """Return what shows another piece of work as done."""
        task = self.bar.add_task(name, total=total)
        return lambda: self.bar.advance(task)

    def given(self, **flags: str) -> dict[str, Any]:
        """Return arguments with the values of flags, where the user has given these."""
        return {name: self.options[flag] for name, flag in flags.items() if self.options[flag] is not None}


@dataclass(frozen=True)
class Found:
    """What was found.

    Args:
        title: what it is about.
        n_images: how many.
        rows: what the rows of the table are.
        columns: which numbers it shows, their headings and how they are written.
        numbers: by row and column; more than are shown.
        draw: writes figures, and returns which.
        notes: what else there is to say.
        also: further numbers for machines.
        data: which images, where not those of the job.
    """

    title: str
    n_images: int
    rows: str
    columns: Columns
    numbers: Mapping[str, Mapping[str, Any]]
    draw: Callable[[Path], list[Path]]
    notes: tuple[str, ...] = ()
    also: Mapping[str, Any] = field(default_factory=dict)
    data: str = ""


@dataclass(frozen=True)
class Kind:
    """A kind of analysis.

    Args:
        work: does it.
        about: what it is, in a line.
        images: how many it takes, where the user does not say.
        flags: which it takes besides those of all kinds.
        several: whether it compares runs.
    """

    work: Callable[[Job], Found]
    about: str
    images: int
    flags: tuple[str, ...] = ()
    several: bool = False


def gathered(loader: Loader) -> Batch:
    """Return all batches as one."""
    return Batch(*(torch.cat(parts) for parts in zip(*loader.epoch(0), strict=True)))


def drawn(draw: Callable[..., None], result: Any, title: str, **options: Any) -> Callable[[Path], list[Path]]:
    """Return what draws a result into a file."""

    def write(out: Path) -> list[Path]:
        draw(result, out, title, **options)
        return [out]

    return write


def pieces(n_images: int, size: int = PIECE) -> int:
    """Return in how many pieces so many images are looked at."""
    return math.ceil(n_images / size)


def interval(accuracy: float, n: int) -> tuple[float, float]:
    """Return the 95 % interval of a share of so many images."""
    return wilson_interval(round(accuracy * n), n)


def between(bounds: tuple[float, float]) -> str:
    """Write an interval."""
    return f"{100 * bounds[0]:.2f} to {100 * bounds[1]:.2f} %"


def whole(value: int) -> str:
    """Write a whole number."""
    return f"{value:,}"


def decimal(digits: int) -> Callable[[float], str]:
    """Return what writes a number."""
    return lambda value: f"{value:.{digits}f}"
