"""``torchcaps reproduce`` and ``torchcaps report``."""

import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from torchcaps._core.files import reason_of, staging_directory
from torchcaps.cli.console import print_table, start_table
from torchcaps.cli.parser import Parser
from torchcaps.cli.runs import exit_on_error
from torchcaps.papers import find_paper, list_papers
from torchcaps.reproduce.planner import TaskPlan, TaskState, make_plan, missing_datasets
from torchcaps.reproduce.render import render_item, write_item, write_report
from torchcaps.reproduce.runner import PlanProgress, execute_plan
from torchcaps.reproduce.scales import DEFAULT_SEEDS, SCALES
from torchcaps.reproduce.schema import Item, Paper, Run, TableRow
from torchcaps.reproduce.store import RESULTS_DIRECTORY, WORK_DIRECTORY, RecordStore

__all__ = ["report_command", "reproduce_command"]

REPRODUCE_DESCRIPTION = (
    "Reproduce a table or figure of a paper and compare it with the published numbers. The plan is printed first: "
    "runs, steps, and the time and memory they need on this machine, estimated from a few steps. If interrupted, the "
    "same command resumes. Scales: smoke (seconds, on embedded digits; checks that everything runs, its numbers are "
    "meaningless), cpu (hours on two cores: narrower networks, fewer images and epochs, the same for all rows), long "
    "(hours per run-set on two cores: longer trainings and all images, still narrower than the paper), full (the "
    "paper's own setting). Examples: torchcaps reproduce; torchcaps reproduce sabour2017; "
    "torchcaps reproduce sabour2017 table1 --scale cpu --seeds 3; "
    "torchcaps reproduce tsai2020 fig4 --scale cpu --rows EM --shard 2/8"
)
REPORT_DESCRIPTION = (
    "Write all tables and figures from the existing records to one Markdown report, next to the published numbers; "
    "'not run' marks numbers without a record. Example: torchcaps report --scale cpu --out docs/results.md"
)
SCALE_HELP = f"Scale: {', '.join(SCALES[:-1])} or {SCALES[-1]}"


def reproduce_command(words: list[str]) -> None:
    """Reproduce a table or figure of a paper."""
    parser = Parser(prog="torchcaps reproduce", description=REPRODUCE_DESCRIPTION)
    papers = ", ".join(paper.name for paper in list_papers())
    parser.add_argument("paper", nargs="?", help=f"Name of a paper ({papers}); without it the papers are listed")
    parser.add_argument("item", nargs="?", help="Table or figure of the paper, or 'all'; without it they are listed")
    parser.add_argument("--scale", default="smoke", help=SCALE_HELP)
    defaults = ", ".join(f"{n} at {scale}" for scale, n in DEFAULT_SEEDS.items())
    parser.add_argument("--seeds", type=int | None, help=f"Number of seeds (default: {defaults})")
    parser.add_argument("--rows", type=str | None, help="Only these rows: indices from 1, or parts of their labels")
    parser.add_argument(
        "--columns", type=str | None, help="Only these columns: indices from 1, or parts of their names"
    )
    parser.add_argument("--shard", default="1/1", help="Run one shard of the work: INDEX/COUNT, such as 2/8")
    parser.add_argument(
        "--half-length",
        type=bool,
        default=True,
        help="Also train the runs that a claim compares for half their length, without which it is not judged; "
        "never done at the scale smoke, which judges no claim",
    )
    parser.add_argument("--plan", type=bool, default=False, help="Print the plan and exit")
    parser.add_argument("--num-threads", type=int | None, help="Number of CPU threads (default: number of cores)")
    parser.add_argument("--data-dir", type=str | None, help="Data directory (default: TORCHCAPS_DATA)")
    parser.add_argument(
        "--results", default=str(RESULTS_DIRECTORY), help="Directory of the records, tables and figures"
    )
    parser.add_argument("--work", default=str(WORK_DIRECTORY), help="Directory of the training runs and checkpoints")
    words, rows = _take_values(parser, words, "--rows")
    words, columns = _take_values(parser, words, "--columns")
    options, _ = parser.parse(words)
    options.rows, options.columns = rows, columns
    _check_options(parser, options)
    if options.paper is None:
        if rows or columns:
            parser.error("--rows and --columns take all arguments up to the next flag: name the paper and item first")
        _list_papers()
        return
    paper = find_paper(options.paper)
    if options.item is None:
        _list_items(paper)
        return
    items = list(paper.items) if options.item == "all" else [paper.item(options.item)]
    if (options.rows or options.columns) and len(items) > 1:
        parser.error("--rows and --columns need one table or figure, got the item 'all'")
    store = RecordStore(options.scale, options.results, options.work)
    for name in ("results", "work") if not options.plan else ():
        _check_writable(parser, name, Path(options[name]).expanduser())
    exit_on_error(lambda: _reproduce(paper, items, store, options))


def _take_values(parser: Parser, words: list[str], flag: str) -> tuple[list[str], list[str]]:
    """Split the arguments into those without ``flag`` and its values, which extend to the next flag."""
    rest: list[str] = []
    values: list[str] = []
    reading = False
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            reading = name == flag
            if reading:
                values += [value] if equals else []
                continue
        (values if reading else rest).append(word)
    given = flag in words or any(word.startswith(f"{flag}=") for word in words)
    if given and not (values and all(values)):
        parser.error(f"{flag} needs one or more values: indices from 1, or parts of the labels")
    return rest, values


