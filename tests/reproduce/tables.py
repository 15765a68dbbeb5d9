"""Small tables with known records."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchcaps._core.serialize import pack_bits
from torchcaps.reproduce.scales import Scale, run_spec
from torchcaps.reproduce.schema import Cell, Claim, Item, Measurement, Published, Run, TableRow
from torchcaps.reproduce.statistics import Results
from torchcaps.reproduce.store import RecordKey, RecordStore
from torchcaps.routing import Dynamic

A_IS_BETTER = Claim("a is better", ("a", "error"), ("b", "error"))


def measure_nothing(context: Any) -> dict[str, Any]:
    return {}


def measurement(name: str) -> Measurement:
    return Measurement(name, measure_nothing)


def cpu_store(directory: Path) -> RecordStore:
    return scaled_store(directory, "cpu")


def scaled_store(directory: Path, scale: Scale) -> RecordStore:
    return RecordStore(scale, directory / "results", directory / "work")


def measured_table(
    directory: Path, a: list[float], b: list[float], images: int = 10_000, scale: Scale = "cpu"
) -> Results:
    """Return a table with rows a and b, whose errors in per cent are measured with one seed each."""
    store = scaled_store(directory, scale)
    cells = {name: Cell(Published(1.0, 0.1), measurement(name), "error") for name in ("a", "b")}
    rows = tuple(TableRow(name, {"error": cell}) for name, cell in cells.items())
    item = Item("t", "Table", "A table.", {"error": "test error, %"}, rows, (A_IS_BETTER,))
    for name, numbers in (("a", a), ("b", b)):
        for seed, number in enumerate(numbers):
            key = RecordKey(measurement(name), seed)
            store.write_measurement(key, {"error": number, "error_images": images}, 1.0)
    return Results(item, store)


def make_runs(names: str) -> dict[str, Run]:
    """Return a different run for each letter."""
    return {name: Run("capsnet_small", {"routing": Dynamic(index)}) for index, name in enumerate(names, start=1)}


def run_table(
    store: RecordStore, runs: dict[str, Run], groups: dict[str, str] | None = None, claim: Claim = A_IS_BETTER
) -> Results:
    """Return a table with one row per run."""
    groups = groups or {}
    rows = tuple(TableRow(name, {"error": Cell(None, run)}, groups.get(name, "")) for name, run in runs.items())
    return Results(Item("t", "Table", "A table.", {"error": "%"}, rows, (claim,)), store)


def write_run(store: RecordStore, run: Run, correct: Tensor, seed: int = 0, **test_results: Any) -> None:
    """Write the record of a run with these per-image test results, and further ones."""
    key = RecordKey(run, seed)
    directory = store.run_directory(key)
    directory.path.mkdir(parents=True)
    directory.write_config(run_spec(run, store.scale, seed))
    n, n_correct = len(correct), int(correct.sum())
    test = {"accuracy": n_correct / n, "n": n, "n_correct": n_correct, "loss": 0.0, "correct": pack_bits(correct)}
    test |= test_results
    report = {
        "stop_reason": "max_epochs",
        "epochs": 1,
        "steps": 2,
        "seconds": 1.0,
        "eval_weights": "last",
        "test": {"last": test},
    }
    directory.results.write_text(json.dumps({**report, "machine": {}}))
    store.write_run(key)


def write_errors(store: RecordStore, run: Run, n_incorrect: tuple[int, ...]) -> None:
    """Write one record per seed; the first ``n_incorrect`` of 10,000 images are misclassified."""
    for seed, count in enumerate(n_incorrect):
        correct = torch.ones(10_000, dtype=torch.bool)
        correct[:count] = False
        write_run(store, run, correct, seed)
