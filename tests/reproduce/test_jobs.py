"""Reproductions as jobs of submitit: local processes, Slurm scripts, killed and failing jobs."""

import dataclasses
import functools
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from submitit.core.utils import JobPaths

from tests.cli.commands import usage_error
from tests.reproduce.items import smoke_store
from tests.sampling import sample
from torchcaps.cli import execution
from torchcaps.cli.main import main
from torchcaps.reproduce import executors, jobs
from torchcaps.reproduce.executors import JobOptions, RecordJob, create_executor
from torchcaps.reproduce.jobs import execute_jobs
from torchcaps.reproduce.planner import Task, make_plan
from torchcaps.reproduce.runner import PlanProgress, TaskOutcome, TaskResult
from torchcaps.reproduce.schema import Cell, Item, Measurement, Run, TableRow
from torchcaps.reproduce.status import FailureNote, RecordState, record_status
from torchcaps.reproduce.store import RecordKey, RecordStore
from torchcaps.training.errors import RunInterrupted

SIGNAL_STEP, CHECKPOINT_INTERVAL = 13, 5
REQUEUE = signal.SIGUSR2  # sent by submitit and Slurm before a time limit and on preemption


class Submissions:
    """Create executors and record their options and the names of the submitted jobs."""

    def __init__(self, create: Callable[[JobOptions, Path], Any]) -> None:
        self.create, self.options, self.names = create, [], []

    def create_executor(self, options: JobOptions, folder: Path) -> Any:
        self.options.append(options)
        executor = self.create(options, folder)
        submit = executor.submit

        def record(function: RecordJob) -> Any:
            self.names.append(function.name)
            return submit(function)

        executor.submit = record
        return executor


@dataclasses.dataclass(frozen=True)
class SignallingJob(RecordJob):
    """Job that sends itself a signal at a training step, once, and records at which step it continues."""

    number: int = 0

    def __call__(self) -> TaskResult:
        signalled, resumed = self.work / "signalled", self.work / "resumed"

        def on_step(progress: PlanProgress, step: int, *_: Any) -> None:
            if step == SIGNAL_STEP and not signalled.exists():
                signalled.touch()
                os.kill(os.getpid(), self.number)
            elif signalled.exists() and not resumed.exists():
                resumed.write_text(str(step - 1))

        PlanProgress.on_step = on_step  # type: ignore[method-assign]
        return super().__call__()


def fail(context: Any) -> dict[str, Any]:
    raise OSError(f"{torch.get_num_threads()} threads, niceness {os.nice(0)}")


def measure_nothing(context: Any, net: Any = None) -> dict[str, Any]:
    return {"x": 1}


def item_of(**sources: Run | Measurement) -> Item:
    rows = (TableRow(name, {"x": Cell(None, source, "x")}) for name, source in sources.items())
    return Item("t", "T", "T.", {"x": ""}, tuple(rows))


def tasks_of(store: RecordStore, **sources: Run | Measurement) -> list[Task]:
    return make_plan(item_of(**sources), store, 1, timed=False).pending


