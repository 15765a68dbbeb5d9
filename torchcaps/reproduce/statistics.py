"""From records to numbers: the mean over seeds with a 95 % interval, and whether a paper's claim holds."""

import dataclasses
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from torchcaps.metrics import wilson_interval
from torchcaps.reproduce.schema import Cell, Claim, Item, Measure, Parameters, Row, Run, Source
from torchcaps.reproduce.store import Job, Store, from_hex
from torchcaps.training import RunSpec
from torchcaps.training.setup import make_network

__all__ = ["Results", "Value", "Verdict", "n_parameters"]

NORMAL = 1.959964
SIGNED = (None, "", "%")  # units of columns in which a number may be below zero


@dataclass(frozen=True)
class Value:
    """A number of ours.

    Args:
        mean: over the seeds.
        low, high: the 95 % interval: of the share on so many test images (Wilson's) or of a mean over images, and of
            the mean over seeds (Student's, its variance pooled over the runs of a column), added in squares. The same
            images test every seed, so that more seeds do not make the first part smaller.
        spread: the standard deviation over the seeds, ``None`` for one.
        seeds: how many. diverged: how many more did not train.
        once: whether there is nothing that a seed decides.
    """

    mean: float
    low: float
    high: float
    spread: float | None
    seeds: int
    diverged: int = 0
    once: bool = False


@dataclass(frozen=True)
class Verdict:
    """What our numbers say of a claim.

    Args:
        claim: the claim.
        word: ``"holds"``, ``"contradicted"``, ``"undecided"`` or ``"not run"``; ``"one measurement agrees"``, or
            disagrees, where there is no interval.
        difference: by how much the better is better; ``half`` of its 95 % interval.
        seeds: how many there were of the one that has fewer: of one, the interval is that of the images alone.
    """

    claim: Claim
    word: str
    difference: float = 0.0
    half: float = 0.0
    seeds: int = 0

    def __str__(self) -> str:
        if not self.difference and not self.half:
            return f"{self.word}: {self.claim.text}"
        half = f" ± {self.half:.2g}" if self.half else ""
        seeds = f", {self.seeds} seeds" if self.seeds > 1 and self.half else ""
        word = f"{self.word} with one seed" if self.seeds == 1 and self.half else self.word
        return f"{word}: {self.claim.text} (by {self.difference:.2g}{half}{seeds})"


