"""Numbers in the README are those of the committed runs; those of the benchmarks are checked in test_bench.py."""

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


def read_run(name: str) -> dict[str, Any]:
    """Return the results of a committed run; check that its files belong together."""
    directory = ROOT / "results/runs" / name
    results = json.loads((directory / "results.json").read_text())
    spec = RunDirectory(directory).read_config()
    assert (spec.model, spec.seed) == (results["model"], results["seed"])
    assert read_metrics(directory / "metrics.csv")[-1]["step"] == results["steps"]
    assert results["command"].startswith("torchcaps train")
    return results


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
