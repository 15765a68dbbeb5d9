"""Execution of the work of ``torchcaps reproduce``: flags, plans, in this process or as jobs, and the tables."""

import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from torchcaps._core.files import reason_of, staging_directory
from torchcaps.cli.parser import Parser
from torchcaps.reproduce.executors import EXECUTORS, ExecutorName, JobOptions, check_executor
from torchcaps.reproduce.jobs import execute_jobs
from torchcaps.reproduce.planner import Task, TaskPlan, TaskState, make_plan, missing_datasets
from torchcaps.reproduce.render import render_item, write_item
from torchcaps.reproduce.runner import PlanProgress, TaskOutcome, TaskResult, execute_plan
from torchcaps.reproduce.scales import SCALES, Scale
from torchcaps.reproduce.schema import Item, Paper, Run, TableRow
from torchcaps.reproduce.store import RESULTS_DIRECTORY, WORK_DIRECTORY, RecordStore
from torchcaps.training.errors import RunError

__all__ = [
    "SCALE_HELP",
    "WorkItem",
    "add_execution_flags",
    "add_store_flags",
    "check_execution_flags",
    "check_scale",
    "check_writable",
    "describe_total",
    "run_work",
]

SCALE_HELP = f"Scale: {', '.join(SCALES[:-1])} or {SCALES[-1]}"
SLURM_FLAGS = ("partition", "time_minutes", "memory_gb", "cpus")


@dataclass(frozen=True)
class WorkItem:
    """A table or figure, or a part of it, that is to be reproduced.

    Args:
        paper, item: the table or figure.
        rows, columns: labels and names of a part of it; all by default.
        seeds: number of seeds.
    """

    paper: Paper
    item: Item
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    seeds: int = 1


# Flags ---------------------------------------------------------------------------------------------------------


def add_store_flags(parser: Parser, scale: str) -> None:
    """Add ``--scale`` with its default, ``--results``, ``--work`` and ``--data-dir``."""
    parser.add_argument("--scale", default=scale, help=SCALE_HELP)
    parser.add_argument("--data-dir", type=str | None, help="Data directory (default: TORCHCAPS_DATA)")
    parser.add_argument(
        "--results", default=str(RESULTS_DIRECTORY), help="Directory of the records, tables and figures"
    )
    parser.add_argument("--work", default=str(WORK_DIRECTORY), help="Directory of the training runs and checkpoints")


def add_execution_flags(parser: Parser) -> None:
    """Add the flags that decide how work is executed: plan, shard, threads, executor."""
    parser.add_argument("--shard", default="1/1", help="Run one shard of the work: INDEX/COUNT, such as 2/8")
    parser.add_argument(
        "--half-length",
        type=bool,
        default=True,
        help="Also train the runs that a claim compares for half their length, without which it is not judged; "
        "never done at the scale smoke, which judges no claim",
    )
    parser.add_argument("--plan", type=bool, default=False, help="Print the plan and exit")
    parser.add_argument(
        "--num-threads",
        type=int | None,
        help="Number of CPU threads (default: number of cores; 1 with several jobs; --cpus on Slurm)",
    )
    parser.add_argument(
        "--executor",
        type=ExecutorName | None,
        help="Run each run and measurement as a job of its own: local (processes of this machine) or slurm (default: "
        "one after the other in this process); needs pip install 'torchcaps[cluster]'",
    )
    parser.add_argument("--jobs", type=int | None, help="Number of jobs at a time (default: 1)")
    parser.add_argument("--nice", type=int, default=0, help="Niceness added to the jobs, 0 to 19")
    parser.add_argument("--partition", type=str | None, help="Slurm: partition (default: the cluster's)")
    parser.add_argument(
        "--time-minutes",
        type=int | None,
        help="Slurm: time limit of a job, which is requeued and resumes after it (default: 240)",
    )
    parser.add_argument("--memory-gb", type=float | None, help="Slurm: memory of a job (default: the cluster's)")
    parser.add_argument("--cpus", type=int | None, help="Slurm: CPUs of a job (default: --num-threads, or 1)")