class Results:
    """What there is for an item: records by source, and numbers read off them."""

    def __init__(self, item: Item, store: Store) -> None:
        self.item, self.store = item, store

    @property
    def title(self) -> str:
        """What stands over a figure that shows one seed's: curves, images."""
        return f"{self.item.title}, scale {self.store.scale}, seed 0"

    def records(self, source: Source) -> Iterator[tuple[int, dict[str, Any]]]:
        """Give the records of a source, seed by seed."""
        if isinstance(source, Parameters):
            return
        for seed in self.store.seeds(source):
            found = self.store.record(Job(source, seed))
            if found is not None:
                yield seed, found

    def first(self, source: Source) -> dict[str, Any] | None:
        """Return what came out of a source with its first seed."""
        return next((record for _, record in self.records(source)), None)

    def value(self, cell: Cell) -> Value | None:
        """Return our number for a cell; ``None`` where nothing ran."""
        if cell.source is None:
            return None
        if isinstance(cell.source, Parameters):
            count = float(n_parameters(cell.source.run))
            return Value(count, count, count, None, 0)
        numbers, halves, images, diverged = [], [], 0, 0
        for _, record in self.records(cell.source):
            found = record["found"]
            if found.get("diverged"):
                diverged += 1
                continue
            number = _number(found, cell)
            if number is not None:
                numbers.append(number)
                halves.append(found.get(f"{cell.read}_half") or 0.0)
                images = found.get("n" if isinstance(cell.source, Run) else f"{cell.read}_images") or 0
        if not numbers:
            return Value(math.nan, math.nan, math.nan, None, 0, diverged) if diverged else None
        unit = self.item.columns.get(self._place(cell)[1])
        bounds = (0.0, 100.0) if images else (0.0, 1.0) if unit == "ratio" else (0.0, math.inf)
        if unit in SIGNED and not images:
            bounds = (-math.inf, math.inf)
        value = _summed(numbers, images, max(halves), diverged, self._noise(cell), bounds)
        once = isinstance(cell.source, Measure) and cell.source.once
        return dataclasses.replace(value, once=once)

    def _noise(self, cell: Cell) -> tuple[float, int] | None:
        """Return the variance of a number from seed to seed, and its degrees of freedom.

        Of two or three seeds it is hardly known. Runs of one column are alike enough to share it, unless their rows say
        otherwise: it is pooled over those of them that have several seeds. Measurements share it where their rows do.
        """
        alike = [cell]
        row, column = self._place(cell)
        if row is not None and (row.alike or isinstance(cell.source, Run)):
            alike = [r.cells[column] for r in self.item.rows if column in r.cells and r.alike == row.alike]
        total, freedom = 0.0, 0
        for other in alike:
            if other.source is None or type(other.source) is not type(cell.source):
                continue
            if isinstance(cell.source, Run) and other.read != cell.read:
                continue
            numbers = [_number(record["found"], other) for _, record in self.records(other.source)]
            known = [number for number in numbers if number is not None]
            if len(known) > 1:
                total += statistics.variance(known) * (len(known) - 1)
                freedom += len(known) - 1
        return (total / freedom, freedom) if freedom else None

    def _place(self, cell: Cell) -> tuple[Row | None, str]:
        """Return the row and the column that a cell stands in."""
        return next(((row, name) for row in self.item.rows for name, c in row.cells.items() if c is cell), (None, ""))

    def cell(self, row: str, column: str) -> Cell:
        """Return a cell by the labels of its row and column."""
        (found,) = (r for r in self.item.rows if r.label == row)
        return found.cells[column]

    def verdicts(self) -> list[Verdict]:
        """Return what our numbers say of the item's claims."""
        return [self.verdict(claim) for claim in self.item.claims]

    def verdict(self, claim: Claim) -> Verdict:
        """Return what our numbers say of a claim: by whether the interval of the difference excludes 0.

        Two runs that were tested on the same images are compared image by image, which is far sharper: most images are
        right, or wrong, with both.
        """
        better, worse = (self.value(self.cell(*place)) for place in (claim.better, claim.worse))
        if better is None or worse is None:
            return Verdict(claim, "not run")
        if better.seeds == 0 or worse.seeds == 0:  # one of them did not train, or neither
            trained = [value.seeds > 0 for value in (better, worse)]
            words = {(True, False): "holds, the other did not train", (False, True): "contradicted, it did not train"}
            return Verdict(claim, words.get((trained[0], trained[1]), "neither trained"))
        seeds = min(better.seeds, worse.seeds)
        difference = worse.mean - better.mean if claim.lower else better.mean - worse.mean
        cells = self.cell(*claim.better), self.cell(*claim.worse)
        paired = self._paired(*cells) or self._together(*cells, claim.lower)
        if paired is not None:
            difference, half = paired
            word = "holds" if difference > half else "contradicted" if -difference > half else "undecided"
            return Verdict(claim, word, difference, half, seeds)
        half = math.hypot(*((value.high - value.low) / 2 for value in (better, worse)))
        if not half:  # one measurement of each: no interval, no verdict
            word = "one measurement agrees" if difference > 0 else "one measurement disagrees"
            return Verdict(claim, word, difference)
        word = "holds" if difference > half else "contradicted" if -difference > half else "undecided"
        return Verdict(claim, word, difference, half, seeds)

    def _together(self, better: Cell, worse: Cell, lower: bool) -> tuple[float, float] | None:
        """Return by how much one number of a measurement is better than another of the same, and half of the 95 %
        interval; ``None`` where they are not of one measurement, have one seed, or share the noise of other rows.

        What a seed decides, such as the images of a GAN, is the same for both: seeds are compared one by one.
        """
        if not isinstance(better.source, Measure) or better.source != worse.source:
            return None
        rows = [self._place(cell)[0] for cell in (better, worse)]
        if any(row is not None and row.alike for row in rows):
            return None
        found = [record["found"] for _, record in self.records(better.source)]
        pairs = [(_number(one, better), _number(one, worse)) for one in found]
        apart = [b - a if lower else a - b for a, b in pairs if a is not None and b is not None]
        if len(apart) < 2:
            return None
        half = student(len(apart) - 1) * statistics.stdev(apart) / math.sqrt(len(apart))
        for cell, place in ((better, 0), (worse, 1)):
            images = found[0].get(f"{cell.read}_images")
            if images:
                mean = statistics.fmean(pair[place] or 0.0 for pair in pairs if None not in pair)
                low, high = wilson_interval(round(mean / 100 * images), images)
                half = math.hypot(half, 50 * (high - low))
            half = math.hypot(half, max(one.get(f"{cell.read}_half") or 0.0 for one in found))
        return statistics.fmean(apart), half

    def _paired(self, better: Cell, worse: Cell) -> tuple[float, float] | None:
        """Return by how much more of the same test images one run recognises than another, in per cent, and half of the
        95 % interval; ``None`` where they were not tested on the same, or it is not known which were right.
        """
        if not (isinstance(better.source, Run) and isinstance(worse.source, Run)):
            return None
        one, other = ([r for _, r in self.records(source)] for source in (better.source, worse.source))
        one, other = ([r for r in records if not r["found"].get("diverged")] for records in (one, other))
        if len({repr(_tested(record)) for record in one + other}) != 1:
            return None
        if any(record["found"].get("right") is None for record in one + other):
            return None
        means = [torch.stack([_right(record) for record in records]).mean(0) for records in (one, other)]  # [images]
        apart = means[0] - means[1]
        half = 100 * NORMAL * math.sqrt(float(apart.var()) / len(apart))
        noise = [found for cell in (better, worse) if (found := self._noise(cell)) is not None]
        if noise:  # where it is known of one of the two only, it stands for both
            of_seeds = noise[0][0] / len(one) + noise[-1][0] / len(other)
            half = math.hypot(half, student(min(found[1] for found in noise)) * math.sqrt(of_seeds))
        return 100 * float(apart.mean()), half


