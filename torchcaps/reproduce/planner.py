"""Plan of the work for a table or figure: its runs and measurements, their state, and the cost of the rest."""

import dataclasses
import enum
import functools
import json
import time
from dataclasses import dataclass
from typing import Any

import torch

from torchcaps.bench.timing import training_step
from torchcaps.data.inspect import check_availability
from torchcaps.profiling.memory import estimate_memory
from torchcaps.reproduce.scales import Scale, run_spec, scaled_dataset
from torchcaps.reproduce.schema import Item, Measurement, ParameterCount, Run, Source
from torchcaps.reproduce.store import RecordKey, RecordStore
from torchcaps.training import RunSpec
from torchcaps.training.logging import read_metrics
from torchcaps.training.setup import RunData, adapt_to_data, build_network, open_data

__all__ = [
    "Task",
    "TaskPlan",
    "TaskState",
    "datasets_of",
    "ensemble_keys",
    "make_plan",
    "missing_datasets",
    "planned_keys",
    "record_keys",
    "task_names",
]

TIMED_STEPS = 2  # after one warm-up step
FORWARD_FRACTION = 1 / 3  # estimated time of an evaluation batch relative to a training step


class TaskState(enum.Enum):
    """State of a task."""

    DONE = "done"
    STARTED = "started"  # there is a checkpoint
    NEW = "new"
    DATA_MISSING = "data_missing"
    OTHER_SHARD = "other_shard"


@dataclass(frozen=True)
class Task:
    """A run or measurement and its state.

    Args:
        key: the record that the task produces.
        state: its state.
        steps: remaining training steps.
        seconds: estimated duration.
        memory: estimated peak memory in bytes.
        missing: data sets that are not in the data directory.
        name: description for progress output.
    """

    key: RecordKey
    state: TaskState
    steps: int = 0
    seconds: float = 0.0
    memory: int = 0
    missing: tuple[str, ...] = ()
    name: str = ""

    @property
    def pending(self) -> bool:
        """Whether the task has to be executed."""
        return self.state in (TaskState.STARTED, TaskState.NEW)

    @property
    def half_length(self) -> bool:
        """Whether the task belongs to the half-length companions of the compared runs."""
        return self.key.source.half_length


@dataclass(frozen=True)
class TaskPlan:
    """The tasks of an item in the order of execution."""

    tasks: tuple[Task, ...]

    @property
    def pending(self) -> list[Task]:
        """Tasks that have to be executed."""
        return [task for task in self.tasks if task.pending]

    @property
    def seconds(self) -> float:
        """Estimated duration of the pending tasks."""
        return sum(task.seconds for task in self.pending)

    def count(self, state: TaskState) -> int:
        """Return the number of tasks in a state."""
        return sum(task.state is state for task in self.tasks)

    def missing(self) -> tuple[str, ...]:
        """Return the data sets that are not in the data directory."""
        return tuple(dict.fromkeys(name for task in self.tasks for name in task.missing))


def record_keys(sources: list[Source], seeds: int, scale: Scale) -> list[RecordKey]:
    """Return the records that sources need, each once.

    The runs of the first seed come first, then those of the next; measurements follow, each after its dependencies.
    """
    runs: dict[RecordKey, None] = {}
    measurements: dict[RecordKey, None] = {}

    def add(source: Source, seed: int) -> None:
        """Add the records of a source for a seed, after those that it needs; seed-independent ones for seed 0 only."""
        if isinstance(source, Run):
            runs[RecordKey(source, seed)] = None
        elif isinstance(source, Measurement):
            if source.seed_independent and seed:
                return
            for run in source.runs.values():
                for key in ensemble_keys(source, run, seed, scale):
                    runs[key] = None
            for dependency in source.depends_on.values():
                add(dependency, seed)
            measurements[RecordKey(source, seed)] = None

    for seed in range(seeds):
        for source in sources:
            if not isinstance(source, ParameterCount):
                add(source, seed)
    return [*runs, *measurements]


def ensemble_keys(measurement: Measurement, run: Run, seed: int, scale: Scale) -> list[RecordKey]:
    """Return the keys of the networks that a measurement needs of one of its runs: one, or an ensemble."""
    size = min(measurement.ensemble_size, 2) if scale == "smoke" else measurement.ensemble_size
    return [RecordKey(run, seed * size + member) for member in range(size)]