def check_execution_flags(parser: Parser, options: Any) -> None:
    """Exit with an error for invalid flags; parse ``shard`` and set ``job_options``."""
    check_scale(parser, options.scale)
    for name in ("results", "work"):
        if not options[name]:
            parser.error(f"--{name} needs a directory")
    if options.num_threads is not None and options.num_threads < 1:
        parser.error(f"--num-threads must be 1 or more, got {options.num_threads}")
    match = re.fullmatch(r"(\d+)/(\d+)", options.shard)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        parser.error(f"--shard must be INDEX/COUNT with 1 <= INDEX <= COUNT, such as 2/8, got {options.shard!r}")
    options.shard = (int(match[1]), int(match[2]))
    options.job_options = _job_options(parser, options)


def _job_options(parser: Parser, options: Any) -> JobOptions | None:
    """Return the settings of the executor; ``None`` without ``--executor``."""
    if options.executor is None:
        given = [name for name in ("jobs", *SLURM_FLAGS) if options[name] is not None] + ["nice"] * bool(options.nice)
        if given:
            flag = f"--{given[0].replace('_', '-')}"
            parser.error(f"{flag} needs --executor {' or '.join(EXECUTORS)}, got no executor")
        return None
    fields = {name: options[name] for name in ("num_threads", "nice", *SLURM_FLAGS)}
    try:
        return JobOptions(options.executor, jobs=1 if options.jobs is None else options.jobs, **fields)
    except ValueError as error:
        name, _, rest = str(error).partition(" ")
        parser.error(f"--{name.replace('_', '-')} {rest}")


def check_scale(parser: Parser, scale: str) -> None:
    """Exit with an error if a scale does not exist."""
    if scale not in SCALES:
        parser.error(f"--scale must be {', '.join(SCALES[:-1])} or {SCALES[-1]}, got {scale!r}")


def check_writable(parser: Parser, options: Any) -> None:
    """Exit with an error if a directory can't be written, before anything is trained."""
    for name in ("results", "work"):
        directory = Path(options[name]).expanduser()
        if directory.exists() and not directory.is_dir():
            parser.error(f"--{name} must be a directory, got the file {directory}")
        try:
            with staging_directory(directory) as own:
                (own / "probe").touch()
        except OSError as error:
            parser.error(f"--{name} {directory} can't be written: {reason_of(error)}")


# Execution -----------------------------------------------------------------------------------------------------


def run_work(work: list[WorkItem], store: RecordStore, options: Any) -> None:
    """Print the plan of each item, execute it, and write and print the tables.

    Raises:
        RunError: a job failed.
    """
    settings = {"num_threads": options.num_threads, "data_dir": _absolute(options.data_dir)}
    settings = {name: value for name, value in settings.items() if value is not None}
    jobs: JobOptions | None = options.job_options
    if jobs is not None and not options.plan:
        check_executor(jobs.executor)
    plans = []
    for entry in work:
        paper, item = entry.paper, entry.item
        print(f"{paper.name}, {item.title}, scale {store.scale}: {item.description}")
        timed = store.scale != "smoke" and (jobs is None or options.plan)
        half_length = None if options.half_length else False
        selection = (entry.rows, entry.columns, options.shard, timed, half_length)
        plan = make_plan(item, store, entry.seeds, *selection, **settings)
        _print_plan(plan, store, options)
        _report_missing(plan, item, store, options)
        plans.append((entry, plan))
        if options.plan or jobs is not None:
            continue
        progress = PlanProgress(plan, sys.stdout.isatty(), _print_line)
        for task, result in execute_plan(plan, store, progress, **settings):
            print(f"torchcaps: {task.name}: {result}", file=sys.stderr)
        _write_item(entry, store)
    if options.plan and len(plans) > 1:
        print(describe_total([plan for _, plan in plans], store.scale, 1 if jobs is None else jobs.jobs))
    if jobs is not None and not options.plan:
        _run_jobs(plans, store, jobs, settings)


def describe_total(plans: list[TaskPlan], scale: Scale, jobs: int) -> str:
    """Return the work of several plans as text; runs that they share are counted once, and ``jobs`` run at a time."""
    tasks = {task.key.name(scale): task for plan in plans for task in plan.pending}.values()
    runs = [task for task in tasks if isinstance(task.key.source, Run)]
    steps = f"{_count(len(runs), 'run')} with {sum(task.steps for task in runs):,} steps"
    text = f"in all: {steps}, {_count(len(tasks) - len(runs), 'measurement')}"
    seconds = sum(task.seconds for task in tasks) / jobs
    at_a_time = f" with {jobs} jobs at a time" if jobs > 1 else ""
    return text + (f"; estimated on this machine: {_duration(seconds)}{at_a_time}" if seconds else "")


