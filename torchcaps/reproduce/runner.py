"""Execution of a plan: train or measure each task in turn and write its record when it has finished."""

import contextlib
import enum
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchcaps._core.files import reason_of, write_atomic
from torchcaps._core.optional import import_optional
from torchcaps._core.serialize import is_subset
from torchcaps.analysis import ANALYSES, Subject, run_analysis
from torchcaps.data import Batch, Dataset, create_dataset
from torchcaps.data.registry import find_spec
from torchcaps.models import Network
from torchcaps.reproduce.planner import Task, TaskPlan, ensemble_keys
from torchcaps.reproduce.scales import Scale, run_spec, scaled_dataset
from torchcaps.reproduce.schema import Measurement, Run
from torchcaps.reproduce.store import RecordKey, RecordStore
from torchcaps.training import DivergenceError, RunSpec, TrainedRun, load_run, resume, train
from torchcaps.training.errors import RunError, RunInUseError
from torchcaps.training.evaluation import RunningEvaluation
from torchcaps.training.logging import ConsoleLogger, Expectation
from torchcaps.training.run_dir import RunDirectory
from torchcaps.training.setup import limit_images

__all__ = [
    "MeasurementContext",
    "PlanProgress",
    "TaskOutcome",
    "TaskResult",
    "execute_plan",
    "execute_task",
    "first_of_each_class",
]

STATUS_INTERVAL_S = 60.0  # between two status lines if the output is not a terminal


@dataclass(frozen=True)
class MeasurementContext:
    """Context of a measurement: scale, seed, directories, data sets.

    Args:
        scale, seed: scale and seed of the record.
        directory: working directory of the measurement, for checkpoints and output files.
        data_dir: the data directory.
        progress: called regularly, to update the progress bar.
        dependencies: results of the measurements that it depends on, by name.
    """

    scale: Scale
    seed: int
    directory: Path
    data_dir: str | None = None
    progress: Callable[[], object] = lambda: None
    dependencies: dict[str, dict[str, Any]] = field(default_factory=dict)

    def dataset(self, name: str, split: str = "test", n: int | None = None, **options: Any) -> Dataset:
        """Return a data set, or ``n`` images spread over it; see `scaled_dataset` for replacements at smaller scales.

        Options that the data set does not have are ignored.
        """
        name, overrides = scaled_dataset(name, self.scale)
        known = set(type(find_spec(name)).__dataclass_fields__)
        accepted = {key: value for key, value in {**options, **overrides}.items() if key in known}
        return limit_images(create_dataset(name, split, self.data_dir, **accepted), n)

    def batch(self, run: TrainedRun, name: str, n: int, split: str = "test", **options: Any) -> Batch:
        """Return ``n`` images of a data set, preprocessed for a trained network."""
        batches = list(run.loader(self.dataset(name, split, n, **options)).epoch(0))
        parts = [[getattr(batch, key) for batch in batches] for key in ("images", "labels", "targets", "indices")]
        return Batch(*(torch.cat(part) for part in parts))

    def test_batch(self, run: TrainedRun, n: int, **options: Any) -> Batch:
        """Return ``n`` test images of the data set that a network was trained on."""
        return self.batch(run, run.spec.recipe.data, n, **{**run.spec.data_options, **options})

    def analyze(
        self, run: TrainedRun, analysis: str, n: int, data: str = "", model: Network | None = None, **options: Any
    ) -> Any:
        """Return the result of a registered analysis (`torchcaps.analysis.run_analysis`) on ``n`` test images.

        Args:
            run: the trained network.
            analysis: name of the analysis.
            n: number of images.
            data: name of the data set; by default the one that the network was trained on.
            model: a network that is analysed instead, on the same images.
            options: options of the analysis.
        """
        batch = self.batch(run, data, n) if data else self.test_batch(run, n)
        network = run.model if model is None else model
        subject = Subject(network.name, network, batch, track=lambda n_steps: self.progress)
        result = run_analysis(analysis, subject, **options).result
        return result[subject.name] if ANALYSES.get(analysis).compares_models else result


def first_of_each_class(labels: Tensor, n: int) -> Tensor:
    """Return the indices of the first ``n`` images of each class, ordered by class."""
    return torch.cat([(labels == label).nonzero()[:n, 0] for label in labels.unique(sorted=True)])


class TaskOutcome(enum.Enum):
    """How the execution of a task ended."""

    TRAINED = "trained"
    MEASURED = "measured"
    DIVERGED = "diverged"
    LOCKED = "locked"  # another process executes it
    DEPENDENCY_PENDING = "dependency_pending"
    DEPENDENCY_DIVERGED = "dependency_diverged"
    STOPPED = "stopped"  # by a signal; resumes from its checkpoint
    FAILED = "failed"  # an error in its job

    @property
    def unfinished(self) -> bool:
        """Whether the same command has to be run again later."""
        pending = (TaskOutcome.LOCKED, TaskOutcome.DEPENDENCY_PENDING, TaskOutcome.STOPPED, TaskOutcome.FAILED)
        return self in pending


