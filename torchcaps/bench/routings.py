"""Comparison of routings: each in the same small network, with the same data and the same number of training steps.

A cell is one training or one measurement of cost, and one JSON file; `run_cells` measures those that are missing, so an
interrupted comparison continues. `torchcaps.bench.routings_report` makes the table, the figure and the page.
"""

import dataclasses
import functools
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from torchcaps._core.files import write_atomic
from torchcaps._core.machine import describe_machine, record_header
from torchcaps._core.registry import check_name
from torchcaps.bench.cases import Work
from torchcaps.bench.memory import TrainingCase, measure_training_peaks
from torchcaps.bench.timing import num_threads, shortest_seconds, training_step
from torchcaps.data import Dataset
from torchcaps.data.geometry import RandomAffine
from torchcaps.data.pipelines import Pipeline
from torchcaps.data.transforms import ScalePixels
from torchcaps.models import create_model
from torchcaps.models.recipe import OptimizerConfig
from torchcaps.models.schedules import OneCycle
from torchcaps.models.spec import Image
from torchcaps.routing import Dynamic, Routing, RoutingDivergence, create_routing, list_routings
from torchcaps.training import RunSpec, TrainedRun, load_run, train
from torchcaps.training.errors import DivergenceError, RunError, RunInterrupted
from torchcaps.training.inference import evaluate_runs
from torchcaps.training.logging import ConsoleLogger
from torchcaps.training.setup import open_data

__all__ = [
    "SCALES",
    "Comparison",
    "RoutingCell",
    "affine_pipeline",
    "list_rows",
    "pending_cells",
    "read_record",
    "run_cells",
]

MODEL, BASELINE = "capsnet_images", "cnn_images"
CNN = "cnn"  # the row of the baseline
BASELINE_ROWS = ("uniform", CNN)
VARIANTS: dict[str, Routing] = {
    "dynamic-maxmin": Dynamic(normalize="maxmin")
}  # rows besides the default of each routing
TYPES, PRIMARY_DIM, DIM = 4, 8, 16
LEARNING_RATES = (1e-3, 3e-3, 1e-2, 3e-2)
BETA2 = 0.99  # of Adam; with 0.999 the average of squared gradients is longer than a short training
N_REPEATS = 5  # of the timed training step

Record = dict[str, Any]


@dataclass(frozen=True)
class Comparison:
    """Data set, network and budget, equal for all rows of a table.

    Args:
        data: name of the data set.
        image: size of its images.
        channels: channels of the convolutions below the capsules.
        augmentation: preprocessing pipeline.
        fill: value of the pixels that an affine transformation moves into the image.
        steps: optimiser steps of each training.
        batch_size: images per step.
        seeds: seeds of the trainings with the selected learning rate; the first is also that of the selection.
        lrs: learning rates, of which the validation accuracy selects one per row.
        val_fraction: fraction of the training images used for the selection and not for training.
        max_images: number of training images, and of test images, that are used (default: all).
    """

    data: str
    image: Image
    channels: tuple[int, ...]
    augmentation: str
    fill: Literal["zero", "nearest"]
    steps: int
    batch_size: int = 64
    seeds: tuple[int, ...] = (0, 1, 2)
    lrs: tuple[float, ...] = LEARNING_RATES
    val_fraction: float = 0.1
    max_images: int | None = None

    def affine(self) -> RandomAffine:
        """Return the transformation of the robustness column: the ranges of affNIST, in the image's own frame."""
        return RandomAffine(rotation=20, shift=0.1, scale=0.2, shear=0.2, fill=self.fill)


SCALES: dict[str, tuple[Comparison, ...]] = {
    "smoke": (
        Comparison("digits", (1, 28, 28), (8, 8, 8), "sabour2017.mnist", "zero", 2, 8, (0, 1), (1e-3, 3e-3), 0.1, 40),
    ),
    "cpu": (
        Comparison("mnist", (1, 28, 28), (16, 32, 32), "sabour2017.mnist", "zero", 600),
        Comparison("cifar10", (3, 32, 32), (32, 64, 64), "tsai2020.cifar10", "nearest", 1500),
    ),
}


