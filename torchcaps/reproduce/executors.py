"""Executors of `submitit` and the function of a job: processes of this machine, or jobs of a Slurm cluster."""

import os
import re
import shutil
import signal
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NoReturn

import torch

from torchcaps._core.optional import import_optional
from torchcaps.reproduce.planner import Task, TaskPlan, TaskState
from torchcaps.reproduce.runner import PlanProgress, TaskOutcome, TaskResult, execute_task
from torchcaps.reproduce.scales import Scale
from torchcaps.reproduce.store import RecordKey, RecordStore
from torchcaps.training.errors import RunError, RunInterrupted

__all__ = [
    "EXECUTORS",
    "ExecutorName",
    "JobOptions",
    "RecordJob",
    "check_executor",
    "create_executor",
    "prepare_process",
]

ExecutorName = Literal["local", "slurm"]
EXECUTORS: tuple[ExecutorName, ...] = ("local", "slurm")
LOCAL_TIMEOUT_MIN = 60 * 24 * 365  # submitit stops local jobs after 2 minutes by default
SLURM_TIME_MINUTES = 240  # default; submitit's is 5
SIGNAL_DELAY_S = 120  # between the signal to requeue and the time limit of a Slurm job


@dataclass(frozen=True)
class JobOptions:
    """Settings of the executor.

    Args:
        executor: ``"local"`` or ``"slurm"``.
        jobs: largest number of jobs at a time.
        num_threads: CPU threads per job (default: 1 for several local jobs, all cores for one; ``cpus`` on Slurm).
        nice: niceness that is added to that of this process, 0 to 19.
        partition, memory_gb, cpus: partition, memory and CPUs of a Slurm job (default: the cluster's; one CPU).
        time_minutes: time limit of a Slurm job, which is requeued and resumes after it (default: 240).

    >>> JobOptions("local", jobs=2).threads
    1
    >>> JobOptions("slurm", jobs=8, cpus=4).threads
    4
    """

    executor: ExecutorName
    jobs: int = 1
    num_threads: int | None = None
    nice: int = 0
    partition: str | None = None
    time_minutes: int | None = None
    memory_gb: float | None = None
    cpus: int | None = None

    def __post_init__(self) -> None:
        if self.executor not in EXECUTORS:
            raise ValueError(f"executor must be {' or '.join(EXECUTORS)}, got {self.executor!r}")
        for name in ("jobs", "num_threads", "time_minutes", "cpus"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be 1 or more, got {value}")
        if not 0 <= self.nice <= 19:
            raise ValueError(f"nice must be in 0..19, got {self.nice}")
        if self.memory_gb is not None and not self.memory_gb > 0:
            raise ValueError(f"memory_gb must be positive, got {self.memory_gb}")
        if self.partition is not None and not re.fullmatch(r"[\w.,-]+", self.partition):
            raise ValueError(f"partition must be a name of letters, digits, '_', '-', '.', got {self.partition!r}")
        if self.executor == "local":
            for name in ("partition", "time_minutes", "memory_gb", "cpus"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} needs the executor slurm, got local: local jobs have no such limit")

    @property
    def threads(self) -> int | None:
        """CPU threads per job; ``None``: all cores."""
        if self.num_threads is not None:
            return self.num_threads
        if self.executor == "slurm":
            return self.cpus or 1
        return 1 if self.jobs > 1 else None


@dataclass(frozen=True)
class RecordJob:
    """Function of a job: execute one run or measurement. It is pickled, and called again if the job is requeued.

    Args:
        key: the record.
        name: description for the log.
        scale, results, work: those of the `RecordStore`; absolute paths.
        settings: fields of the run that do not change its result.
        nice: niceness that is added.
        arguments: command line of the submitting process, which the record states; the job has one of submitit's.
    """

    key: RecordKey
    name: str
    scale: Scale
    results: Path
    work: Path
    settings: dict[str, Any] = field(default_factory=dict)
    nice: int = 0
    arguments: tuple[str, ...] = field(default_factory=lambda: tuple(sys.argv[1:]))

    def __call__(self) -> TaskResult:
        """Execute the task; an error is printed to the log and returned as `TaskOutcome.FAILED`."""
        sys.argv[1:] = self.arguments
        prepare_process(self.nice, self.settings.get("num_threads"))
        store = RecordStore(self.scale, self.results, self.work)
        task = Task(self.key, TaskState.NEW, name=self.name)
        progress = PlanProgress(TaskPlan((task,)), False, lambda line: print(line, flush=True))
        progress.begin(1, 1, task)
        try:
            result = execute_task(self.key, store, progress, self.settings)
        except RunInterrupted as interrupted:
            result = TaskResult(TaskOutcome.STOPPED, detail=str(interrupted))
        except Exception as error:  # of any kind: the other jobs continue
            traceback.print_exc()
            message = " ".join(str(error).split())
            is_expected = isinstance(error, RunError | ValueError)
            result = TaskResult(
                TaskOutcome.FAILED, detail=message if is_expected else f"{type(error).__name__}: {message}"
            )
        progress.end(result)
        return result

    def checkpoint(self) -> Any:
        """Return the submission of the requeued job, which resumes from the checkpoint on disk."""
        return import_optional("submitit.helpers", "jobs").DelayedSubmission(self)


def prepare_process(nice: int, num_threads: int | None) -> None:
    """Set niceness, CPU threads and signal handling of the process of a job."""
    signal.signal(signal.SIGTERM, _raise_interrupted)  # submitit ignores it; training handles it itself
    if hasattr(os, "setpgrp"):
        os.setpgrp()  # Ctrl-C stops the submitting process only, which then stops its jobs
    if nice:
        os.nice(nice)
    if num_threads is not None:
        torch.set_num_threads(num_threads)


def _raise_interrupted(number: int, _frame: FrameType | None) -> NoReturn:
    raise RunInterrupted("stopped before the first step or during a measurement", number)


def check_executor(name: ExecutorName) -> Any:
    """Return the module `submitit` if an executor can be used on this machine.

    Raises:
        MissingExtraError: submitit is not installed.
        ValueError: Slurm's commands are not found.
    """
    submitit = import_optional("submitit", f"--executor {name}")
    for command in ("sbatch", "srun") if name == "slurm" else ():
        if shutil.which(command) is None:
            raise ValueError(
                f"--executor slurm needs Slurm's command {command}, which was not found: run this on a login node of "
                "the cluster, or use --executor local"
            )
    return submitit


def create_executor(options: JobOptions, folder: Path) -> Any:
    """Return the `submitit` executor; see `check_executor` for errors.

    Args:
        options: its settings.
        folder: directory for logs and pickled jobs; on Slurm, on a file system that all nodes share.
    """
    submitit = check_executor(options.executor)
    if options.executor == "local":
        executor = submitit.LocalExecutor(folder)
        executor.update_parameters(timeout_min=LOCAL_TIMEOUT_MIN, stderr_to_stdout=True)
        return executor
    executor = submitit.SlurmExecutor(folder, max_num_timeout=1_000)  # time limits are not failures: jobs resume
    limits = {
        "partition": options.partition,
        "time": options.time_minutes or SLURM_TIME_MINUTES,
        "mem": None if options.memory_gb is None else f"{round(options.memory_gb * 1024)}M",
        "cpus_per_task": options.cpus or options.threads,
    }
    executor.update_parameters(
        job_name="torchcaps",
        signal_delay_s=SIGNAL_DELAY_S,
        stderr_to_stdout=True,
        **{name: value for name, value in limits.items() if value is not None},
    )
    return executor
