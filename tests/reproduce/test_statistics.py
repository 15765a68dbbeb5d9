"""Estimates and differences against values computed by hand."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from tests.reproduce.items import smoke_store
from tests.reproduce.tables import (
    A_IS_BETTER,
    cpu_store,
    make_runs,
    measured_table,
    measurement,
    run_table,
    write_errors,
    write_run,
)
from torchcaps.metrics import wilson_interval
from torchcaps.reproduce.scales import run_spec
from torchcaps.reproduce.schema import Cell, Claim, Item, TableRow
from torchcaps.reproduce.statistics import Estimate, Results, mean_with_interval
from torchcaps.reproduce.store import RecordKey

B_IS_BETTER = Claim("b is better", ("b", "error"), ("a", "error"))
T1, T2 = 12.706, 4.303  # two-sided 95 % quantiles of Student's t with 1 and 2 degrees of freedom


def estimates(results: Results) -> list[Estimate]:
    """Return our number of each row of a one-column table."""
    found = [results.estimate(cell) for row in results.item.rows for cell in row.cells.values()]
    assert None not in found
    return [estimate for estimate in found if estimate is not None]


def test_mean_with_interval_averages_the_numbers_of_an_image_first() -> None:
    numbers = mean_with_interval("a", torch.tensor([[1.0, 3.0], [4.0, 4.0], [6.0, 6.0]]))
    assert numbers == pytest.approx({"a": 4.0, "a_ci95": 1.959964 * 2.0 / 3**0.5})
    assert mean_with_interval("b", torch.empty(0)) == {"b": None}


def test_one_seed_has_the_interval_of_its_test_images(tmp_path: Path) -> None:
    results = measured_table(tmp_path, [2.0], [])
    estimate = results.estimate(results.cell("a", "error"))
    low, high = wilson_interval(200, 10_000)
    assert estimate is not None
    assert (estimate.mean, estimate.seeds, estimate.spread) == (2.0, 1, None)
    assert (estimate.low, estimate.high) == pytest.approx((100 * low, 100 * high))


def test_the_intervals_of_images_and_seeds_add_in_quadrature(tmp_path: Path) -> None:
    results = measured_table(tmp_path, [1.8, 2.2], [])
    estimate = results.estimate(results.cell("a", "error"))
    assert estimate is not None
    _, high = wilson_interval(200, 10_000)
    spread = math.sqrt(0.08)
    assert estimate.spread == pytest.approx(spread)
    assert estimate.high - estimate.mean == pytest.approx(math.hypot(100 * high - 2, T1 * spread / math.sqrt(2)))


def test_runs_tested_on_the_same_images_are_compared_by_image(tmp_path: Path) -> None:
    """McNemar's variance: 30 images are correct with a alone, 10 with b alone, of 10,000."""
    store, runs = smoke_store(tmp_path), make_runs("ab")
    a, b = torch.ones(2, 10_000, dtype=torch.bool)
    b[:30] = False
    a[30:40] = False
    a[100:300] = b[100:300] = False  # misclassified by both, which does not affect the difference
    write_run(store, runs["a"], a)
    write_run(store, runs["b"], b)
    results = run_table(store, runs)
    variance = (30 + 10 - 20**2 / 10_000) / 10_000 / 9_999
    half_width = pytest.approx(100 * 1.959964 * math.sqrt(variance))
    assert results.difference(A_IS_BETTER) == (pytest.approx(0.2), half_width)
    more_errors = dataclasses.replace(A_IS_BETTER, lower_is_better=False)
    assert results.difference(more_errors) == (pytest.approx(-0.2), half_width)


def test_only_errors_and_accuracies_are_compared_by_image(tmp_path: Path) -> None:
    """Both runs took two steps, whatever the images that only one of them classified correctly."""
    store, runs = smoke_store(tmp_path), make_runs("ab")
    write_errors(store, runs["a"], (100,))
    write_errors(store, runs["b"], (200,))
    rows = tuple(TableRow(name, {"error": Cell(None, run, "steps")}) for name, run in runs.items())
    results = Results(Item("t", "Table", "A table.", {"error": "steps"}, rows), store)
    assert results.difference(A_IS_BETTER) == (0.0, 0.0)


