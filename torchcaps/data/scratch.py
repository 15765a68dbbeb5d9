"""A folder of one's own beside where files will stand, so that they can be moved into place whole."""

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["scratch"]

PREFIX = ".torchcaps-"
STALE = 24 * 3600  # seconds after which what a killed process left behind is swept away


@contextlib.contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """Make a folder of one's own in a folder, and remove it afterwards; what others left long ago is swept away."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another process may sweep as well
            if time.time() - left.stat().st_mtime > STALE:
                shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=folder, ignore_cleanup_errors=True) as own:
        yield Path(own)
