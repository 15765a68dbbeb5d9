"""The report: summary of the verdicts, all papers and items, and records that are not readable."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tests.reproduce.items import reproduce_smoke, smoke_store
from tests.reproduce.tables import cpu_store, measured_table
from torchcaps.papers import find_item, list_papers
from torchcaps.reproduce.report import render_summary, write_report
from torchcaps.reproduce.schema import Paper
from torchcaps.training.errors import RunError


def summary_of(directory: Path, a: list[float], b: list[float]) -> list[str]:
    """Return the lines of the summary of a claim that needs no training."""
    results = measured_table(directory, a, b)
    claim = dataclasses.replace(
        results.item.claims[0], convergence="not applicable", convergence_reason="nothing is trained"
    )
    item = dataclasses.replace(results.item, claims=(claim,))
    papers = [Paper("one", "", "", "", "", (), (item,)), Paper("two", "", "", "", "", (), ())]
    return render_summary(papers, results.store).splitlines()


def test_the_summary_counts_verdicts_by_paper(tmp_path: Path) -> None:
    lines = summary_of(tmp_path, [1.0, 1.1], [5.0, 5.1])
    header = "| | holds | contradicted | too short to judge | undecided | not judged | not run |"
    position = lines.index(header)
    assert lines[position + 2 : position + 5] == [
        "| one | 1 | 0 | 0 | 0 | 0 | 0 |",
        "| two | 0 | 0 | 0 | 0 | 0 | 0 |",
        "| all claims | 1 | 0 | 0 | 0 | 0 | 0 |",
    ]


def test_the_summary_lists_decided_claims_and_the_reasons_of_others(tmp_path: Path) -> None:
    holds = summary_of(tmp_path / "holds", [1.0, 1.1], [5.0, 5.1])
    (line,) = (line for line in holds if line.startswith("- one, Table: "))
    assert line.startswith("- one, Table: holds: a is better (by 4 ")
    assert "Contradicted claims: none." in holds
    contradicted = summary_of(tmp_path / "contradicted", [5.0, 5.1], [1.0, 1.1])
    assert "Claims that hold: none." in contradicted
    assert sum(line.startswith("- one, Table: contradicted: ") for line in contradicted) == 1
    undecided = summary_of(tmp_path / "undecided", [1.0], [5.0])
    assert 'Reasons for "undecided": one seed (1).' in undecided
    assert not [line for line in undecided if line.startswith("- ")]


def test_remarks_about_all_records_follow_the_summary(tmp_path: Path) -> None:
    store = cpu_store(tmp_path)
    (store.results / "findings").mkdir(parents=True)
    (store.results / "findings" / "remarks.md").write_text("### Provenance\n")
    papers = [Paper("one", "", "", "", "", (), ())]
    lines = write_report(papers, store, tmp_path / "page.md", "torchcaps report").read_text().splitlines()
    headings = [line for line in lines if line.startswith("#")]
    assert headings == ["# Reproduced results", "## Summary", "### Provenance", "## one"]


def test_a_report_without_records_has_published_numbers_and_commands(tmp_path: Path) -> None:
    out = write_report(list_papers(), cpu_store(tmp_path), tmp_path / "report.md", "torchcaps report")
    text = out.read_text()
    for paper in list_papers():
        assert f"## {paper.name}\n" in text
        for item in paper.items:
            assert f"torchcaps reproduce {paper.name} {item.name} --scale cpu" in text
    for number in ("0.25 ± 0.005", "8,215,568", "not run"):
        assert number in text
    assert "![" not in text  # no figure


@pytest.mark.parametrize(("field", "value"), [("steps", None), ("accuracy", 7)], ids=["missing", "out of range"])
def test_the_report_skips_and_names_an_invalid_run(tmp_path: Path, field: str, value: Any) -> None:
    _, item, store = reproduce_smoke(tmp_path, "sabour2017", "figa2")
    path = next((store.results / "runs").glob("*.json"))
    record = json.loads(path.read_text())
    record["results"][field] = value
    if value is None:
        del record["results"][field]
    path.write_text(json.dumps(record))
    store = smoke_store(tmp_path)
    store.skip_unreadable = True
    out = write_report([find_item("sabour2017", "figa2")[0]], store, tmp_path / "page.md", "torchcaps report")
    (problem,) = store.problems.values()
    assert path.name in problem
    assert repr(field) in problem
    assert f"### sabour2017, {item.title}" in out.read_text()


def test_an_invalid_measurement_costs_its_item_only(tmp_path: Path) -> None:
    paper, item, store = reproduce_smoke(tmp_path, "sabour2017", "fig4")
    paths = sorted((store.results / "measurements").glob("*.json"))
    records = {path: json.loads(path.read_text()) for path in paths}
    (path, record), *_ = ((p, record) for p, record in records.items() if "largest_change" in record["results"])
    record["results"]["largest_change"] = "abc"
    path.write_text(json.dumps(record))
    store = smoke_store(tmp_path)
    store.skip_unreadable = True
    out = write_report(list_papers(), store, tmp_path / "page.md", "torchcaps report", update_items=False)
    assert list(store.problems) == ["sabour2017 fig4"]
    text = out.read_text()
    for paper in list_papers():
        for item in paper.items:
            assert f"### {paper.name}, {item.title}\n" in text


def test_a_table_that_cannot_be_written_raises(tmp_path: Path) -> None:
    paper, _, store = reproduce_smoke(tmp_path, "sabour2017", "fig4")
    store.skip_unreadable = True
    path = store.results / "sabour2017-fig4.md"
    path.mkdir()
    with pytest.raises(RunError) as raised:
        write_report([paper], store, tmp_path / "page.md", "torchcaps report")
    assert str(path) in str(raised.value)
