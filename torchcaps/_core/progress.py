"""Progress bars on a terminal; plain lines or silence in pipes and files."""

import sys
from collections.abc import Iterable, Iterator, Sized
from typing import Any, TypeVar

from torchcaps._core.optional import import_optional

__all__ = ["DownloadBar", "track"]

T = TypeVar("T")
MIN_ITEMS_FOR_BAR = 500


def track(items: Iterable[T], description: str, total: int | None = None) -> Iterator[T]:
    """Iterate over items with a progress bar, if standard error is a terminal and there are many of them."""
    count = total if total is not None else len(items) if isinstance(items, Sized) else None
    if not sys.stderr.isatty() or (count is not None and count < MIN_ITEMS_FOR_BAR):
        return iter(items)
    console = import_optional("rich.console", "the progress bar").Console(stderr=True)
    return iter(import_optional("rich.progress", "the progress bar").track(items, description, count, console=console))


class DownloadBar:
    """Progress bar with the interface that pooch expects; drawn by rich if standard error is a terminal."""

    def __init__(self, name: str) -> None:
        self._progress: Any = None
        self._name = name
        if sys.stderr.isatty():
            rich = import_optional("rich.progress", "the progress bar")
            console = import_optional("rich.console", "the progress bar").Console(stderr=True)
            columns = (
                rich.TextColumn("{task.description}"),
                rich.BarColumn(),
                rich.DownloadColumn(),
                rich.TransferSpeedColumn(),
                rich.TimeRemainingColumn(),
            )
            self._progress = rich.Progress(*columns, console=console)
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
        """Advance by a number of bytes."""
        if self._progress is not None:
            self._progress.update(self._task, advance=amount, total=self.total or None)

    def reset(self) -> None:
        """Start again at zero."""
        if self._progress is not None:
            self._progress.reset(self._task)

    def close(self) -> None:
        """Do nothing: leaving the context ends the bar."""
