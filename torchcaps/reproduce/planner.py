"""What has to be done for a table or figure: which runs, which of them are done, and what the rest takes here."""

import dataclasses
import functools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from torchcaps.data.inspect import check_availability
from torchcaps.models import Network
from torchcaps.profiling.memory import estimate_memory
from torchcaps.reproduce.scales import Scale, run_spec
from torchcaps.reproduce.schema import Item, Measure, Parameters, Run, Source
from torchcaps.reproduce.store import Job, Store
from torchcaps.routing import Quadratic
from torchcaps.training import RunSpec
from torchcaps.training.setup import Images, fitted, make_network, open_images

__all__ = ["Plan", "Task", "data_of", "jobs_of", "make_plan", "members_of", "missing_data", "timed_step"]

STEPS = 2  # that a time is measured from, after a first one that is not
FORWARD = 1 / 3  # of a training step's time: that of looking at a batch


@dataclass(frozen=True)
class Task:
    """A job and where it stands.

    Args:
        job: the run or measurement.
        state: ``"done"``, ``"begun"`` (there is a checkpoint), ``"new"``, ``"missing"`` (its data is not here) or
            ``"elsewhere"`` (another shard's).
        steps: that are left. seconds: that they are likely to take. memory: bytes that it takes.
        missing: the data sets that are not here.
        name: what a person calls it.
    """

    job: Job
    state: Literal["done", "begun", "new", "missing", "elsewhere"]
    steps: int = 0
    seconds: float = 0.0
    memory: int = 0
    missing: tuple[str, ...] = ()
    name: str = ""

    @property
    def open(self) -> bool:
        """Whether there is something to do."""
        return self.state in ("begun", "new")


@dataclass(frozen=True)
class Plan:
    """The tasks of an item, in the order in which they are worked through."""

    tasks: tuple[Task, ...]

    @property
    def open(self) -> list[Task]:
        """What is to be done."""
        return [task for task in self.tasks if task.open]

    @property
    def seconds(self) -> float:
        """What it is likely to take in all."""
        return sum(task.seconds for task in self.open)

    def missing(self) -> tuple[str, ...]:
        """Return the data sets that are not here."""
        return tuple(dict.fromkeys(name for task in self.tasks for name in task.missing))


def jobs_of(sources: list[Source], seeds: int, scale: Scale) -> list[Job]:
    """Return runs and measurements with their seeds, each once: all runs of a seed, then those of the next, then
    measurements, each after those that it needs.
    """
    runs: dict[Job, None] = {}
    measures: dict[Job, None] = {}

    def add(source: Source, seed: int) -> None:
        if isinstance(source, Run):
            runs[Job(source, seed)] = None
        elif isinstance(source, Measure):
            if source.once and seed:
                return
            for run in source.runs.values():
                for job in members_of(source, run, seed, scale):
                    runs[job] = None
            for before in source.after.values():
                add(before, seed)
            measures[Job(source, seed)] = None

    for seed in range(seeds):
        for source in sources:
            if not isinstance(source, Parameters):
                add(source, seed)
    return [*runs, *measures]


def members_of(measure: Measure, run: Run, seed: int, scale: Scale) -> list[Job]:
    """Return the runs that stand behind one of a measurement's networks: one, or those of an ensemble."""
    n = min(measure.members, 2) if scale == "smoke" else measure.members
    return [Job(run, seed * n + member) for member in range(n)]


def data_of(source: Source, store: Store) -> tuple[str, ...]:
    """Return the data sets that a source reads at a scale."""
    if isinstance(source, Parameters) or store.scale == "smoke":
        return ()
    if isinstance(source, Run):
        recipe = run_spec(source, store.scale).recipe
        return tuple(dict.fromkeys(name for name in (recipe.data, recipe.test_data) if name))
    names = list(source.data)
    if store.scale == "cpu":
        names = ["affnist-style" if name == "affnist" else name for name in names]
    for needed in (*source.runs.values(), *source.after.values()):
        names += data_of(needed, store)
    return tuple(dict.fromkeys(names))


def missing_data(source: Source, store: Store, data_dir: str | None) -> tuple[str, ...]:
    """Return the data sets that a source needs and that are not here."""
    return tuple(name for name in data_of(source, store) if _absent(name, data_dir))


@functools.lru_cache(maxsize=64)
def _absent(name: str, data_dir: str | None) -> bool:
    return bool(check_availability(name, data_dir).missing)


def make_plan(
    item: Item,
    store: Store,
    seeds: int,
    rows: tuple[str, ...] = (),
    columns: tuple[str, ...] = (),
    shard: tuple[int, int] = (1, 1),
    timed: bool = True,
    **own: Any,
) -> Plan:
    """Lay out the work for an item.

    Args:
        item: the table or figure.
        store: its records.
        seeds: how many.
        rows: labels of those that are wanted; all by default.
        columns: their names, in the same way.
        shard: (which, of how many): every run belongs to one of them.
        timed: measure how long steps take here; without it times are 0.
        own: fields of all runs, such as threads.
    """
    jobs = jobs_of(item.sources(rows, columns), seeds, store.scale)
    needed = _needed_again(jobs, store)
    names = _names(item)
    tasks, numbers = [], {Run: 0, Measure: 0}
    for job in jobs:
        number = numbers[type(job.source)]
        numbers[type(job.source)] += 1
        missing = missing_data(job.source, store, own.get("data_dir"))
        if store.record(job) is not None and job not in needed:
            tasks.append(Task(job, "done"))
        elif missing:
            tasks.append(Task(job, "missing", missing=missing))
        elif number % shard[1] != shard[0] - 1:
            tasks.append(Task(job, "elsewhere"))
        elif isinstance(job.source, Measure):
            tasks.append(Task(job, "new", seconds=job.source.seconds if timed and store.scale != "smoke" else 0.0))
        else:
            tasks.append(_run_task(job, store, timed, own))
    return Plan(tuple(dataclasses.replace(task, name=_name(task.job, names)) for task in tasks))


