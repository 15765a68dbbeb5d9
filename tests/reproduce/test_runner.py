"""Execution of plans: interrupted runs resume, other settings are rejected, progress is printed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.reproduce.items import reproduce_smoke, smoke_store
from torchcaps.reproduce import runner
from torchcaps.reproduce.planner import Task, TaskPlan, TaskState, make_plan
from torchcaps.reproduce.runner import PlanProgress, TaskOutcome, TaskResult, execute_plan
from torchcaps.reproduce.schema import Cell, Item, Measurement, Run, TableRow
from torchcaps.reproduce.store import RecordKey, RecordStore
from torchcaps.training.errors import RunError
from torchcaps.training.logging import read_metrics
from torchcaps.training.run_dir import RunDirectory

LONG = Run("capsnet_small", {"width": 8, "types": 2, "max_train_images": 400, "max_test_images": 50, "batch_size": 16,
                             "steps": 60, "checkpoint_interval_steps": 5, "eval_interval_steps": 100})  # fmt: skip
ITEM = Item("long", "Long", "One run.", {"error": "%"}, (TableRow("a", {"error": Cell(None, LONG)}),))
SCRIPT = """\
import sys
from pathlib import Path
from tests.reproduce.test_runner import run_long
run_long(Path(sys.argv[1]))
"""


def run_long(directory: Path) -> RecordStore:
    store = RecordStore("full", directory / "results", directory / "work")
    plan = make_plan(ITEM, store, 1, timed=False, num_threads=1)
    execute_plan(plan, store, PlanProgress(plan, False, lambda line: None), num_threads=1)
    return store


def saved_step(directory: RunDirectory) -> int:
    """Return the step of the newest complete checkpoint."""
    try:
        checkpoint, _ = directory.newest_checkpoint()
    except OSError:
        return 0
    return 0 if checkpoint is None else int(checkpoint.state["run"]["step"])


def test_a_killed_run_resumes_and_ends_with_the_same_record(tmp_path: Path) -> None:
    """Killed twice by SIGKILL: less than the steps between two checkpoints is lost."""
    key = RecordKey(LONG, 0)
    uninterrupted = run_long(tmp_path / "uninterrupted")
    directory = RecordStore("full", tmp_path / "killed" / "results", tmp_path / "killed" / "work").run_directory(key)
    for target_step in (5, 30):
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(tmp_path / "killed")], cwd=Path(__file__).parents[2], env=os.environ
        )
        while saved_step(directory) < target_step and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert 30 <= saved_step(directory) < 60
    assert not RecordStore("full", tmp_path / "killed" / "results").path(key).exists()
    resumed = run_long(tmp_path / "killed")
    records = [store.read(key) for store in (uninterrupted, resumed)]
    assert records[0] is not None
    assert records[1] is not None
    assert records[1]["results"] | {"seconds": 0} == records[0]["results"] | {"seconds": 0}
    assert read_metrics(directory.metrics)[-1]["step"] == 60


def test_weights_of_other_settings_are_not_measured(tmp_path: Path) -> None:
    """The record of the measurement is missing, and the run directory is that of a run with other settings."""
    _, item, store = reproduce_smoke(tmp_path, "sabour2017", "fig4")
    (measurement,) = item.sources()
    assert isinstance(measurement, Measurement)
    store.path(RecordKey(measurement, 0)).unlink()
    (settings,) = store.work.glob("sabour2017_mnist-*.json")
    settings.write_text(settings.read_text().replace('"batch_size": 16', '"batch_size": 17'))
    store = smoke_store(tmp_path)
    plan = make_plan(item, store, 1, timed=False)
    with pytest.raises(RunError) as raised:
        execute_plan(plan, store, PlanProgress(plan, False, str))
    assert str(settings.with_suffix("")) in str(raised.value)


def test_a_measurement_waits_for_runs_of_another_shard(tmp_path: Path) -> None:
    run = Run("chen2019_lenet")
    measurement = Measurement("m", lambda context, net: {"x": 1}, {"net": run})
    item = Item("t", "T", "T.", {"x": ""}, (TableRow("a", {"x": Cell(None, measurement, "x")}),))
    store = smoke_store(tmp_path)
    plan = TaskPlan((Task(RecordKey(measurement, 0), TaskState.NEW, name="m"),))
    ((task, result),) = execute_plan(plan, store, PlanProgress(plan, False, str))
    assert (task, result.outcome) == (plan.tasks[0], TaskOutcome.DEPENDENCY_PENDING)
    assert RecordKey(run, 0).name("smoke") in result.detail
    assert store.read(RecordKey(measurement, 0)) is None
    assert item.sources() == [measurement]


def test_a_locked_run_is_left_to_the_other_process(tmp_path: Path) -> None:
    store, key = smoke_store(tmp_path), RecordKey(Run("chen2019_lenet"), 0)
    directory = store.run_directory(key)
    directory.path.mkdir(parents=True)
    directory.lock()
    plan = TaskPlan((Task(key, TaskState.NEW, name="LeNet"),))
    try:
        ((_, result),) = execute_plan(plan, store, PlanProgress(plan, False, str))
    finally:
        directory.release()
    assert result.outcome is TaskOutcome.LOCKED


def test_a_long_measurement_prints_a_line_per_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = SimpleNamespace(value=0.0)
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: now.value))
    lines: list[str] = []
    task = Task(RecordKey(LONG, 0), TaskState.NEW, name="a measurement")
    progress = PlanProgress(TaskPlan((task,)), False, lines.append)
    progress.begin(1, 1, task)
    printed = []
    for now.value in (30, 61, 90, 122):
        progress.on_eval_batch()
        printed.append(len(lines))
    progress.end(TaskResult(TaskOutcome.MEASURED, 122))
    assert printed == [0, 1, 1, 2]
    assert all(line.startswith("1 of 1: a measurement: ") for line in lines)
    assert len(lines) == 3