def datasets_of(source: Source, scale: Scale) -> tuple[str, ...]:
    """Return the data sets that a source reads from the data directory at a scale."""
    if isinstance(source, ParameterCount) or scale == "smoke":
        return ()
    if isinstance(source, Run):
        recipe = run_spec(source, scale).recipe
        return tuple(dict.fromkeys(name for name in (recipe.data, recipe.test_data) if name))
    names = [scaled_dataset(name, scale)[0] for name in source.datasets]
    for needed in (*source.runs.values(), *source.depends_on.values()):
        names += datasets_of(needed, scale)
    return tuple(dict.fromkeys(names))


def missing_datasets(source: Source, scale: Scale, data_dir: str | None) -> tuple[str, ...]:
    """Return the data sets of a source that are not in the data directory."""
    return tuple(name for name in datasets_of(source, scale) if _is_missing(name, data_dir))


@functools.lru_cache(maxsize=64)
def _is_missing(name: str, data_dir: str | None) -> bool:
    return bool(check_availability(name, data_dir).missing)


def make_plan(
    item: Item,
    store: RecordStore,
    seeds: int,
    rows: tuple[str, ...] = (),
    columns: tuple[str, ...] = (),
    shard: tuple[int, int] = (1, 1),
    timed: bool = True,
    half_length: bool | None = None,
    **settings: Any,
) -> TaskPlan:
    """Return the plan for an item: its runs and measurements, then their half-length companions.

    Args:
        item: the table or figure.
        store: its records.
        seeds: number of seeds.
        rows: labels of the rows to run; all by default.
        columns: names of the columns to run; all by default.
        shard: (index from 1, count): each run is executed by one shard.
        timed: estimate durations by timing a few training steps; otherwise they are 0.
        half_length: include the half-length companions, without which no claim about trained networks is judged
            (default: at every scale except ``smoke``, at which no claim is judged).
        settings: fields of all runs that do not change their results, such as ``num_threads``.
    """
    keys = planned_keys(item, store.scale, seeds, rows, columns, half_length)
    repeated = _keys_to_repeat(keys, store)
    names = task_names(item, keys)
    tasks, counts = [], {Run: 0, Measurement: 0}
    images: dict[str, RunData] = {}  # shared by runs with equal data; freed with this plan, unlike the step costs
    for key in keys:
        index = counts[type(key.source)]
        counts[type(key.source)] += 1
        missing = missing_datasets(key.source, store.scale, settings.get("data_dir"))
        if store.read(key) is not None and key not in repeated:
            task = Task(key, TaskState.DONE)
        elif missing:
            task = Task(key, TaskState.DATA_MISSING, missing=missing)
        elif index % shard[1] != shard[0] - 1:
            task = Task(key, TaskState.OTHER_SHARD)
        elif isinstance(key.source, Measurement):
            seconds = key.source.estimated_seconds if timed and store.scale != "smoke" else 0.0
            task = Task(key, TaskState.NEW, seconds=seconds)
        else:
            task = _run_task(key, store, timed, settings, images)
        tasks.append(dataclasses.replace(task, name=names[key]))
    return TaskPlan(tuple(tasks))


def planned_keys(
    item: Item,
    scale: Scale,
    seeds: int,
    rows: tuple[str, ...] = (),
    columns: tuple[str, ...] = (),
    half_length: bool | None = None,
) -> list[RecordKey]:
    """Return the records of the plan for an item, in the order of execution; arguments as for `make_plan`."""
    keys = record_keys(item.sources(rows, columns), seeds, scale)
    if half_length if half_length is not None else scale != "smoke":
        names = {key.name(scale) for key in keys}  # a companion may equal a run of the item
        companions = record_keys(item.half_length_sources(rows, columns), seeds, scale)
        keys += [key for key in companions if key.name(scale) not in names]
    return keys


def task_names(item: Item, keys: list[RecordKey]) -> dict[RecordKey, str]:
    """Return the display name of each of an item's records, such as ``"Baseline CNN; MNIST, seed 0"``."""
    names = _run_names(item)
    return {key: _task_name(key, names) for key in keys}


def _run_names(item: Item) -> dict[Source, str]:
    """Return the display name of each run.

    This is the label of its first row (and the column, if runs are in several), or the measurement that needs it.
    """
    cells = [(row.label, column, cell.source) for row in item.rows for column, cell in row.cells.items()]
    columns = {column for _, column, source in cells if isinstance(source, Run)}
    names: dict[Source, str] = {}
    for label, column, source in cells:
        if isinstance(source, Run):
            names.setdefault(source, f"{label}; {column}" if len(columns) > 1 else label)
    for measurement in (source for source in item.sources() if isinstance(source, Measurement)):
        for run in measurement.runs.values():
            names.setdefault(run, f"{run.model} for {measurement.name}")
    return names