def _names(item: Item) -> dict[Source, str]:
    """Return what the runs of an item are called: by the first row that has them, and its column if there are more, or
    by the first measurement.
    """
    cells = [(row.label, column, cell.source) for row in item.rows for column, cell in row.cells.items()]
    columns = {column for _, column, source in cells if isinstance(source, Run)}
    names: dict[Source, str] = {}
    for label, column, source in cells:
        if isinstance(source, Run):
            names.setdefault(source, f"{label}; {column}" if len(columns) > 1 else label)
    for measure in (source for source in item.sources() if isinstance(source, Measure)):
        for run in measure.runs.values():
            names.setdefault(run, f"{run.model} for {measure.name}")
    return names


def _name(job: Job, names: dict[Source, str]) -> str:
    if isinstance(job.source, Measure):
        return f"{job.source.name}, seed {job.seed}"
    return f"{names.get(job.source, job.source.model)}, seed {job.seed}"


def _needed_again(jobs: list[Job], store: Store) -> set[Job]:
    """Return what must be done again although its record is there: a measurement needs the weights of a run, or a file
    of another measurement, which are not in the working folder.
    """
    needed = set()
    for job in jobs:
        if not isinstance(job.source, Measure) or store.record(job) is not None:
            continue
        for before in job.source.after.values():
            other = Job(before, 0 if before.once else job.seed)
            if before.leaves and not (store.work / other.key(store.scale) / before.leaves).exists():
                needed.add(other)
        for run in job.source.runs.values():
            for member in members_of(job.source, run, job.seed, store.scale):
                record = store.record(member)
                diverged = record is not None and record["found"].get("diverged")
                if not diverged and not store.folder(member).results.exists():
                    needed.add(member)
    return needed


def _run_task(job: Job, store: Store, timed: bool, own: dict[str, Any]) -> Task:
    assert isinstance(job.source, Run)
    folder = store.folder(job)
    spec = run_spec(job.source, store.scale, job.seed, **own)
    images = _opened(_data_key(spec), spec)
    per_epoch = -(-len(images.train) // spec.recipe.batch_size)
    steps = spec.recipe.steps or (spec.recipe.epochs or 1) * per_epoch
    begun = folder.config.exists()
    done = _step_reached(store, job) if begun else 0
    left = max(0, steps - done)
    seconds, memory = 0.0, 0
    if timed and left:
        step, memory = _step_cost(spec.record_name(), spec, images)
        looks = max(1, left // (spec.eval_interval_steps or per_epoch)) + 1
        watched = images.held_out if images.held_out is not None else images.test
        batches = len(watched) / spec.recipe.batch_size if watched is not None else 0.0
        seconds = step * (left + FORWARD * looks * batches)
    return Task(job, "begun" if begun else "new", left, seconds, memory)


def _step_reached(store: Store, job: Job) -> int:
    """Return the step of the last row that a run has written: near where it will go on."""
    from torchcaps.training.logging import read_metrics

    rows = read_metrics(store.folder(job).metrics)
    return rows[-1]["step"] if rows else 0


def _data_key(spec: RunSpec) -> str:
    recipe = spec.recipe
    parts = (
        recipe.data,
        recipe.test_data,
        recipe.augmentation,
        recipe.val_fraction,
        spec.max_train_images,
        spec.max_test_images,
    )
    return json.dumps([*parts, spec.data_options, spec.test_options, spec.data_dir, spec.seed])


_OPEN: dict[str, Images] = {}


def _opened(key: str, spec: RunSpec) -> Images:
    """Open the images of a run, once for all that read the same."""
    if key not in _OPEN:
        _OPEN[key] = open_images(spec)
    return _OPEN[key]


_COSTS: dict[str, tuple[float, int]] = {}


def _step_cost(name: str, spec: RunSpec, images: Images) -> tuple[float, int]:
    """Return the seconds of a training step here, measured from a few, and the bytes that it takes; once for a run."""
    if name not in _COSTS:
        if spec.num_threads:
            torch.set_num_threads(spec.num_threads)
        model = make_network(fitted(spec, images))
        step = timed_step(model, spec.recipe.batch_size)
        times = []
        for _ in range(1 + STEPS):
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
        _COSTS[name] = min(times[1:]), estimate_memory(model, spec.recipe.batch_size).total
    return _COSTS[name]


def timed_step(model: Network, n: int) -> Callable[[], None]:
    """Return a function that takes a training step with ``n`` images of noise, with what the model's recipe has: its
    loss, its optimiser, its steps of ascent.
    """
    recipe = model.recipe
    loss, optimizer = model.loss(), recipe.optimizer.make(model.parameters())
    images, labels, targets = _noise(model, n)

    def step() -> None:
        optimizer.zero_grad()
        loss(model(images, labels), labels, targets).backward()
        optimizer.step()
        for _ in range(recipe.ascents):
            Quadratic.ascend(model, images, labels)

    return step


def _noise(model: Network, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return images, labels and targets of a model's shapes, to time it with."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(n, *model.spec.image, generator=generator)
    if model.n_objects == 1:
        return images, torch.randint(model.spec.classes, (n,), generator=generator), images
    objects = model.n_objects or 2
    numbers = torch.stack([torch.randperm(model.spec.classes, generator=generator)[:objects] for _ in range(n)])
    labels = numbers
    if model.n_objects is None:
        labels = torch.zeros(n, model.spec.classes).scatter_(1, numbers, 1.0)
    return images, labels, images.unsqueeze(1).expand(-1, objects, -1, -1, -1)
