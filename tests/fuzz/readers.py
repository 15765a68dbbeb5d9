"""Mutated files for every reader of the data sets.

A mutant must be rejected with a `DataError` of one line that names the file, or be loaded. If the result differs from
that of the valid file, a warning must have reported it, unless the format makes this impossible. No mutant may end the
process, take minutes, or raise anything else.

    python -m tests.fuzz.readers --seed 1 --budget 10000 --out /tmp/failures
"""

import argparse
import contextlib
import multiprocessing
import os
import shutil
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.fuzz.mutate import mutate
from tests.fuzz.samples import Sample, list_samples, published
from torchcaps.data import DataError

__all__ = ["FuzzReport", "fuzz_readers", "run_mutant"]

MUTANT_TIMEOUT_S = 300.0
MAX_MEMORY_BYTES = 6 << 30
GOOD = ("rejected", "unchanged", "reported", "undetectable")


@dataclass
class FuzzReport:
    """Results of a fuzz run.

    Args:
        counts: number of mutants by reader and outcome.
        failures: a description of each failure; the first word is the name of its saved input.
    """

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    @property
    def n_mutants(self) -> int:
        """Number of mutants."""
        return sum(self.counts.values())

    def __str__(self) -> str:
        outcomes = sorted({outcome for _, outcome in self.counts}, key=lambda o: (o not in GOOD, o))
        lines = [f"{'reader':28}" + "".join(f"{outcome:>14}" for outcome in outcomes)]
        for reader in sorted({reader for reader, _ in self.counts}):
            lines.append(f"{reader:28}" + "".join(f"{self.counts[reader, outcome]:14,}" for outcome in outcomes))
        totals = [sum(n for (_, kind), n in self.counts.items() if kind == outcome) for outcome in outcomes]
        lines.append(f"{'all':28}" + "".join(f"{total:14,}" for total in totals))
        return "\n".join([*lines, *self.failures])


def fuzz_readers(
    seed: int, budget: int, out: Path | None = None, max_seconds: float = float("inf"), isolated: bool = True
) -> FuzzReport:
    """Load mutated files with every reader.

    Args:
        seed: seed of the mutations; mutant ``i`` of a seed is always the same.
        budget: number of mutants.
        out: directory to which the inputs of failures are saved.
        max_seconds: time after which no mutant is started.
        isolated: run mutants in child processes, so that a crash or a hang of one is a failure among others.
    """
    report, end, index = FuzzReport(), time.monotonic() + max_seconds, 0
    with tempfile.TemporaryDirectory(prefix="torchcaps-fuzz-") as directory:
        work = Path(directory)
        while index < budget and time.monotonic() < end:
            steps = _run_isolated if isolated else _run_here
            for position, reader, outcome, message in steps(seed, index, budget, work, end):
                index = position + 1
                report.counts[reader, outcome] += 1
                if outcome not in GOOD:
                    name = f"{reader}-{seed}-{position}"
                    report.failures.append(f"{name} {outcome}: {message}")
                    if out is not None:
                        shutil.copytree(work / "data", out / name, dirs_exist_ok=True)
    return report


Step = tuple[int, str, str, str]  # index of the mutant, reader, outcome, message


def _run_here(seed: int, start: int, budget: int, work: Path, end: float) -> Iterator[Step]:
    """Run mutants one after the other."""
    samples = list_samples()
    order = [sample for sample in samples for _ in range(sample.weight)]
    expected = {sample.name: _load_valid(sample, work) for sample in samples}
    for index in range(start, budget):
        if time.monotonic() > end:
            return
        rng = np.random.default_rng([seed, index])
        sample = order[int(rng.integers(len(order)))]
        yield index, sample.name, *run_mutant(sample, expected[sample.name], rng, work)


def _load_valid(sample: Sample, work: Path) -> list[torch.Tensor]:
    with warnings.catch_warnings(), published(sample):
        warnings.simplefilter("error")
        return sample.load(_write(sample, sample.files[sample.target], work))


def _write(sample: Sample, content: bytes, work: Path) -> Path:
    """Write the files of a sample with other content of its target; return their directory."""
    root = work / "data"
    shutil.rmtree(root, ignore_errors=True)
    for path, data in {**sample.files, sample.target: sample.wrap(content)}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    return root


def run_mutant(sample: Sample, expected: list[torch.Tensor], rng: np.random.Generator, work: Path) -> tuple[str, str]:
    """Load one mutant; return the outcome and a message. Failures have outcomes that are not in `GOOD`."""
    root = _write(sample, mutate(sample.files[sample.target], rng), work)
    try:
        with warnings.catch_warnings(record=True) as reported, published(sample):
            warnings.simplefilter("always")
            actual = sample.load(root)
    except DataError as error:
        message = str(error)
        if "\n" in message:
            return "several-lines", message
        if str(root) not in message:
            return "no-path", message
        return "rejected", message
    except BaseException as error:
        return "exception", "".join(traceback.format_exception(error)[-3:])
    equal = len(actual) == len(expected) and all(map(torch.equal, actual, expected))
    if equal:
        return "unchanged", ""
    if any(issubclass(warning.category, UserWarning) for warning in reported):
        return "reported", ""
    return ("silent" if sample.detects else "undetectable"), "the data differ and nothing was reported"


# Child processes ------------------------------------------------------------------------------------------------


def _run_isolated(seed: int, start: int, budget: int, work: Path, end: float) -> Iterator[Step]:
    """Run mutants in a child process; if it dies or hangs, yield that as the outcome of its mutant and return."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_serve, args=(sender, seed, start, budget, work, end - time.monotonic()))
    child.start()
    sender.close()
    index, reader = start, "unknown"
    try:
        while True:
            if not receiver.poll(MUTANT_TIMEOUT_S):
                child.kill()
                yield index, reader, "hang", f"more than {MUTANT_TIMEOUT_S:.0f} s"
                return
            try:
                step = receiver.recv()
            except EOFError:
                child.join()
                if child.exitcode:
                    yield index, reader, "crash", f"exit code {child.exitcode}"
                return
            index, reader = step[0] + 1, step[1]
            yield step
            if step[2] not in GOOD:
                return  # the parent copies the input; the child waits for the pipe and is killed
    finally:
        child.kill()
        child.join()
        receiver.close()


def _serve(sender: Any, seed: int, start: int, budget: int, work: Path, seconds: float) -> None:
    """Run mutants and send their outcomes; wait after a failure."""
    torch.set_num_threads(1)
    with contextlib.suppress(ImportError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for step in _run_here(seed, start, budget, work, time.monotonic() + seconds):
        sender.send(step)
        if step[2] not in GOOD:
            time.sleep(MUTANT_TIMEOUT_S)
    sender.close()
    os._exit(0)


def main() -> None:
    """Run from the command line; exit with status 1 if there are failures."""
    parser = argparse.ArgumentParser(description="Load mutated files with every reader of the data sets.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", type=int, default=10_000, help="number of mutants")
    parser.add_argument("--max-seconds", type=float, default=600.0)
    parser.add_argument("--out", type=Path, default=None, help="directory for the inputs of failures")
    options = parser.parse_args()
    report = fuzz_readers(options.seed, options.budget, options.out, options.max_seconds)
    print(report)
    raise SystemExit(bool(report.failures))


if __name__ == "__main__":
    main()