@dataclass(frozen=True)
class TaskResult:
    """Result of executing a task.

    Args:
        outcome: how it ended.
        seconds: duration of the training run or measurement.
        accuracy: test accuracy of a run, 0 to 1.
        detail: name of the record it depends on, or the reason of a divergence, lock, stop or failure.
    """

    outcome: TaskOutcome
    seconds: float = 0.0
    accuracy: float | None = None
    detail: str = ""

    def __str__(self) -> str:
        if self.outcome is TaskOutcome.TRAINED:
            accuracy = "trained" if self.accuracy is None else f"test accuracy {100 * self.accuracy:.2f} %"
            return f"{accuracy}, {self.seconds:.0f} s"
        if self.outcome is TaskOutcome.MEASURED:
            return f"measured, {self.seconds:.0f} s"
        if self.outcome is TaskOutcome.DIVERGED:
            return f"diverged: {self.detail}"
        if self.outcome is TaskOutcome.LOCKED:
            return f"skipped, another process executes it ({self.detail}): run this command again when it has finished"
        if self.outcome is TaskOutcome.DEPENDENCY_PENDING:
            return f"skipped, {self.detail} has not finished: run this command again when it has"
        if self.outcome is TaskOutcome.DEPENDENCY_DIVERGED:
            return f"not possible: {self.detail} diverged"
        return f"{self.outcome.value}: {self.detail}"


