"""The command ``torchcaps bench routings``."""

import os
from pathlib import Path
from typing import Any, Literal

from torchcaps._core.files import write_atomic
from torchcaps._core.registry import check_name
from torchcaps.bench.routings import (
    SCALES,
    Comparison,
    RoutingCell,
    list_rows,
    pending_cells,
    run_cells,
    select_comparisons,
)
from torchcaps.bench.routings_report import HEADINGS, draw_routings, read_rows, render_page
from torchcaps.cli.console import print_table, start_table
from torchcaps.cli.parser import Parser

__all__ = ["ROUTINGS", "bench_routings_command"]

ROUTINGS = "routings"  # name of the part
PAGE = Path("docs/routings.md")
FIGURE = Path("docs/images/routings.png")
DESCRIPTION = (
    "Compare all routings in the same small network with the same data and number of training steps, next to uniform "
    "couplings and to a plain CNN with as many parameters: accuracy with its interval over seeds, robustness to affine "
    "transformations, time per step, memory and parameters. Each training is one file in --out, so an interrupted "
    "comparison continues where it stopped. The scale 'cpu' takes about 15 minutes of CPU time for MNIST and an hour "
    "for CIFAR-10."
)
EXAMPLES = (
    "torchcaps bench routings",
    "torchcaps bench routings --plan",
    "torchcaps bench routings --report",
    "torchcaps bench routings --data mnist --rows em,cnn --max-minutes 10",
    "torchcaps bench routings --scale smoke --out /tmp/routings",
)


def bench_routings_command(words: list[str]) -> None:
    """Measure the missing cells of the comparison of routings, print the tables and write the page."""
    parser = Parser(prog="torchcaps bench routings", description=DESCRIPTION, examples=EXAMPLES)
    scales = Literal[tuple(SCALES)]  # type: ignore[valid-type]
    parser.add_argument("--scale", type=scales, default="cpu", help="sizes, data sets and number of steps")
    parser.add_argument("--data", type=str | None, help="data sets of the scale, separated by commas (default: all)")
    parser.add_argument(
        "--rows", type=str | None, help="routings, variants or 'cnn' to measure, separated by commas (default: all)"
    )
    parser.add_argument("--out", type=str, default="results/bench/routings", help="directory of the records")
    parser.add_argument("--plan", type=bool, default=False, help="list the cells that are missing and exit")
    parser.add_argument("--report", type=bool, default=False, help="measure nothing: print and write the results")
    parser.add_argument("--max-minutes", type=float | None, help="start no further cell after this time")
    parser.add_argument(
        "--page",
        type=str | None,
        help=f"Markdown page to write (default: {PAGE} for all data sets of the scale 'cpu', if the directory exists)",
    )
    parser.add_argument(
        "--figure", type=str | None, help=f"image file of the figure on the page (default: {FIGURE}, as the page)"
    )
    options, _ = parser.parse(words)
    if options.max_minutes is not None and not options.max_minutes > 0:
        parser.error(f"--max-minutes must be above 0, got {options.max_minutes}")
    rows = [check_name(row, list_rows(), "row") for row in _split(options.rows) or list_rows()]
    comparisons = select_comparisons(options.scale, _split(options.data))
    directory = Path(options.out).expanduser() / options.scale
    if options.plan:
        _print_plan(pending_cells(directory, comparisons, rows))
        return
    seconds = None if options.max_minutes is None else 60 * options.max_minutes
    if not options.report:
        run_cells(directory, comparisons, rows, _report, seconds)
    for comparison in comparisons:
        _print_rows(directory, comparison)
    if n_missing := len(pending_cells(directory, comparisons, rows)):
        print(f"{n_missing} cells are missing: 'torchcaps bench routings' measures them")
    _write_page(directory, options)


def _split(text: str | None) -> list[str]:
    """Return the names of a list separated by commas; an empty list for ``None``."""
    return [] if text is None else [name.strip() for name in text.split(",")]


def _report(cell: RoutingCell, record: dict[str, Any], n_left: int) -> None:
    """Print the result of a cell."""
    result = record["status"]
    if result == "finished" and cell.is_cost:
        result = f"{1e3 * record['step_seconds']:.1f} ms per step"
    elif result == "finished":
        result = f"validation {100 * record['val_accuracy']:.2f} %, {record['cpu_seconds']:.0f} s of CPU time"
    print(f"{cell.file.removesuffix('.json')}: {result}; {n_left} left", flush=True)


def _print_plan(cells: list[RoutingCell]) -> None:
    """Print the missing cells; seeds whose learning rate is not selected yet are listed with the first one."""
    for cell in cells:
        print(cell.file.removesuffix(".json"))
    print(f"{len(cells)} cells are missing")


def _print_rows(directory: Path, comparison: Comparison) -> None:
    """Print the table of a data set."""
    print(f"{comparison.data}, {comparison.steps:,} steps, accuracies in percent:")
    table = start_table(*HEADINGS, right=HEADINGS[1:])
    for row in read_rows(directory, comparison):
        table.add_row(*row.cells())
    print_table(table)


def _write_page(directory: Path, options: Any) -> None:
    """Write page and figure, which always contain all data sets of the scale."""
    page, figure = options.page, options.figure
    if page is None and figure is None and options.scale == "cpu" and FIGURE.parent.is_dir():
        page, figure = PAGE, FIGURE
    comparisons = SCALES[options.scale]
    figure = None if figure is None else Path(figure).expanduser()
    if figure is not None and not draw_routings(directory, comparisons, figure):
        figure = None  # nothing to draw
    if page is not None:
        page = Path(page).expanduser()
        link = None if figure is None else Path(os.path.relpath(figure, page.parent)).as_posix()
        write_atomic(page, render_page(directory, comparisons, link), ValueError)
        print(f"page written to {page}")
