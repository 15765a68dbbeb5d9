"""The commands: what they list, what they refuse, that nothing is lost when they are killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchcaps.cli.main import main
from torchcaps.papers.registry import find_columns, find_item, find_rows
from torchcaps.reproduce.planner import jobs_of, make_plan
from torchcaps.reproduce.runner import Bar, work_through
from torchcaps.reproduce.schema import Cell, Item, Row, Run
from torchcaps.reproduce.store import Job, Store
from torchcaps.training.logging import read_metrics
from torchcaps.training.run_dir import RunFolder


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    main(["reproduce", *words])
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *words: str, command: str = "reproduce") -> str:
    with pytest.raises(SystemExit) as left:
        main([command, *words])
    assert left.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


def test_papers_and_items_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    papers = said(capsys)
    for name in ("sabour2017", "choi2019", "tsai2020", "chen2019", "yang2021"):
        assert name in papers
    items = said(capsys, "choi2019")
    for words in ("table3", "Claimed:", "Cost:", "At the scale cpu:", "Where we differ:"):
        assert words in items


def test_what_is_unknown_lists_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert "there are sabour2017, choi2019" in refused(capsys, "sabour2018", "table1")
    assert "there are table1, fig3" in refused(capsys, "sabour2017", "table7")
    line = refused(capsys, "sabour2017", "table1", "--rows", "LSTM")
    assert "has no row 'LSTM'" in line
    assert "1 'Baseline CNN'" in line
    assert "smoke, cpu or full" in refused(capsys, "sabour2017", "table1", "--scale", "huge")
    assert "such as 2/8" in refused(capsys, "sabour2017", "table1", "--shard", "9/8")
    assert "1 or more" in refused(capsys, "sabour2017", "table1", "--seeds", "0")
    assert "needs numbers" in refused(capsys, "sabour2017", "table1", "--rows")
    assert "one table or figure" in refused(capsys, "sabour2017", "all", "--rows", "1")
    assert "1 'MNIST'; 2 'MultiMNIST'" in refused(capsys, "sabour2017", "table1", "--columns", "SVHN")
    assert "no folder" in refused(capsys, "--out", "/nowhere/at/all.md", command="report")


def test_rows_are_chosen_by_number_or_by_words() -> None:
    _, item = find_item("sabour2017", "Table 1")
    assert find_rows(item, ["1", "3 iterations, no"]) == ("Baseline CNN", "CapsNet, 3 iterations, no reconstruction")
    assert len(find_rows(item, ["capsnet"])) == 4
    assert find_columns(item, ["mnist"]) == ("MNIST",)
    assert len(item.sources(columns=("MultiMNIST",))) == 3


def test_missing_data_says_how_to_get_it_and_what_runs_without(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    places = ("--results", str(tmp_path / "r"), "--work", str(tmp_path / "w"), "--data-dir", str(tmp_path / "data"))
    line = refused(capsys, "sabour2017", "table1", "--scale", "cpu", *places)
    assert "mnist" in line
    assert "torchcaps data get mnist" in line
    assert "no row can run without them" in line
    # The GAN and the nets need files; parameters don't.
    main(["reproduce", "choi2019", "cost", "--scale", "cpu", "--plan", *places])
    assert "1 measurement" in capsys.readouterr().out


def test_the_plan_is_printed_and_nothing_is_done(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    places = ("--results", str(tmp_path / "r"), "--work", str(tmp_path / "w"))
    text = said(capsys, "chen2019", "table2", "--plan", "--seeds", "2", *places)
    assert "22 runs with 44 steps" in text
    assert not (tmp_path / "w").exists()


def test_shards_share_the_runs_without_overlap(tmp_path: Path) -> None:
    _, item = find_item("chen2019", "table2")
    store = Store("smoke", tmp_path / "r", tmp_path / "w")
    shards = [make_plan(item, store, 2, shard=(which, 3), timed=False).open for which in (1, 2, 3)]
    jobs = [task.job.key("smoke") for shard in shards for task in shard]
    assert sorted(jobs) == sorted(job.key("smoke") for job in jobs_of(item.sources(), 2, "smoke"))
    assert len(set(jobs)) == len(jobs)
    assert min(map(len, shards)) > 0


LONG = Run("capsnet_small", {"width": 8, "types": 2, "max_train_images": 400, "max_test_images": 50, "batch_size": 16,
                             "steps": 60, "checkpoint_interval_steps": 5, "eval_interval_steps": 100})  # fmt: skip
ITEM = Item("long", "Long", "One run.", {"error": "%"}, (Row("a", {"error": Cell(None, LONG)}),))
SCRIPT = """\
import sys
from tests.papers.test_reproduce_command import work
work(sys.argv[1])
"""


def work(folder: str) -> Store:
    store = Store("full", Path(folder) / "r", Path(folder) / "w")
    plan = make_plan(ITEM, store, 1, timed=False, num_threads=1)
    work_through(plan, store, Bar(plan, False, lambda line: None), num_threads=1)
    return store


def test_killed_at_any_point_it_goes_on_and_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    """Killed twice, without a chance to save: what is lost is less than the steps between two checkpoints."""
    whole = work(str(tmp_path / "whole"))
    folder = RunFolder(tmp_path / "broken" / "w" / "full" / Job(LONG, 0).key("full"))
    for wanted in (5, 30):
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(tmp_path / "broken")], cwd=Path(__file__).parents[2], env=os.environ
        )
        started = time.monotonic()
        while _saved(folder) < wanted and process.poll() is None and time.monotonic() - started < 300:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not Store("full", tmp_path / "broken" / "r", tmp_path / "broken" / "w").record(Job(LONG, 0))
    reached = _saved(folder)
    assert reached >= 30
    broken = work(str(tmp_path / "broken"))
    records = [store.record(Job(LONG, 0)) for store in (whole, broken)]
    assert records[0] is not None
    assert records[1] is not None
    assert records[1]["found"] | {"seconds": 0} == records[0]["found"] | {"seconds": 0}
    rows = read_metrics(folder.metrics)
    assert rows[-1]["step"] == 60


def _saved(folder: RunFolder) -> int:
    """Return the step of the newest checkpoint that is whole."""
    try:
        checkpoint, _ = folder.newest()
    except OSError:
        return 0
    return 0 if checkpoint is None else int(checkpoint.state["run"]["step"])


def test_a_broken_record_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    store = Store("smoke", tmp_path / "r", tmp_path / "w")
    _, item = find_item("chen2019", "multi")
    (source,) = item.sources()
    path = store.path(Job(source, 0))  # type: ignore[arg-type]
    path.parent.mkdir(parents=True)
    path.write_text("{")
    with pytest.raises(SystemExit) as left:
        main(["reproduce", "chen2019", "multi", "--results", str(tmp_path / "r"), "--work", str(tmp_path / "w")])
    assert left.value.code == 1
    assert f"{path} is no record" in capsys.readouterr().err


def test_the_report_is_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    places = ("--results", str(tmp_path / "r"))
    main(["reproduce", "chen2019", "multi", *places, "--work", str(tmp_path / "w")])
    main(["report", "--scale", "smoke", *places, "--out", str(tmp_path / "page.md")])
    text = (tmp_path / "page.md").read_text()
    assert "| Conv Caps Routing#1 | 56,400 [1] | 100,352 |" in text
    assert "chen2019-multi.png" in text
    record = json.loads((tmp_path / "r/smoke/measures/chen2019-multi-seed0.json").read_text())
    assert record["found"]["total"] == 750_816