def _check_options(parser: Parser, options: Any) -> None:
    """Exit with an error for invalid options; set the default of ``seeds`` and parse ``shard``."""
    _check_scale(parser, options.scale)
    for name in ("results", "work"):
        if not options[name]:
            parser.error(f"--{name} needs a directory")
    for name in ("seeds", "num_threads"):
        if options[name] is not None and options[name] < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more, got {options[name]}")
    if options.seeds is None:
        options.seeds = DEFAULT_SEEDS[options.scale]
    match = re.fullmatch(r"(\d+)/(\d+)", options.shard)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        parser.error(f"--shard must be INDEX/COUNT with 1 <= INDEX <= COUNT, such as 2/8, got {options.shard!r}")
    options.shard = (int(match[1]), int(match[2]))


def _check_scale(parser: Parser, scale: str) -> None:
    if scale not in SCALES:
        parser.error(f"--scale must be {', '.join(SCALES[:-1])} or {SCALES[-1]}, got {scale!r}")


def _check_writable(parser: Parser, name: str, directory: Path) -> None:
    """Exit with an error if a directory can't be written, before anything is trained."""
    try:
        with staging_directory(directory) as own:
            (own / "probe").touch()
    except OSError as error:
        parser.error(f"--{name} {directory} can't be written: {reason_of(error)}")


def _reproduce(paper: Paper, items: list[Item], store: RecordStore, options: Any) -> None:
    """Print the plan of each item, execute it, and write and print the tables."""
    settings = {"num_threads": options.num_threads, "data_dir": _absolute(options.data_dir)}
    settings = {name: value for name, value in settings.items() if value is not None}
    for item in items:
        rows, columns = item.select_rows(options.rows), item.select_columns(options.columns)
        print(f"{paper.name}, {item.title}, scale {store.scale}: {item.description}")
        timed = store.scale != "smoke"
        half_length = None if options.half_length else False
        plan = make_plan(item, store, options.seeds, rows, columns, options.shard, timed, half_length, **settings)
        _print_plan(plan, store, options)
        _report_missing(plan, item, store, options)
        if options.plan:
            continue
        progress = PlanProgress(plan, sys.stdout.isatty(), lambda line: print(line, flush=True))
        for task, result in execute_plan(plan, store, progress, **settings):
            print(f"torchcaps: {task.name}: {result}", file=sys.stderr)
        for path in write_item(paper, item, store):
            print(f"wrote {path}")
        _print_markdown(render_item(paper, item, store, heading=False))


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


def _list_papers() -> None:
    table = start_table("paper", "items", "citation")
    for paper in list_papers():
        table.add_row(paper.name, ", ".join(item.name for item in paper.items), paper.citation)
    print_table(table)
    print("List the items of a paper: torchcaps reproduce sabour2017")
    print("Run one: torchcaps reproduce sabour2017 table1 --scale cpu")


def _list_items(paper: Paper) -> None:
    """Print a paper's claims, cost, items and deviations."""
    print(f"{paper.citation}\n")
    print(f"Claims: {paper.summary}\nCost: {paper.cost}\nScale cpu: {paper.cpu_scale}\n")
    table = start_table("item", "in the paper", "description", "rows", right=("rows",))
    for item in paper.items:
        table.add_row(item.name, item.title, item.description, str(len(item.rows)))
    print_table(table)
    print("Deviations:")
    for deviation in paper.deviations:
        print(f"- {deviation}")
    print(f"\nRun one: torchcaps reproduce {paper.name} {paper.items[0].name} --scale cpu")


def report_command(words: list[str]) -> None:
    """Write all tables and figures to one report."""
    parser = Parser(prog="torchcaps report", description=REPORT_DESCRIPTION)
    parser.add_argument("--scale", default="cpu", help=SCALE_HELP)
    parser.add_argument(
        "--out", default="", help="Path of the report (default: docs/results.md for cpu, else results-SCALE.md)"
    )
    parser.add_argument("--results", default=str(RESULTS_DIRECTORY), help="Directory of the records")
    options, _ = parser.parse(words)
    _check_scale(parser, options.scale)
    if not options.results:
        parser.error("--results needs a directory")
    out = Path(options.out or ("docs/results.md" if options.scale == "cpu" else f"results-{options.scale}.md"))
    out = out.expanduser()
    if not out.resolve().parent.is_dir():
        parser.error(f"--out {out} can't be written: {out.parent} is not a directory")
    store = RecordStore(options.scale, options.results)
    if not any(store.results.glob("*/*.json")):
        parser.error(
            f"{store.results} has no records: create them by 'torchcaps reproduce PAPER ITEM --scale {options.scale}'"
        )
    store.skip_unreadable = True  # write the rest of the report if one record is damaged
    command = shlex.join(["torchcaps", *sys.argv[1:]])
    exit_on_error(lambda: print(f"wrote {write_report(list_papers(), store, out, command)}"))
    for problem in store.problems.values():
        print(f"torchcaps: {problem}", file=sys.stderr)
