"""``torchcaps reproduce`` and ``torchcaps report``."""

import shlex
import sys
from pathlib import Path

from torchcaps._core.registry import check_name
from torchcaps.cli.console import print_table, start_table
from torchcaps.cli.execution import (
    SCALE_HELP,
    WorkItem,
    add_execution_flags,
    add_store_flags,
    check_execution_flags,
    check_scale,
    check_writable,
    run_work,
)
from torchcaps.cli.parser import Parser
from torchcaps.cli.queue import queue_command, status_command
from torchcaps.cli.runs import exit_on_error
from torchcaps.papers import find_paper, list_papers
from torchcaps.reproduce.report import write_report
from torchcaps.reproduce.scales import DEFAULT_SEEDS, Scale
from torchcaps.reproduce.schema import Paper
from torchcaps.reproduce.store import RESULTS_DIRECTORY, RecordStore

__all__ = ["report_command", "reproduce_command"]

REPRODUCE_DESCRIPTION = (
    "Reproduce a table or figure of a paper and compare it with the published numbers. The plan is printed first: "
    "runs, steps, and the time and memory they need on this machine, estimated from a few steps. If interrupted, the "
    "same command resumes. 'torchcaps reproduce queue' runs many items in a documented order, 'torchcaps reproduce "
    "status' shows what is done, running and waiting; both have a --help. "
    "Scales: smoke (seconds, on embedded digits; checks that everything runs, its numbers are meaningless), cpu "
    "(hours on two cores: narrower networks, fewer images and epochs, the same for all rows), long (the networks of "
    "cpu, trained longer and on all images: hours per table on two cores), full (the paper's own setting)."
)
REPRODUCE_EXAMPLES = (
    "torchcaps reproduce",
    "torchcaps reproduce sabour2017",
    "torchcaps reproduce sabour2017 table1 --scale cpu --seeds 3",
    "torchcaps reproduce tsai2020 fig4 --scale cpu --rows EM --shard 2/8",
    "torchcaps reproduce sabour2017 table1 --scale long --executor local --jobs 2 --nice 19",
)
REPORT_DESCRIPTION = (
    "Write all tables and figures from the existing records to one Markdown report, next to the published numbers; "
    "'not run' marks numbers without a record. Without --scale the report has all scales except smoke, and a claim is "
    "judged at the largest one at which it was run."
)
REPORT_EXAMPLES = (
    "torchcaps report",
    "torchcaps report --scale long --out long.md",
    "torchcaps report --results ~/results --out ~/results.md",
)
REPORT_SCALES: tuple[Scale, ...] = ("full", "long", "cpu")  # in order of precedence


def reproduce_command(words: list[str]) -> None:
    """Reproduce a table or figure of a paper; ``queue`` and ``status`` are commands of their own."""
    if words and words[0] in SUBCOMMANDS:
        SUBCOMMANDS[words[0]](words[1:])
        return
    parser = Parser(prog="torchcaps reproduce", description=REPRODUCE_DESCRIPTION, examples=REPRODUCE_EXAMPLES)
    papers = [paper.name for paper in list_papers()]
    parser.add_argument(
        "paper", nargs="?", help=f"Name of a paper ({', '.join(papers)}); without it the papers are listed"
    )
    parser.add_argument("item", nargs="?", help="Table or figure of the paper, or 'all'; without it they are listed")
    add_store_flags(parser, scale="smoke")
    defaults = ", ".join(f"{n} at {scale}" for scale, n in DEFAULT_SEEDS.items())
    parser.add_argument("--seeds", type=int | None, help=f"Number of seeds (default: {defaults})")
    parser.add_argument("--rows", type=str | None, help="Only these rows: indices from 1, or parts of their labels")
    parser.add_argument(
        "--columns", type=str | None, help="Only these columns: indices from 1, or parts of their names"
    )
    add_execution_flags(parser)
    words, rows = _take_values(parser, words, "--rows")
    words, columns = _take_values(parser, words, "--columns")
    options, _ = parser.parse(words)
    if options.seeds is not None and options.seeds < 1:
        parser.error(f"--seeds must be 1 or more, got {options.seeds}")
    check_execution_flags(parser, options)
    if options.paper is None:
        if rows or columns:
            parser.error("--rows and --columns take all arguments up to the next flag: name the paper and item first")
        _list_papers()
        return
    paper = find_paper(check_name(options.paper, (*papers, *SUBCOMMANDS), "paper or command"))
    if options.item is None:
        _list_items(paper)
        return
    items = list(paper.items) if options.item == "all" else [paper.item(options.item)]
    if (rows or columns) and len(items) > 1:
        parser.error("--rows and --columns need one table or figure, got the item 'all'")
    store = RecordStore(options.scale, options.results, options.work)
    if not options.plan:
        check_writable(parser, options)
    seeds = DEFAULT_SEEDS[options.scale] if options.seeds is None else options.seeds
    work = [WorkItem(paper, item, item.select_rows(rows), item.select_columns(columns), seeds) for item in items]
    exit_on_error(lambda: run_work(work, store, options))


SUBCOMMANDS = {"queue": queue_command, "status": status_command}


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


def _list_papers() -> None:
    """Print the table of papers with their items and citations, and commands to continue with."""
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
    parser = Parser(prog="torchcaps report", description=REPORT_DESCRIPTION, examples=REPORT_EXAMPLES)
    parser.add_argument("--scale", default="", help=f"{SCALE_HELP} (default: all but smoke)")
    parser.add_argument(
        "--out", default="", help="Path of the report (default: docs/results.md; with --scale results-SCALE.md)"
    )
    parser.add_argument("--results", default=str(RESULTS_DIRECTORY), help="Directory of the records")
    options, _ = parser.parse(words)
    if options.scale:
        check_scale(parser, options.scale)
    if not options.results:
        parser.error("--results needs a directory")
    out = Path(options.out or (f"results-{options.scale}.md" if options.scale else "docs/results.md")).expanduser()
    if not out.resolve().parent.is_dir():
        parser.error(f"--out {out} can't be written: {out.parent} is not a directory")
    scales = (options.scale,) if options.scale else REPORT_SCALES
    stores = [RecordStore(scale, options.results) for scale in scales]
    stores = [store for store in stores if any(store.results.glob("*/*.json"))]
    if not stores:
        directories = ", ".join(str(Path(options.results) / scale) for scale in scales)
        create = f"torchcaps reproduce PAPER ITEM --scale {options.scale or 'cpu'}"
        parser.error(f"--results {options.results} has no records ({directories}): create them by '{create}'")
    for store in stores:
        store.skip_unreadable = True  # write the rest of the report if one record is damaged
    command = shlex.join(["torchcaps", *sys.argv[1:]])
    exit_on_error(lambda: print(f"wrote {write_report(list_papers(), stores, out, command)}"))
    for problem in (problem for store in stores for problem in store.problems.values()):
        print(f"torchcaps: {problem}", file=sys.stderr)
