"""``torchcaps reproduce`` and ``torchcaps report``."""

import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from torchcaps._core.files import staging_directory
from torchcaps.cli.console import print_table, start_table
from torchcaps.cli.parser import Parser
from torchcaps.cli.runs import leave_safely
from torchcaps.cli.words import Flags
from torchcaps.papers.registry import find_columns, find_item, find_paper, find_rows, list_papers
from torchcaps.reproduce.markdown import item_text
from torchcaps.reproduce.outputs import write_item
from torchcaps.reproduce.planner import Plan, make_plan, missing_data
from torchcaps.reproduce.render import write_report
from torchcaps.reproduce.runner import Bar, work_through
from torchcaps.reproduce.scales import SCALES, SEEDS
from torchcaps.reproduce.schema import Item, Measure, Paper, Run
from torchcaps.reproduce.store import RESULTS, WORK, Store

__all__ = ["report_command", "reproduce_command"]

DESCRIPTION = (
    "Run a table or figure of a paper, and set what comes out beside what was published. It prints its plan first: "
    "runs, steps, and the time and memory that they take on this machine, measured from a few steps. Killed at any "
    "point, the same command goes on where it was. Scales: smoke (seconds, on embedded digits; no number means "
    "anything), cpu (hours on two cores at most: narrower nets, fewer images and epochs, the same for all rows), full "
    "(the paper's own setting). Examples: torchcaps reproduce; torchcaps reproduce sabour2017; "
    "torchcaps reproduce sabour2017 table1 --scale cpu --seeds 3; "
    "torchcaps reproduce tsai2020 fig4 --scale cpu --rows EM --shard 2/8"
)
REPORT = (
    "Write all tables and figures as one page, from the records that there are: ours beside what was published, and "
    "'not run' where nothing ran. Example: torchcaps report --scale cpu --out docs/results.md"
)


def reproduce_command(words: list[str]) -> None:
    """Run a table or figure of a paper."""
    parser = Parser(prog="torchcaps reproduce", description=DESCRIPTION)
    parser.add_argument("paper", nargs="?", help="one of " + ", ".join(paper.name for paper in list_papers()))
    parser.add_argument("item", nargs="?", help="its table or figure, or all; without one they are listed")
    parser.add_argument("--scale", default="smoke", help="smoke, cpu or full")
    parser.add_argument("--seeds", type=int | None, help="how many (default: 1 at smoke, 2 at cpu, 3 at full)")
    parser.add_argument("--rows", type=str | None, help="only these: numbers from 1, or words of their labels")
    parser.add_argument("--columns", type=str | None, help="only these, in the same way")
    parser.add_argument("--shard", default="1/1", help="the second of eight machines or processes: 2/8")
    parser.add_argument("--plan", type=bool, default=False, help="print the plan and leave")
    parser.add_argument("--num-threads", type=int | None, help="of the CPU (default: as many as there are cores)")
    parser.add_argument("--data-dir", type=str | None, help="the data folder (default: TORCHCAPS_DATA)")
    parser.add_argument("--results", default=str(RESULTS), help="where records, tables and figures go")
    parser.add_argument("--work", default=str(WORK), help="where runs are trained, with their checkpoints")
    words, rows = _several(parser, words, "--rows")
    words, columns = _several(parser, words, "--columns")
    words, _ = Flags(parser.flags, switches={"--plan"}, who="reproduce").read(parser, words)
    options = parser.parse_args(words)
    options.rows, options.columns = rows, columns
    _check(parser, options)
    if options.paper is None:
        if rows or columns:
            parser.error("--rows and --columns take all words up to the next flag: name paper and table before them")
        _list_papers()
        return
    if options.item is None:
        _list_items(find_paper(options.paper))
        return
    paper = find_paper(options.paper)
    items = list(paper.items) if options.item == "all" else [find_item(options.paper, options.item)[1]]
    if (options.rows or options.columns) and len(items) > 1:
        parser.error("--rows and --columns need one table or figure: 'all' has many")
    store = Store(options.scale, options.results, options.work)
    for name in ("results", "work") if not options.plan else ():
        _check_folder(parser, name, Path(options[name]).expanduser())
    leave_safely(lambda: _reproduce(paper, items, store, options))


def _several(parser: Parser, words: list[str], flag: str) -> tuple[list[str], list[str]]:
    """Return the words without a flag and all that follows it up to the next one, and those."""
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
    if (flag in words or any(word.startswith(f"{flag}=") for word in words)) and not all(values or [""]):
        parser.error(f"{flag} needs numbers from 1, or words of the labels")
    return rest, values


def _check(parser: Parser, options: Any) -> None:
    if options.scale not in SCALES:
        parser.error(f"--scale must be smoke, cpu or full, got {options.scale!r}")
    for name in ("results", "work"):
        if not options[name]:
            parser.error(f"--{name} needs a folder's name")
    for name in ("seeds", "num_threads"):
        if options[name] is not None and options[name] < 1:
            parser.error(f"--{name} must be 1 or more, got {options[name]}")
    if options.seeds is None:
        options.seeds = SEEDS[options.scale]
    found = re.fullmatch(r"(\d+)/(\d+)", options.shard)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        parser.error(f"--shard must be WHICH/OF, such as 2/8, got {options.shard!r}")
    options.shard = (int(found[1]), int(found[2]))


