"""Rendered tables, figures and the report. Wording is checked where it carries a number or a verdict."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.reproduce.items import smoke_store
from tests.reproduce.tables import A_IS_BETTER, cpu_store, make_runs, measured_table, run_table, write_errors
from torchcaps.reproduce.render import (
    REASON_TEXT,
    VERDICT_TEXT,
    describe_verdict,
    format_estimate,
    format_published,
    render_item,
)
from torchcaps.reproduce.scales import run_spec
from torchcaps.reproduce.schema import Cell, Item, Paper, ParameterCount, Published, Run, TableRow
from torchcaps.reproduce.statistics import Estimate
from torchcaps.reproduce.store import RecordKey
from torchcaps.reproduce.verdicts import HalfLength, Verdict, VerdictKind, VerdictReason, verdicts


def paper_of(item: Item) -> Paper:
    return Paper("p", "", "", "", "", (), (item,))


def test_a_table_has_published_numbers_ours_and_missing_ones(tmp_path: Path) -> None:
    results = measured_table(tmp_path, [2.1, 2.1], [])
    text = render_item(paper_of(results.item), results.item, results.store)
    assert "| a | 1 ± 0.1 | 2.10 (1.84 to 2.40), 2 seeds |" in text
    assert "| b | 1 ± 0.1 | not run |" in text
    assert "Scale: cpu." in text


def test_notes_become_footnotes(tmp_path: Path) -> None:
    row = TableRow("a", {"error": Cell(Published(5.0, note="impossible"), None)})
    item = Item("t", "Table", "A table.", {"error": "%"}, (row,))
    text = render_item(paper_of(item), item, cpu_store(tmp_path))
    assert "| a | 5 [1] |" in text
    assert "[1] impossible" in text


def test_pipes_are_escaped(tmp_path: Path) -> None:
    item = Item("t", "Table", "A table.", {"change": "mean |change|"}, (TableRow("a | b", {"change": Cell(1.0)}),))
    text = render_item(paper_of(item), item, cpu_store(tmp_path))
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in rows} == {3}


def test_a_diverged_run_is_shown(tmp_path: Path) -> None:
    store, runs = smoke_store(tmp_path), make_runs("a")
    store.write_diverged(RecordKey(runs["a"], 0), run_spec(runs["a"], "smoke"), "step 3: |b| passed 100")
    results = run_table(store, runs)
    assert format_estimate(results.estimate(results.cell("a", "error")), "%") == "diverged (1 of 1)"


def test_number_formats() -> None:
    assert format_estimate(Estimate(8_215_568.0, 0, 0, None, 0), "parameters") == "8,215,568"
    assert format_published(Cell(8.21e6, ParameterCount(Run("capsnet_small"))), "parameters") == "8.21M"
    assert format_estimate(Estimate(0.01234, 0.01234, 0.01234, None, 1), "ratio") == "0.0123, 1 seed"
    assert format_estimate(None, "ratio") == "not run"


@pytest.mark.parametrize(
    ("a", "b", "text"),
    [
        ([1.0], [3.0], "undecided (one seed): a is better (by 2 ± 0.39, 1 seed)"),
        (
            [3.0, 3.0],
            [1.0, 1.0],
            "too short to judge (no runs of half the length): a is better (by -2 ± 0.39, 2 seeds)",
        ),
        ([1.0], [], "not run: a is better"),
    ],
)
def test_verdicts_are_described_with_difference_interval_and_seeds(
    tmp_path: Path, a: list[float], b: list[float], text: str
) -> None:
    (verdict,) = verdicts(measured_table(tmp_path, a, b))
    assert describe_verdict(verdict) == text


def test_a_verdict_states_the_comparison_at_half_length() -> None:
    verdict = Verdict(A_IS_BETTER, VerdictKind.HOLDS, None, 0.5, 0.2, 3, HalfLength(0.4, 0.3, 0.2, 1))
    assert describe_verdict(verdict) == (
        "holds: a is better (by 0.5 ± 0.2, 3 seeds; at half length by 0.4, 1 seed; "
        "from half to full length the two improved by 0.3 and 0.2)"
    )


def test_large_differences_are_written_without_exponent() -> None:
    verdict = Verdict(A_IS_BETTER, VerdictKind.UNDECIDED, VerdictReason.NO_INTERVAL, 1481.3)
    assert describe_verdict(verdict) == "undecided (one measurement without interval): a is better (by 1,481)"


def test_no_difference_to_a_network_at_chance_is_stated() -> None:
    verdict = Verdict(A_IS_BETTER, VerdictKind.NOT_JUDGED, VerdictReason.AT_CHANCE, 46.0, 1.4, 2)
    assert describe_verdict(verdict) == "not judged (at chance): a is better"


def test_a_verdict_states_margin_and_why_training_length_does_not_matter() -> None:
    claim = dataclasses.replace(
        A_IS_BETTER, margin=0.5, convergence="not applicable", convergence_reason="nothing is trained"
    )
    assert describe_verdict(Verdict(claim, VerdictKind.HOLDS, None, -0.1, 0.2)) == (
        "holds: a is better (by -0.1 ± 0.2 with a margin of 0.5; independent of the training length: "
        "nothing is trained)"
    )


@pytest.mark.parametrize(("texts", "kinds"), [(VERDICT_TEXT, VerdictKind), (REASON_TEXT, VerdictReason)])
def test_every_kind_of_verdict_and_reason_has_a_text(texts: dict[Any, str], kinds: Any) -> None:
    assert set(texts) == set(kinds)
    assert len(set(texts.values())) == len(kinds)


def test_no_claim_is_judged_at_the_scale_smoke(tmp_path: Path) -> None:
    store, runs = smoke_store(tmp_path), make_runs("ab")
    for run in runs.values():
        write_errors(store, run, (100, 110))
    item = run_table(store, runs).item
    text = render_item(paper_of(item), item, store)
    assert "| a | 1.05 " in text
    assert "meaningless" in text
    assert not [claim.text for claim in item.claims if claim.text in text]
