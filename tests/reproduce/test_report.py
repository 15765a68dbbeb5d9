"""The report: summary of the verdicts, all papers and items, and records that are not readable."""

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.reproduce.items import reproduce_smoke, smoke_store
from tests.reproduce.tables import cpu_store, measured_table, measurement, scaled_store
from torchcaps.papers import find_item, list_papers
from torchcaps.reproduce.report import choose_verdicts, render_summary, write_report
from torchcaps.reproduce.schema import Item, Paper
from torchcaps.reproduce.store import RecordKey, RecordStore
from torchcaps.reproduce.verdicts import VerdictKind
from torchcaps.training.errors import RunError


def summary_of(directory: Path, a: list[float], b: list[float]) -> list[str]:
    """Return the lines of the summary of a claim that needs no training."""
    results = measured_table(directory, a, b)
    papers = [paper_of(results.item, "one", "paper"), Paper("two", "", "", "", "", (), ())]
    return render_summary(papers, [results.store]).splitlines()


def paper_of(item: Item, name: str, *origins: Literal["paper", "ours"]) -> Paper:
    """Return a paper with one item, whose claim needs no training and is made once by each origin."""
    untrained: dict[str, Any] = {"convergence": "not applicable", "convergence_reason": "nothing is trained"}
    claims = tuple(dataclasses.replace(item.claims[0], origin=origin, **untrained) for origin in origins)
    return Paper(name, "", "", "", "", (), (dataclasses.replace(item, claims=claims),))


def test_the_summary_counts_verdicts_by_paper(tmp_path: Path) -> None:
    lines = summary_of(tmp_path, [1.0, 1.1], [5.0, 5.1])
    header = "| | holds | contradicted | too short to judge | undecided | not judged | not run |"
    position = lines.index(header)
    assert lines[position + 2 : position + 6] == [
        "| one | 1 | 0 | 0 | 0 | 0 | 0 |",
        "| two | 0 | 0 | 0 | 0 | 0 | 0 |",
        "| all claims | 1 | 0 | 0 | 0 | 0 | 0 |",
        "| statements of ours | 0 | 0 | 0 | 0 | 0 | 0 |",
    ]


def test_statements_of_ours_are_marked_and_not_counted_as_claims_of_a_paper(tmp_path: Path) -> None:
    results = measured_table(tmp_path, [1.0, 1.1], [5.0, 5.1])
    paper = paper_of(results.item, "one", "paper", "ours", "ours")
    lines = render_summary([paper], [results.store]).splitlines()
    assert "| all claims | 1 | 0 | 0 | 0 | 0 | 0 |" in lines
    assert "| statements of ours | 2 | 0 | 0 | 0 | 0 | 0 |" in lines
    assert sum("holds: (ours) a is better" in line for line in lines) == 2


def two_scales(directory: Path) -> tuple[Paper, list[RecordStore]]:
    """Return a paper whose claim holds at the scale cpu and is contradicted at the scale long."""
    long = measured_table(directory, [5.0, 5.1], [1.0, 1.1], scale="long")
    cpu = measured_table(directory, [1.2, 1.3], [6.0, 6.1])
    return paper_of(cpu.item, "one", "paper"), [long.store, cpu.store]


def test_a_claim_is_judged_at_the_first_scale_at_which_it_was_run(tmp_path: Path) -> None:
    paper, stores = two_scales(tmp_path)
    (item,) = paper.items
    ((scale, verdict),) = choose_verdicts(item, stores)
    assert (scale, verdict.kind) == ("long", VerdictKind.CONTRADICTED)
    for seed in (0, 1):
        stores[0].path(RecordKey(measurement("b"), seed)).unlink()
    ((scale, verdict),) = choose_verdicts(item, [scaled_store(tmp_path, "long"), stores[1]])
    assert (scale, verdict.kind) == ("cpu", VerdictKind.HOLDS)
    ((scale, verdict),) = choose_verdicts(item, [scaled_store(tmp_path / "none", "long")])
    assert (scale, verdict.kind) == ("long", VerdictKind.NOT_RUN)


def test_a_report_of_two_scales_has_both_tables_and_one_verdict(tmp_path: Path) -> None:
    paper, stores = two_scales(tmp_path)
    for store, remark in zip(stores, ("Long finding.", "Short finding."), strict=True):
        (store.results / "findings").mkdir()
        (store.results / "findings" / "one-t.md").write_text(remark)
    text = write_report([paper], stores, tmp_path / "page.md", "torchcaps report").read_text()
    section = text[text.index("### one, Table") :]
    order = [
        "| a | 1 ± 0.1 | 5.05",
        "- contradicted: a is better (by -4",
        "results/long/one-t.png",
        "Long finding.",
        "reproduce one t --scale long",
        "#### Table at the scale cpu",
        "| a | 1 ± 0.1 | 1.25",
        "results/cpu/one-t.png",
        "Short finding.",
        "reproduce one t --scale cpu",
    ]
    positions = [section.index(part) for part in order]
    assert positions == sorted(positions)
    assert section.count("a is better") == 1
    assert "| one | 0 | 1 | 0 | 0 | 0 | 0 |" in text


def test_a_claim_that_was_run_at_another_scale_than_its_table_names_the_scale(tmp_path: Path) -> None:
    paper, stores = two_scales(tmp_path)
    stores[0].path(RecordKey(measurement("b"), 0)).unlink()
    stores[0].path(RecordKey(measurement("b"), 1)).unlink()
    text = write_report([paper], stores, tmp_path / "page.md", "torchcaps report", update_items=False).read_text()
    assert "- holds: a is better (scale cpu; by " in text[text.index("### one, Table") :]


def test_unreadable_records_of_one_scale_leave_the_other(tmp_path: Path) -> None:
    paper, stores = two_scales(tmp_path)
    path = stores[0].path(RecordKey(measurement("a"), 0))
    path.write_text(path.read_text().replace('"error": 5.0', '"error": "abc"'))
    stores = [scaled_store(tmp_path, "long"), stores[1]]
    for store in stores:
        store.skip_unreadable = True
    text = write_report([paper], stores, tmp_path / "page.md", "torchcaps report", update_items=False).read_text()
    assert list(stores[0].problems) == ["one t"]
    assert "| one | 1 | 0 | 0 | 0 | 0 | 0 |" in text
    assert "Its records at the scale long are not readable." in text


def test_the_summary_lists_decided_claims_and_the_reasons_of_others(tmp_path: Path) -> None:
    holds = summary_of(tmp_path / "holds", [1.0, 1.1], [5.0, 5.1])
    (line,) = (line for line in holds if line.startswith("- one, Table: "))
    assert line.startswith("- one, Table: holds: a is better (scale cpu; by 4 ")
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
    lines = write_report(papers, [store], tmp_path / "page.md", "torchcaps report").read_text().splitlines()
    headings = [line for line in lines if line.startswith("#")]
    assert headings == ["# Reproduced results", "## Summary", "### Provenance", "## one"]


def test_a_report_without_records_has_published_numbers_and_commands(tmp_path: Path) -> None:
    out = write_report(list_papers(), [cpu_store(tmp_path)], tmp_path / "report.md", "torchcaps report")
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
    out = write_report([find_item("sabour2017", "figa2")[0]], [store], tmp_path / "page.md", "torchcaps report")
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
    out = write_report(list_papers(), [store], tmp_path / "page.md", "torchcaps report", update_items=False)
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
        write_report([paper], [store], tmp_path / "page.md", "torchcaps report")
    assert str(path) in str(raised.value)
