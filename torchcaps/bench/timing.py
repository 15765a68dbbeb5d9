"""Timing of benchmark cases: check that torchcaps and the naive baseline agree, then time both, interleaved."""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from torchcaps.bench.cases import Case, Work
from torchcaps.models import Network, Recipe
from torchcaps.training.ascent import CoefficientAscent

__all__ = [
    "compare",
    "matmul_rate",
    "measure_case",
    "num_threads",
    "relative_difference",
    "shortest_seconds",
    "training_step",
]

MIN_TIMED_S = 0.02  # shorter runs are repeated within one measurement
NEGLIGIBLE = 1e-6  # a tensor smaller than this fraction of the largest is rounding error


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    """Set torch's number of threads inside the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def matmul_rate(repeat: int = 5) -> float:
    """Return the multiply-adds per second of a large matrix product on one thread.

    >>> matmul_rate(repeat=1) > 0
    True
    """
    left, right = torch.randn(1024, 1024), torch.randn(1024, 1024)
    with num_threads(1):
        return 1024**3 / min(_seconds(lambda: [left @ right], 4, time.process_time) for _ in range(repeat))


def compare(case: Case) -> tuple[dict[str, Work], float]:
    """Prepare a case; return both implementations and the largest relative RMS difference of results and gradients.

    >>> import torch
    >>> from torchcaps.bench.cases import Case, Work
    >>> left, right = torch.rand(8, 8), torch.rand(8, 8)
    >>> case = Case("matrix product", lambda naive: Work(lambda: [left @ right], multiply_adds=8**3))
    >>> works, difference = compare(case)
    >>> sorted(works), difference
    (['naive', 'torchcaps'], 0.0)
    """
    works = {"torchcaps": case.make(False), "naive": case.make(True)}
    ours, naive = ((work.compared or work.run)() for work in works.values())
    return works, relative_difference(ours, naive)


def relative_difference(actual: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest RMS difference of two lists of tensors, relative to the RMS of the expected tensor."""
    # A gradient that is zero up to rounding, such as that of a bias before a batch norm, is compared with the largest.
    largest = max(_rms(tensor) for tensor in expected)
    sizes = [_rms(b) if _rms(b) > NEGLIGIBLE * largest else largest for b in expected]
    return max(_rms(a - b) / size for a, b, size in zip(actual, expected, sizes, strict=True))


def _rms(tensor: Tensor) -> float:
    return float(tensor.square().mean().sqrt())


def measure_case(case: Case, repeat: int = 3, rate: float | None = None) -> dict[str, Any]:
    """Time a case and return its record row; raise a `ValueError` if the two implementations disagree.

    Args:
        case: the case.
        repeat: number of interleaved repetitions; the shortest counts.
        rate: multiply-adds per second, see `matmul_rate`; default: measured.

    >>> import torch
    >>> left, right = torch.rand(8, 8), torch.rand(8, 8)
    >>> case = Case("matrix product", lambda naive: Work(lambda: [left @ right], multiply_adds=8**3))
    >>> row = measure_case(case, repeat=1)
    >>> row["title"], row["difference"]
    ('matrix product', 0.0)
    """
    rate = matmul_rate() if rate is None else rate
    with num_threads(1):
        works, difference = compare(case)
        if not difference < case.max_difference:
            raise ValueError(
                f"{case.title}: torchcaps and the naive baseline differ by {difference:.1e} (at most "
                f"{case.max_difference:g} is accepted), so they are not timed"
            )
        cpu = shortest_seconds(works, repeat, time.process_time)
    with num_threads(2):
        wall = shortest_seconds(works, repeat, time.perf_counter)
    matmul_seconds = works["torchcaps"].multiply_adds / rate
    return {
        "title": case.title,
        "difference": difference,
        "cpu_seconds": cpu,
        "wall_seconds": wall,
        "speedup": cpu["naive"] / cpu["torchcaps"],
        "wall_speedup": wall["naive"] / wall["torchcaps"],
        "min_speedup": case.min_speedup,
        "target_speedup": case.target_speedup,
        "multiply_adds": works["torchcaps"].multiply_adds,
        "matmul_seconds": matmul_seconds,
        "matmul_ratio": cpu["torchcaps"] / matmul_seconds,
        "max_matmul_ratio": case.max_matmul_ratio,
    }


def shortest_seconds(works: dict[str, Work], repeat: int, clock: Callable[[], float]) -> dict[str, float]:
    """Return the shortest time of each implementation in ``repeat`` interleaved repetitions."""
    counts = {name: max(1, int(MIN_TIMED_S / max(1e-9, _seconds(work.run, 1, clock)))) for name, work in works.items()}
    shortest = dict.fromkeys(works, float("inf"))
    for _ in range(repeat):
        for name, work in works.items():
            shortest[name] = min(shortest[name], _seconds(work.run, counts[name], clock))
    return shortest


def _seconds(run: Callable[[], Any], count: int, clock: Callable[[], float]) -> float:
    """Return the mean time of ``count`` runs."""
    start = clock()
    for _ in range(count):
        run()
    return (clock() - start) / count


# Training steps of any model ------------------------------------------------------------------------------------


def training_step(model: Network, batch_size: int, recipe: Recipe | None = None) -> Callable[[], None]:
    """Return a function that runs one training step on random images, as a recipe (default: the model's) defines it."""
    recipe = model.recipe if recipe is None else recipe
    ascent, steps = CoefficientAscent(model, recipe), itertools.count()
    loss, optimizer = model.loss(), recipe.optimizer.make(model.parameters())
    images, labels, targets = _random_batch(model, batch_size)

    def step() -> None:
        """Run one training step, with the ascent on coefficients if the recipe has one."""
        index = next(steps)
        optimizer.zero_grad()
        with ascent.recording(index) as recorded:
            loss(model(images, labels), labels, targets).backward()
        optimizer.step()
        ascent.run(recorded, images, labels, index, lr_factor=1.0)

    return step


def _random_batch(model: Network, batch_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return random images, labels and reconstruction targets of a model's shapes."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(batch_size, *model.spec.image, generator=generator)
    if model.n_objects == 1:
        return images, torch.randint(model.spec.classes, (batch_size,), generator=generator), images
    n_objects = model.n_objects or 2
    permutations = [torch.randperm(model.spec.classes, generator=generator) for _ in range(batch_size)]
    classes = torch.stack([permutation[:n_objects] for permutation in permutations])
    labels = classes
    if model.n_objects is None:
        labels = torch.zeros(batch_size, model.spec.classes).scatter_(1, classes, 1.0)
    return images, labels, images.unsqueeze(1).expand(-1, n_objects, -1, -1, -1)
