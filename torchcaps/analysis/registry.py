"""Registry of analyses: each is declared once, with its computation, summary, figure and options.

The declaration serves Python (`run_analysis`), the command line (``torchcaps analyze RUN NAME``), the measures of the
papers and the figures of a training run. A file in ``torchcaps/analysis/`` that registers an `Analysis` is all that a
new one takes.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from torchcaps._core.registry import Registry
from torchcaps._core.validation import check_field_names
from torchcaps.analysis.common import Progress
from torchcaps.analysis.pixel_network import PixelNetwork
from torchcaps.data import Batch, Dataset, Loader
from torchcaps.models import Network

__all__ = [
    "ANALYSES",
    "Analysis",
    "AnalysisReport",
    "Column",
    "NoOptions",
    "Subject",
    "Summary",
    "list_analyses",
    "register_analysis",
    "run_analysis",
]


def _no_progress(n_steps: int | None) -> Progress:
    return lambda: None


@dataclass(frozen=True)
class Subject:
    """A network under analysis, with its images.

    Args:
        name: the network in tables and figures.
        model: the network.
        images: the images to analyse, preprocessed as the network was trained: a `torchcaps.data.Loader`, or one batch.
            Analyses that perturb pixels (``attack``, ``universal``, ``gan``) need a loader.
        open_training_set: a function from a maximum number (``None``: all) to the training images, for analyses that
            train a generator.
        batch_size: images per forward pass.
        track: a function that takes the number of steps (``None``: unknown) and returns a callback for each step.

    >>> import torch, torchcaps
    >>> model = torchcaps.create_model("capsnet_small", width=4, types=2, hidden=(8,))
    >>> from torchcaps.data import Batch
    >>> images = torch.rand(4, 1, 28, 28)
    >>> subject = Subject("capsnet_small", model, Batch(images, torch.arange(4), images, torch.arange(4)))
    >>> subject.n_images, subject.classes[:2]
    (4, ('0', '1'))
    """

    name: str
    model: Network
    images: Loader | Batch
    open_training_set: Callable[[int | None], Dataset] | None = None
    batch_size: int = 128
    track: Callable[[int | None], Progress] = _no_progress

    @property
    def loader(self) -> Loader:
        """The loader of the images; a ValueError if they are one batch."""
        if isinstance(self.images, Batch):
            raise ValueError(f"{self.name}: this analysis needs images as a Loader, got a Batch")
        return self.images

    @property
    def n_images(self) -> int:
        """The number of images."""
        return len(self.images.labels) if isinstance(self.images, Batch) else len(self.images.dataset)

    @property
    def classes(self) -> tuple[str, ...]:
        """The class names; indices if the images are one batch."""
        if isinstance(self.images, Batch):
            return tuple(map(str, range(self.model.spec.classes)))
        return self.images.dataset.classes

    def n_batches(self, batch_size: int | None = None) -> int:
        """Return the number of forward passes over all images."""
        return math.ceil(self.n_images / (batch_size or self.batch_size))

    def batch(self) -> Batch:
        """Return all images as one batch, on the model's device."""
        batch = self.images if isinstance(self.images, Batch) else _concatenate(self.images)
        return batch.to(self._device)

    def pixel_network(self) -> PixelNetwork:
        """Return the network with its preprocessing as the first layer: it takes pixels in 0..1."""
        return PixelNetwork(self.model, self.loader.pipeline, self.loader.dataset.shape)

    def pixels(self, network: PixelNetwork, dataset: Dataset | None = None) -> Batch:
        """Return all images, or those of another data set, as the pixels in 0..1 that a `PixelNetwork` takes.

        They are on the model's device.
        """
        dataset = dataset or self.loader.dataset
        loader = Loader(dataset, self.batch_size, pipeline=network.pipeline, train=False)
        return _concatenate(loader).to(self._device)

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def training_set(self, max_images: int | None = None) -> Dataset:
        """Return training images, at most ``max_images``."""
        if self.open_training_set is None:
            raise ValueError(f"{self.name}: this analysis needs training images, and open_training_set is not given")
        return self.open_training_set(max_images)


def _concatenate(loader: Loader) -> Batch:
    """Return all images of a loader as one batch."""
    return Batch(*(torch.cat(parts) for parts in zip(*loader.epoch(0), strict=True)))


@dataclass(frozen=True)
class Column:
    """A column of a summary table.

    Args:
        heading: its heading.
        format: ``"percent"`` (of a fraction), ``"interval"`` (two fractions as percent), ``"text"``, or a format
            specification of Python such as ``".3f"`` or ``",d"``.

    >>> Column("accuracy", "percent")
    Column(heading='accuracy', format='percent')
    """

    heading: str
    format: str = "text"


@dataclass(frozen=True)
class Summary:
    """The numbers of an analysis, for a table or for JSON.

    Args:
        title: the quantity that was measured.
        n_images: number of images it was measured on; ``None`` for all images of the data set.
        row_heading: heading of the column with the names of the rows.
        columns: the columns of the table, by key.
        rows: values by row and key; keys without a column are written to JSON only.
        notes: sentences below the table.
        details: further values for JSON.
        data: the images, if not those of the subject's data set.

    >>> import torch, torchcaps
    >>> model = torchcaps.create_model("capsnet_small", width=4, types=2, hidden=(8,))
    >>> from torchcaps.analysis import run_analysis
    >>> from torchcaps.data import Batch
    >>> images = torch.rand(4, 1, 28, 28)
    >>> subject = Subject("capsnet_small", model, Batch(images, torch.arange(4), images, torch.arange(4)))
    >>> summary = run_analysis("dead", subject).summary
    >>> isinstance(summary, Summary), list(summary.rows)
    (True, ['primary', 'digit'])
    """

    title: str
    n_images: int | None
    row_heading: str
    columns: Mapping[str, Column]
    rows: Mapping[str, Mapping[str, Any]]
    notes: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    data: str = ""


