"""Execution of plans: interrupted runs resume, other settings are rejected, progress is printed."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.reproduce.items import reproduce_item, reproduce_smoke, smoke_store
from tests.sampling import all_cases
from torchcaps.reproduce import runner
from torchcaps.reproduce.planner import Task, TaskPlan, TaskState, make_plan
from torchcaps.reproduce.runner import PlanProgress, TaskOutcome, TaskResult, execute_plan
from torchcaps.reproduce.schema import Cell, Item, Measurement, Run, TableRow
from torchcaps.reproduce.store import RecordKey, RecordStore
from torchcaps.training.errors import RunError
from torchcaps.training.logging import read_metrics

LONG = Run("capsnet_small", {"width": 8, "types": 2, "max_train_images": 400, "max_test_images": 50, "batch_size": 16,
                             "steps": 60, "checkpoint_interval_steps": 5, "eval_interval_steps": 100})  # fmt: skip
ITEM = Item("long", "Long", "One run.", {"error": "%"}, (TableRow("a", {"error": Cell(None, LONG)}),))
SCRIPT = """\
import sys
from pathlib import Path
from tests.reproduce.test_runner import KillAt, run_long
run_long(Path(sys.argv[1]), lambda plan: KillAt(plan, int(sys.argv[2])))
"""


class KillAt(PlanProgress):
    """Progress that kills its process at a training step."""

    def __init__(self, plan: TaskPlan, step: int) -> None:
        super().__init__(plan, False, str)
        self.last_step = step

    def on_step(self, step: int, *args: Any) -> None:
        if step == self.last_step:
            os.kill(os.getpid(), signal.SIGKILL)


def run_long(
    directory: Path, make_progress: Callable[[TaskPlan], PlanProgress] = lambda plan: PlanProgress(plan, False, str)
) -> RecordStore:
    store = RecordStore("full", directory / "results", directory / "work")
    plan = make_plan(ITEM, store, 1, timed=False, num_threads=1)
    execute_plan(plan, store, make_progress(plan), num_threads=1)
    return store


def test_a_killed_run_resumes_and_ends_with_the_same_record(tmp_path: Path) -> None:
    """Killed by SIGKILL, twice with `--all-cases`: at most the steps since the last checkpoint, five, are lost."""
    key = RecordKey(LONG, 0)
    uninterrupted = run_long(tmp_path / "uninterrupted")
    killed = RecordStore("full", tmp_path / "killed" / "results", tmp_path / "killed" / "work")
    directory = killed.run_directory(key)
    for step in (13, 38) if all_cases() else (38,):
        words = (sys.executable, "-c", SCRIPT, str(tmp_path / "killed"), str(step))
        process = subprocess.run(words, cwd=Path(__file__).parents[2], check=False)
        assert process.returncode == -signal.SIGKILL
        checkpoint, problems = directory.newest_checkpoint()
        assert checkpoint is not None, problems
        assert step - 5 <= checkpoint.state["run"]["step"] <= step
    assert not killed.path(key).exists()
    records = [store.read(key) for store in (uninterrupted, run_long(tmp_path / "killed"))]
    assert records[0] is not None
    assert records[1] is not None
    assert records[1]["results"] | {"seconds": 0} == records[0]["results"] | {"seconds": 0}
    assert read_metrics(directory.metrics)[-1]["step"] == 60


def test_weights_of_other_settings_are_not_measured(tmp_path: Path) -> None:
    """The record of the measurement is missing, and the run directory is that of a run with other settings."""
    _, item, store = reproduce_smoke(tmp_path, "sabour2017", "fig4")
    measurement = item.sources()[0]
    assert isinstance(measurement, Measurement)
    store.path(RecordKey(measurement, 0)).unlink()
    (settings,) = store.work.glob("sabour2017_mnist-*.json")
    settings.write_text(settings.read_text().replace('"batch_size": 16', '"batch_size": 17'))
    store = smoke_store(tmp_path)
    plan = make_plan(item, store, 1, timed=False)
    with pytest.raises(RunError) as raised:
        execute_plan(plan, store, PlanProgress(plan, False, str))
    assert str(settings.with_suffix("")) in str(raised.value)


def test_a_run_resumes_if_a_setting_was_added_since_it_was_started(tmp_path: Path) -> None:
    _, item, store = reproduce_smoke(tmp_path, "sabour2017", "fig4")
    measurement = item.sources()[0]
    assert isinstance(measurement, Measurement)
    store.path(RecordKey(measurement, 0)).unlink()
    (path,) = store.work.glob("sabour2017_mnist-*.json")
    settings = json.loads(path.read_text())
    del settings["descents"]
    path.write_text(json.dumps(settings))
    reproduce_item(item, smoke_store(tmp_path))
    assert smoke_store(tmp_path).read(RecordKey(measurement, 0)) is not None


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
    assert [line for line in lines if not line.startswith("1 of 1: a measurement: ")] == []
    assert len(lines) == 3
