"""Numbers in README and docs/results-training.md are those of the committed runs; benchmarks: test_bench.py."""

import json
import re
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
TRAININGS = read_document("docs/results-training.md")


def read_run(name: str) -> dict[str, Any]:
    """Return the results of a committed run; check that its files belong together."""
    directory = ROOT / "results/runs" / name
    results = json.loads((directory / "results.json").read_text())
    spec = RunDirectory(directory).read_config()
    assert (spec.model, spec.seed) == (results["model"], results["seed"])
    assert read_metrics(directory / "metrics.csv")[-1]["step"] == results["steps"]
    assert results["command"].startswith("torchcaps train")
    return results


@pytest.mark.parametrize(
    ("name", "least"), [("mazzia2021_mnist-0", 0.9965), ("sabour2017_mnist", 0.993), ("choi2019_mnist", 0.99)]
)
def test_accuracy_of_recorded_runs(name: str, least: float) -> None:
    results = read_run(name)
    test = results["test"][results["eval_weights"]]
    assert test["n"] == 10_000
    assert test["accuracy"] >= least
    low, high = test["interval"]
    assert f"{100 * test['accuracy']:.2f} %" in TRAININGS
    assert f"{100 * low:.2f} to {100 * high:.2f}" in TRAININGS


def test_accuracy_of_the_recorded_demo() -> None:
    runs = [read_run(f"capsnet_digits-{seed}") for seed in range(3)]
    assert [run["seed"] for run in runs] == [0, 1, 2]
    tests = [run["test"][run["eval_weights"]] for run in runs]
    assert [test["n"] for test in tests] == [1_000] * 3
    mean = sum(test["accuracy"] for test in tests) / 3
    assert mean >= 0.99
    assert f"{100 * mean:.2f} % of 1,000 digits" in TRAININGS
    for test in tests:
        assert f"{100 * test['accuracy']:.1f}" in TRAININGS


def test_reconstructions_of_the_recorded_demo() -> None:
    """Mean squared error per pixel of the reconstructions by label: below 0.030, handwriting can be recognised."""
    errors = []
    for seed in range(3):
        path = ROOT / f"results/runs/capsnet_digits-{seed}/reconstruction.json"
        rows = json.loads(path.read_text())["rows"].values()
        assert sum(row["images"] for row in rows) == 1_000
        total = sum(row["images"] * (row["error_by_label"] or 0.0) for row in rows)
        errors.append(total / 1_000 / 28**2)
    assert max(errors) <= 0.030
    assert f"mean squared error {sum(errors) / 3:.3f}" in TRAININGS


def test_numbers_of_the_readme_are_those_of_the_documents() -> None:
    """Rows of its tables of results start rows of the documents, whose numbers are compared with the records."""
    lines = (ROOT / "README.md").read_text().splitlines()
    measured = [line for line in lines if re.search(r"\d (ms|s|%|minutes)\b", line) and line.startswith("|")]
    sources = [read_document(f"docs/{name}") for name in ("results-training.md", "speed.md", "howto/own-images.md")]
    assert len(measured) >= 5
    for line in measured:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        numbers = re.findall(r"[\d,.]+ (?:ms|%)", cells[1])
        assert numbers, line
        assert any(all(number in source for number in numbers) for source in sources), line


def test_verdicts_of_the_readme_are_those_of_the_page() -> None:
    """The page equals the report of the records (test_recorded.py); the README quotes its decided claims and counts.

    If this fails, copy the rows of the table in docs/results.md that hold or are contradicted.
    """
    page, readme = ((ROOT / name).read_text().splitlines() for name in ("docs/results.md", "README.md"))
    start = next(n for n, line in enumerate(page) if line.startswith("| claim | paper | verdict |"))
    assert [line for line in page[:start] if line.startswith(("|", "!["))] == []  # the page begins with this table
    end = page.index("", start)
    decided = [line for line in page[start + 2 : end] if re.search(r"\| (holds|contradicted) \|", line)]
    quoted = readme.index(page[start])
    assert readme[quoted : quoted + 2 + len(decided) + 1] == [*page[start : start + 2], *decided, ""]
    (counts,) = (line for line in page if line.startswith("| all claims |"))
    numbers = [int(cell) for cell in counts.strip("|").split("|")[1:]]
    held, contradicted, too_short, undecided, not_judged, not_run = numbers
    sentence = f"{held} holds, {contradicted} contradicted, {too_short} too short to judge, {undecided} undecided, "
    assert sentence + f"{not_judged} not judged, {not_run} not run" in README
