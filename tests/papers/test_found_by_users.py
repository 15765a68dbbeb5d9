"""What new users ran into: two at once, folders without records, records that are broken inside, advice that fails."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchcaps import create_model
from torchcaps.analysis.common import require_decoder
from torchcaps.papers.registry import find_item
from torchcaps.reproduce.kept import Kept
from torchcaps.reproduce.markdown import item_text
from torchcaps.reproduce.planner import make_plan
from torchcaps.reproduce.render import write_report
from torchcaps.reproduce.runner import Bar, work_through
from torchcaps.reproduce.schema import Measure
from torchcaps.reproduce.store import Job, Store
from torchcaps.training.errors import RunError

COMMAND = (sys.executable, "-m", "torchcaps")


def reproduce(folder: Path, *words: str) -> "subprocess.Popen[str]":
    flags = ("--num-threads", "1", "--results", str(folder / "results"), "--work", str(folder / "work"))
    return subprocess.Popen(
        (*COMMAND, "reproduce", *words, *flags), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_two_processes_at_once_do_not_end_each_other(tmp_path: Path) -> None:
    """What one has begun, the other leaves to it."""
    both = [reproduce(tmp_path, "sabour2017", "table1", "--rows", "1", "2") for _ in range(2)]
    for process in both:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    assert len(list((tmp_path / "results/smoke/runs").glob("*.json"))) == 3


def smoke(folder: Path, paper: str, name: str) -> tuple[Any, Any, Store]:
    found, item = find_item(paper, name)
    store = Store("smoke", folder / "results", folder / "work")
    plan = make_plan(item, store, 1, timed=False)
    said: list[str] = []
    assert not work_through(plan, store, Bar(plan, False, said.append))
    return found, item, store


def test_weights_of_other_settings_are_not_measured(tmp_path: Path) -> None:
    """The record of the measurement is gone, that of its run is there, and the run's folder is of another one."""
    _, item, store = smoke(tmp_path, "sabour2017", "fig4")
    (measure,) = {cell.source for row in item.rows for cell in row.cells.values()}
    assert isinstance(measure, Measure)
    store.path(Job(measure, 0)).unlink()
    (told,) = store.work.glob("sabour2017_mnist-*.json")
    told.write_text(told.read_text().replace('"batch_size": 16', '"batch_size": 17'))
    fresh = Store("smoke", tmp_path / "results", tmp_path / "work")
    plan = make_plan(item, fresh, 1, timed=False)
    with pytest.raises(RunError, match="was begun with other settings"):
        work_through(plan, fresh, Bar(plan, False, str))


def test_a_record_of_an_older_way_to_measure_is_not_taken(tmp_path: Path) -> None:
    _, item, store = smoke(tmp_path, "chen2019", "multi")
    (measure,) = {cell.source for row in item.rows for cell in row.cells.values()}
    assert isinstance(measure, Measure)
    assert store.record(Job(measure, 0)) is not None
    assert store.record(Job(dataclasses.replace(measure, version=2), 0)) is None


def test_smoke_judges_no_claim_and_says_why(tmp_path: Path) -> None:
    paper, item, store = smoke(tmp_path, "sabour2017", "figa1")
    text = item_text(paper, item, store)
    assert "no number means anything" in text
    assert "Claims" not in text
    assert "contradicted" not in text


def test_a_page_is_written_of_records_only(tmp_path: Path) -> None:
    """A folder without any is refused, and the page that is there is left as it is."""
    done = subprocess.run((*COMMAND, "report", "--results", "none"), capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert "none/cpu" in done.stderr or "docs" in done.stderr
    (tmp_path / "docs").mkdir()
    done = subprocess.run((*COMMAND, "report", "--results", "none"), capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert "none/cpu has no records" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["docs"]


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [("steps", None, "'steps' is no number"), ("accuracy", 7, "'accuracy' is no share")],
    ids=["missing", "impossible"],
)
def test_a_run_that_is_broken_inside_is_named(tmp_path: Path, field: str, value: Any, said: str) -> None:
    _, _, store = smoke(tmp_path, "sabour2017", "figa2")
    path = next((store.results / "runs").glob("*.json"))
    record = json.loads(path.read_text())
    record["found"][field] = value
    if value is None:
        del record["found"][field]
    path.write_text(json.dumps(record))
    again = Store("smoke", tmp_path / "results", tmp_path / "work")
    again.forgiving = True
    write_report(again, tmp_path / "page.md", "torchcaps report")
    (problem,) = again.problems.values()
    assert path.name in problem
    assert said in problem
    assert "Figure A.2" in (tmp_path / "page.md").read_text()


def test_a_measurement_that_is_broken_inside_costs_its_item_only(tmp_path: Path) -> None:
    _, _, store = smoke(tmp_path, "sabour2017", "fig4")
    (path,) = (store.results / "measures").glob("*.json")
    record = json.loads(path.read_text())
    record["found"]["most"] = "abc"
    path.write_text(json.dumps(record))
    again = Store("smoke", tmp_path / "results", tmp_path / "work")
    again.forgiving = True
    write_report(again, tmp_path / "page.md", "torchcaps report")
    (problem,) = again.problems.values()
    assert problem.startswith("sabour2017, Figure 4 can't be written")
    text = (tmp_path / "page.md").read_text()
    assert "Its records can't be read." in text
    assert "### yang2021, Section III" in text, "and all others are there"


def test_a_table_that_cannot_be_written_is_no_broken_record(tmp_path: Path) -> None:
    _, _, store = smoke(tmp_path, "sabour2017", "fig4")
    store.forgiving = True
    (store.results / "sabour2017-fig4.md").mkdir()
    with pytest.raises(RunError, match=r"sabour2017-fig4.md can't be written"):
        write_report(store, tmp_path / "page.md", "torchcaps report")


def test_a_full_disk_is_said_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos\nmore of it")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(RunError, match=r"kept.pt can't be written: .* unexpected pos$"):
        Kept(tmp_path / "kept.pt", None).write({})
    assert not (tmp_path / "kept.pt").exists()


def test_advice_can_be_followed() -> None:
    fields = {"width": 16, "types": 4, "dim": 16}
    with pytest.raises(ValueError, match=r"without one, since its images have any number of objects$"):
        require_decoder(create_model("tsai2020_diverse_vector", **fields), "perturbation")
    with pytest.raises(ValueError, match="train it with --reconstruction true"):
        require_decoder(create_model("capsnet_small", reconstruction=False), "perturbation")


def test_missing_data_are_fetched_to_where_they_were_looked_for(tmp_path: Path) -> None:
    words = ("sabour2017", "fig4", "--scale", "cpu", "--plan", "--data-dir", str(tmp_path))
    process = reproduce(tmp_path, *words)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert f"torchcaps data get mnist --data-dir {tmp_path}" in errors


def test_the_bar_moves_at_smoke_and_speaks_while_it_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchcaps.reproduce import runner as work

    now = SimpleNamespace(value=0.0)
    monkeypatch.setattr(work, "time", SimpleNamespace(monotonic=lambda: now.value))
    said: list[str] = []
    task = SimpleNamespace(name="a measurement", steps=0, seconds=0.0)
    bar = Bar(SimpleNamespace(open=[task]), False, said.append)  # type: ignore[arg-type]
    bar.begin(1, 1, task)  # type: ignore[arg-type]
    for now.value in (30, 61, 90, 122):
        bar.tick()
    assert said == ["1 of 1: a measurement: at work for 1 minutes", "1 of 1: a measurement: at work for 2 minutes"]
    assert work._share(task) == 1.0  # type: ignore[arg-type]
