"""Runs of fuzz targets: case by case, in child processes, with a report and a copy of every failing input."""

import contextlib
import dataclasses
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

__all__ = ["Case", "FuzzReport", "Target", "fuzz"]

PROGRESS_INTERVAL_S = 60.0
MAX_MEMORY_BYTES = 6 << 30  # of address space
MAX_GROWTH_BYTES = 1 << 30  # of memory in use, by one case
MEMORY_FILES = Path("/dev/shm")  # directories are created and removed a hundred times faster than on a disk


@dataclass(frozen=True)
class Case:
    """Outcome of one case.

    Args:
        index: index of the case; it is a function of the seed and this index.
        group: name of the reader, loader or routing.
        outcome: one of the target's `Target.good` outcomes, or the kind of failure.
        message: description of a failure.
        evaluations: number of inputs that the case has evaluated.
    """

    index: int
    group: str
    outcome: str
    message: str = ""
    evaluations: int = 1


class Target(ABC):
    """A kind of input to fuzz.

    Attributes:
        good: outcomes that are not failures.
        name: name on the command line.
        unit: noun of an evaluation.
        timeout_s: time after which a case counts as a hang.
        input: directory, below the working directory, with the input of the last case; saved after a failure.
    """

    name: str
    unit: str
    good: tuple[str, ...]
    timeout_s: float = 300.0
    input: str = "input"

    @abstractmethod
    def prepare(self, work: Path) -> None:
        """Prepare a process for cases in a working directory."""

    @abstractmethod
    def run(self, seed: int, index: int, work: Path) -> Case:
        """Run one case."""


@dataclass
class FuzzReport:
    """Results of a fuzz run.

    Args:
        target: the target.
        counts: number of evaluations by group and outcome.
        failures: a description of each failure; the first word is the name of its saved input.
        n_cases: number of cases.
        seconds: wall-clock time.
    """

    target: Target
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    n_cases: int = 0
    seconds: float = 0.0

    @property
    def n_evaluations(self) -> int:
        """Number of evaluations."""
        return sum(self.counts.values())

    def by_outcome(self) -> dict[str, int]:
        """Return the number of evaluations by outcome, failures last."""
        outcomes = sorted({outcome for _, outcome in self.counts}, key=lambda o: (o not in self.target.good, o))
        return {outcome: sum(n for (_, kind), n in self.counts.items() if kind == outcome) for outcome in outcomes}

    def by_group(self) -> dict[str, dict[str, int]]:
        """Return the number of evaluations by group and outcome."""
        groups = sorted({group for group, _ in self.counts})
        return {
            group: {o: self.counts[group, o] for o in self.by_outcome() if self.counts[group, o]} for group in groups
        }

    def __str__(self) -> str:
        totals = self.by_outcome()
        lines = [f"{self.target.name:28}" + "".join(f"{outcome:>14}" for outcome in totals)]
        for group, counts in self.by_group().items():
            lines.append(f"{group:28}" + "".join(f"{counts.get(outcome, 0):14,}" for outcome in totals))
        lines.append(f"{'all':28}" + "".join(f"{total:14,}" for total in totals.values()))
        lines.append(
            f"{self.n_evaluations:,} {self.target.unit} in {self.n_cases:,} cases, {len(self.failures)} failures"
        )
        return "\n".join([*lines, *self.failures])