def _run_jobs(
    plans: list[tuple[WorkItem, TaskPlan]], store: RecordStore, jobs: JobOptions, settings: dict[str, Any]
) -> None:
    """Execute plans as jobs; write the table of an item when the last of its tasks has ended."""
    pending = [(entry, {task.key.name(store.scale) for task in plan.pending}) for entry, plan in plans]
    tasks = [task for _, plan in plans for task in plan.pending]

    def on_end(task: Task, _: TaskResult) -> None:
        """Remove a task from those that items wait for; write the items whose last task it was."""
        for entry, names in pending:
            if task.key.name(store.scale) in names:
                names.remove(task.key.name(store.scale))
                if not names:
                    _write_item(entry, store)

    for entry, names in pending:
        if not names:
            _write_item(entry, store)
    unfinished = execute_jobs(tasks, store, jobs, _print_line, on_end, **settings)
    for task, result in unfinished:
        print(f"torchcaps: {task.name}: {result}", file=sys.stderr)
    n_failed = sum(result.outcome in (TaskOutcome.FAILED, TaskOutcome.STOPPED) for _, result in unfinished)
    if n_failed:
        raise RunError(f"{_count(n_failed, 'job')} failed: repeat the command to try again")


def _write_item(entry: WorkItem, store: RecordStore) -> None:
    """Write an item's table and figure, and print the table."""
    for path in write_item(entry.paper, entry.item, store):
        print(f"wrote {path}")
    _print_markdown(render_item(entry.paper, entry.item, store, heading=False))


def _print_line(line: str) -> None:
    print(line, flush=True)


def _print_markdown(text: str) -> None:
    """Print Markdown, formatted if the output is a terminal."""
    print()
    if sys.stdout.isatty():
        Console().print(Markdown(text))
    else:
        print(text)


def _absolute(path: str | None) -> str | None:
    return None if path is None else os.path.abspath(os.path.expanduser(path))


def _print_plan(plan: TaskPlan, store: RecordStore, options: Any) -> None:
    """Print the number of tasks and their estimated time and memory."""
    runs = [task for task in plan.pending if isinstance(task.key.source, Run)]
    n_measurements = len(plan.pending) - len(runs)
    parts = [f"{_count(len(runs), 'run')} with {sum(task.steps for task in runs):,} steps"]
    parts.append(_count(n_measurements, "measurement"))
    if companions := sum(task.half_length for task in plan.pending):
        parts.append(f"{companions} of these of half length")
    if done := plan.count(TaskState.DONE):
        parts.append(f"{done} already done")
    if options.shard[1] > 1:
        parts.append(f"{plan.count(TaskState.OTHER_SHARD)} in other shards")
    print("plan: " + ", ".join(parts))
    if not plan.seconds:
        return
    memory = max((task.memory for task in plan.pending), default=0)
    space = f", {memory / 2**20:,.0f} MiB of memory" if memory else ""
    more = " or more (measurements take longer at this scale)" if n_measurements and store.scale == "full" else ""
    print(f"estimated on this machine: {_duration(plan.seconds)}{more}{space}")
    load, cores = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0, os.cpu_count() or 1
    if load > cores:
        print(f"(the machine is busy, load {load:.0f} on {cores} cores: it may take less time when it is idle)")


def _report_missing(plan: TaskPlan, item: Item, store: RecordStore, options: Any) -> None:
    """Print the missing data sets and how to get them; raise a ValueError if nothing can run without them."""
    missing = plan.missing()
    if not missing:
        return
    possible = [row.label for row in item.rows if not _needs_missing_data(row, store, options)]
    directory = f" --data-dir {shlex.quote(options.data_dir)}" if options.data_dir else ""
    commands = "; ".join(f"torchcaps data get {name}{directory}" for name in missing)
    rows = f"rows that run without: {'; '.join(possible)}" if possible else "no row runs without"
    message = f"missing data: {', '.join(missing)}; get by '{commands}'; {rows}"
    if not plan.pending and not plan.count(TaskState.DONE):
        raise ValueError(message)
    print(f"torchcaps: {message}", file=sys.stderr)


def _needs_missing_data(row: TableRow, store: RecordStore, options: Any) -> bool:
    sources = (cell.source for cell in row.cells.values() if cell.source is not None)
    return any(missing_datasets(source, store.scale, options.data_dir) for source in sources)


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'s' * (n != 1)}"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