@pytest.mark.timeout(1_200)  # three processes import torch, which takes long on a busy machine
@pytest.mark.parametrize("number", sample([signal.SIGKILL, REQUEUE], 1))
def test_local_jobs_resume_after_a_signal_and_report_a_failure(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two at a time: a run that is killed or requeued, and a measurement that fails."""
    monkeypatch.setattr(jobs, "RecordJob", functools.partial(SignallingJob, number=number))
    submitted = Submissions(create_executor)
    monkeypatch.setattr(jobs, "create_executor", submitted.create_executor)
    monkeypatch.setattr(sys, "argv", ["torchcaps", "reproduce", "t"])
    size = {"width": 8, "types": 2, "batch_size": 16, "steps": 20, "max_train_images": 800, "max_test_images": 20}
    run = Run("capsnet_small", {**size, "checkpoint_interval_steps": CHECKPOINT_INTERVAL})
    failing = Measurement("f", fail)
    store = RecordStore("full", tmp_path / "results", tmp_path / "work")
    lines: list[str] = []
    options = JobOptions("local", jobs=2, nice=1)
    tasks = tasks_of(store, run=run, f=failing)
    unfinished = execute_jobs(tasks, store, options, lines.append)
    assert [(task.key.source, result.outcome) for task, result in unfinished] == [(failing, TaskOutcome.FAILED)], lines
    assert f"OSError: 1 threads, niceness {min(19, os.nice(0) + 1)}" in unfinished[0][1].detail
    assert int((tmp_path / "work/resumed").read_text()) == SIGNAL_STEP // CHECKPOINT_INTERVAL * CHECKPOINT_INTERVAL
    record = store.read(RecordKey(run, 0))
    assert record is not None
    assert (record["results"]["steps"], record["machine"]["threads"]) == (20, 1)
    assert record["command"] == "torchcaps reproduce t"
    again = [tasks[0].name] if number == signal.SIGKILL else []  # submitit itself starts a requeued job again
    assert submitted.names == [*(task.name for task in tasks), *again]
    failed = record_status(RecordKey(failing, 0), store)
    assert (failed.state, failed.detail) == (RecordState.FAILED, unfinished[0][1].detail)
    logs = [path for path in (store.work / "jobs").glob("*/*.out") if str(path) in failed.detail]
    assert len(logs) == 1
    assert "Traceback" in logs[0].read_text()


# Without processes ---------------------------------------------------------------------------------------------


class InProcessExecutor:
    """Executor whose jobs are executed by this process when they are submitted."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.n_jobs = folder, 0

    def submit(self, function: RecordJob) -> Any:
        self.n_jobs += 1
        paths, result = JobPaths(self.folder, str(self.n_jobs)), function()
        return SimpleNamespace(job_id=str(self.n_jobs), paths=paths, done=lambda: True, result=lambda: result)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> Submissions:
    """Execute jobs in this process."""
    submitted = Submissions(lambda options, folder: InProcessExecutor(folder))
    monkeypatch.setattr(jobs, "create_executor", submitted.create_executor)
    monkeypatch.setattr(jobs, "POLL_INTERVAL_S", 0.0)
    monkeypatch.setattr(executors, "prepare_process", lambda nice, num_threads: None)
    monkeypatch.setattr(jobs._JobPool, "_result", lambda self, job: job.result())
    return submitted


def test_measurements_are_submitted_after_what_they_need(tmp_path: Path, in_process: Submissions) -> None:
    store, run = smoke_store(tmp_path), Run("chen2019_lenet")
    first = Measurement("first", measure_nothing, {"net": run})
    second = Measurement("second", measure_nothing, depends_on={"first": first})
    tasks = list(reversed(tasks_of(store, second=second)))
    assert execute_jobs([*tasks, *tasks], store, JobOptions("local", jobs=9), lambda line: None) == []
    assert in_process.names == [task.name for task in reversed(tasks)]
    assert store.read(RecordKey(second, 0)) is not None


def test_a_task_of_another_process_is_waited_for(tmp_path: Path, in_process: Submissions) -> None:
    store, measurement = smoke_store(tmp_path), Measurement("m", measure_nothing)
    key = RecordKey(measurement, 0)
    other = store.run_directory(key)
    other.path.mkdir(parents=True)
    other.lock()
    lines: list[str] = []

    def print_line(line: str) -> None:  # the other process finishes while this one waits
        lines.append(line)
        smoke_store(tmp_path).write_measurement(key, {"x": 7}, 0.0)
        other.release()

    assert execute_jobs(tasks_of(store, m=measurement), store, JobOptions("local"), print_line) == []
    assert in_process.names == []
    assert len(lines) == 2


def test_a_job_that_keeps_being_stopped_is_given_up(
    tmp_path: Path, in_process: Submissions, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, measurement = smoke_store(tmp_path), Measurement("m", measure_nothing)
    stopped = TaskResult(TaskOutcome.STOPPED, detail="its job was killed")
    monkeypatch.setattr(jobs._JobPool, "_result", lambda self, job: stopped)
    tasks = tasks_of(store, m=measurement)
    ((task, result),) = execute_jobs(tasks, store, JobOptions("local"), lambda line: None)
    assert (task.key.source, result) == (measurement, stopped)
    assert in_process.names == [task.name] * jobs.MAX_ATTEMPTS
    assert FailureNote.of(task.key, store).read() == stopped.detail


def test_a_signal_stops_the_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job is a process that does nothing but wait for a signal."""
    process = subprocess.Popen(["sleep", "600"])
    job = SimpleNamespace(job_id=str(process.pid), done=lambda: process.poll() is not None)
    monkeypatch.setattr(jobs, "create_executor", lambda *_: SimpleNamespace(submit=lambda function: job))
    monkeypatch.setattr(jobs, "POLL_INTERVAL_S", 0.01)
    store, options = smoke_store(tmp_path), JobOptions("local")
    try:
        with pytest.raises(RunInterrupted) as raised:
            execute_jobs(
                tasks_of(store, m=Measurement("m", measure_nothing)),
                store,
                options,
                lambda line: signal.raise_signal(signal.SIGINT),
            )
        assert (raised.value.signal, process.wait(60)) == (signal.SIGINT, -signal.SIGTERM)
    finally:
        process.kill()


def test_a_stopped_job_is_not_a_failure(tmp_path: Path, in_process: Submissions) -> None:
    def stop(context: Any) -> NoReturn:
        raise RunInterrupted("stopped at step 3", signal.SIGTERM)

    key = RecordKey(Measurement("m", stop), 0)
    result = RecordJob(key, "m", "smoke", tmp_path / "results", tmp_path / "work")()
    assert result == TaskResult(TaskOutcome.STOPPED, detail="stopped at step 3")


def test_a_failed_job_exits_with_one_sentence(
    tmp_path: Path, in_process: Submissions, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executors, "execute_task", lambda *_: (_ for _ in ()).throw(OSError("no space left")))
    directories = ("--results", str(tmp_path / "results"), "--work", str(tmp_path / "work"))
    with pytest.raises(SystemExit) as exited:
        main(["reproduce", "chen2019", "multi", "--executor", "local", "--jobs", "3", *directories])
    assert exited.value.code == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("torchcaps: ")]
    assert len(errors) == 2  # the task and the command
    assert [part for part in ("chen2019-multi, seed 0", "OSError: no space left") if part not in errors[0]] == []
    assert (in_process.options[0].jobs, in_process.options[0].threads) == (3, 1)


def test_a_requeued_job_is_the_same_job(tmp_path: Path) -> None:
    job = RecordJob(RecordKey(Run("chen2019_lenet"), 0), "LeNet", "smoke", tmp_path, tmp_path)
    assert job.checkpoint().function == job


# Options -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--executor pbs", ("--executor", "local", "slurm", "'pbs'")),
        ("--executor local --jobs 0", ("--jobs", "got 0")),
        ("--executor local --nice 20", ("--nice", "0..19", "got 20")),
        ("--executor local --partition cpu", ("--partition", "slurm")),
        ("--executor slurm --memory-gb -1", ("--memory-gb", "got -1.0")),
        ("--executor slurm --time-minutes 0", ("--time-minutes", "got 0")),
        ("--executor slurm --partition a;b", ("--partition", "'a;b'")),
        ("--jobs 2", ("--jobs", "--executor")),
        ("--cpus 2", ("--cpus", "--executor")),
    ],
)
def test_invalid_options_of_executors_are_named(flags: str, named: tuple[str, ...]) -> None:
    line = usage_error("reproduce", "chen2019", "multi", *flags.split())
    assert [name for name in named if name not in line] == []


@pytest.mark.parametrize(
    ("options", "threads"),
    [
        (JobOptions("local"), None),
        (JobOptions("local", jobs=2), 1),
        (JobOptions("local", jobs=2, num_threads=3), 3),
        (JobOptions("slurm"), 1),
        (JobOptions("slurm", cpus=4), 4),
    ],
)
def test_threads_per_job(options: JobOptions, threads: int | None) -> None:
    assert options.threads == threads


def test_missing_commands_and_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("reproduce", "chen2019", "multi", "--results", str(tmp_path / "r"), "--work", str(tmp_path / "w"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(execution, "make_plan", None)  # known before the plan, which takes a minute for the queue
        assert "sbatch" in usage_error(*words, "--executor", "slurm")
    monkeypatch.setitem(sys.modules, "submitit", None)
    assert "pip install 'torchcaps[cluster]'" in usage_error(*words, "--executor", "local")


# Slurm ---------------------------------------------------------------------------------------------------------


def test_slurm_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script that submitit gives to sbatch, which only prints a job ID here."""
    for name in ("sbatch", "srun"):
        command = tmp_path / "bin" / name
        command.parent.mkdir(exist_ok=True)
        command.write_text("#!/bin/sh\necho Submitted batch job 7\n")
        command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    options = JobOptions("slurm", jobs=8, partition="cpu", time_minutes=90, memory_gb=2.5, cpus=4)
    function = RecordJob(RecordKey(Run("chen2019_lenet"), 0), "LeNet", "smoke", tmp_path, tmp_path)
    job = create_executor(options, tmp_path / "jobs").submit(function)
    lines = job.paths.submission_file.read_text().splitlines()
    flags = dict(line.removeprefix("#SBATCH --").split("=", 1) for line in lines if "#SBATCH" in line and "=" in line)
    expected = {"partition": "cpu", "time": "90", "mem": "2560M", "cpus-per-task": "4", "job-name": "torchcaps"}
    assert {name: flags.get(name) for name in expected} == expected
    assert flags["signal"] == "USR2@120"  # submitit requeues the job, which resumes
    (command,) = (shlex.split(line) for line in lines if line.startswith("srun"))
    assert [sys.executable, "-u", "-m", "submitit.core._submit", str(tmp_path / "jobs")] == command[-5:]
    assert job.submission().function == function
