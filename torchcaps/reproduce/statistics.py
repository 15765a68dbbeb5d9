"""Statistics of records: means over seeds and differences of two means, with 95 % confidence intervals."""

import dataclasses
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchcaps._core.serialize import unpack_bits
from torchcaps._core.stats import NORMAL_QUANTILE, student_quantile, wilson_interval
from torchcaps.reproduce.schema import Cell, Claim, Item, Measurement, ParameterCount, Run, Source, TableRow
from torchcaps.reproduce.store import RecordKey, RecordStore, has_diverged
from torchcaps.training import RunSpec
from torchcaps.training.setup import build_network

__all__ = [
    "Estimate",
    "Results",
    "count_parameters",
    "improvement",
    "mean_with_interval",
]

FRACTIONS = ("error", "accuracy")  # metrics of a run that are fractions of the test images
PERCENTAGES = (
    "% of images",
    "% of training images",
    "% of coefficients",
    "error, %",
    "intersection over union, %",
    "classes with a direction for it, %",
    "of all responses of that direction, %",
)
LIMITS = {  # smallest and largest possible number, by the unit of a column; those of other units are not negative
    **dict.fromkeys((None, "", "%", "test minus training, points"), (-math.inf, math.inf)),
    **dict.fromkeys(PERCENTAGES, (0.0, 100.0)),
    "ratio": (0.0, 1.0),
    "R2": (-math.inf, 1.0),
    "cosine": (-1.0, 1.0),
}


@dataclass(frozen=True)
class Estimate:
    """Our number for a table cell.

    The interval combines two independent parts, added in quadrature: that of the test images (Wilson's interval of a
    fraction, or that of a mean over images) and that of the mean over seeds (Student's t; the variance is pooled over
    the runs of a column). All seeds are tested on the same images, so more seeds do not shrink the first part.

    Args:
        mean: mean over the seeds.
        low, high: bounds of the 95 % interval.
        spread: standard deviation over the seeds; ``None`` for one seed.
        seeds: number of seeds that trained.
        diverged: number of seeds that diverged.
        seed_independent: the number does not depend on a seed.
    """

    mean: float
    low: float
    high: float
    spread: float | None
    seeds: int
    diverged: int = 0
    seed_independent: bool = False


