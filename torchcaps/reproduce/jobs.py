"""Execution of a plan as jobs, one per record; see `torchcaps.reproduce.executors` for where they run.

This process submits the jobs and waits for them; at most `JobOptions.jobs` are submitted at a time. A job does what
`torchcaps.reproduce.runner.execute_task` does in one process: it locks its directory, resumes from a checkpoint, and
writes its record atomically. Measurements are submitted after the runs and measurements that they need.
"""

import collections
import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

from torchcaps._core.optional import import_optional
from torchcaps.reproduce.executors import JobOptions, RecordJob, create_executor
from torchcaps.reproduce.planner import Task, ensemble_keys
from torchcaps.reproduce.runner import TaskOutcome, TaskResult
from torchcaps.reproduce.schema import Measurement
from torchcaps.reproduce.status import FailureNote
from torchcaps.reproduce.store import RecordKey, RecordStore
from torchcaps.training.distributed import StopSignal
from torchcaps.training.errors import RunInterrupted
from torchcaps.training.run_dir import RunDirectory

__all__ = ["execute_jobs"]

MAX_ATTEMPTS = 3  # of a job that was killed or stopped, each from the checkpoint of the one before
POLL_INTERVAL_S = 0.5
STOP_TIMEOUT_S = 120  # for local jobs to finish a step and save a checkpoint
INHERITED_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGHUP") if hasattr(signal, name))


def execute_jobs(
    tasks: list[Task],
    store: RecordStore,
    options: JobOptions,
    print_line: Callable[[str], object] = print,
    on_end: Callable[[Task, TaskResult], object] = lambda task, result: None,
    **settings: Any,
) -> list[tuple[Task, TaskResult]]:
    """Execute pending tasks as jobs, in order; return those that could not be finished.

    A job that was killed is submitted again, up to `MAX_ATTEMPTS` times in all, and resumes from its checkpoint. A task
    that another process executes is left to it; it is waited for after everything else is done.

    Args:
        tasks: the tasks; equal records are executed once.
        store: the records.
        options: executor and number of jobs.
        print_line: prints a line.
        on_end: called at the end of each task.
        settings: fields of the runs that do not change their results, such as ``data_dir``.

    Raises:
        RunInterrupted: a signal has arrived; jobs have been stopped, local ones waited for.
    """
    pool = _JobPool(tasks, store, options, print_line, settings)
    with StopSignal() as stop:
        while pool.waiting or pool.running:
            for task, result in pool.collect():
                print_line(f"{task.name}: {result}")
                on_end(task, result)
            pool.submit_ready()
            if stop.signal:
                n_left = pool.stop()
                state = f"{n_left} jobs are still running" if n_left else "all jobs have saved their checkpoints"
                raise RunInterrupted(f"stopped; {state}. See 'torchcaps reproduce status'", stop.signal)
            time.sleep(POLL_INTERVAL_S)
    return pool.unfinished


