"""The commands ``torchcaps reproduce`` and ``torchcaps report``."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sampling import all_cases
from torchcaps.cli.execution import describe_total
from torchcaps.cli.main import main
from torchcaps.papers import find_item, find_paper, list_papers
from torchcaps.reproduce.planner import Task, TaskPlan, TaskState
from torchcaps.reproduce.schema import Measurement, Run
from torchcaps.reproduce.store import RecordKey, RecordStore

COMMAND = (sys.executable, "-m", "torchcaps")


def run_reproduce(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    main(["reproduce", *words])
    return capsys.readouterr().out


def rejected(capsys: pytest.CaptureFixture[str], *words: str, command: str = "reproduce") -> str:
    """Run a command that must exit with code 2; return its one line of error output."""
    with pytest.raises(SystemExit) as exited:
        main([command, *words])
    assert exited.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


def directories(path: Path) -> tuple[str, ...]:
    return "--results", str(path / "results"), "--work", str(path / "work")


def test_papers_and_items_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    output = run_reproduce(capsys)
    for paper in list_papers():
        assert paper.name in output
    output = run_reproduce(capsys, "choi2019")
    paper = find_paper("choi2019")
    for item in paper.items:
        assert item.name in output
    for deviation in paper.deviations:
        assert deviation in output


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("sabour2018 table1", ("'sabour2018'", "sabour2017")),
        ("staus", ("'staus'", "status")),
        ("sabour2017 table7", ("'table7'", "table1", "fig3")),
        ("sabour2017 table1 --rows LSTM", ("'LSTM'", "1 'Baseline CNN'")),
        ("sabour2017 table1 --columns SVHN", ("'SVHN'", "1 'MNIST'; 2 'MultiMNIST'")),
        ("sabour2017 table1 --scale huge", ("--scale", "'huge'", "smoke", "cpu", "long", "full")),
        ("sabour2017 table1 --shard 9/8", ("--shard", "'9/8'")),
        ("sabour2017 table1 --seeds 0", ("--seeds", "got 0")),
        ("sabour2017 table1 --num-threads 0", ("--num-threads", "got 0")),
        ("sabour2017 table1 --rows", ("--rows",)),
        ("sabour2017 all --rows 1", ("--rows", "'all'")),
        ("--rows 1", ("--rows",)),
        ("sabour2017 table1 --results=", ("--results",)),
    ],
)
def test_invalid_arguments_are_named(capsys: pytest.CaptureFixture[str], words: str, named: tuple[str, ...]) -> None:
    line = rejected(capsys, *words.split())
    assert [name for name in named if name not in line] == []


def test_a_file_instead_of_a_directory_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "results").touch()
    line = rejected(capsys, "sabour2017", "table1", *directories(tmp_path))
    assert f"--results must be a directory, got the file {tmp_path / 'results'}" in line


def test_a_report_into_a_missing_directory_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert "/nowhere/at" in rejected(capsys, "--out", "/nowhere/at/all.md", command="report")


def test_rows_and_columns_are_selected_by_index_or_part_of_their_label() -> None:
    _, item = find_item("sabour2017", "Table 1")
    selected = item.select_rows(["1", "3 iterations, no"])
    assert selected == ("Baseline CNN", "CapsNet, 3 iterations, no reconstruction")
    assert item.select_rows(["capsnet"]) == tuple(row.label for row in item.rows[1:])
    assert item.select_columns(["mnist"]) == ("MNIST",)  # an exact match wins
    assert len(item.sources(columns=("MultiMNIST",))) == 3


def test_missing_data_is_reported_with_the_command_that_gets_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    data = ("--data-dir", str(tmp_path / "data"))
    line = rejected(capsys, "sabour2017", "table1", "--scale", "cpu", *directories(tmp_path), *data)
    assert f"torchcaps data get mnist --data-dir {tmp_path / 'data'}" in line
    # Parameter counts and timing need no data.
    main(["reproduce", "choi2019", "cost", "--scale", "cpu", "--plan", *directories(tmp_path), *data])
    assert "4 measurements" in capsys.readouterr().out  # two data sets, two seeds


def test_plan_prints_and_runs_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    output = run_reproduce(capsys, "chen2019", "table2", "--plan", "--seeds", "2", *directories(tmp_path))
    _, item = find_item("chen2019", "table2")
    n_runs = 2 * sum(isinstance(source, Run) for source in item.sources())
    assert f"{n_runs} runs with {2 * n_runs} steps" in output  # two seeds, two steps each
    assert list(tmp_path.iterdir()) == []


def test_the_total_of_a_queue_counts_shared_runs_once() -> None:
    keys = [RecordKey(Run("chen2019_lenet"), seed) for seed in (0, 1)]
    first, second = (Task(key, TaskState.NEW, steps=100, seconds=3600.0) for key in keys)
    measured = Task(RecordKey(Measurement("m", lambda context: {}), 0), TaskState.NEW, seconds=1800.0)
    text = describe_total([TaskPlan((first, second)), TaskPlan((second, measured))], "smoke", 2)
    assert "2 runs with 200 steps, 1 measurement;" in text
    assert "75 minutes with 2 jobs at a time" in text


def test_a_damaged_record_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    store = RecordStore("smoke", tmp_path / "results", tmp_path / "work")
    _, item = find_item("chen2019", "multi")
    (source,) = item.sources()
    path = store.path(RecordKey(source, 0))  # type: ignore[arg-type]
    path.parent.mkdir(parents=True)
    path.write_text("{")
    with pytest.raises(SystemExit) as exited:
        main(["reproduce", "chen2019", "multi", *directories(tmp_path)])
    assert exited.value.code == 1
    assert str(path) in capsys.readouterr().err


def test_records_are_rendered_in_a_report(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    main(["reproduce", "chen2019", "multi", *directories(tmp_path)])
    main(["report", "--scale", "smoke", *directories(tmp_path)[:2], "--out", str(tmp_path / "page.md")])
    text = (tmp_path / "page.md").read_text()
    assert "| Conv Caps Routing#1 | 56,400 [1] | 100,352 |" in text
    assert "chen2019-multi.png" in text
    record = json.loads((tmp_path / "results/smoke/measurements/chen2019-multi-seed0.json").read_text())
    assert record["results"]["total"] == 750_816


def test_a_report_without_records_is_rejected(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An existing report is not overwritten by an empty one."""
    monkeypatch.chdir(tmp_path)
    assert "docs" in rejected(capsys, "--results", "none", command="report")
    (tmp_path / "docs").mkdir()
    assert "none/cpu" in rejected(capsys, "--results", "none", command="report")
    assert [path.name for path in tmp_path.rglob("*")] == ["docs"]


@pytest.mark.skipif(not all_cases(), reason="the test of local jobs covers it; make test-all runs both")
def test_two_processes_share_the_runs_of_an_item(tmp_path: Path) -> None:
    words = ("reproduce", "sabour2017", "table1", "--rows", "1", "2", "--num-threads", "1", *directories(tmp_path))
    processes = [
        subprocess.Popen((*COMMAND, *words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in processes:
        _, errors = process.communicate()
        assert process.returncode == 0, errors
    assert len(list((tmp_path / "results/smoke/runs").glob("*.json"))) == 3
