"""The committed records: complete, made with the present settings, and equal to the report."""

import json
from pathlib import Path

import pytest

from tools import findings
from torchcaps.cli.reproduce import REPORT_SCALES
from torchcaps.papers import list_papers
from torchcaps.reproduce.report import write_report
from torchcaps.reproduce.schema import Item, Measurement, Run
from torchcaps.reproduce.store import RecordKey, RecordStore, has_diverged

ROOT = Path(__file__).resolve().parents[2]
SCALES = [scale for scale in REPORT_SCALES if (ROOT / "results/papers" / scale).is_dir()]
RECORDS = ROOT / "results/papers"
FILES = sorted(path for scale in SCALES for path in (RECORDS / scale).glob("*/*.json"))
RECORDED = {  # items that have to be run at the scale cpu
    "sabour2017": ("table1", "fig3", "fig4", "fig5", "sec52"),
    "choi2019": ("table1", "table3", "fig4"),
    "tsai2020": ("table1", "fig4", "ablations"),
    "yang2021": ("table2", "fig4"),
    "chen2019": ("table2", "blackbox", "whitebox", "table3"),
}


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> list[RecordStore]:
    """The records of all scales, in order of precedence."""
    monkeypatch.chdir(ROOT)
    return [RecordStore(scale) for scale in SCALES]


@pytest.fixture(params=SCALES)
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> RecordStore:
    monkeypatch.chdir(ROOT)
    return RecordStore(request.param)


def sources_of(item: Item) -> list[Run | Measurement]:
    """Return the runs and measurements of an item, those of half length included, with all that they depend on."""
    declared = [*item.sources(), *item.half_length_sources()]
    direct = [source for source in declared if isinstance(source, Run | Measurement)]
    measurements = [source for source in direct if isinstance(source, Measurement)]
    needed = [run for measurement in measurements for run in measurement.runs.values()]
    return [*direct, *needed, *(other for measurement in measurements for other in measurement.depends_on.values())]


def test_the_report_is_up_to_date(stores: list[RecordStore], tmp_path: Path) -> None:
    """If this fails, run ``torchcaps report``."""
    copy = ROOT / "docs" / f".{tmp_path.name}.md"  # in docs/, since links to figures are relative
    try:
        write_report(list_papers(), stores, copy, "torchcaps report", update_items=False)
        assert copy.read_text().splitlines() == (ROOT / "docs/results.md").read_text().splitlines()
    finally:
        copy.unlink(missing_ok=True)


def test_every_record_belongs_to_an_item(store: RecordStore) -> None:
    known = {
        store.path(RecordKey(source, seed))
        for paper in list_papers()
        for item in paper.items
        for source in sources_of(item)
        for seed in store.seeds(source)
    }
    assert {path.relative_to(ROOT) for path in FILES if path.parents[1].name == store.scale} == known


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parents[1].name}-{path.stem}")
def test_a_record_is_complete(path: Path) -> None:
    record = json.loads(path.read_text())
    assert record["command"].startswith("torchcaps reproduce ")
    assert (record["name"], record["scale"]) == (path.stem, path.parents[1].name)
    assert record["machine"], "a record states the machine"
    if path.parent.name == "runs":
        assert len(record["curve"]) > 0
        assert record["config"]["model"] == record["settings"]["identity"]["model"]
        results = record["results"]
        if not has_diverged(record):
            assert len(results["correct"]) == 2 * -(-results["n"] // 8)


def test_findings_refer_to_the_present_numbers(store: RecordStore) -> None:
    """If this fails, compare them with their tables and run ``python -m tools.findings --stamp NAME``."""
    assert findings.stale(store) == []


def test_records_have_the_present_settings(store: RecordStore) -> None:
    for paper in list_papers():
        for item in paper.items:
            for source in sources_of(item):
                for seed in store.seeds(source):
                    assert store.read(RecordKey(source, seed)) is not None, (paper.name, item.name, seed)


@pytest.mark.parametrize(("paper", "item"), [(paper, item) for paper, items in RECORDED.items() for item in items])
def test_table_and_figure_are_committed(paper: str, item: str) -> None:
    assert {path.suffix for path in (RECORDS / "cpu").glob(f"{paper}-{item}.*")} == {".md", ".png"}
