"""Verdicts on the claims of a paper.

A claim *holds* or is *contradicted* only if

a. both numbers are means over two seeds or more (measurements that do not depend on a seed are exempt),
b. the 95 % interval of their difference excludes zero, and
c. training has converged: runs of half the length, with complete schedules of their own, give a difference of the same
   sign, and from half to full length neither number changes by as much as the difference. A network whose accuracy
   is nearer to that of a constant prediction than to the published one has not: at the start of a training two lengths
   can differ little because neither has learned much. A claim for which training length does not matter declares so,
   with a reason (`Claim.convergence`).

It is *undecided* if (a) or (b) fails and *too short to judge* if (c) does. Nothing is concluded from networks at chance
level or from diverged runs: such a claim is *not judged*.
"""

import dataclasses
import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torchcaps._core.stats import wilson_interval
from torchcaps.data.registry import find_spec
from torchcaps.reproduce.schema import Cell, Claim, Measurement, ParameterCount, Run, Source
from torchcaps.reproduce.statistics import Estimate, Results, improvement
from torchcaps.reproduce.store import has_diverged

__all__ = ["HalfLength", "Verdict", "VerdictKind", "VerdictReason", "chance_accuracy", "judge", "verdicts"]

MIN_SEEDS = 2


class VerdictKind(enum.Enum):
    """Outcome of comparing our numbers with a claim."""

    HOLDS = "holds"
    CONTRADICTED = "contradicted"
    TOO_SHORT = "too_short"
    UNDECIDED = "undecided"
    NOT_JUDGED = "not_judged"
    NOT_RUN = "not_run"


class VerdictReason(enum.Enum):
    """Why a claim neither holds nor is contradicted."""

    ONE_SEED = "one_seed"
    NO_INTERVAL = "no_interval"  # a single measurement
    INTERVAL_INCLUDES_ZERO = "interval_includes_zero"
    HALF_LENGTH_MISSING = "half_length_missing"
    HALF_LENGTH_OTHER_SIGN = "half_length_other_sign"
    STILL_CHANGING = "still_changing"  # from half to full length by as much as the difference
    NEAR_CHANCE = "near_chance"  # nearer to it than to the published number
    AT_CHANCE = "at_chance"
    DIVERGED = "diverged"


@dataclass(frozen=True)
class HalfLength:
    """The comparison of a claim with half-length runs.

    Args:
        difference: improvement of the better over the worse number.
        better_change, worse_change: change of the two numbers from half to full length; positive is an improvement.
        seeds: number of half-length seeds of the side that has fewer; 0 if only one side is trained.
    """

    difference: float
    better_change: float
    worse_change: float
    seeds: int


@dataclass(frozen=True)
class Verdict:
    """Verdict on a claim.

    Args:
        claim: the claim.
        kind: the outcome.
        reason: why it neither holds nor is contradicted; ``None`` if it does.
        difference: improvement of the better over the worse number; ``None`` if one of them is missing.
        half_width: half-width of the 95 % interval of the difference; 0 if there is no interval.
        seeds: number of seeds of the side that has fewer; 0 if the numbers do not depend on a seed.
        half: the comparison at half length; ``None`` if it has not run or does not apply.
    """

    claim: Claim
    kind: VerdictKind
    reason: VerdictReason | None = None
    difference: float | None = None
    half_width: float = 0.0
    seeds: int = 0
    half: HalfLength | None = None


def verdicts(results: Results) -> list[Verdict]:
    """Return the verdicts on the claims of an item."""
    return [judge(results, claim) for claim in results.item.claims]


def judge(results: Results, claim: Claim) -> Verdict:
    """Return the verdict on a claim; see the rules in the description of this module."""
    cells = results.cell(*claim.better), results.cell(*claim.worse)
    better, worse = (results.estimate(cell) for cell in cells)
    if better is None or worse is None:
        return Verdict(claim, VerdictKind.NOT_RUN)
    if better.diverged or worse.diverged:
        return Verdict(claim, VerdictKind.NOT_JUDGED, VerdictReason.DIVERGED)
    compared = results.difference(claim)
    assert compared is not None, "both numbers exist"
    half = _half_length(results, claim) if claim.convergence == "training" else None
    seeds = [e.seeds for c, e in zip(cells, (better, worse), strict=True) if _depends_on_seed(c, e)]
    verdict = Verdict(claim, VerdictKind.UNDECIDED, None, *compared, min(seeds, default=0), half)
    if any(_is_at_chance(results, cell) for cell in cells):
        return dataclasses.replace(verdict, kind=VerdictKind.NOT_JUDGED, reason=VerdictReason.AT_CHANCE)
    kind, reason = _judge_difference(verdict, exact=all(isinstance(cell.source, ParameterCount) for cell in cells))
    is_settled = kind is not VerdictKind.UNDECIDED
    if is_settled and claim.convergence == "training" and any(_is_near_chance(results, cell) for cell in cells):
        kind, reason = VerdictKind.TOO_SHORT, VerdictReason.NEAR_CHANCE
    return dataclasses.replace(verdict, kind=kind, reason=reason)