class Results:
    """The records of an item, and the numbers computed from them."""

    def __init__(self, item: Item, store: RecordStore) -> None:
        self.item, self.store = item, store

    @property
    def title(self) -> str:
        """Title of a figure that shows the first seed."""
        return f"{self.item.title}, scale {self.store.scale}, seed 0"

    def records(self, source: Source) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield (seed, record) for each record of a source."""
        if isinstance(source, ParameterCount):
            return
        for seed in self.store.seeds(source):
            record = self.store.read(RecordKey(source, seed))
            if record is not None:
                yield seed, record

    def first(self, source: Source) -> dict[str, Any] | None:
        """Return the results of the first seed of a source; ``None`` if it has not run."""
        return next((record["results"] for _, record in self.records(source)), None)

    def estimate(self, cell: Cell) -> Estimate | None:
        """Return our number for a cell; ``None`` if nothing ran."""
        if cell.source is None:
            return None
        if isinstance(cell.source, ParameterCount):
            count = float(count_parameters(cell.source.run))
            return Estimate(count, count, count, None, 0)
        numbers, half_widths, images, diverged = [], [], 0, 0
        for _, record in self.records(cell.source):
            if has_diverged(record):
                diverged += 1
                continue
            results = record["results"]
            number = _number(results, cell)
            if number is not None:
                numbers.append(number)
                half_widths.append(results.get(f"{cell.metric}_ci95") or 0.0)
                images = _n_images(results, cell)
        if not numbers:
            return Estimate(math.nan, math.nan, math.nan, None, 0, diverged) if diverged else None
        unit = self.item.columns.get(self._location(cell)[1])
        limits = (0.0, 100.0) if images else LIMITS.get(unit, (0.0, math.inf))
        estimate = _estimate(numbers, images, max(half_widths), diverged, self._seed_variance(cell), limits)
        seed_independent = isinstance(cell.source, Measurement) and cell.source.seed_independent
        return dataclasses.replace(estimate, seed_independent=seed_independent)

    def mean(self, cell: Cell) -> tuple[float, int] | None:
        """Return the mean of a cell's number over seeds and the number of seeds; ``None`` if nothing ran or trained."""
        if cell.source is None or isinstance(cell.source, ParameterCount):
            return None
        trained = [record["results"] for _, record in self.records(cell.source) if not has_diverged(record)]
        numbers = [number for results in trained if (number := _number(results, cell)) is not None]
        return (statistics.fmean(numbers), len(numbers)) if numbers else None

    def _seed_variance(self, cell: Cell) -> tuple[float, int] | None:
        """Return the variance of a number between seeds and its degrees of freedom; ``None`` if it is unknown.

        Two or three seeds say little about it, so it is pooled over the rows of a column with the same
        ``variance_group`` that have several seeds.
        """
        group = [cell]
        row, column = self._location(cell)
        if row is not None and (row.variance_group or isinstance(cell.source, Run)):
            rows = [r for r in self.item.rows if column in r.cells and r.variance_group == row.variance_group]
            group = [r.cells[column] for r in rows]
        total, freedom = 0.0, 0
        for other in group:
            if other.source is None or type(other.source) is not type(cell.source):
                continue
            if isinstance(cell.source, Run) and other.metric != cell.metric:
                continue
            numbers = [_number(record["results"], other) for _, record in self.records(other.source)]
            known = [number for number in numbers if number is not None]
            if len(known) > 1:
                total += statistics.variance(known) * (len(known) - 1)
                freedom += len(known) - 1
        return (total / freedom, freedom) if freedom else None

    def _location(self, cell: Cell) -> tuple[TableRow | None, str]:
        """Return the row and the column name of a cell."""
        return next(((row, name) for row in self.item.rows for name, c in row.cells.items() if c is cell), (None, ""))

    def cell(self, row: str, column: str) -> Cell:
        """Return the cell of a row label and a column name."""
        return self.item.cell(row, column)

    def difference(self, claim: Claim) -> tuple[float, float] | None:
        """Return by how much a claim's better number is better, and the half-width of the 95 % interval.

        Two runs that were tested on the same images are compared image by image, which is far more precise: most
        images are classified correctly, or incorrectly, by both. The half-width is 0 if there is no interval. Returns
        ``None`` if a number is missing.
        """
        cells = self.cell(*claim.better), self.cell(*claim.worse)
        better, worse = (self.estimate(cell) for cell in cells)
        if better is None or worse is None:
            return None
        paired = self._paired_by_image(*cells, claim.lower_is_better)
        paired = paired or self._paired_by_seed(*cells, claim.lower_is_better)
        if paired is not None:
            return paired
        half_width = math.hypot(*((estimate.high - estimate.low) / 2 for estimate in (better, worse)))
        return improvement(better.mean, worse.mean, claim.lower_is_better), half_width

    def _paired_by_seed(self, better: Cell, worse: Cell, lower_is_better: bool) -> tuple[float, float] | None:
        """Return the difference of two numbers of one measurement and the half-width of its 95 % interval.

        A seed changes both numbers alike (the images of a GAN, for example), so they are compared seed by seed. Returns
        ``None`` if the numbers are of two measurements, have one seed, or pool their variance with other rows.
        """
        if not isinstance(better.source, Measurement) or better.source != worse.source:
            return None
        rows = [self._location(cell)[0] for cell in (better, worse)]
        if any(row is not None and row.variance_group for row in rows):
            return None
        results = [record["results"] for _, record in self.records(better.source)]
        pairs = [(_number(one, better), _number(one, worse)) for one in results]
        complete = [(a, b) for a, b in pairs if a is not None and b is not None]
        differences = [improvement(a, b, lower_is_better) for a, b in complete]
        if len(differences) < 2:
            return None
        half_width = (
            student_quantile(len(differences) - 1) * statistics.stdev(differences) / math.sqrt(len(differences))
        )
        for index, cell in enumerate((better, worse)):
            images = results[0].get(f"{cell.metric}_images")
            if images:
                mean = statistics.fmean(pair[index] for pair in complete)
                low, high = wilson_interval(round(mean / 100 * images), images)
                half_width = math.hypot(half_width, 50 * (high - low))
            half_width = math.hypot(half_width, max(one.get(f"{cell.metric}_ci95") or 0.0 for one in results))
        return statistics.fmean(differences), half_width

    def _paired_by_image(self, better: Cell, worse: Cell, lower_is_better: bool) -> tuple[float, float] | None:
        """Return the improvement in error or accuracy of two runs on the same test images, in per cent, and the
        half-width of its 95 % interval; ``None`` if the test images differ or if per-image results are missing.
        """
        if not (isinstance(better.source, Run) and isinstance(worse.source, Run)):
            return None
        if better.metric != worse.metric or better.metric not in FRACTIONS:
            return None
        one, other = ([r for _, r in self.records(source)] for source in (better.source, worse.source))
        one, other = ([r for r in records if not has_diverged(r)] for records in (one, other))
        if len({repr(_test_set(record)) for record in one + other}) != 1:
            return None
        if {better.metric, worse.metric} - {"error", "accuracy"}:
            return None
        if any(record["results"].get("correct") is None for record in one + other):
            return None
        means = [torch.stack([_correct(record) for record in records]).mean(0) for records in (one, other)]  # [images]
        differences = means[0] - means[1]
        half_width = 100 * NORMAL_QUANTILE * math.sqrt(float(differences.var()) / len(differences))
        variances = [v for cell in (better, worse) if (v := self._seed_variance(cell)) is not None]
        if variances:  # if it is known for one of the two only, it is used for both
            variance = variances[0][0] / len(one) + variances[-1][0] / len(other)
            freedom = min(v[1] for v in variances)
            half_width = math.hypot(half_width, student_quantile(freedom) * math.sqrt(variance))
        gain = 100 * float(differences.mean())  # in accuracy
        return (gain if lower_is_better == (better.metric == "error") else -gain), half_width


