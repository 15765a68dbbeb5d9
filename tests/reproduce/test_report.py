"""The report: summary of the verdicts, all papers and items, and records that are not readable."""

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.reproduce.items import reproduce_smoke, smoke_store
from tests.reproduce.tables import (
    cpu_store,
    make_runs,
    measured_table,
    measurement,
    run_table,
    scaled_store,
    write_errors,
)
from torchcaps.papers import find_item, list_papers
from torchcaps.reproduce.report import choose_verdicts, judge_claims, render_claims, write_report
from torchcaps.reproduce.scales import run_spec
from torchcaps.reproduce.schema import Claim, Item, Paper
from torchcaps.reproduce.store import RecordKey, RecordStore
from torchcaps.reproduce.verdicts import VerdictKind
from torchcaps.training.errors import RunError


def summary_of(directory: Path, a: list[float], b: list[float]) -> list[str]:
    """Return the lines of the summary of a claim that needs no training."""
    results = measured_table(directory, a, b)
    papers = [paper_of(results.item, "one", "paper"), Paper("two", "", "", "", "", (), ())]
    return render_claims(papers, [results.store]).splitlines()


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
    lines = render_claims([paper], [results.store]).splitlines()
    assert "| all claims | 1 | 0 | 0 | 0 | 0 | 0 |" in lines
    assert "| statements of ours | 2 | 0 | 0 | 0 | 0 | 0 |" in lines
    assert sum(line.startswith("| (ours) a is better | one, Table | holds |") for line in lines) == 2


def two_scales(directory: Path) -> tuple[Paper, list[RecordStore]]:
    """Return a paper whose claim holds at the scale cpu and is contradicted at the scale long."""
    long = measured_table(directory, [5.0, 5.1], [1.0, 1.1], scale="long")
    cpu = measured_table(directory, [1.2, 1.3], [6.0, 6.1])
    return paper_of(cpu.item, "one", "paper"), [long.store, cpu.store]


def test_a_claim_is_judged_at_the_first_scale_that_is_complete(tmp_path: Path) -> None:
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


def test_a_claim_that_is_judged_at_another_scale_than_its_table_names_the_scale(tmp_path: Path) -> None:
    paper, stores = two_scales(tmp_path)
    for name in ("a", "b"):  # one seed is left, which decides nothing
        stores[0].path(RecordKey(measurement(name), 1)).unlink()
    stores = [scaled_store(tmp_path, "long"), stores[1]]
    text = write_report([paper], stores, tmp_path / "page.md", "torchcaps report", update_items=False).read_text()
    assert "- holds: a is better (scale cpu; by " in text[text.index("### one, Table") :]


def test_the_first_records_of_a_longer_scale_replace_neither_table_nor_verdict(tmp_path: Path) -> None:
    long = measured_table(tmp_path, [5.0], [], scale="long")
    cpu = measured_table(tmp_path, [1.2, 1.3], [6.0, 6.1])
    paper, stores = paper_of(cpu.item, "one", "paper"), [long.store, cpu.store]
    text = write_report([paper], stores, tmp_path / "page.md", "torchcaps report", update_items=False).read_text()
    section = text[text.index("### one, Table") :]
    partial = section.index("#### Table at the scale long")
    assert "| b | 1 ± 0.1 | 6.05" in section[:partial]  # the complete table comes first
    assert "| a | 1 ± 0.1 | 5" in section[partial:]
    assert "| b |" not in section[partial:]
    assert "Run at this scale: 1 of 2 rows." in section[partial:]
    measured_table(tmp_path, [5.0], [1.0], scale="long")  # one seed: nothing can be decided at this scale yet
    ((scale, verdict),) = choose_verdicts(paper.items[0], [scaled_store(tmp_path, "long"), cpu.store])
    assert (scale, verdict.kind) == ("cpu", VerdictKind.HOLDS)
    measured_table(tmp_path, [5.0, 5.1], [1.0, 1.1], scale="long")
    ((scale, verdict),) = choose_verdicts(paper.items[0], [scaled_store(tmp_path, "long"), cpu.store])
    assert (scale, verdict.kind) == ("long", VerdictKind.CONTRADICTED)