def _check_folder(parser: Parser, name: str, folder: Path) -> None:
    """Refuse a folder that can't be written before anything is trained for it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with staging_directory(folder) as own:
            (own / "probe").touch()
    except OSError as error:
        parser.error(f"--{name} {folder} can't be written: {error.strerror or error}")


def _reproduce(paper: Paper, items: list[Item], store: Store, options: Any) -> None:
    own = {"num_threads": options.num_threads, "data_dir": _absolute(options.data_dir)}
    own = {name: value for name, value in own.items() if value is not None}
    for item in items:
        rows, columns = find_rows(item, options.rows), find_columns(item, options.columns)
        print(f"{paper.name}, {item.title}, at the scale {store.scale}: {item.about}")
        timed = store.scale != "smoke"
        plan = make_plan(item, store, options.seeds, rows, columns, options.shard, timed, **own)
        _show_plan(plan, item, store, options)
        if options.plan:
            continue
        bar = Bar(plan, sys.stdout.isatty(), lambda line: print(line, flush=True))
        for problem in work_through(plan, store, bar, **own):
            print(f"torchcaps: {problem}", file=sys.stderr)
        for path in write_item(paper, item, store):
            print(f"written: {path}")
        _show_text(item_text(paper, item, store, heading=False))


def _show_text(text: str) -> None:
    """Print Markdown: laid out on a terminal, as it is elsewhere."""
    print()
    if sys.stdout.isatty():
        Console().print(Markdown(text))
    else:
        print(text)


def _absolute(path: str | None) -> str | None:
    return None if path is None else os.path.abspath(os.path.expanduser(path))


def _show_plan(plan: Plan, item: Item, store: Store, options: Any) -> None:
    todo = plan.open
    runs = [task for task in todo if isinstance(task.job.source, Run)]
    measures = [task for task in todo if isinstance(task.job.source, Measure)]
    done = sum(task.state == "done" for task in plan.tasks)
    words = [f"{_counted(len(runs), 'run')} with {sum(task.steps for task in runs):,} steps"]
    words.append(_counted(len(measures), "measurement"))
    words += [f"{done} done already"] if done else []
    words += (
        [f"{sum(task.state == 'elsewhere' for task in plan.tasks)} of other shards"] if options.shard[1] > 1 else []
    )
    print("plan: " + ", ".join(words))
    if plan.seconds:
        memory = max((task.memory for task in todo), default=0)
        space = f", and {memory / 2**20:,.0f} MiB of memory" if memory else ""
        more = " and more: measurements are longer at this scale" if measures and store.scale == "full" else ""
        print(f"on this machine about {_duration(plan.seconds)}{more}{space}")
        load, cores = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0, os.cpu_count() or 1
        if load > cores:
            print(f"(it is busy: {load:.0f} processes want its {cores} cores, so that it may take less when it is not)")
    missing = plan.missing()
    if not missing:
        return
    without = [row.label for row in item.rows if not _lacking(row.cells.values(), store, options)]
    names = ", ".join(missing)
    where = f" --data-dir {shlex.quote(options.data_dir)}" if options.data_dir else ""
    get = "; ".join(f"torchcaps data get {name}{where}" for name in missing)
    are, it = ("is", "it") if len(missing) == 1 else ("are", "them")
    able = f"rows that can run without {it}: {'; '.join(without)}" if without else f"no row can run without {it}"
    message = f"{names} {are} not here: get {it} by '{get}'; {able}"
    if not todo and not done:
        raise ValueError(message)
    print(f"torchcaps: {message}", file=sys.stderr)


def _lacking(cells: Any, store: Store, options: Any) -> bool:
    """Return whether any number of a row needs data that is not here."""
    return any(missing_data(cell.source, store, options.data_dir) for cell in cells if cell.source is not None)


def _counted(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def _list_papers() -> None:
    table = start_table("paper", "items", "citation")
    for paper in list_papers():
        table.add_row(paper.name, ", ".join(item.name for item in paper.items), paper.citation)
    print_table(table)
    print("For one of them: torchcaps reproduce sabour2017; to run: torchcaps reproduce sabour2017 table1 --scale cpu")


def _list_items(paper: Paper) -> None:
    print(f"{paper.citation}\n\nClaimed: {paper.claimed}\nCost: {paper.cost}\nAt the scale cpu: {paper.scale}\n")
    table = start_table("item", "in the paper", "what it shows", "rows", right=("rows",))
    for item in paper.items:
        table.add_row(item.name, item.title, item.about, str(len(item.rows)))
    print_table(table)
    print("Where we differ:")
    for deviation in paper.deviations:
        print(f"- {deviation}")
    print(f"\nRun one: torchcaps reproduce {paper.name} {paper.items[0].name} --scale cpu")


def report_command(words: list[str]) -> None:
    """Write all tables and figures as one page."""
    parser = Parser(prog="torchcaps report", description=REPORT)
    parser.add_argument("--scale", default="cpu", help="smoke, cpu or full")
    parser.add_argument("--out", default="", help="the page (default: docs/results.md for cpu, else results-SCALE.md)")
    parser.add_argument("--results", default=str(RESULTS), help="where the records are")
    words, _ = Flags(parser.flags, who="report").read(parser, words)
    options = parser.parse_args(words)
    if options.scale not in SCALES:
        parser.error(f"--scale must be smoke, cpu or full, got {options.scale!r}")
    if not options.results:
        parser.error("--results needs a name")
    out = Path(options.out or ("docs/results.md" if options.scale == "cpu" else f"results-{options.scale}.md"))
    out = out.expanduser()
    if not out.resolve().parent.is_dir():
        parser.error(f"{out} can't be written: there is no folder {out.parent}")
    store = Store(options.scale, options.results)
    if not any(store.results.glob("*/*.json")):
        parser.error(
            f"{store.results} has no records: 'torchcaps reproduce PAPER ITEM --scale {options.scale}' makes them"
        )
    store.forgiving = True  # one broken record is no reason to have no page
    leave_safely(lambda: print(f"written: {write_report(store, out, shlex.join(['torchcaps', *sys.argv[1:]]))}"))
    for problem in store.problems.values():
        print(f"torchcaps: {problem}", file=sys.stderr)
