"""Tables, as wide as the terminal or as they need."""

import sys

from rich import box
from rich.console import Console
from rich.table import Table

__all__ = ["print_table", "start_table"]


def start_table(*headings: str, right: tuple[str, ...] = ()) -> Table:
    """Start a table whose first column and numbers are never cut; the rest gives way."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, heading in enumerate(headings):
        whole = heading in right or number == 0
        justify = "right" if heading in right else "left"
        table.add_column(heading, justify=justify, no_wrap=whole, overflow="fold")
    return table


def print_table(table: Table) -> None:
    """Print a table: as wide as the terminal, or on a pipe as wide as it needs."""
    width = None if sys.stdout.isatty() else 400
    console = Console(width=width)
    with console.capture() as capture:
        console.print(table)
    lines = [line.rstrip() for line in capture.get().splitlines()]
    print("\n".join(lines).strip("\n") + "\n")