@pytest.mark.parametrize("problem", ["diverged", "chance"])
def test_runs_that_are_not_judged_do_not_replace_a_verdict(tmp_path: Path, problem: str) -> None:
    """A run of the scale long that diverged or is at chance level concludes nothing: the scale smoke has a verdict."""
    runs = make_runs("ab")
    short = smoke_store(tmp_path)
    for name, errors in (("a", (100, 110)), ("b", (300, 310))):
        write_errors(short, runs[name], errors)
        write_errors(short, runs[name].halved(), tuple(n + 50 for n in errors))
    long = scaled_store(tmp_path, "long")
    write_errors(long, runs["a"], (100, 110))
    write_errors(long, runs["b"], (300, 310 if problem == "diverged" else 9_000))
    if problem == "diverged":
        long.write_diverged(RecordKey(runs["b"], 2), run_spec(runs["b"], "long"), "step 3")
    item = run_table(short, runs).item
    ((scale, verdict),) = choose_verdicts(item, [long, short])
    assert (scale, verdict.kind) == ("smoke", VerdictKind.HOLDS)
    ((scale, verdict),) = choose_verdicts(item, [long])
    assert (scale, verdict.kind) == ("long", VerdictKind.NOT_JUDGED)


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


def test_the_table_of_claims_has_verdict_numbers_seeds_and_reason(tmp_path: Path) -> None:
    def row_of(name: str, a: list[float], b: list[float]) -> list[str]:
        (line,) = (line for line in summary_of(tmp_path / name, a, b) if line.startswith("| a is better |"))
        return [cell.strip() for cell in line.strip("|").split("|")]

    holds = row_of("holds", [1.0, 1.1], [5.0, 5.1])
    assert holds[:6] == ["a is better", "one, Table", "holds", *holds[3:5], "2"]
    assert holds[3] == "a: 1.05; b: 5.05 (error, test error, %)"
    assert holds[4] == "1 ± 0.1 against 1 ± 0.1"
    assert row_of("contradicted", [5.0, 5.1], [1.0, 1.1])[2] == "contradicted"
    undecided = row_of("undecided", [1.0], [5.0])
    assert (undecided[2], undecided[5], undecided[6]) == ("undecided", "1", "One seed decides nothing.")
    assert 'Reasons for "undecided": one seed (1).' in summary_of(tmp_path / "undecided", [1.0], [5.0])


def claim_lines(paper: Paper, stores: list[RecordStore]) -> list[str]:
    """Return the rows of the table of claims."""
    lines = render_claims([paper], stores).splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("| claim | paper |"))
    return lines[start + 2 : lines.index("", start)]


def test_cases_of_a_claim_with_the_same_verdict_share_a_row(tmp_path: Path) -> None:
    results = measured_table(tmp_path, [1.0, 1.1], [5.0, 5.1])
    paper = paper_of(results.item, "one", "paper")
    (item,) = paper.items
    (claim,) = item.claims

    def rows_of(*claims: Claim) -> list[str]:
        cases = dataclasses.replace(item, claims=claims)
        return claim_lines(dataclasses.replace(paper, items=(cases,)), [results.store])

    left, right, up = (dataclasses.replace(claim, case=case) for case in ("left", "right", "up"))
    (row,) = rows_of(left, right)
    assert row.startswith("| a is better (left; right) | one, Table | holds | 1.05 against 5.05; 1.05 against 5.05 (")
    (row,) = rows_of(left, right, up)
    assert row.startswith("| a is better (3 cases) | one, Table | holds | 1.05 to 1.05 against 5.05 to 5.05 (")
    assert "| 1 to 1 against 1 to 1 | 2 | Each of the 3 differences, 4 to 4 points," in row
    swapped = dataclasses.replace(right, better=claim.worse, worse=claim.better)
    assert [row.split(" | ")[2] for row in rows_of(left, swapped)] == ["holds", "contradicted"]
    assert len(rows_of(claim, claim)) == 2  # without a case


