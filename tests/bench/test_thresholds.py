"""Measurement of thresholds: a complete record at smoke size, comparison before timing, and crossovers."""

import json
import math
from pathlib import Path

import pytest
import torch

from tests.cli.commands import run_command, usage_error
from torchcaps.bench import thresholds
from torchcaps.bench.cases import Work
from torchcaps.bench.thresholds import SWEEPS, Point, Sweep, find_crossover, measure_threshold
from torchcaps.votes import dispatch
from torchcaps.votes.cpu.build import has_kernel
from torchcaps.votes.dispatch import THRESHOLDS


@pytest.mark.skipif(not has_kernel(torch.float32), reason="no compiled kernel")
def test_command_writes_a_complete_record(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "thresholds.json"
    before = {name: getattr(dispatch, name) for name in THRESHOLDS}
    text = run_command(capsys, "bench", "thresholds", "--smoke", "--repeat", "1", "--out", str(path))
    record = json.loads(path.read_text())
    assert set(record) == {"command", "finished", "seed", "machine", "rows"}
    assert [row["threshold"] for row in record["rows"]] == list(SWEEPS)
    for row in record["rows"]:
        name = row["threshold"]
        assert f"{name} = {row['value']:,} {row['unit']}" in text
        assert (row["value"], row["unit"]) == (THRESHOLDS[name].value, THRESHOLDS[name].unit)
        assert len({point["at"] for point in row["points"]}) == 2, name
        for point in row["points"]:
            first, second = point["seconds"].values()
            assert point["ratio"] == first / second
        assert ("crossover" in row) == (SWEEPS[name].result == "crossover"), name
    assert before == {name: getattr(dispatch, name) for name in THRESHOLDS}


def test_sizes_are_on_both_sides_of_each_threshold() -> None:
    for name, sweep in SWEEPS.items():
        value = THRESHOLDS[name].value
        assert min(sweep.sizes()) <= value / 4, name
        assert max(sweep.sizes()) == 8 * value, name


def test_alternatives_that_differ_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(size: int, count: int) -> Point:
        return Point(size, {"one": Work(lambda: [torch.ones(3)], 0), "two": Work(lambda: [torch.full((3,), 2.0)], 0)})

    sweep = Sweep("MIN_KERNEL_LANES", "two numbers", "crossover", make, 1, (1, 1, 2), kernel=False)
    monkeypatch.setitem(SWEEPS, "MIN_KERNEL_LANES", sweep)
    with pytest.raises(ValueError, match=r"MIN_KERNEL_LANES at 1: one and two differ by 5\.0e-01"):
        measure_threshold("MIN_KERNEL_LANES", 1, smoke=True)


def test_kernel_is_required_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "has_kernel", lambda dtype: False)
    with pytest.raises(ValueError, match=r"MIN_KERNEL_BYTES .* compiler"):
        measure_threshold("MIN_KERNEL_BYTES", 1, smoke=True)
    assert "'MIN_KERNEL_BYTES'" in usage_error("bench", "MIN_KERNEL_BYTE")  # the nearest name


def test_optimum_is_the_fastest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {1: 3.0, 2: 1.0}
    seconds = iter(times.values())
    monkeypatch.setattr(
        thresholds, "shortest_seconds", lambda works, *_: {"this size": next(seconds), "threshold": 2.0}
    )

    def make(size: int, count: int) -> Point:
        return Point(size, {name: Work(lambda: [torch.ones(1)], 0) for name in ("this size", "threshold")})

    monkeypatch.setitem(SWEEPS, "CHUNK_BYTES", Sweep("CHUNK_BYTES", "", "optimum", make, 1, (1, 1, 2), kernel=False))
    row = measure_threshold("CHUNK_BYTES", 1, smoke=True)
    assert (row["optimum"], row["optimum_ratio"]) == (2, 0.5)


def test_crossover_is_interpolated_between_sizes() -> None:
    crossover = find_crossover({1: 0.25, 4: 0.5, 16: 2.0}, value=1)
    assert crossover is not None
    assert math.isclose(crossover, 8), crossover
    assert find_crossover({1: 0.5, 2: 0.9}, value=1) is None
    assert find_crossover({1: 1.5, 2: 2.0}, value=1) is None
    assert find_crossover({1: 2.0, 2: 0.5}, value=1) is None  # the wrong way round
    noisy = {1: 0.5, 2: 1.0, 4: 0.5, 8: 1.0}
    assert (find_crossover(noisy, value=1), find_crossover(noisy, value=16)) == (pytest.approx(2), pytest.approx(8))
