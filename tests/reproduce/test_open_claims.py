"""The section on open claims: missing records, their estimated duration, and items that need more seeds."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.reproduce.tables import A_IS_BETTER, cpu_store, make_runs, measured_table, run_table, write_errors
from torchcaps.reproduce.open_claims import missing_records, open_claim_lines
from torchcaps.reproduce.report import judge_claims
from torchcaps.reproduce.schema import Paper
from torchcaps.reproduce.statistics import Results
from torchcaps.reproduce.store import RecordKey


def section_of(results: Results) -> list[str]:
    """Return the rows of the section for a paper with one item."""
    paper = Paper("one", "", "", "", "", (), (results.item,))
    lines = open_claim_lines(judge_claims([paper], [results.store]), [results.store])
    return [line for line in lines if line.startswith("| one, ")]


def test_missing_half_length_runs_are_counted_with_half_of_the_duration(tmp_path: Path) -> None:
    store, runs = cpu_store(tmp_path), make_runs("ab")
    for run, counts in zip(runs.values(), ((100, 110), (500, 510)), strict=True):
        write_errors(store, run, counts)  # each in one second
    results = run_table(store, runs)
    missing = missing_records(results.item, [A_IS_BETTER], store)
    assert missing == {RecordKey(run.halved(), seed): 0.5 for run in runs.values() for seed in (0, 1)}
    assert section_of(results) == [
        "| one, Table | no runs of half the length (1) | 4 records | 0.0 | `torchcaps reproduce one t --scale cpu` |"
    ]


def test_a_missing_seed_is_counted_with_its_half_length_runs(tmp_path: Path) -> None:
    store, runs = cpu_store(tmp_path), make_runs("ab")
    write_errors(store, runs["a"], (100, 110))
    write_errors(store, runs["b"], (500,))
    missing = missing_records(run_table(store, runs).item, [A_IS_BETTER], store)
    assert missing[RecordKey(runs["b"], 1)] == 1.0
    assert len(missing) == 1 + 4


@pytest.mark.parametrize(("b", "rows"), [([1.0, 1.2], 1), ([5.0, 5.1], 0)], ids=["interval with zero", "decided"])
def test_a_claim_with_all_records_misses_none(tmp_path: Path, b: list[float], rows: int) -> None:
    results = measured_table(tmp_path, [1.0, 1.1], b)
    untrained: dict[str, Any] = {"convergence": "not applicable", "convergence_reason": "nothing is trained"}
    claim = dataclasses.replace(A_IS_BETTER, **untrained)
    item = dataclasses.replace(results.item, claims=(claim,))
    assert missing_records(item, [claim], results.store) == {}
    lines = section_of(Results(item, results.store))
    assert lines == ["| one, Table | the interval includes zero (1) | more seeds or longer training |  |  |"] * rows