def _task_name(key: RecordKey, names: dict[Source, str]) -> str:
    """Return the display name of a task: its measurement or run, with length if half, and seed."""
    if isinstance(key.source, Measurement):
        return f"{key.source.name}, seed {key.seed}"
    full_length = dataclasses.replace(key.source, half_length=False)
    length = ", half length" if key.source.half_length else ""
    return f"{names.get(full_length, key.source.model)}{length}, seed {key.seed}"


def _keys_to_repeat(keys: list[RecordKey], store: RecordStore) -> set[RecordKey]:
    """Return keys that have a record but have to be executed again.

    A pending measurement needs the weights of a run, or the output file of another measurement, that are no longer in
    the working directory.
    """
    repeated = set()
    for key in keys:
        if not isinstance(key.source, Measurement) or store.read(key) is not None:
            continue
        for dependency in key.source.depends_on.values():
            other = RecordKey(dependency, 0 if dependency.seed_independent else key.seed)
            file = dependency.output_file
            if file and not (store.work_directory(other) / file).exists():
                repeated.add(other)
        for run in () if key.source.from_records else key.source.runs.values():
            for member in ensemble_keys(key.source, run, key.seed, store.scale):
                if not store.has_diverged(member) and not store.run_directory(member).results.exists():
                    repeated.add(member)
    return repeated


def _run_task(
    key: RecordKey, store: RecordStore, timed: bool, settings: dict[str, Any], opened: dict[str, RunData]
) -> Task:
    """Return the task of a run: state, remaining steps, and, if ``timed``, estimated seconds and memory.

    Args:
        key: the run and its seed.
        store: the records.
        timed: whether to time a few training steps.
        settings: fields of all runs that do not change their results.
        opened: data sets that are open already; extended by that of this run.
    """
    assert isinstance(key.source, Run)
    directory = store.run_directory(key)
    spec = run_spec(key.source, store.scale, key.seed, **settings)
    images = _open_images(spec, opened)
    batches_per_epoch = -(-len(images.train) // spec.recipe.batch_size)
    total = spec.recipe.steps or (spec.recipe.epochs or 1) * batches_per_epoch
    started = directory.config.exists()
    rows = read_metrics(directory.metrics) if started else []
    steps = max(0, total - (rows[-1]["step"] if rows else 0))
    seconds, memory = 0.0, 0
    if timed and steps:
        step_seconds, memory = _step_cost(spec, images)
        evaluations = max(1, steps // (spec.eval_interval_steps or batches_per_epoch)) + 1
        evaluated = images.val if images.val is not None else images.test
        batches = len(evaluated) / spec.recipe.batch_size if evaluated is not None else 0.0
        seconds = step_seconds * (steps + FORWARD_FRACTION * evaluations * batches)
    return Task(key, TaskState.STARTED if started else TaskState.NEW, steps, seconds, memory)


def _open_images(spec: RunSpec, opened: dict[str, RunData]) -> RunData:
    """Return the data of a run, from ``opened`` if a run with equal data settings was planned before."""
    recipe = spec.recipe
    names = (recipe.data, recipe.test_data, recipe.augmentation, recipe.val_fraction)
    options = (spec.max_train_images, spec.max_test_images, spec.data_options, spec.test_options)
    key = json.dumps([*names, *options, spec.data_dir, spec.seed])
    if key not in opened:
        opened[key] = open_data(spec)
    return opened[key]


_STEP_COSTS: dict[str, tuple[float, int]] = {}  # cache: seeds of a run cost the same


def _step_cost(spec: RunSpec, images: RunData) -> tuple[float, int]:
    """Return the measured seconds of a training step and the estimated bytes that it needs."""
    key = spec.record_name()
    if key not in _STEP_COSTS:
        if spec.num_threads:
            torch.set_num_threads(spec.num_threads)
        model = build_network(adapt_to_data(spec, images))
        step = training_step(model, spec.recipe.batch_size)
        durations = []
        for _ in range(1 + TIMED_STEPS):
            start = time.perf_counter()
            step()
            durations.append(time.perf_counter() - start)
        _STEP_COSTS[key] = min(durations[1:]), estimate_memory(model, spec.recipe.batch_size).total
    return _STEP_COSTS[key]