def _judge_difference(verdict: Verdict, exact: bool) -> tuple[VerdictKind, VerdictReason | None]:
    """Return whether a claim's difference is decided: by enough seeds, an interval without zero, and convergence.

    Args:
        verdict: the difference with its interval, and that of runs of half the length.
        exact: the numbers are parameter counts, which need neither seeds, interval nor training.
    """
    claim, half = verdict.claim, verdict.half
    assert verdict.difference is not None
    excess = verdict.difference + claim.margin
    if not exact:
        if 0 < verdict.seeds < MIN_SEEDS:
            return VerdictKind.UNDECIDED, VerdictReason.ONE_SEED
        if not verdict.half_width:
            return VerdictKind.UNDECIDED, VerdictReason.NO_INTERVAL
    if abs(excess) <= verdict.half_width:
        return VerdictKind.UNDECIDED, VerdictReason.INTERVAL_INCLUDES_ZERO
    if not exact and claim.convergence == "training":
        if half is None:
            return VerdictKind.TOO_SHORT, VerdictReason.HALF_LENGTH_MISSING
        if (half.difference + claim.margin) * excess <= 0:
            return VerdictKind.TOO_SHORT, VerdictReason.HALF_LENGTH_OTHER_SIGN
        if max(abs(half.better_change), abs(half.worse_change)) >= abs(excess):
            return VerdictKind.TOO_SHORT, VerdictReason.STILL_CHANGING
    return (VerdictKind.HOLDS if excess > 0 else VerdictKind.CONTRADICTED), None


def _depends_on_seed(cell: Cell, estimate: Estimate) -> bool:
    return not isinstance(cell.source, ParameterCount) and not estimate.seed_independent


def _half_length(results: Results, claim: Claim) -> HalfLength | None:
    """Return the comparison with half-length runs; ``None`` if one is missing, diverged, or none is trained."""
    means: list[tuple[float, float]] = []  # at half and at full length
    seeds = []
    for location in (claim.better, claim.worse):
        cell = results.cell(*location)
        source = cell.source
        if not isinstance(source, Run | Measurement):
            return None
        full, halved = results.mean(cell), source.halved()
        half = results.mean(dataclasses.replace(cell, source=halved))
        if full is None or half is None or any(has_diverged(record) for _, record in results.records(halved)):
            return None
        means.append((half[0], full[0]))
        seeds += [half[1]] if halved != source else []
    if not seeds:
        return None
    (better_half, better), (worse_half, worse) = means
    lower = claim.lower_is_better
    return HalfLength(
        improvement(better_half, worse_half, lower),
        improvement(better, better_half, lower),
        improvement(worse, worse_half, lower),
        min(seeds),
    )


def _is_at_chance(results: Results, cell: Cell) -> bool:
    """Return whether a network behind a cell has a seed whose accuracy is not significantly above chance level."""
    runs = _runs_of(cell.source)
    return any(_record_is_at_chance(record) for run in runs for _, record in results.records(run))


def _is_near_chance(results: Results, cell: Cell) -> bool:
    """Return whether the accuracy of a training run is nearer to that of a constant prediction than to the paper's."""
    ours = results.mean(cell)
    if not isinstance(cell.source, Run) or cell.metric not in ("error", "accuracy") or not cell.printed or ours is None:
        return False
    chances = [chance_accuracy(record) for _, record in results.records(cell.source)]
    if not chances or chances[0] is None:
        return False
    chance = 100 * (chances[0] if cell.metric == "accuracy" else 1 - chances[0])
    return abs(ours[0] - chance) < abs(ours[0] - cell.printed.value)


def _runs_of(source: Source | None) -> Iterator[Run]:
    """Yield the training runs behind a number."""
    if isinstance(source, Run):
        yield source
    elif isinstance(source, Measurement):
        yield from source.runs.values()
        for dependency in source.depends_on.values():
            yield from _runs_of(dependency)


def _record_is_at_chance(record: dict[str, Any]) -> bool:
    """Return whether the 95 % interval of a record's accuracy extends to chance level; false if unknown."""
    results = record["results"]
    chance = chance_accuracy(record)
    if results["accuracy"] is None or chance is None:
        return False
    low, _ = wilson_interval(round(results["accuracy"] * results["n"]), results["n"])
    return low <= chance


def chance_accuracy(record: dict[str, Any]) -> float | None:
    """Return the accuracy of the best constant prediction on the test set of a run's record.

    This is the fraction of the largest class, if the record has the class counts of images with one object each;
    otherwise that of balanced classes (`DataSpec.chance_accuracy`), or ``None`` if their number is unknown.
    """
    config, results = record["config"], record["results"]
    counts = results.get("class_counts")
    if counts and sum(counts) == results["n"]:
        return max(counts) / results["n"]
    name, options = config["data"], config["data_options"]
    if config["test_data"]:
        name, options = config["test_data"], config["test_options"]
    return dataclasses.replace(find_spec(name), **options).chance_accuracy()
