"""Progress bars where somebody looks, and plain lines or nothing elsewhere."""

import sys
from collections.abc import Iterable, Iterator, Sized
from typing import Any, TypeVar

from torchcaps.data.errors import extra

__all__ = ["DownloadBar", "tracked"]

T = TypeVar("T")
FEW = 500  # things that take no time worth a bar


def tracked(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """Go through things; on a terminal, and when they are many, with a bar."""
    count = total if total is not None else len(items) if isinstance(items, Sized) else None
    if not sys.stderr.isatty() or (count is not None and count < FEW):
        return iter(items)
    console = extra("rich.console", "the progress bar").Console(stderr=True)
    return iter(extra("rich.progress", "the progress bar").track(items, what, count, console=console))


class DownloadBar:
    """A progress bar as pooch wants one, drawn by rich where somebody looks."""

    def __init__(self, name: str) -> None:
        self._progress: Any = None
        self._name = name
        if sys.stderr.isatty():
            rich, console = extra("rich.progress", "the progress bar"), extra("rich.console", "the progress bar")
            columns = (
                rich.TextColumn("{task.description}"),
                rich.BarColumn(),
                rich.DownloadColumn(),
                rich.TransferSpeedColumn(),
                rich.TimeRemainingColumn(),
            )
            self._progress = rich.Progress(*columns, console=console.Console(stderr=True))
            self._task = self._progress.add_task(name, total=None)
        self.total: int | None = None

    def __enter__(self) -> "DownloadBar":
        if self._progress is not None:
            self._progress.start()
        else:
            print(f"downloading {self._name}", file=sys.stderr)
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def update(self, amount: int) -> None:
        """Take note of bytes that came in."""
        if self._progress is not None:
            self._progress.update(self._task, advance=amount, total=self.total or None)

    def reset(self) -> None:
        """Begin again at nothing."""
        if self._progress is not None:
            self._progress.reset(self._task)

    def close(self) -> None:
        """Nothing: leaving the context ends the bar."""
