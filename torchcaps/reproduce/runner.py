"""Working through a plan: every run and measurement in its turn, each recorded when it is over."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchcaps._core.optional import import_optional
from torchcaps.reproduce.context import Context
from torchcaps.reproduce.planner import Plan, Task, members_of
from torchcaps.reproduce.scales import run_spec
from torchcaps.reproduce.schema import Measure, Run
from torchcaps.reproduce.store import Job, Store, write_whole
from torchcaps.training import DivergenceError, RunSpec, load_run, resume, train
from torchcaps.training.errors import RunError, RunInUseError
from torchcaps.training.evaluation import Tally
from torchcaps.training.inference import right_images
from torchcaps.training.logging import ConsoleLogger
from torchcaps.training.run_dir import RunFolder
from torchcaps.training.setup import open_test

__all__ = ["Bar", "work_through"]


class Bar(ConsoleLogger):
    """One bar for the whole plan on a terminal; elsewhere a line for each job.

    Args:
        plan: what is to be done.
        say: prints a line.
    """

    def __init__(self, plan: Plan, terminal: bool, say: Callable[[str], object] = print) -> None:
        super().__init__(enabled=False)  # runs are quiet: this speaks for them
        self.plan, self.tall, self.line = plan, terminal, say
        self._progress: Any = None
        self._share = 0.0
        self._before = 0.0
        self._quiet = time.monotonic()

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Show the bar while the work goes on."""
        if not self.tall:
            yield
            return
        rich = import_optional("rich.progress", "the progress bar")
        columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), rich.TaskProgressColumn())
        self._progress = rich.Progress(*columns, rich.TimeRemainingColumn(compact=True), refresh_per_second=4)
        with self._progress:
            self._task = self._progress.add_task("", total=sum(_share(task) for task in self.plan.open))
            yield
        self._progress = None

    def begin(self, number: int, count: int, task: Task) -> None:
        """Take note that a job begins."""
        self._name, self._steps, self._share = f"{number} of {count}: {task.name}", max(1, task.steps), _share(task)
        self._first: int | None = None
        self._begun = self._quiet = time.monotonic()
        if self._progress is not None:
            self._progress.update(self._task, description=self._name)

    def end(self, words: str) -> None:
        """Take note that it is over."""
        self._before += self._share
        if self._progress is not None:
            self._progress.update(self._task, completed=self._before)
            self._progress.console.print(f"{self._name}: {words}", markup=False, highlight=False)
        else:
            self.line(f"{self._name}: {words}")

    @contextlib.contextmanager
    def progress(self, total: int, completed: int) -> Iterator[None]:
        """Show no bar of a single run's own."""
        yield

    def on_step(self, step: int, epoch: float, total: int, tally: Tally) -> None:
        """Move on."""
        if self._first is None:
            self._first = step - 1
        share = min(1.0, (step - self._first) / self._steps)
        if self._progress is not None:
            self._progress.update(self._task, completed=self._before + share * self._share)
        elif time.monotonic() - self._quiet > 60:
            self._quiet = time.monotonic()
            self.line(f"{self._name}: step {step:,} of {total:,}")

    def on_eval_batch(self) -> None:
        """Look alive: a measurement has no steps to tell."""
        if self._progress is not None:
            self._progress.refresh()
        elif time.monotonic() - self._quiet > 60:
            self._quiet = time.monotonic()
            self.line(f"{self._name}: at work for {(self._quiet - self._begun) / 60:.0f} minutes")

    def on_metrics(self, row: dict[str, Any], epochs: int | None) -> None:
        """Say nothing of an epoch: the record has it."""


def _share(task: Task) -> float:
    """Return how much of the bar a task is: its seconds, or as much as any other where they are not known."""
    return task.seconds or 1.0