@dataclass(frozen=True)
class RoutingCell:
    """One training, or one measurement of time and memory.

    Args:
        comparison: data set, network and budget.
        row: name of a routing or variant, or ``"cnn"``.
        lr: learning rate; ``None`` for a measurement of cost.
        seed: seed of the training.
    """

    comparison: Comparison
    row: str
    lr: float | None = None
    seed: int = 0

    @property
    def is_cost(self) -> bool:
        """Whether time and memory are measured instead of a training."""
        return self.lr is None

    @property
    def file(self) -> str:
        """Path of the record relative to the directory of the scale."""
        suffix = "cost" if self.is_cost else f"lr{self.lr:g}-seed{self.seed}"
        return f"{self.comparison.data}/{self.row}-{suffix}.json"

    def model_options(self) -> dict[str, Any]:
        """Return the fields of the row's model that differ from its defaults, without those that follow the data."""
        if self.row == CNN:
            return {"channels": baseline_channels(self.comparison)}
        routing = VARIANTS[self.row] if self.row in VARIANTS else create_routing(self.row)
        sizes = {"types": TYPES, "primary_dim": PRIMARY_DIM, "dim": DIM, "primary_activation": "squash"}
        return {"channels": self.comparison.channels, **sizes, "routing": routing}

    def spec(self) -> RunSpec:
        """Return the settings of the training."""
        comparison = self.comparison
        spec = RunSpec.of(
            BASELINE if self.row == CNN else MODEL,
            model_options=self.model_options(),
            data=comparison.data,
            augmentation=comparison.augmentation,
            val_fraction=comparison.val_fraction,
            optimizer=OptimizerConfig("adam", 1e-3 if self.lr is None else self.lr, beta2=BETA2),
            lr_schedule=OneCycle(),
            batch_size=comparison.batch_size,
            steps=comparison.steps,
            eval_interval_steps=comparison.steps,
            max_train_images=comparison.max_images,
            max_test_images=comparison.max_images,
            seed=self.seed,
            num_threads=1,
            device="cpu",
        )
        # the margin of the spread loss reaches its maximum in the middle of the training
        loss = dataclasses.replace(spec.recipe.loss, margin_steps=max(1, comparison.steps // 2))
        return spec.replace_recipe(loss=loss, steps=comparison.steps)


def list_rows() -> list[str]:
    """Return the rows of a table: the baselines, then all registered routings and variants."""
    others = [name for name in list_routings() if name not in BASELINE_ROWS]
    return [*BASELINE_ROWS, *sorted([*others, *VARIANTS])]


@functools.cache
def baseline_channels(comparison: Comparison) -> tuple[int, int, int]:
    """Return the channels ``(c, 2c, 2c)`` with which the plain CNN has as many parameters as the capsule network.

    The capsule network is that with uniform couplings, which have no parameters of their own.
    """
    with torch.device("meta"):
        network = create_model(MODEL, image=comparison.image, **RoutingCell(comparison, "uniform").model_options())

        def distance(width: int) -> int:
            channels = (width, 2 * width, 2 * width)
            return abs(create_model(BASELINE, image=comparison.image, channels=channels).n_parameters - target)

        target = network.n_parameters
        width = min(range(4, 80), key=distance)
    return width, 2 * width, 2 * width


# Cells ----------------------------------------------------------------------------------------------------------


@functools.cache
def _settings(cell: RoutingCell) -> str:
    """Return a name that changes with the settings of the training."""
    return cell.spec().record_name()


def read_record(directory: Path, cell: RoutingCell) -> Record | None:
    """Return the record of a cell; ``None`` if there is none, or only one of other settings."""
    path = directory / cell.file
    if not path.exists():
        return None
    record = json.loads(path.read_text())
    return record if record["settings"] == _settings(cell) else None


def selected_lr(directory: Path, comparison: Comparison, row: str) -> float | None:
    """Return the learning rate with the highest validation accuracy of the first seed.

    Equal accuracies select the smaller one. ``None`` if a training of the grid is missing or all of them diverged.
    """
    records = [read_record(directory, RoutingCell(comparison, row, lr, comparison.seeds[0])) for lr in comparison.lrs]
    if any(record is None for record in records):
        return None
    finished = [record for record in records if record is not None and record["status"] == "finished"]
    return max(finished, key=lambda record: (record["val_accuracy"], -record["lr"]))["lr"] if finished else None


def pending_cells(directory: Path, comparisons: Sequence[Comparison], rows: Sequence[str]) -> list[RoutingCell]:
    """Return the cells without a record, row by row.

    The trainings with further seeds need the learning rate. They are listed with the first one of the grid until it is
    selected, so that the list has the length of the remaining work.
    """
    cells = []
    for comparison in comparisons:
        for row in rows:
            grid = [RoutingCell(comparison, row, lr, comparison.seeds[0]) for lr in comparison.lrs]
            lr = selected_lr(directory, comparison, row)
            complete = all(read_record(directory, cell) for cell in grid)
            others = [
                RoutingCell(comparison, row, comparison.lrs[0] if lr is None else lr, n) for n in comparison.seeds[1:]
            ]
            if complete and lr is None:
                others = []  # every training of the grid diverged
            candidates = [*grid, RoutingCell(comparison, row), *others]
            cells += [cell for cell in candidates if read_record(directory, cell) is None]
    return cells


def run_cells(
    directory: Path,
    comparisons: Sequence[Comparison],
    rows: Sequence[str],
    report: Callable[[RoutingCell, Record, int], object] = lambda cell, record, n_left: None,
    max_seconds: float | None = None,
) -> int:
    """Measure the cells without a record and write each as a file; return the number of cells that are left.

    Args:
        directory: directory of the records of a scale.
        comparisons: data sets with their networks and budgets.
        rows: names of the rows.
        report: called after each cell with its record and the number of cells that are left.
        max_seconds: start no further cell after this time.
    """
    for row in rows:
        check_name(row, list_rows(), "row")
    end = None if max_seconds is None else time.monotonic() + max_seconds
    while cells := pending_cells(directory, comparisons, rows):
        if end is not None and time.monotonic() > end:
            break
        cell = cells[0]
        record = _measure_cost(cell) if cell.is_cost else _measure_training(cell)
        header = {"data": cell.comparison.data, "row": cell.row, "lr": cell.lr, "seed": cell.seed}
        record = {**header, "settings": _settings(cell), **record, **record_header()}
        record["machine"] = describe_machine()
        write_atomic(directory / cell.file, json.dumps(record, indent=1) + "\n", RunError)
        report(cell, record, len(cells) - 1)
    return len(pending_cells(directory, comparisons, rows))


def _measure_training(cell: RoutingCell) -> Record:
    """Train and evaluate; a training that diverges has the status ``"diverged"`` and no accuracies."""
    spec = cell.spec()
    data = open_data(spec, download=True)
    started = time.process_time()
    with tempfile.TemporaryDirectory() as name, num_threads(1):
        out = Path(name) / "run"
        try:
            result = train(spec, out, console=ConsoleLogger(False), figures=False, data=data)
        except RunInterrupted:
            raise KeyboardInterrupt from None  # nothing to resume: the directory is temporary
        except (DivergenceError, RoutingDivergence) as error:
            return {"status": "diverged", "reason": str(error)}
        seconds = time.process_time() - started
        best = json.loads((out / "results.json").read_text())["best"]
        assert result.test is not None
        assert data.test is not None
        affine = _affine_accuracy(load_run(out), data.test, cell.comparison)
    return {
        "status": "finished",
        "steps": result.steps,
        "val_accuracy": best["accuracy"],
        "n_test": result.test.n,
        "test_accuracy": result.test.accuracy,
        "affine_accuracy": affine,
        "cpu_seconds": round(seconds, 1),
    }


def _affine_accuracy(run: TrainedRun, dataset: Dataset, comparison: Comparison) -> float:
    """Return the accuracy on test images transformed by the same affine transformations for every row and seed."""
    pipeline = affine_pipeline(run.pipeline, comparison.affine())
    with torch.no_grad():
        return evaluate_runs([dataclasses.replace(run, pipeline=pipeline)], dataset).accuracy


def affine_pipeline(pipeline: Pipeline, affine: RandomAffine) -> Pipeline:
    """Return the pipeline whose test images are transformed before anything but the scaling of bytes."""
    scale, *others = pipeline.test
    assert isinstance(scale, ScalePixels)
    return dataclasses.replace(pipeline, test=[scale, affine, *others])


def _measure_cost(cell: RoutingCell) -> Record:
    """Measure parameters, CPU time and peak memory of a training step."""
    spec, options = cell.spec(), {"image": cell.comparison.image, **cell.model_options()}
    batch_size = cell.comparison.batch_size
    torch.manual_seed(0)
    model = create_model(spec.model, **options)
    step = training_step(model, batch_size, spec.recipe)

    def run() -> list[Tensor]:
        step()
        return []

    with num_threads(1):
        seconds = shortest_seconds({"step": Work(run, 0)}, N_REPEATS, time.process_time)["step"]
        peak = measure_training_peaks({"step": TrainingCase(spec.model, batch_size, options)})["step"]
    return {
        "status": "finished",
        "parameters": model.n_parameters,
        "step_seconds": seconds,
        "step_bytes": peak.step_bytes,
    }


def select_comparisons(scale: str, names: Sequence[str] = ()) -> tuple[Comparison, ...]:
    """Return the comparisons of a scale, or those of some data sets."""
    comparisons = {comparison.data: comparison for comparison in SCALES[check_name(scale, SCALES, "scale")]}
    return tuple(comparisons[check_name(name, comparisons, "data set")] for name in names or comparisons)


def iter_selected(directory: Path, comparison: Comparison, row: str) -> Iterator[Record]:
    """Yield the records of the trainings with the selected learning rate that exist."""
    lr = selected_lr(directory, comparison, row)
    for seed in comparison.seeds if lr is not None else ():
        record = read_record(directory, RoutingCell(comparison, row, lr, seed))
        if record is not None and record["status"] == "finished":
            yield record
