"""Files from the network: the next mirror when one fails, and a file that is whole or not there."""

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchcaps.data.errors import MissingData, extra
from torchcaps.data.scratch import scratch

__all__ = ["download"]

TIMEOUT = 30  # seconds without a byte


def download(name: str, urls: Sequence[str], checksum: str, folder: Path) -> Path:
    """Fetch a file from the first mirror that has it whole; return where it lies.

    It is written into a folder of its own and moved into place after its checksum was seen to be right, so that a
    file of this name is always whole, whatever happens, and two processes at once don't meet.
    """
    pooch = extra("pooch", f"downloading {name}")
    errors = extra("requests.exceptions", f"downloading {name}")
    pooch.get_logger().setLevel("ERROR")  # it is said below, in our words
    problems = []
    new = not folder.exists()
    try:
        with scratch(folder) as own:
            for url in urls:
                try:
                    with _Bar(name) as bar:
                        fetch = pooch.HTTPDownloader(timeout=TIMEOUT, progressbar=bar)
                        pooch.retrieve(url, checksum or None, fname=name, path=own, downloader=fetch)
                    whole = own / name
                    with whole.open("rb") as file:
                        os.fsync(file.fileno())
                    os.replace(whole, folder / name)
                    return folder / name
                except (errors.RequestException, ValueError) as error:
                    problems.append(_problem(url, error))
    except OSError as error:
        reason = error.strerror or str(error)
        raise MissingData(f"{folder} can't be written: {reason[:1].lower()}{reason[1:]}") from error
    if new:
        with contextlib.suppress(OSError):
            folder.rmdir()  # nothing came: leave no trace
    raise MissingData("; ".join(problems))


def _problem(url: str, error: Exception) -> str:
    """Say in a few words what went wrong with a mirror."""
    host = url.split("/")[2]
    response = getattr(error, "response", None)
    if response is not None:
        return f"{host} answered {response.status_code}"
    kind = type(error).__name__
    if "hash of downloaded file" in str(error):
        return f"{host} sent a file with another checksum"
    if "Timeout" in kind or "timed out" in str(error).lower():
        return f"{host} did not answer in time"
    if "Chunked" in kind or "IncompleteRead" in str(error):
        return f"{host} broke off"
    return f"{host} can't be reached"


class _Bar:
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

    def __enter__(self) -> "_Bar":
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
