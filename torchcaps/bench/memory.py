"""Peak memory of training, measured in a separate process, compared with the naive baseline and with the estimate."""

import contextlib
import multiprocessing
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from torchcaps.bench.naive import use_naive_votes
from torchcaps.bench.timing import training_step
from torchcaps.models import create_model, list_models
from torchcaps.profiling.memory import estimate_memory
from torchcaps.training.errors import RunError

__all__ = [
    "ESTIMATE_CASES",
    "MEMORY_CASES",
    "MemoryCase",
    "TrainingCase",
    "TrainingPeak",
    "compare_with_estimates",
    "compare_with_naive",
    "measure_training_peaks",
    "parse_estimate_case",
    "peak_resident_bytes",
    "reset_peak_resident",
]

N_STEPS = 2  # the optimizer allocates its state in the first step
MODES = {"auto": "auto", "stored": False, "streamed": True}  # values of the model option `streamed`


def peak_resident_bytes() -> int:
    """Return the largest resident set size that this process has had, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return 1024 * int(line.split()[1])
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def reset_peak_resident() -> None:
    """Reset the peak resident set size of this process to the current one, if the system supports it (Linux)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


# Peaks in separate processes ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingCase:
    """A network and a batch size to train with.

    Args:
        model: name in the model registry.
        batch_size: images per training step.
        options: fields of the model that differ from its defaults.
        naive: whether to use the naive baseline (`torchcaps.bench.naive`) instead of torchcaps' votes.
    """

    model: str
    batch_size: int
    options: Mapping[str, Any] = field(default_factory=dict)
    naive: bool = False


@dataclass(frozen=True)
class TrainingPeak:
    """Peak resident memory of two training steps, in bytes.

    Args:
        training_bytes: increase over a process that has trained a small network: weights, optimizer state and all
            tensors of a step.
        step_bytes: the part of it that came after the network and its optimizer were built.
        process_bytes: resident memory of the whole process.
    """

    training_bytes: int
    step_bytes: int
    process_bytes: int


def _measure_here(case: TrainingCase, num_threads: int) -> TrainingPeak:
    """Measure a case in the current process, which must be a new one: freed memory is not always returned."""
    torch.set_num_threads(num_threads)
    torch.manual_seed(0)
    training_step(create_model("capsnet_small"), 2)()  # loads libraries and buffers that every process needs
    reset_peak_resident()
    before = peak_resident_bytes()
    model = create_model(case.model, **case.options)
    step = training_step(use_naive_votes(model) if case.naive else model, case.batch_size)
    built = peak_resident_bytes()
    for _ in range(N_STEPS):
        step()
    peak = peak_resident_bytes()
    return TrainingPeak(peak - before, peak - built, peak)


def _start_fork_server() -> None:
    """Start the fork server with SIGINT ignored, so that Ctrl-C is handled by this process alone."""
    from multiprocessing import forkserver

    if threading.current_thread() is not threading.main_thread():
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, handler)


def measure_training_peaks(
    cases: Mapping[str, TrainingCase], on_case_done: Callable[[], object] = lambda: None
) -> dict[str, TrainingPeak]:
    """Measure the peak memory of two training steps of each case, each in its own process.

    Args:
        cases: the cases by name.
        on_case_done: called after each case, e.g. to advance a progress bar.

    Raises:
        RunError: if a process was killed, typically because memory ran out.
    """
    methods = multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    if "forkserver" in methods:
        context.set_forkserver_preload([__name__])  # imports torch once for all processes
        _start_fork_server()
    peaks = {}
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        for name, case in cases.items():
            try:
                peaks[name] = pool.submit(_measure_here, case, torch.get_num_threads()).result()
            except BrokenProcessPool as error:
                raise RunError(
                    f"the process that measured the memory of {case.model} was killed, probably because memory ran "
                    "out; reduce the batch size or close other programs"
                ) from error
            on_case_done()
    return peaks


# Comparison with the naive baseline -----------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryCase:
    """A model whose training memory is compared with a bound.

    Args:
        model, batch_size: see `TrainingCase`.
        max_fraction: largest accepted fraction of the naive baseline's memory; ``None``: the baseline is not run.
        max_process_bytes: largest accepted memory of the process, or ``None``.
    """

    model: str
    batch_size: int
    max_fraction: float | None = None
    max_process_bytes: int | None = None


MEMORY_CASES = (
    MemoryCase("tsai2020_cifar10", 16, max_fraction=1 / 8),
    MemoryCase("tsai2020_cifar100", 128, max_process_bytes=6 * 2**30),
)


def compare_with_naive(case: MemoryCase) -> dict[str, Any]:
    """Measure memory of a training step, also of the naive baseline given a ``max_fraction``; return the record row."""
    cases = {"torchcaps": TrainingCase(case.model, case.batch_size)}
    if case.max_fraction is not None:
        cases["naive"] = TrainingCase(case.model, case.batch_size, naive=True)
    row = {name: value for name, value in asdict(case).items() if value is not None}
    for name, peak in measure_training_peaks(cases).items():
        row[name] = {"step_bytes": peak.step_bytes, "process_bytes": peak.process_bytes}
    return row


# Comparison with the estimate -----------------------------------------------------------------------------------

ESTIMATE_CASES = (
    "sabour2017_mnist:128:stored",
    "sabour2017_mnist:128:streamed",
    "sabour2017_multimnist:64:auto",
    "choi2019_mnist:100:auto",
    "choi2019_cifar10:32:auto",
    "tsai2020_cifar10:8:stored",
    "tsai2020_cifar10:32:streamed",
    "tsai2020_cifar10:128:streamed",
    "tsai2020_em_cifar10:16:streamed",
    "tsai2020_resnet18_cifar10:64:auto",
    "chen2019_multi_cifar10:100:auto",
    "yang2021_mnist:64:auto",
    "hinton2018_smallnorb:16:streamed",
)


def parse_estimate_case(text: str) -> TrainingCase:
    """Return the case ``MODEL:BATCH_SIZE`` or ``MODEL:BATCH_SIZE:MODE``; raise a `ValueError` if it is invalid.

    >>> parse_estimate_case("tsai2020_cifar10:32:streamed")
    TrainingCase(model='tsai2020_cifar10', batch_size=32, options={'streamed': True}, naive=False)
    """
    name, batch_size, mode, *rest = (*text.split(":"), "", "")
    if name not in list_models() or not batch_size.isdigit() or (mode or "auto") not in MODES or any(rest):
        raise ValueError(
            f"invalid case {text!r}: expected MODEL:BATCH_SIZE or MODEL:BATCH_SIZE:MODE with MODE one of "
            f"{', '.join(MODES)}, e.g. tsai2020_cifar10:32:streamed"
        )
    with torch.device("meta"):
        has_votes = hasattr(create_model(name).spec, "streamed")
    return TrainingCase(name, int(batch_size), {"streamed": MODES[mode or "auto"]} if has_votes else {})


def compare_with_estimates(texts: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield a record row per case ``MODEL:BATCH_SIZE[:MODE]``: estimated and measured peak memory of training."""
    for text in texts:
        case = parse_estimate_case(text)
        with torch.device("meta"):
            model = create_model(case.model, **case.options)
        estimate = estimate_memory(model, case.batch_size)
        measured = measure_training_peaks({text: case})[text].training_bytes
        yield {
            "kind": "estimate",
            "case": text,
            "estimated_bytes": estimate.total,
            "measured_bytes": measured,
            "ratio": estimate.total / measured,
            "vote_bytes": estimate.votes,
        }
