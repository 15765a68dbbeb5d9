"""Measuring a case: first whether both ways agree, then how long they take, interleaved, the least of several."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from torchcaps.bench.cases import Case, Work

__all__ = ["compare", "matmul_rate", "measure_case"]

SHORT = 0.02  # seconds: what takes less is done several times at once
TINY = 1e-6  # of the largest: what is smaller is rounding


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Compute with so many threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def matmul_rate(repeat: int = 5) -> float:
    """Return the multiply-adds a second that a large matrix product reaches on one thread."""
    left, right = torch.randn(1024, 1024), torch.randn(1024, 1024)
    with threads(1):
        return 1024**3 / min(_timed(lambda: [left @ right], 4, time.process_time) for _ in range(repeat))


def compare(case: Case) -> tuple[dict[str, Work], float]:
    """Set up both ways; return them, and the largest relative RMS difference between their results and gradients."""
    works = {"ours": case.make(False), "usual": case.make(True)}
    found = [(work.compared or work.run)() for work in works.values()]
    # A gradient that is zero but for rounding, such as that of a bias before a batch norm, has no size of its own.
    largest = max(_size(tensor) for tensor in found[1])
    sizes = [_size(b) if _size(b) > TINY * largest else largest for b in found[1]]
    return works, max(_size(a - b) / size for a, b, size in zip(*found, sizes, strict=True))


def _size(tensor: Tensor) -> float:
    return float(tensor.square().mean().sqrt())


def measure_case(case: Case, repeat: int = 3, rate: float | None = None) -> dict[str, Any]:
    """Measure a case; raise a `ValueError` where the two ways don't agree.

    Args:
        case: what to measure.
        repeat: interleaved repetitions, of which the least counts.
        rate: multiply-adds a second, as `matmul_rate` returns; by default it is measured.
    """
    rate = matmul_rate() if rate is None else rate
    with threads(1):
        works, difference = compare(case)
        if not difference < case.limit:
            raise ValueError(f"{case.title}: the two ways differ by {difference:.1e}, so they are not timed")
        cpu = _least(works, repeat, time.process_time)
    with threads(2):
        wall = _least(works, repeat, time.perf_counter)
    floor = works["ours"].multiply_adds / rate
    return {
        "title": case.title,
        "difference": difference,
        "cpu_seconds": cpu,
        "wall_seconds": wall,
        "ratio": cpu["usual"] / cpu["ours"],
        "wall_ratio": wall["usual"] / wall["ours"],
        "least": case.least,
        "aim": case.aim,
        "multiply_adds": works["ours"].multiply_adds,
        "floor_seconds": floor,
        "above_floor": cpu["ours"] / floor,
        "most_above_floor": case.floor,
    }


def _least(works: dict[str, Work], repeat: int, clock: Callable[[], float]) -> dict[str, float]:
    """Return the least time of each way."""
    counts = {way: max(1, int(SHORT / max(1e-9, _timed(work.run, 1, clock)))) for way, work in works.items()}
    least = dict.fromkeys(works, float("inf"))
    for _ in range(repeat):
        for way, work in works.items():
            least[way] = min(least[way], _timed(work.run, counts[way], clock))
    return least


def _timed(run: Callable[[], Any], count: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(count):
        run()
    return (clock() - start) / count
