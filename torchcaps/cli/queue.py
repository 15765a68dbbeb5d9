"""``torchcaps reproduce queue`` and ``torchcaps reproduce status``."""

import collections
import json
import time
from dataclasses import dataclass
from typing import Any

from torchcaps.cli.console import print_table, start_table
from torchcaps.cli.execution import (
    WorkItem,
    add_execution_flags,
    add_store_flags,
    check_execution_flags,
    check_scale,
    check_writable,
    run_work,
)
from torchcaps.cli.parser import Parser
from torchcaps.cli.runs import exit_on_error
from torchcaps.papers import find_item, find_paper
from torchcaps.papers.queue import QUEUE
from torchcaps.reproduce.planner import planned_keys, task_names
from torchcaps.reproduce.scales import DEFAULT_SEEDS, Scale
from torchcaps.reproduce.schema import Run
from torchcaps.reproduce.status import MAX_CHECKPOINT_AGE_S, RecordState, RecordStatus, record_status
from torchcaps.reproduce.store import RecordStore

__all__ = ["queue_command", "status_command"]

QUEUE_DESCRIPTION = (
    "Run the queue: the items that are reproduced at the scale long, in this order (see docs/reproduction.md): "
    "{order}. Finished records are skipped and interrupted runs resume, so the command can be stopped (Ctrl-C or "
    "SIGTERM; checkpoints are saved) and repeated at any time."
)
QUEUE_EXAMPLES = (
    "torchcaps reproduce queue --plan",
    "torchcaps reproduce queue --executor local --jobs 2 --nice 19 --work /data/runs",
    "torchcaps reproduce queue --executor slurm --jobs 20 --partition cpu --memory-gb 4 --cpus 2",
)
STATUS_DESCRIPTION = (
    "Show what is done, running (with the estimated time left), waiting and failed: of the queue, or of a paper or one "
    "of its items. Works while other processes run; a process that has died does not count as running."
)
STATUS_EXAMPLES = (
    "torchcaps reproduce status",
    "torchcaps reproduce status sabour2017 table1 --scale long",
    "torchcaps reproduce status --work /data/runs --json",
)
INDENT = "  "


def queue_command(words: list[str]) -> None:
    """Run the queue."""
    order = ", ".join(dict.fromkeys(f"{entry.paper} {entry.item}" for entry in QUEUE))
    description = QUEUE_DESCRIPTION.format(order=order)
    parser = Parser(prog="torchcaps reproduce queue", description=description, examples=QUEUE_EXAMPLES)
    add_store_flags(parser, scale="long")
    add_execution_flags(parser)
    options, _ = parser.parse(words)
    check_execution_flags(parser, options)
    store = RecordStore(options.scale, options.results, options.work)
    if not options.plan:
        check_writable(parser, options)
    exit_on_error(lambda: run_work(queue_work(options.scale), store, options))


def queue_work(scale: Scale) -> list[WorkItem]:
    """Return the queue's items; at the scale ``smoke`` with one seed."""
    work = []
    for entry in QUEUE:
        paper, item = find_item(entry.paper, entry.item)
        rows, columns = item.select_rows(list(entry.rows)), item.select_columns(list(entry.columns))
        work.append(WorkItem(paper, item, rows, columns, 1 if scale == "smoke" else entry.seeds))
    return work


def status_command(words: list[str]) -> None:
    """Show the status of the queue, or of a paper or item."""
    parser = Parser(prog="torchcaps reproduce status", description=STATUS_DESCRIPTION, examples=STATUS_EXAMPLES)
    parser.add_argument("paper", nargs="?", help="Name of a paper; without it the queue is shown")
    parser.add_argument("item", nargs="?", help="Table or figure of the paper; without it all of them")
    add_store_flags(parser, scale="long")
    defaults = ", ".join(f"{n} at {scale}" for scale, n in DEFAULT_SEEDS.items())
    parser.add_argument("--seeds", type=int | None, help=f"Number of seeds of a paper or item (default: {defaults})")
    parser.add_argument("--json", action="store_true", help="Print JSON")
    options, _ = parser.parse(words)
    check_scale(parser, options.scale)
    if options.seeds is not None and options.seeds < 1:
        parser.error(f"--seeds must be 1 or more, got {options.seeds}")
    if options.seeds is not None and options.paper is None:
        parser.error("--seeds needs a paper: each entry of the queue has its own number of seeds")
    exit_on_error(lambda: _show_status(options))


@dataclass(frozen=True)
class _ItemStatus:
    """Status of the records of an item, with their display names."""

    work: WorkItem
    records: list[tuple[str, RecordStatus]]

    def count(self, state: RecordState) -> int:
        """Return the number of records in a state."""
        return sum(record.state is state for _, record in self.records)


