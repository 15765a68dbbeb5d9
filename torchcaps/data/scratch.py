"""A folder of one's own beside where files will stand, so that they can be moved into place whole."""

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["into_place", "scratch", "sync_file"]

PREFIX = ".torchcaps-scratch-"
STALE = 24 * 3600  # seconds after which what a killed process left behind is swept away


@contextlib.contextmanager
def scratch(folder: Path, sweep: bool = True) -> Iterator[Path]:
    """Make a folder of one's own in a folder, and remove it afterwards.

    Args:
        folder: where the files will stand.
        sweep: remove what processes that were killed have left there; only for folders of the library's own.
    """
    own = _own_folder(folder)
    for left in folder.glob(f"{PREFIX}*") if sweep else ():
        with contextlib.suppress(OSError):  # another process may sweep as well
            if time.time() - left.stat().st_mtime > STALE:
                shutil.rmtree(left)
    try:
        yield own
    finally:
        shutil.rmtree(own, ignore_errors=True)


def _own_folder(folder: Path) -> Path:
    for _ in range(10):
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # another process removed the folder, since nothing was in it
            return Path(tempfile.mkdtemp(prefix=PREFIX, dir=folder))
    raise FileNotFoundError(2, "it is removed again and again", str(folder))


def sync_file(path: Path) -> None:
    """Wait until a file is on the disk."""
    with path.open("rb+") as file:  # Windows flushes only what could have been written
        os.fsync(file.fileno())


def into_place(source: Path, target: Path) -> None:
    """Move a file to where it belongs, once it is on the disk, readable by whom the user's other files are."""
    sync_file(source)
    mask = os.umask(0)
    os.umask(mask)
    source.chmod(0o666 & ~mask)
    os.replace(source, target)