class PlanProgress(ConsoleLogger):
    """Progress of a plan: one bar on a terminal, otherwise one line per task.

    Args:
        plan: the plan.
        terminal: whether to draw a bar.
        print_line: prints a line.
    """

    def __init__(self, plan: TaskPlan, terminal: bool, print_line: Callable[[str], object] = print) -> None:
        super().__init__(enabled=False)  # a run prints nothing itself
        self.plan, self.draws_bar, self.print_line = plan, terminal, print_line
        self._progress: Any = None
        self._weight = 0.0  # of the present task
        self._completed = 0.0  # weight of the finished tasks
        self._printed_at = time.monotonic()

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Show the bar inside the context."""
        if not self.draws_bar:
            yield
            return
        rich = import_optional("rich.progress", "the progress bar")
        columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), rich.TaskProgressColumn())
        self._progress = rich.Progress(*columns, rich.TimeRemainingColumn(compact=True), refresh_per_second=4)
        with self._progress:
            self._task = self._progress.add_task("", total=sum(_bar_weight(task) for task in self.plan.pending))
            yield
        self._progress = None

    def begin(self, index: int, count: int, task: Task) -> None:
        """Start a task, the ``index``-th (from 1) of ``count``."""
        self._name, self._steps = f"{index} of {count}: {task.name}", max(1, task.steps)
        self._weight = _bar_weight(task)
        self._first_step: int | None = None
        self._started_at = self._printed_at = time.monotonic()
        if self._progress is not None:
            self._progress.update(self._task, description=self._name)

    def end(self, result: TaskResult) -> None:
        """Finish the present task."""
        self._completed += self._weight
        line = f"{self._name}: {result}"
        if self._progress is not None:
            self._progress.update(self._task, completed=self._completed)
            self._progress.console.print(line, markup=False, highlight=False)
        else:
            self.print_line(line)

    @contextlib.contextmanager
    def progress(self, total: int, completed: int) -> Iterator[None]:
        """Show no bar for a single run."""
        yield

    def on_step(self, step: int, epoch: float, expected: Expectation, train_metrics: RunningEvaluation) -> None:
        """Advance the bar by a training step."""
        if self._first_step is None:
            self._first_step = step - 1
        fraction = min(1.0, (step - self._first_step) / self._steps)
        if self._progress is not None:
            self._progress.update(self._task, completed=self._completed + fraction * self._weight)
        elif self._status_due():
            self.print_line(f"{self._name}: step {step:,} of {expected.steps:,}")

    def on_eval_batch(self) -> None:
        """Refresh the bar during a measurement, which reports no steps."""
        if self._progress is not None:
            self._progress.refresh()
        elif self._status_due():
            minutes = (self._printed_at - self._started_at) / 60
            self.print_line(f"{self._name}: running for {minutes:.0f} minutes")

    def _status_due(self) -> bool:
        """Return whether the status was last printed longer ago than the interval."""
        now = time.monotonic()
        due = now - self._printed_at > STATUS_INTERVAL_S
        self._printed_at = now if due else self._printed_at
        return due

    def on_metrics(self, row: dict[str, Any], expected: Expectation) -> None:
        """Print nothing per epoch: the record has the curve."""


def _bar_weight(task: Task) -> float:
    """Return the part of the bar that a task takes: its estimated seconds, or 1 if they are unknown."""
    return task.seconds or 1.0


def execute_plan(
    plan: TaskPlan, store: RecordStore, progress: PlanProgress, **settings: Any
) -> list[tuple[Task, TaskResult]]:
    """Execute the pending tasks of a plan; return those that could not be finished yet."""
    unfinished = []
    tasks = plan.pending
    with progress.open():
        for index, task in enumerate(tasks, start=1):
            progress.begin(index, len(tasks), task)
            result = execute_task(task.key, store, progress, settings)
            if result.outcome.unfinished:
                unfinished.append((task, result))
            progress.end(result)
    return unfinished


def execute_task(key: RecordKey, store: RecordStore, progress: PlanProgress, settings: dict[str, Any]) -> TaskResult:
    """Train a run or execute a measurement, and write its record.

    Args:
        key: the record.
        store: where the record is written.
        progress: shows the progress.
        settings: fields of the run that do not change its result, such as ``num_threads``.
    """
    if isinstance(key.source, Run):
        return _train(key, store, progress, settings)
    with RunDirectory(store.work_directory(key)) as directory:
        try:
            directory.path.mkdir(parents=True, exist_ok=True)
            directory.lock()
        except OSError as error:
            raise RunError(f"{directory.path} can't be created: {reason_of(error)}") from error
        except RunInUseError as error:
            return TaskResult(TaskOutcome.LOCKED, detail=str(error))
        return _measure(key, store, progress, settings)


def _train(key: RecordKey, store: RecordStore, progress: PlanProgress, settings: dict[str, Any]) -> TaskResult:
    """Train a run, or resume it, and write its record."""
    assert isinstance(key.source, Run)
    directory = store.run_directory(key)
    spec = run_spec(key.source, store.scale, key.seed, checkpoint_interval_minutes=1.0, **settings)
    try:
        with contextlib.suppress(OSError):
            directory.path.mkdir(parents=True, exist_ok=True)
        directory.lock()
        directory.release()
        _check_settings(directory, spec)
        if not directory.config.exists():
            train(spec, directory.path, console=progress, figures=False)
        elif not directory.results.exists():
            resume(directory.path, console=progress, figures=False)
    except RunInUseError as error:  # by the first check, or between it and the training
        return TaskResult(TaskOutcome.LOCKED, detail=str(error))
    except DivergenceError as error:
        store.write_diverged(key, spec, str(error))
        return TaskResult(TaskOutcome.DIVERGED, detail=str(error))
    store.write_run(key)
    record = store.read(key)
    assert record is not None
    return TaskResult(TaskOutcome.TRAINED, record["results"]["seconds"], record["results"]["accuracy"])


def _check_settings(directory: RunDirectory, spec: RunSpec) -> None:
    """Raise a `RunError` if a run was started with other settings, because a default has changed since.

    The settings are in a file next to the run directory, since the directory of a new run must be empty. A setting that
    the file lacks was added later, see `RecordStore.read`.
    """
    path = directory.path.with_name(f"{directory.path.name}.json")
    settings = json.dumps(spec.identity(), indent=1)
    if not directory.config.exists() or not path.exists():
        write_atomic(path, settings, RunError, sweep=True)
        return
    try:
        is_same = is_subset(json.loads(path.read_text(encoding="utf-8", errors="replace")), json.loads(settings))
    except ValueError:  # a damaged file
        is_same = False
    if not is_same:
        raise RunError(f"{directory.path} was started with other settings: remove it to train the run again")


def _measure(key: RecordKey, store: RecordStore, progress: PlanProgress, settings: dict[str, Any]) -> TaskResult:
    """Execute a measurement, if its runs and dependencies are finished, and write its record."""
    measurement = key.source
    assert isinstance(measurement, Measurement)
    runs: dict[str, Any] = {}
    for name, run in measurement.runs.items():
        members = ensemble_keys(measurement, run, key.seed, store.scale)
        for member in members:
            diverged = store.has_diverged(member)
            finished = store.run_directory(member).results.exists()
            if measurement.from_records:
                finished = store.read(member) is not None and not diverged
            if not finished:
                outcome = TaskOutcome.DEPENDENCY_DIVERGED if diverged else TaskOutcome.DEPENDENCY_PENDING
                return TaskResult(outcome, detail=f"the run {member.name(store.scale)}")
        if measurement.from_records:
            records = [store.read(member) for member in members]
            runs[name] = records[0] if measurement.ensemble_size == 1 else records
            continue
        for member in members:
            _check_settings(store.run_directory(member), run_spec(run, store.scale, member.seed, **settings))
        networks = [load_run(store.run_directory(member).path) for member in members]
        runs[name] = networks[0] if measurement.ensemble_size == 1 else networks
    if settings.get("num_threads"):
        torch.set_num_threads(settings["num_threads"])
    dependencies = {}
    for name, other in measurement.depends_on.items():
        record = store.read(RecordKey(other, 0 if other.seed_independent else key.seed))
        if record is None:
            return TaskResult(TaskOutcome.DEPENDENCY_PENDING, detail=f"the measurement {other.name}")
        dependencies[name] = record["results"]
    directory, data_dir = store.work_directory(key), settings.get("data_dir")
    context = MeasurementContext(store.scale, key.seed, directory, data_dir, progress.on_eval_batch, dependencies)
    torch.set_flush_denormal(True)  # as in training
    start = time.monotonic()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(key.seed)
        results = measurement.function(context, **runs, **store.options(measurement))
    seconds = time.monotonic() - start
    store.write_measurement(key, results, seconds)
    return TaskResult(TaskOutcome.MEASURED, seconds)