def _show_status(options: Any) -> None:
    """Read and print the status."""
    store = RecordStore(options.scale, options.results, options.work)
    store.skip_unreadable = True  # show the rest if one record is damaged
    if options.paper is None:
        work = queue_work(options.scale)
    else:
        paper = find_paper(options.paper)
        items = list(paper.items) if options.item is None else [paper.item(options.item)]
        seeds = options.seeds or DEFAULT_SEEDS[options.scale]
        work = [WorkItem(paper, item, seeds=seeds) for item in items]
    statuses, seen = [], set()
    for entry in work:
        keys = planned_keys(entry.item, store.scale, entry.seeds, entry.rows, entry.columns)
        names = task_names(entry.item, keys)
        keys = [key for key in keys if key.name(store.scale) not in seen]  # items share runs
        seen |= {key.name(store.scale) for key in keys}
        records = [(names[key], record_status(key, store, options.data_dir)) for key in keys]
        statuses.append(_ItemStatus(entry, records))
    if options.json:
        print(json.dumps([_to_json(status, store) for status in statuses], indent=2))
    else:
        _print_status(statuses, store, with_records=len(statuses) == 1)


def _to_json(status: _ItemStatus, store: RecordStore) -> dict[str, Any]:
    """Return the status of an item as JSON values."""
    records = []
    for name, record in status.records:
        progress = record.progress
        values = {
            "record": record.key.name(store.scale),
            "name": name,
            "seed": record.key.seed,
            "state": record.state.value,
            "step": None if progress is None else progress.step,
            "steps": None if progress is None else progress.total,
            "seconds_left": None if record.seconds_left is None else round(record.seconds_left),
            "detail": record.detail,
        }
        records.append(values)
    work = status.work
    selection = {"rows": list(work.rows), "columns": list(work.columns), "seeds": work.seeds}
    return {"paper": work.paper.name, "item": work.item.name, "scale": store.scale, **selection, "records": records}


def _print_status(statuses: list[_ItemStatus], store: RecordStore, with_records: bool) -> None:
    """Print one line per item, then the records that are running, stopped or failed; all of them for one item."""
    states = list(RecordState)
    counts = collections.Counter(record.state for status in statuses for _, record in status.records)
    print(f"scale {store.scale}: " + ", ".join(f"{counts[state]} {state.value}" for state in states))
    headings = [state.value for state in states]
    table = start_table("", "paper", "item", *headings, "part", right=tuple(headings))
    for index, status in enumerate(statuses, start=1):
        numbers = [str(status.count(state) or "-") for state in states]
        table.add_row(str(index), status.work.paper.name, status.work.item.name, *numbers, _describe_part(status.work))
    print_table(table)
    for state in states:
        shown = [
            (status, name, record)
            for status in statuses
            for name, record in status.records
            if record.state is state and (with_records or state in (RecordState.RUNNING, RecordState.FAILED))
        ]
        if shown:
            print(f"{state.value}:")
        for status, name, record in shown:
            place = "" if with_records else f"{status.work.paper.name} {status.work.item.name}, "
            print(f"{INDENT}{place}{name}")
            if text := _describe_progress(record):
                print(f"{INDENT}{INDENT}{text}")


def _describe_part(work: WorkItem) -> str:
    """Return the columns and rows of a work item, in few characters: ``"C10, C10+; 4 rows"``."""
    rows = f"{len(work.rows)} rows" if len(work.rows) > 1 else "".join(work.rows)
    columns = f"{len(work.columns)} columns" if len(work.columns) > 2 else ", ".join(work.columns)
    return "; ".join(part for part in (columns, rows) if part)


def _describe_progress(record: RecordStatus) -> str:
    """Return steps and time left of a record, or why it failed; empty if there is nothing to tell."""
    parts = []
    if record.progress is not None:
        percent = 100 * record.progress.step / max(1, record.progress.total)
        parts.append(f"step {record.progress.step:,} of {record.progress.total:,} ({percent:.0f} %)")
    if record.state is RecordState.RUNNING:
        left = record.seconds_left
        if left is not None:
            end = time.strftime("%a %H:%M", time.localtime(time.time() + left))
            parts.append(f"{_duration(left)} left, until {end}")
            age = time.time() - record.progress.saved_at if record.progress is not None else 0.0
            if age > MAX_CHECKPOINT_AGE_S:
                parts.append(f"last checkpoint {_duration(age)} ago")
        elif record.progress is None and isinstance(record.key.source, Run):
            parts.append("no checkpoint yet")
    if record.state is RecordState.WAITING and record.progress is not None:
        parts.append("stopped, will resume")
    return ", ".join([*parts, *([record.detail] if record.detail else [])])


def _duration(seconds: float) -> str:
    """Return a duration, such as ``3 min`` or ``2.5 h``."""
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