def test_recall_of_a_class_and_lowest_recall(tmp_path: Path) -> None:
    """Intervals are those of the images of the class; the means over the seeds are of one class or of the lowest."""
    store, runs = smoke_store(tmp_path), make_runs("ab")
    correct = torch.ones(100, dtype=torch.bool)
    for seed, class_correct in enumerate(([30, 5], [15, 35])):
        write_run(store, runs["a"], correct, seed, class_correct=class_correct, class_counts=[60, 40])
    write_run(store, runs["b"], correct)  # a record without counts per class
    metrics = {"first": "recall 0", "second": "recall 1", "lowest": "lowest recall"}
    cells = {run: {name: Cell(None, runs[run], metric) for name, metric in metrics.items()} for run in "ab"}
    columns = dict.fromkeys(metrics, "test accuracy, %")
    results = Results(Item("t", "T", "A table.", columns, tuple(TableRow(r, c) for r, c in cells.items())), store)
    means = {name: estimate.mean for name, cell in cells["a"].items() if (estimate := results.estimate(cell))}
    assert means == pytest.approx({"first": 37.5, "second": 50.0, "lowest": (12.5 + 25) / 2})
    first = results.estimate(cells["a"]["first"])
    assert first is not None
    _, high = wilson_interval(22, 60)  # 37.5 % of 60, rounded
    seeds = T1 * 12.5 * math.sqrt(2) / math.sqrt(2)
    assert first.high == pytest.approx(min(100, 37.5 + math.hypot(100 * high - 37.5, seeds)))
    assert [results.estimate(cell) for cell in cells["b"].values()] == [None] * 3


def test_recalls_are_not_compared_by_image(tmp_path: Path) -> None:
    store, runs = smoke_store(tmp_path), make_runs("ab")
    correct = torch.ones(100, dtype=torch.bool)
    for name, n in (("a", 30), ("b", 20)):
        write_run(store, runs[name], correct, class_correct=[n, 60], class_counts=[40, 60])
    rows = tuple(TableRow(name, {"error": Cell(None, run, "recall 0")}) for name, run in runs.items())
    claim = Claim("a is better", ("a", "error"), ("b", "error"), lower_is_better=False)
    results = Results(Item("t", "T", "A table.", {"error": "%"}, rows, (claim,)), store)
    assert (results.difference(claim) or (0,))[0] == pytest.approx(25)


def test_runs_tested_on_other_images_are_not_compared_by_image(tmp_path: Path) -> None:
    store, runs = smoke_store(tmp_path), make_runs("ab")
    correct = torch.ones(10_000, dtype=torch.bool)
    correct[:100] = False
    write_run(store, runs["a"], correct)
    write_run(store, runs["b"], correct[:5_000])
    _, half_width = run_table(store, runs).difference(A_IS_BETTER) or (0, 0)
    intervals = [wilson_interval(100, 10_000), wilson_interval(100, 5_000)]
    assert half_width == pytest.approx(math.hypot(*(50 * (high - low) for low, high in intervals)))


def test_the_variance_between_seeds_is_pooled_over_the_runs_of_a_column(tmp_path: Path) -> None:
    """10, 20 and 30, 50 errors of 10,000: variances of 0.005 and 0.02 in per cent, two degrees of freedom."""
    store, runs = smoke_store(tmp_path), make_runs("ab")
    write_errors(store, runs["a"], (10, 20))
    write_errors(store, runs["b"], (30, 50))
    results = run_table(store, runs)
    a, _ = estimates(results)
    of_images = 100 * wilson_interval(15, 10_000)[1] - 0.15
    of_seeds = T2 * math.sqrt(0.0125 / 2)
    assert a.high - a.mean == pytest.approx(math.hypot(of_images, of_seeds))
    difference, half_width = results.difference(A_IS_BETTER) or (0, 0)
    assert difference == pytest.approx(0.25)
    assert half_width > T2 * math.sqrt(2 * 0.0125 / 2)


def test_a_variance_group_of_runs_has_a_variance_of_its_own(tmp_path: Path) -> None:
    store, runs = smoke_store(tmp_path), make_runs("abc")
    for name, errors in (("a", (200, 210)), ("b", (100, 110)), ("c", (100, 900))):
        write_errors(store, runs[name], errors)
    results = run_table(store, runs, {"c": "unsteady"})
    a, b, c = estimates(results)
    of_seeds = T2 * math.sqrt(0.005 / 2)
    of_images = 100 * wilson_interval(205, 10_000)[1] - 2.05
    assert a.high - a.mean == pytest.approx(math.hypot(of_images, of_seeds))
    assert b.high - b.mean < a.high - a.mean
    assert c.high > 50
    difference, half_width = results.difference(B_IS_BETTER) or (0, 0)
    assert difference > half_width > of_seeds


