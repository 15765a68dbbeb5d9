"""Terminal output of the commands: tables, percentages, and exit codes."""

import os
import sys
import textwrap
from enum import IntEnum
from typing import Any, NoReturn

from rich import box
from rich.console import Console
from rich.table import Table

from torchcaps._core.validation import escape_control

__all__ = [
    "ExitCode",
    "escape_control",
    "exit_code_of",
    "exit_with_failure",
    "percent",
    "print_table",
    "print_text",
    "print_warning",
    "start_table",
    "terminal_width",
]

MIN_TEXT_WIDTH = 12  # characters of a column of text that stay readable
PIPE_WIDTH = 400  # columns of a table that is not printed on a terminal


class ExitCode(IntEnum):
    """Exit codes of ``torchcaps``. A command stopped by signal n exits with 128 + n: 130 for Ctrl-C, 143 for TERM."""

    OK = 0
    FAILURE = 1  # the run failed: diverged, disk full, no network, a process lost
    USAGE = 2  # invalid usage or input: nothing was started
    SIGNAL = 128
    INTERRUPTED = 130


def exit_code_of(error: BaseException) -> ExitCode:
    """Return the exit code for an error: a failure of network or disk, otherwise invalid usage or input."""
    return ExitCode.FAILURE if isinstance(error, OSError) else ExitCode.USAGE


def exit_with_failure(error: Exception) -> NoReturn:
    """Print an error as one line and exit with `ExitCode.FAILURE`."""
    print(f"torchcaps: {escape_control(' '.join(str(error).split()))}", file=sys.stderr)
    sys.exit(ExitCode.FAILURE)


class _EscapedTable(Table):
    """A table whose cells can't control the terminal."""

    def add_row(self, *cells: Any, **options: Any) -> None:
        """Add a row of strings."""
        super().add_row(*(escape_control(str(cell)) for cell in cells), **options)


def start_table(*headings: str, right: tuple[str, ...] = ()) -> Table:
    """Return an empty table.

    Args:
        headings: column headings. The first column is never truncated.
        right: headings of numeric columns, which are right-aligned and never truncated.
    """
    table = _EscapedTable(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, heading in enumerate(headings):
        justify = "right" if heading in right else "left"
        table.add_column(heading, justify=justify, no_wrap=heading in right or index == 0, overflow="fold")
    return table


def terminal_width() -> int | None:
    """Return the width of the terminal, or of the environment variable ``COLUMNS``; ``None`` if there is neither."""
    return Console().width if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit() else None


def print_table(table: Table) -> None:
    """Print a table at the width of the terminal; at full width if the output is not a terminal.

    If the terminal is too narrow for the numbers and names, each row is printed as lines of ``heading value``.
    """
    width = terminal_width()
    if width is not None and width < _min_width(table):
        print("\n".join(_row_lines(table, width)) + "\n")
        return
    console = Console(width=width or PIPE_WIDTH, markup=False, emoji=False, highlight=False)
    with console.capture() as capture:
        console.print(table)
    lines = [line.rstrip() for line in capture.get().splitlines()]
    print("\n".join(lines).strip("\n") + "\n")


def print_text(text: str, indent: str = "") -> None:
    """Print a sentence, wrapped between words at the width of the terminal; on one line if there is none.

    Args:
        text: the sentence.
        indent: of all lines but the first.
    """
    width = terminal_width()
    print(text if width is None else _wrap(text, width, indent))


def print_warning(message: object, *_: object) -> None:
    """Print a warning as one line on standard error; for ``warnings.showwarning``."""
    print(f"torchcaps: {escape_control(' '.join(str(message).split()))}", file=sys.stderr)


def _wrap(text: str, width: int, indent: str) -> str:
    return textwrap.fill(text, max(width, 20), subsequent_indent=indent, break_on_hyphens=False, drop_whitespace=True)


def _min_width(table: Table) -> int:
    """Return the width below which a table would truncate names or numbers, or break words of short columns."""
    width = 1
    for column in table.columns:
        words = [word for cell in (column.header, *column.cells) for word in str(cell).split()]
        lines = [str(cell) for cell in (column.header, *column.cells)]
        is_whole = column.no_wrap and column.overflow != "ellipsis"
        needed = max(map(len, lines)) if is_whole else min(MIN_TEXT_WIDTH, max(map(len, words), default=0))
        width += needed + 2
    return width


def _row_lines(table: Table, width: int) -> list[str]:
    """Return the rows of a table as lines of ``heading value`` below the value of the first column."""
    headings = [str(column.header) for column in table.columns]
    label_width = max(map(len, headings[1:]), default=0)
    lines = []
    for first, *cells in zip(*(map(str, column.cells) for column in table.columns), strict=True):
        lines.append(_wrap(first, width, "  "))
        for heading, cell in zip(headings[1:], cells, strict=True):
            if cell:
                lines.append(_wrap(f"  {heading:<{label_width}}  {cell}", width, " " * 4))
    return lines


def percent(fraction: float) -> str:
    """Return a fraction in percent, with two decimals."""
    return f"{100 * fraction:.2f} %"