def _tested(record: dict[str, Any]) -> tuple[Any, ...]:
    """Return what a run was tested on."""
    config = record["config"]
    own = not config["test_data"]
    options = config["data_options"] if own else config["test_options"]
    return config["data"] if own else config["test_data"], options, config["max_test_images"], record["found"]["n"]


def _right(record: dict[str, Any]) -> torch.Tensor:
    return from_hex(record["found"]["right"], record["found"]["n"]).double()


def _number(found: dict[str, Any], cell: Cell) -> float | None:
    if isinstance(cell.source, Measure):
        value = found.get(cell.read)
        return None if value is None else float(value)
    if found["accuracy"] is None:
        return None
    return {"error": 100 * (1 - found["accuracy"]), "accuracy": 100 * found["accuracy"], **_rest(found)}[cell.read]


def _rest(found: dict[str, Any]) -> dict[str, float]:
    return {name: found[name] for name in ("seconds", "steps", "epochs")}


# Student's t: what 95 % lie within, by degrees of freedom; beyond these the normal's is near enough.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


def student(freedom: int) -> float:
    """Return the factor of a standard error whose variance has so many degrees of freedom."""
    return STUDENT[freedom - 1] if freedom <= len(STUDENT) else NORMAL * (1 + 1.3 / freedom)


def _summed(
    numbers: list[float],
    images: int,
    half: float,
    diverged: int,
    noise: tuple[float, int] | None,
    limits: tuple[float, float],
) -> Value:
    mean = statistics.fmean(numbers)
    spread = statistics.stdev(numbers) if len(numbers) > 1 else None
    low = high = half
    if images:  # a share in per cent
        bounds = wilson_interval(round(mean / 100 * images), images)
        low, high = mean - 100 * bounds[0], 100 * bounds[1] - mean
    if noise is not None:
        of_seeds = student(noise[1]) * math.sqrt(noise[0] / len(numbers))
        low, high = math.hypot(low, of_seeds), math.hypot(high, of_seeds)
    return Value(mean, max(limits[0], mean - low), min(limits[1], mean + high), spread, len(numbers), diverged)


_COUNTS: dict[str, int] = {}


def n_parameters(run: Run) -> int:
    """Return the parameters of a run's model in the paper's own size; nothing is allocated for it."""
    spec = RunSpec.of(run.model, **run.changes)
    key = f"{spec.model} {sorted(map(str, spec.model_options.items()))}"
    if key not in _COUNTS:
        with torch.device("meta"):
            _COUNTS[key] = make_network(spec).n_parameters
    return _COUNTS[key]