def fuzz(
    target: Target,
    seed: int,
    budget: int,
    out: Path | None = None,
    max_seconds: float = float("inf"),
    isolated: bool = True,
    start: int = 0,
    on_progress: Callable[[FuzzReport], object] | None = None,
) -> FuzzReport:
    """Run the cases of a target; an interrupt (Ctrl-C) ends the run and keeps its results.

    Args:
        target: the target.
        seed: seed of the cases; case ``i`` of a seed is always the same.
        budget: number of cases.
        out: directory to which the inputs of failures are saved.
        max_seconds: time after which no case is started, except the first.
        isolated: run cases in child processes, so that a crash or a hang of one is a failure among others.
        start: index of the first case.
        on_progress: called every minute with the report so far.
    """
    report, began, index = FuzzReport(target), time.monotonic(), start
    end, next_progress = began + max_seconds, began + PROGRESS_INTERVAL_S
    parent = MEMORY_FILES if os.access(MEMORY_FILES, os.W_OK) else None
    with (
        tempfile.TemporaryDirectory(prefix="torchcaps-fuzz-", dir=parent, ignore_cleanup_errors=True) as directory,
        contextlib.suppress(KeyboardInterrupt),
    ):
        work = Path(directory).resolve()
        while index < start + budget and (report.n_cases == 0 or time.monotonic() < end):
            run = _run_isolated if isolated else _run_here
            for case in run(target, seed, index, start + budget, work, end):
                index = case.index + 1
                _add(report, case, seed, work, out)
                report.seconds = time.monotonic() - began
                if on_progress is not None and time.monotonic() > next_progress:
                    on_progress(report)
                    next_progress = time.monotonic() + PROGRESS_INTERVAL_S
    report.seconds = time.monotonic() - began
    return report


def _add(report: FuzzReport, case: Case, seed: int, work: Path, out: Path | None) -> None:
    """Add a case to a report; save its input if it is a failure."""
    target = report.target
    report.n_cases += 1
    report.counts[case.group, case.outcome] += case.evaluations
    if case.outcome in target.good:
        return
    name = f"{target.name}-{seed}-{case.index}"
    report.failures.append(f"{name} {case.group} {case.outcome}: {case.message}")
    if out is not None and (work / target.input).exists():
        shutil.copytree(work / target.input, out / name, symlinks=True, dirs_exist_ok=True)
        report.failures[-1] += f" (saved to {out / name})"


def _run_here(target: Target, seed: int, start: int, stop: int, work: Path, end: float) -> Iterator[Case]:
    """Run cases one after the other in this process."""
    target.prepare(work)
    for index in range(start, stop):
        if index > start and time.monotonic() > end:
            return
        yield target.run(seed, index, work)


def _run_isolated(target: Target, seed: int, start: int, stop: int, work: Path, end: float) -> Iterator[Case]:
    """Run cases in a child process; if it dies or hangs, yield that as the outcome of its case and return."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe()
    child = context.Process(target=_serve, args=(sender, target, seed, start, stop, work, end - time.monotonic()))
    child.start()
    sender.close()
    index = start
    try:
        while True:
            if not receiver.poll(target.timeout_s):
                yield Case(index, "unknown", "hang", f"more than {target.timeout_s:.0f} s")
                return
            try:
                case = receiver.recv()
            except EOFError:
                child.join()
                if child.exitcode:
                    yield Case(index, "unknown", "crash", f"exit code {child.exitcode}")
                return
            index = case.index + 1
            yield case
            if case.outcome not in target.good:
                receiver.send(None)  # the input has been saved: continue
    finally:
        child.kill()
        child.join()
        receiver.close()


def _serve(sender: Any, target: Target, seed: int, start: int, stop: int, work: Path, seconds: float) -> None:
    """Run cases and send their outcomes; after a failure, wait until its input has been saved."""
    torch.set_num_threads(1)
    with contextlib.suppress(ImportError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    memory = 0
    for case in _run_here(target, seed, start, stop, work, time.monotonic() + seconds):
        memory, before = _peak_memory(), memory
        if before and memory - before > MAX_GROWTH_BYTES and case.outcome in target.good:
            message = f"memory in use has grown by {(memory - before) >> 20:,} MiB"
            case = dataclasses.replace(case, outcome="memory", message=message)
        sender.send(case)
        if case.outcome not in target.good:
            sender.recv()
    sender.close()
    os._exit(0)


def _peak_memory() -> int:
    """Return the largest memory in use of this process so far in bytes; 0 if the system does not tell."""
    try:
        import resource
    except ImportError:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
