"""What is recorded: the page says what the records say, and the records are whole."""

import json
from pathlib import Path

import pytest

from tools import findings
from torchcaps.papers import list_papers
from torchcaps.reproduce.render import write_report
from torchcaps.reproduce.schema import Measure, Run
from torchcaps.reproduce.store import Job, Store

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "results/papers/cpu"
FILES = sorted(RECORDS.glob("*/*.json"))


@pytest.fixture
def at_home(monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.chdir(ROOT)
    return Store("cpu")


def test_the_page_says_what_the_records_say(at_home: Store, tmp_path: Path) -> None:
    """Where this fails: torchcaps report."""
    page = ROOT / "docs/results.md"
    again = ROOT / "docs" / f".{tmp_path.name}.md"  # beside it, since its pictures are told from there
    try:
        write_report(at_home, again, "torchcaps report", figures=False)
        assert again.read_text() == page.read_text()
    finally:
        again.unlink(missing_ok=True)


def test_every_record_belongs_to_a_table_or_figure(at_home: Store) -> None:
    known = set()
    for paper in list_papers():
        for item in paper.items:
            for source in item.sources():
                if isinstance(source, Run | Measure):
                    known |= {at_home.path(Job(source, seed)) for seed in at_home.seeds(source)}
                    needed = source.runs.values() if isinstance(source, Measure) else ()
                    known |= {at_home.path(Job(run, seed)) for run in needed for seed in at_home.seeds(run)}
    assert {path.relative_to(ROOT) for path in FILES} == known


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_record_says_how_it_came_to_be(path: Path) -> None:
    record = json.loads(path.read_text())
    assert record["command"].startswith("torchcaps reproduce ")
    assert record["scale"] == "cpu"
    assert record["machine"]["cores"] == 2
    assert path.stem == record["name"]
    if path.parent.name == "runs":
        assert record["curve"]
        assert record["config"]["model"]
        assert record["net"]
        found = record["found"]
        assert found.get("diverged") or found["right"] is not None


def test_findings_were_written_of_the_numbers_that_stand(at_home: Store) -> None:
    """Where this fails: read them again beside their tables, and python -m tools.findings --stamp NAME."""
    assert not findings.stale(at_home)


def test_a_record_is_that_of_its_run_or_measurement_as_it_is_now(at_home: Store) -> None:
    """No setting has changed since, of a run, a net that was measured, or the measurement."""
    for paper in list_papers():
        for item in paper.items:
            for source in item.sources():
                if isinstance(source, Run | Measure):
                    for seed in at_home.seeds(source):
                        assert at_home.record(Job(source, seed)) is not None, (paper.name, item.name, seed)


def test_what_had_to_run_has_run(at_home: Store) -> None:
    """At least these, at the scale cpu."""
    wanted = {
        "sabour2017": ("table1", "fig3", "fig4", "fig5", "figa1", "sec52"),
        "choi2019": ("table1", "table3", "fig4"),
        "tsai2020": ("table1", "fig4", "ablations"),
        "yang2021": ("table2", "fig4"),
        "chen2019": ("table2", "blackbox", "whitebox", "table3"),
    }
    for paper, items in wanted.items():
        for item in items:
            for ending in (".md", ".png", ".svg"):
                assert (RECORDS / f"{paper}-{item}{ending}").exists(), (paper, item, ending)