def work_through(plan: Plan, store: Store, bar: Bar, **own: Any) -> list[str]:
    """Do what a plan says; return what could not be done, in words."""
    problems: list[str] = []
    todo = plan.open
    with bar.open():
        for number, task in enumerate(todo, start=1):
            job = task.job
            bar.begin(number, len(todo), task)
            words = (_train if isinstance(job.source, Run) else _measured)(job, store, bar, own)
            if words.startswith("waits"):
                problems.append(f"{task.name} {words}")
            bar.end(words)
    return problems


def _train(job: Job, store: Store, bar: Bar, own: dict[str, Any]) -> str:
    assert isinstance(job.source, Run)
    folder = store.folder(job)
    spec = run_spec(job.source, store.scale, job.seed, checkpoint_interval_minutes=1.0, **own)
    try:
        with contextlib.suppress(OSError):
            folder.path.mkdir(parents=True, exist_ok=True)
        folder.hold()
        folder.release()
        _same_settings(folder, spec)
        if not folder.config.exists():
            train(spec, folder.path, console=bar, figures=False)
        elif not folder.results.exists():
            resume(folder.path, console=bar, figures=False)
    except RunInUseError as error:  # at the first look, or between it and the training
        return f"waits, another process has it ({error}): run this again when it is done"
    except DivergenceError as error:
        store.write_diverged(job, spec, str(error))
        return f"diverged: {error}"
    trained = load_run(folder.path)
    images = open_test(trained.spec)
    right = None if images is None else right_images(trained, images)
    store.write_run(job, right)
    found = store.record(job)
    assert found is not None
    accuracy = found["found"]["accuracy"]
    words = f"{100 * accuracy:.2f} % right" if accuracy is not None else "done"
    return f"{words}, {found['found']['seconds']:.0f} s"


def _same_settings(folder: RunFolder, spec: RunSpec) -> None:
    """Refuse to go on with a run whose settings were others when it was begun: a default has changed since.

    They stand in a file beside the folder, since the folder of a new run must be empty.
    """
    told = folder.path.with_name(f"{folder.path.name}.json")
    now = json.dumps(spec.identity(), indent=1)
    if not folder.config.exists() or not told.exists():
        write_whole(told, now.encode())
    elif told.read_text(encoding="utf-8", errors="replace") != now:
        raise RunError(
            f"{folder.path} was begun with other settings than it would have now: remove it, and it is begun again"
        )


def _measured(job: Job, store: Store, bar: Bar, own: dict[str, Any]) -> str:
    measure = job.source
    assert isinstance(measure, Measure)
    runs: dict[str, Any] = {}
    for name, run in measure.runs.items():
        members = members_of(measure, run, job.seed, store.scale)
        lacking = [member for member in members if not store.folder(member).results.exists()]
        if lacking:
            record = store.record(lacking[0])
            if record is not None and record["found"].get("diverged"):
                return f"can't be done: {lacking[0].key(store.scale)} diverged"
            return f"waits for {lacking[0].key(store.scale)}, which is not done: run it again then"
        for member in members:
            _same_settings(store.folder(member), run_spec(run, store.scale, member.seed, **own))
        loaded = [load_run(store.folder(member).path) for member in members]
        runs[name] = loaded[0] if measure.members == 1 else loaded
    if own.get("num_threads"):
        torch.set_num_threads(own["num_threads"])
    records = {}
    for name, before in measure.after.items():
        found = store.record(Job(before, 0 if before.once else job.seed))
        if found is None:
            return f"waits for the measurement {before.name}: run it again then"
        records[name] = found["found"]
    folder = store.work / job.key(store.scale)
    context = Context(store.scale, job.seed, folder, own.get("data_dir"), bar.on_eval_batch, records)
    options = {k: v for k, v in store.options(job).items() if k not in ("runs", "after", "version")}
    torch.set_flush_denormal(True)  # as in training
    start = time.monotonic()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.seed)
        found = measure.function(context, **runs, **options)
    seconds = time.monotonic() - start
    store.write_measure(job, found, seconds)
    return f"measured, {seconds:.0f} s"