def _test_set(record: dict[str, Any]) -> tuple[Any, ...]:
    """Return the data set, options and number of images that a run was tested on."""
    config = record["config"]
    same_data = not config["test_data"]
    options = config["data_options"] if same_data else config["test_options"]
    return (
        config["data"] if same_data else config["test_data"],
        options,
        config["max_test_images"],
        record["results"]["n"],
    )


def _correct(record: dict[str, Any]) -> Tensor:
    """Return 1 for each test image that is classified correctly, else 0: ``[images]``."""
    return unpack_bits(record["results"]["correct"], record["results"]["n"]).double()


def _number(results: dict[str, Any], cell: Cell) -> float | None:
    """Return the number of a record that a cell shows; ``None`` if the record does not have it."""
    if isinstance(cell.source, Measurement):
        value = results.get(cell.metric)
        return None if value is None else float(value)
    if results["accuracy"] is None:
        return None
    if cell.metric in FRACTIONS:
        fraction = results["accuracy"]
        return 100 * (fraction if cell.metric == "accuracy" else 1 - fraction)
    if "recall" in cell.metric:
        index = _recall_index(results, cell.metric)
        return None if index is None else 100 * results["class_correct"][index] / results["class_counts"][index]
    return results[cell.metric]


def _n_images(results: dict[str, Any], cell: Cell) -> int:
    """Return the number of test images of which a cell shows a percentage; 0 if it shows another kind of number."""
    if isinstance(cell.source, Measurement):
        return results.get(f"{cell.metric}_images") or 0
    if "recall" in cell.metric:
        index = _recall_index(results, cell.metric)
        return 0 if index is None else results["class_counts"][index]
    return (results.get("n") or 0) if cell.metric in FRACTIONS else 0


def _recall_index(results: dict[str, Any], metric: str) -> int | None:
    """Return the class of a metric ``"recall 3"`` or ``"lowest recall"``; ``None`` without counts per class."""
    counts, correct = results.get("class_counts"), results.get("class_correct")
    if not counts or not correct:
        return None
    present = [index for index, count in enumerate(counts) if count]  # in the test set
    if metric == "lowest recall":
        return min(present, key=lambda index: correct[index] / counts[index], default=None)
    index = int(metric.removeprefix("recall "))
    return index if index in present else None


def improvement(better: float, worse: float, lower_is_better: bool) -> float:
    """Return by how much one number is better than another."""
    return worse - better if lower_is_better else better - worse


def mean_with_interval(name: str, values: Tensor) -> dict[str, float | None]:
    """Return the mean over images and the half-width of its 95 % interval, as ``name`` and ``{name}_ci95``.

    Args:
        name: name of the number in a record.
        values: one or more numbers per image; the first axis is that of the images.
    """
    if not len(values):
        return {name: None}
    per_image = values.double().flatten(1).mean(1) if values.dim() > 1 else values.double()
    half_width = NORMAL_QUANTILE * float(per_image.std()) / math.sqrt(len(per_image)) if len(per_image) > 1 else 0.0
    return {name: float(per_image.mean()), f"{name}_ci95": half_width}


def _estimate(
    numbers: list[float],
    images: int,
    half_width: float,
    diverged: int,
    variance: tuple[float, int] | None,
    limits: tuple[float, float],
) -> Estimate:
    """Return the mean with its interval: of ``images`` test images or ``half_width``, and of the seeds' variance."""
    mean = statistics.fmean(numbers)
    spread = statistics.stdev(numbers) if len(numbers) > 1 else None
    below = above = half_width
    if images:  # a fraction in per cent
        low, high = wilson_interval(round(mean / 100 * images), images)
        below, above = mean - 100 * low, 100 * high - mean
    if variance is not None:
        seeds = student_quantile(variance[1]) * math.sqrt(variance[0] / len(numbers))
        below, above = math.hypot(below, seeds), math.hypot(above, seeds)
    return Estimate(mean, max(limits[0], mean - below), min(limits[1], mean + above), spread, len(numbers), diverged)


_PARAMETER_COUNTS: dict[str, int] = {}


def count_parameters(run: Run) -> int:
    """Return the number of parameters of a run's model at the paper's size, without allocating them."""
    spec = RunSpec.of(run.model, **run.changes)
    key = f"{spec.model} {sorted(map(str, spec.model_options.items()))}"
    if key not in _PARAMETER_COUNTS:
        with torch.device("meta"):
            _PARAMETER_COUNTS[key] = build_network(spec).n_parameters
    return _PARAMETER_COUNTS[key]