@dataclass(frozen=True)
class NoOptions:
    """Options of an analysis that has none."""


@dataclass(frozen=True)
class Analysis:
    """The declaration of an analysis.

    Args:
        name: its name on the command line and in `run_analysis`.
        description: one line for the help.
        run: ``run(subject, options) -> result``; ``run(subjects, options)`` if ``compares_models``.
        summarize: ``summarize(result, classes) -> Summary``.
        draw: ``draw(result, out, title, classes)`` writes the figure; it returns the files if it writes several.
        options: a frozen dataclass. Its fields are the flags of the command, with the defaults and, from its docstring,
            the help texts; a field of type ``Subject | None`` takes a run directory there.
        n_images: default number of images; ``None`` for an analysis that generates its own.
        compares_models: whether it takes several networks.

    >>> from torchcaps.analysis import ANALYSES
    >>> ANALYSES.get("affine").flags
    ()
    """

    name: str
    description: str
    run: Callable[[Any, Any], Any]
    summarize: Callable[[Any, Sequence[str]], Summary]
    draw: Callable[[Any, Path, str, Sequence[str]], Sequence[Path] | None]
    options: type[Any] = NoOptions
    n_images: int | None = 500
    compares_models: bool = False

    @property
    def flags(self) -> tuple[str, ...]:
        """The names of the options."""
        return tuple(option.name for option in dataclasses.fields(self.options))


@dataclass(frozen=True)
class AnalysisReport:
    """The result of an analysis, with its summary and its figure.

    Args:
        analysis: the declaration.
        options: the options it ran with.
        result: the return value of ``analysis.run``.
        subjects: the networks.

    >>> import torch, torchcaps
    >>> model = torchcaps.create_model("capsnet_small", width=4, types=2, hidden=(8,))
    >>> from torchcaps.data import Batch
    >>> images = torch.rand(4, 1, 28, 28)
    >>> subject = Subject("capsnet_small", model, Batch(images, torch.arange(4), images, torch.arange(4)))
    >>> from torchcaps.analysis import run_analysis
    >>> report = run_analysis("dead", subject)
    >>> isinstance(report, AnalysisReport), report.summary.n_images
    (True, 4)
    """

    analysis: Analysis
    options: Any
    result: Any
    subjects: tuple[Subject, ...]

    @property
    def summary(self) -> Summary:
        """The numbers."""
        return self.analysis.summarize(self.result, self.subjects[0].classes)

    def draw(self, out: Path | str, title: str | None = None) -> list[Path]:
        """Write the figure (.png, .svg or .pdf) and return the files; the default title is the name of the network."""
        if title is None:
            title = self.subjects[0].name if len(self.subjects) == 1 else ""
        files = self.analysis.draw(self.result, Path(out), title, self.subjects[0].classes)
        return [Path(out)] if files is None else list(files)


ANALYSES: Registry[Analysis] = Registry("analysis", "torchcaps.analysis")


def register_analysis(analysis: Analysis) -> Analysis:
    """Register a declaration under its name and return it.

    >>> import dataclasses
    >>> with ANALYSES.restored():  # only for this example
    ...     analysis = register_analysis(dataclasses.replace(ANALYSES.get("dead"), name="silent"))
    ...     found = "silent" in list_analyses()
    >>> found
    True
    """
    ANALYSES.register(analysis.name, analysis)
    return analysis


def list_analyses() -> list[str]:
    """Return the names of all analyses, sorted.

    >>> "affine" in list_analyses()
    True
    """
    return ANALYSES.list()


def run_analysis(name: str, subjects: Subject | Sequence[Subject], **options: Any) -> AnalysisReport:
    """Run an analysis by its name.

    Args:
        name: one of `list_analyses`.
        subjects: the network with its images; several if the analysis compares models.
        options: fields of the analysis's options.

    >>> from torchcaps import create_model
    >>> from torchcaps.data import Loader, create_dataset
    >>> model = create_model("capsnet_small", width=4, types=2, hidden=(8,))
    >>> loader = Loader(create_dataset("digits", "test").subset(torch.arange(4)), 4)
    >>> report = run_analysis("dead", Subject("small", model, loader), threshold=0.1)
    >>> report.summary.n_images, list(report.summary.rows)
    (4, ['primary', 'digit'])
    """
    analysis = ANALYSES.get(name)
    check_field_names(analysis.options, options, f"analysis {name!r}")
    chosen: tuple[Subject, ...] = (subjects,) if isinstance(subjects, Subject) else tuple(subjects)
    if len(chosen) == 0 or (len(chosen) > 1 and not analysis.compares_models):
        expected = "one or more networks" if analysis.compares_models else "one network"
        raise ValueError(f"subjects must be {expected} for the analysis {name!r}, got {len(chosen)}")
    if len({subject.name for subject in chosen}) < len(chosen):
        raise ValueError(f"subjects must have different names, got {[subject.name for subject in chosen]}")
    values = analysis.options(**options)
    result = analysis.run(chosen if analysis.compares_models else chosen[0], values)
    return AnalysisReport(analysis, values, result, chosen)
