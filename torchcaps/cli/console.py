"""Terminal output of the commands: tables, percentages, and exit codes."""

import sys
from enum import IntEnum

from rich import box
from rich.console import Console
from rich.table import Table

__all__ = ["ExitCode", "percent", "print_table", "start_table"]

PIPE_WIDTH = 400  # columns of a table that is not printed on a terminal


class ExitCode(IntEnum):
    """Exit codes of ``torchcaps``. A command stopped by signal n exits with 128 + n: 130 for Ctrl-C, 143 for TERM."""

    OK = 0
    FAILURE = 1  # the run failed: diverged, disk full, a process lost
    USAGE = 2  # invalid usage or input: nothing was started
    SIGNAL = 128
    INTERRUPTED = 130


def start_table(*headings: str, right: tuple[str, ...] = ()) -> Table:
    """Return an empty table.

    Args:
        headings: column headings. The first column is never truncated.
        right: headings of numeric columns, which are right-aligned and never truncated.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, heading in enumerate(headings):
        justify = "right" if heading in right else "left"
        table.add_column(heading, justify=justify, no_wrap=heading in right or index == 0, overflow="fold")
    return table


def print_table(table: Table) -> None:
    """Print a table at the width of the terminal; at full width if the output is not a terminal."""
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    with console.capture() as capture:
        console.print(table)
    lines = [line.rstrip() for line in capture.get().splitlines()]
    print("\n".join(lines).strip("\n") + "\n")


def percent(fraction: float) -> str:
    """Return a fraction in percent, with two decimals."""
    return f"{100 * fraction:.2f} %"