def test_open_claims_follow_decided_ones_in_the_order_of_papers_and_items(tmp_path: Path) -> None:
    decided = measured_table(tmp_path, [1.0, 1.1], [5.0, 5.1])
    paper = paper_of(decided.item, "one", "paper")
    (item,) = paper.items
    text = {"a is better": VerdictKind.HOLDS, "close": VerdictKind.UNDECIDED, "short": VerdictKind.TOO_SHORT}
    close = dataclasses.replace(item.claims[0], text="close", margin=4.0, better=("b", "error"), worse=("a", "error"))
    trained = dataclasses.replace(
        item.claims[0], text="short", convergence="training", convergence_reason="", case="half length"
    )
    item = dataclasses.replace(item, claims=(close, trained, item.claims[0]))
    paper = dataclasses.replace(paper, items=(item,))
    kinds = {one.verdict.claim.text: one.verdict.kind for one in judge_claims([paper], [decided.store])}
    assert kinds == text
    rows = claim_lines(paper, [decided.store])
    assert [row.split(" | ")[0] for row in rows] == ["| a is better", "| close", "| short (half length)"]


def test_the_table_of_claims_names_a_scale_other_than_the_last(tmp_path: Path) -> None:
    paper, stores = two_scales(tmp_path)
    (row,) = claim_lines(paper, stores)
    assert row.split(" | ")[1] == "one, Table, scale long"


def test_the_table_of_claims_is_ordered_by_verdict(tmp_path: Path) -> None:
    results = measured_table(tmp_path, [1.0, 1.1], [5.0, 5.1])
    paper = paper_of(results.item, "one", "paper", "ours")
    (item,) = paper.items
    reversed_claim = dataclasses.replace(
        item.claims[1], text="b is better", better=("b", "error"), worse=("a", "error")
    )
    item = dataclasses.replace(item, claims=(reversed_claim, item.claims[0]))
    paper = dataclasses.replace(paper, items=(item,))
    kinds = [one.verdict.kind for one in judge_claims([paper], [results.store])]
    assert kinds == [VerdictKind.CONTRADICTED, VerdictKind.HOLDS]  # in the order of the declaration
    rows = [line for line in render_claims([paper], [results.store]).splitlines() if "is better |" in line]
    assert [row.split(" | ")[0] for row in rows] == ["| a is better", "| (ours) b is better"]


def test_claims_that_were_not_run_are_counted_and_not_in_the_table(tmp_path: Path) -> None:
    item = measured_table(tmp_path / "other", [1.0, 1.1], [5.0, 5.1]).item
    lines = render_claims([paper_of(item, "one", "paper")], [cpu_store(tmp_path / "none")]).splitlines()
    assert "No claim has been run yet." in lines
    assert "| all claims | 0 | 0 | 0 | 0 | 0 | 1 |" in lines


def test_the_report_has_claims_remarks_papers_method_and_appendix_in_this_order(tmp_path: Path) -> None:
    store = cpu_store(tmp_path)
    (store.results / "findings").mkdir(parents=True)
    (store.results / "findings" / "remarks.md").write_text("### Remarks\n")
    (store.results / "findings" / "provenance.md").write_text("### Provenance\n")
    papers = [Paper("one", "", "", "", "", (), ())]
    lines = write_report(papers, [store], tmp_path / "page.md", "torchcaps report").read_text().splitlines()
    headings = [line for line in lines if line.startswith("#")]
    first = ["# Reproduced results", "## Claims", "### Counts", "### Remarks"]
    assert headings == [*first, "## one", "## Method", "## Appendix", "### Provenance"]


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
