"""From records to numbers: the mean over seeds with a 95 % interval, and whether a paper's claim holds."""

import dataclasses
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from torchcaps.metrics import wilson_interval
from torchcaps.papers.parts import Cell, Claim, Item, Measure, Parameters, Run, Source
from torchcaps.papers.records import Job, Store
from torchcaps.training import RunSpec
from torchcaps.training.setting import make_network

__all__ = ["Results", "Value", "Verdict", "n_parameters"]

NORMAL = 1.959964


@dataclass(frozen=True)
class Value:
    """A number of ours.

    Args:
        mean: over the seeds.
        low, high: the 95 % interval: of the share on so many test images (Wilson's) or of a mean over images, and of
            the mean over seeds where there are two or more, added in squares. The same images test every seed, so that
            more seeds do not make the first part smaller.
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
    """

    claim: Claim
    word: str
    difference: float = 0.0
    half: float = 0.0

    def __str__(self) -> str:
        if self.word == "not run":
            return f"not run: {self.claim.text}"
        half = f" ± {self.half:.3g}" if self.half else ""
        return f"{self.word}: {self.claim.text} (by {self.difference:.3g}{half})"


class Results:
    """What there is for an item: records by source, and numbers read off them."""

    def __init__(self, item: Item, store: Store) -> None:
        self.item, self.store = item, store

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
        value = _summed(numbers, images, max(halves), diverged)
        once = isinstance(cell.source, Measure) and cell.source.once
        return dataclasses.replace(value, once=once)

    def cell(self, row: str, column: str) -> Cell:
        """Return a cell by the labels of its row and column."""
        (found,) = (r for r in self.item.rows if r.label == row)
        return found.cells[column]

    def verdicts(self) -> list[Verdict]:
        """Return what our numbers say of the item's claims."""
        return [self.verdict(claim) for claim in self.item.claims]

    def verdict(self, claim: Claim) -> Verdict:
        """Return what our numbers say of a claim: by whether the interval of the difference excludes 0."""
        better, worse = (self.value(self.cell(*place)) for place in (claim.better, claim.worse))
        if better is None or worse is None:
            return Verdict(claim, "not run")
        if better.seeds == 0 or worse.seeds == 0:  # one of them did not train
            trained = better.seeds > 0
            return Verdict(claim, "holds" if trained else "contradicted", math.inf if trained else -math.inf)
        difference = worse.mean - better.mean if claim.lower else better.mean - worse.mean
        half = math.hypot(*((value.high - value.low) / 2 for value in (better, worse)))
        if not half:  # one measurement of each: no interval, no verdict
            word = "one measurement agrees" if difference > 0 else "one measurement disagrees"
            return Verdict(claim, word, difference)
        word = "holds" if difference > half else "contradicted" if -difference > half else "undecided"
        return Verdict(claim, word, difference, half)


def _number(found: dict[str, Any], cell: Cell) -> float | None:
    if isinstance(cell.source, Measure):
        value = found.get(cell.read)
        return None if value is None else float(value)
    if found["accuracy"] is None:
        return None
    return {"error": 100 * (1 - found["accuracy"]), "accuracy": 100 * found["accuracy"], **_rest(found)}[cell.read]


def _rest(found: dict[str, Any]) -> dict[str, float]:
    return {name: found[name] for name in ("seconds", "steps", "epochs")}


def _summed(numbers: list[float], images: int, half: float, diverged: int) -> Value:
    mean = statistics.fmean(numbers)
    spread = statistics.stdev(numbers) if len(numbers) > 1 else None
    low = high = half
    if images:  # a share in per cent
        bounds = wilson_interval(round(mean / 100 * images), images)
        low, high = mean - 100 * bounds[0], 100 * bounds[1] - mean
    if spread is not None:
        of_seeds = NORMAL * spread / math.sqrt(len(numbers))
        low, high = math.hypot(low, of_seeds), math.hypot(high, of_seeds)
    return Value(mean, mean - low, mean + high, spread, len(numbers), diverged)


_COUNTS: dict[str, int] = {}


def n_parameters(run: Run) -> int:
    """Return the parameters of a run's model in the paper's own size; nothing is allocated for it."""
    spec = RunSpec.of(run.model, **run.changes)
    key = f"{spec.model} {sorted(map(str, spec.fields.items()))}"
    if key not in _COUNTS:
        with torch.device("meta"):
            _COUNTS[key] = make_network(spec).n_parameters
    return _COUNTS[key]
