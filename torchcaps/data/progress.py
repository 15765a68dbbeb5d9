"""A progress bar where somebody looks, and nothing elsewhere."""

import sys
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

from torchcaps.data.errors import extra

__all__ = ["tracked"]

T = TypeVar("T")
FEW = 500  # things that take no time worth a bar


def tracked(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """Go through things; on a terminal, and when they are many, with a bar."""
    count = total if total is not None else len(items) if isinstance(items, Sized) else None
    if not sys.stderr.isatty() or (count is not None and count < FEW):
        return iter(items)
    console = extra("rich.console", "the progress bar").Console(stderr=True)
    return iter(extra("rich.progress", "the progress bar").track(items, what, count, console=console))