class _JobPool:
    """Tasks that are waiting and jobs that are running.

    Args:
        tasks: the tasks, in order.
        store: the records.
        options: executor and number of jobs.
        print_line: prints a line.
        settings: fields of the runs that do not change their results.

    Attributes:
        waiting: tasks that have not been submitted, by the name of their record.
        running: submitted jobs with their tasks, by the name of their record.
        unfinished: tasks that ended without a record, with the reason.
    """

    def __init__(
        self,
        tasks: list[Task],
        store: RecordStore,
        options: JobOptions,
        print_line: Callable[[str], object],
        settings: dict[str, Any],
    ) -> None:
        self.store, self.options, self.print_line = store, options, print_line
        self.settings = {**settings, **({"num_threads": options.threads} if options.threads else {})}
        # One directory per session: local jobs are named by their process ID, which may be used again later.
        session = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        self.executor = create_executor(options, store.work.absolute() / "jobs" / session)
        self.waiting = {task.key.name(store.scale): task for task in reversed(tasks)}
        self.waiting = dict(reversed(self.waiting.items()))  # the first of equal records
        self.running: dict[str, tuple[Any, Task]] = {}
        self.unfinished: list[tuple[Task, TaskResult]] = []
        self._attempts: collections.Counter[str] = collections.Counter()
        self._locked: set[str] = set()  # tasks that another process was executing

    def submit_ready(self) -> None:
        """Submit waiting tasks, as many as may run at a time."""
        for name, task in list(self.waiting.items()):
            if len(self.running) >= self.options.jobs:
                return
            if any(needed in self.waiting or needed in self.running for needed in self._needed(task.key)):
                continue
            if RunDirectory(self.store.work / name).is_locked():
                if name not in self._locked:
                    self.print_line(f"{task.name}: another process executes it; waiting for it to finish")
                self._locked.add(name)
                continue
            del self.waiting[name]
            if name in self._locked and self.store.read(task.key) is not None:
                self.print_line(f"{task.name}: recorded by another process")
                continue
            self._submit(name, task)

    def _needed(self, key: RecordKey) -> list[str]:
        """Return the names of the records that a measurement needs."""
        source, scale = key.source, self.store.scale
        if not isinstance(source, Measurement):
            return []
        runs = [member for run in source.runs.values() for member in ensemble_keys(source, run, key.seed, scale)]
        others = [RecordKey(m, 0 if m.seed_independent else key.seed) for m in source.depends_on.values()]
        return [needed.name(scale) for needed in (*runs, *others)]

    def _submit(self, name: str, task: Task) -> None:
        """Submit the job of a task, and delete the note about its last failure."""
        FailureNote.of(task.key, self.store).clear()
        self._attempts[name] += 1
        results, work = (path.absolute().parent for path in (self.store.results, self.store.work))
        function = RecordJob(task.key, task.name, self.store.scale, results, work, self.settings, self.options.nice)
        with _signals_ignored():
            job = self.executor.submit(function)
        self.running[name] = job, task
        self.print_line(f"{task.name}: started job {job.job_id}")

    def collect(self) -> list[tuple[Task, TaskResult]]:
        """Return the tasks that have ended since the last call; those to be submitted again are waiting again."""
        ended = []
        for name, (job, task) in list(self.running.items()):
            if not job.done():
                continue
            del self.running[name]
            result = self._result(job)
            if result.outcome is TaskOutcome.LOCKED:
                self.waiting[name] = task
                self._locked.add(name)
                continue
            if result.outcome is TaskOutcome.STOPPED and self._attempts[name] < MAX_ATTEMPTS:
                self.print_line(f"{task.name}: {result}; it is submitted again")
                self.waiting = {name: task, **self.waiting}
                continue
            if result.outcome in (TaskOutcome.FAILED, TaskOutcome.STOPPED):
                FailureNote.of(task.key, self.store).write(result.detail)
            else:
                _remove_files(job)
            if result.outcome.unfinished:
                self.unfinished.append((task, result))
            ended.append((task, result))
        return ended

    def _result(self, job: Any) -> TaskResult:
        """Return the result of an ended job; a job that was killed has written none."""
        errors = import_optional("submitit.core.utils", "jobs")
        log = job.paths.stdout
        killed = TaskResult(TaskOutcome.STOPPED, detail=f"its job was killed (log: {log})")
        if self.options.executor == "local" and not job.paths.result_pickle.exists():
            return killed  # submitit would wait for the file, as network file systems need
        try:
            result: TaskResult = job.result()
        except errors.FailedJobError as error:  # before `RecordJob` was called, such as a failed import
            (*_, reason) = [line for line in str(error).splitlines() if "Error" in line] or [str(error)]
            return TaskResult(TaskOutcome.FAILED, detail=f"{reason.strip()} (log: {log})")
        except errors.UncompletedJobError:
            return killed
        is_failed = result.outcome is TaskOutcome.FAILED
        return dataclasses.replace(result, detail=f"{result.detail} (log: {log})") if is_failed else result

    def stop(self) -> int:
        """Stop all jobs and wait until local ones have saved their checkpoints; return the number still running."""
        for job, _ in self.running.values():
            if self.options.executor == "local":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(job.job_id), signal.SIGTERM)  # job.cancel() would kill it after one second
            else:
                job.cancel(check=False)  # Slurm sends SIGTERM, and SIGKILL after its KillWait
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while True:
            n_left = sum(not job.done() for job, _ in self.running.values())
            if not n_left or self.options.executor != "local" or time.monotonic() > deadline:
                return n_left
            time.sleep(POLL_INTERVAL_S)


def _remove_files(job: Any) -> None:
    """Remove the files of a job that succeeded: a long queue would leave thousands."""
    paths = job.paths
    for path in (paths.submitted_pickle, paths.result_pickle, paths.submission_file, paths.stdout, paths.stderr):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # jobs of this session are left in it
        paths.folder.rmdir()


@contextlib.contextmanager
def _signals_ignored() -> Iterator[None]:
    """Ignore SIGINT and SIGHUP inside the context, so that a new process ignores them as well.

    Both are sent to all processes of a terminal; submitit's controller would kill a job while it saves its checkpoint.
    """
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in INHERITED_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
