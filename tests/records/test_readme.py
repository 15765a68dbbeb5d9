"""Numbers in the README and docs/scaling.md are those of the committed records."""

import json
from pathlib import Path
from typing import Any

import pytest

from torchcaps.training.logging import read_metrics
from torchcaps.training.run_dir import RunDirectory

ROOT = Path(__file__).resolve().parents[2]


def read_document(name: str) -> str:
    """Return the text of a document with all white space as single spaces."""
    return " ".join((ROOT / name).read_text().split())


README = read_document("README.md")


def read_benchmark(name: str) -> list[dict[str, Any]]:
    return json.loads((ROOT / "results/bench" / f"{name}.json").read_text())["rows"]


def read_run(name: str) -> dict[str, Any]:
    """Return the results of a committed run; check that its files belong together."""
    directory = ROOT / "results/runs" / name
    results = json.loads((directory / "results.json").read_text())
    spec = RunDirectory(directory).read_config()
    assert (spec.model, spec.seed) == (results["model"], results["seed"])
    assert read_metrics(directory / "metrics.csv")[-1]["step"] == results["steps"]
    assert results["command"].startswith("torchcaps train")
    return results


def test_estimates_of_training_memory() -> None:
    """Most estimates are within a quarter of the measurement."""
    rows = read_benchmark("training_memory")
    for row in rows:
        estimated, measured = (f"{row[key] / 2**20:,.0f} MiB" for key in ("estimated_bytes", "measured_bytes"))
        assert f"| {estimated} | {measured} | {row['ratio']:.2f} |" in README
    outside = [row["case"] for row in rows if not 0.76 < row["ratio"] < 1.25]
    assert len(outside) <= 0.16 * len(rows), outside


def test_costs_of_data() -> None:
    *rows, reading = read_benchmark("data")
    for row in rows:
        cells = f"{1e3 * row['batch_seconds']:.1f} ms | {row['step_seconds']:.2f} s | {100 * row['share']:.2f} % |"
        assert cells in README
    assert f"takes {reading['mnist_read_seconds']:.2f} s and {reading['mnist_bytes'] / 1e6:.0f} MB" in README
    assert f"{reading['multimnist_per_second']:,.0f}" in README
    assert reading["mnist_bytes"] < 120e6


@pytest.mark.parametrize(("name", "least"), [("sabour2017_mnist", 0.993), ("choi2019_mnist", 0.99)])
def test_accuracy_of_recorded_runs(name: str, least: float) -> None:
    results = read_run(name)
    test = results["test"][results["eval_weights"]]
    assert test["n"] == 10_000
    assert test["accuracy"] >= least
    low, high = test["interval"]
    assert f"{100 * test['accuracy']:.2f} %" in README
    assert f"{100 * low:.2f} to {100 * high:.2f}" in README


def test_accuracy_of_the_recorded_demo() -> None:
    runs = [read_run(f"capsnet_small-{seed}") for seed in range(3)]
    assert [run["seed"] for run in runs] == [0, 1, 2]
    tests = [run["test"][run["eval_weights"]] for run in runs]
    assert [test["n"] for test in tests] == [1_000] * 3
    mean = sum(test["accuracy"] for test in tests) / 3
    assert mean >= 0.984
    assert f"{100 * mean:.2f} % of 1,000 digits" in README
    for test in tests:
        assert f"{100 * test['accuracy']:.1f}" in README
    assert f"{max(run['seconds'] for run in runs):.0f} s at most" in README


def test_costs_of_the_training_loop() -> None:
    rows = read_benchmark("training")
    for row in rows:
        if row["kind"] == "loop":
            assert f"{100 * row['share']:.1f} % for `{row['model']}`" in README
        elif row["kind"] == "help":
            assert f"`{row['command']}` answers in {row['seconds']:.2f} s" in README
    processes = [row for row in rows if row["kind"] == "processes"]
    assert {(row["processes"], row["threads"]) for row in processes} == {(1, 1), (1, 2), (2, 1)}
    scaling = read_document("docs/scaling.md")
    for row in processes:
        cells = f"{row['step_seconds']:.3f} s | {row['images_per_second']:,.0f} | {100 * row['efficiency']:.0f} %"
        assert f"| {row['processes']} | {row['threads']} | {cells} |" in scaling