def test_measurements_pool_their_variance_only_in_a_variance_group(tmp_path: Path) -> None:
    """0.90, 0.94 and 0.95, 0.97: variances of 0.0008 and 0.0002; the third row, far noisier, has its own."""
    store = cpu_store(tmp_path)
    for name, numbers in {"a": (0.90, 0.94), "b": (0.95, 0.97), "c": (0.2, 0.8)}.items():
        for seed, number in enumerate(numbers):
            store.write_measurement(RecordKey(measurement(name), seed), {"number": number}, 1.0)
    groups = {"a": "digit", "b": "digit", "c": ""}
    rows = tuple(TableRow(k, {"x": Cell(None, measurement(k), "number")}, group) for k, group in groups.items())
    a, b, c = estimates(Results(Item("t", "Table", "A table.", {"x": "ratio"}, rows), store))
    half_width = T2 * math.sqrt(0.0005 / 2)
    assert [a.mean - a.low, b.mean - b.low] == pytest.approx([half_width, half_width])
    assert b.high == 1  # the largest ratio
    assert (c.low, c.high) == (0, 1)


@pytest.mark.parametrize(
    ("unit", "numbers", "limits"),
    [
        ("cosine", (-0.9, 0.9), (-1, 1)),
        ("% of images", (5.0, 95.0), (0, 100)),
        ("ratio", (0.1, 0.9), (0, 1)),
        ("seconds", (1.0, 9.0), (0, None)),
        ("test minus training, points", (-1.0, 9.0), (None, None)),
    ],
)
def test_intervals_contain_possible_numbers_only(
    tmp_path: Path, unit: str, numbers: tuple[float, float], limits: tuple[float | None, float | None]
) -> None:
    store = cpu_store(tmp_path)
    for seed, number in enumerate(numbers):
        store.write_measurement(RecordKey(measurement("a"), seed), {"number": number}, 1.0)
    rows = (TableRow("a", {"x": Cell(None, measurement("a"), "number")}),)
    (estimate,) = estimates(Results(Item("t", "Table", "A table.", {"x": unit}, rows), store))
    half_width = 12.706 * (numbers[1] - numbers[0]) / 2
    free = estimate.mean - half_width, estimate.mean + half_width
    expected = [bound if limit is None else limit for bound, limit in zip(free, limits, strict=True)]
    assert [estimate.low, estimate.high] == pytest.approx(expected, rel=1e-4)


def test_a_variance_known_for_one_run_is_used_for_both(tmp_path: Path) -> None:
    """Errors of 2 % with three seeds (1.9, 2.0, 2.1) and of 1 % with one seed."""
    store, runs = smoke_store(tmp_path), make_runs("ab")
    write_errors(store, runs["a"], (190, 200, 210))
    write_errors(store, runs["b"], (100,))
    difference, half_width = run_table(store, runs, {"b": "other"}).difference(B_IS_BETTER) or (0, 0)
    assert difference == pytest.approx(1.0)
    of_seeds = T2 * math.sqrt(0.01 / 3 + 0.01)
    assert of_seeds < half_width < 1.2 * of_seeds


def test_a_run_that_diverged_has_no_number(tmp_path: Path) -> None:
    store, runs = smoke_store(tmp_path), make_runs("ab")
    write_run(store, runs["a"], torch.ones(10, dtype=torch.bool))
    store.write_diverged(RecordKey(runs["b"], 0), run_spec(runs["b"], "smoke"), "step 3")
    (_, b) = estimates(run_table(store, runs))
    assert (b.seeds, b.diverged) == (0, 1)
    assert math.isnan(b.mean)


def test_two_numbers_of_one_measurement_are_compared_by_seed(tmp_path: Path) -> None:
    """Errors near 60 and 20 % with two GANs; the better network has 2 and 3 points less."""
    store, gan = cpu_store(tmp_path), measurement("gan")
    for seed, (a, b) in enumerate(((58.0, 60.0), (17.0, 20.0))):
        store.write_measurement(RecordKey(gan, seed), {"a": a, "a_images": 40_000, "b": b, "b_images": 40_000}, 1.0)
    rows = tuple(TableRow(name, {"error": Cell(None, gan, name)}) for name in ("a", "b"))
    claims = tuple(Claim("a is better", ("a", "error"), ("b", "error"), lower) for lower in (True, False))
    results = Results(Item("t", "Table", "A table.", {"error": "%"}, rows, claims), store)
    of_images = [50 * (high - low) for low, high in (wilson_interval(n, 40_000) for n in (15_000, 16_000))]
    half_width = math.hypot(T1 * math.sqrt(0.5 / 2), *of_images)
    less, more = (results.difference(claim) for claim in claims)
    assert (less, more) == ((2.5, pytest.approx(half_width)), (-2.5, pytest.approx(half_width)))
