"""Atomic file writes: a file is written next to its target, synced to disk and then renamed over it."""

import contextlib
import errno
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = [
    "STAGING_PREFIX",
    "atomic_path",
    "check_inside",
    "check_regular_file",
    "move_into_place",
    "move_tree_into_place",
    "reason_of",
    "staging_directory",
    "sync_directory",
    "sync_file",
    "write_atomic",
]

STAGING_PREFIX = ".torchcaps-scratch-"
STALE_AFTER_S = 24 * 3600  # age from which a staging directory is known to be left over from a killed process


@contextlib.contextmanager
def staging_directory(directory: Path, sweep: bool = True) -> Iterator[Path]:
    """Create a private directory inside ``directory`` (so that a rename stays on one file system); remove it on exit.

    Args:
        directory: the directory that will contain the finished files; created if missing.
        sweep: also remove staging directories that killed processes left there. Use it only in directories that
            belong to the library.
    """
    staging = _make_private(directory)
    for leftover in directory.glob(f"{STAGING_PREFIX}*") if sweep else ():
        with contextlib.suppress(OSError):  # another process may sweep at the same time
            if time.time() - leftover.stat().st_mtime > STALE_AFTER_S:
                shutil.rmtree(leftover)
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _make_private(directory: Path) -> Path:
    """Return a new private subdirectory named with `STAGING_PREFIX`; create ``directory`` if it is missing."""
    for _ in range(10):
        directory.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # another process removed the directory while it was empty
            return Path(tempfile.mkdtemp(prefix=STAGING_PREFIX, dir=directory))
    raise FileNotFoundError(2, "another process keeps removing it", str(directory))


def sync_file(path: Path) -> None:
    """Flush a file to disk (fsync)."""
    with path.open("rb+") as file:  # Windows flushes only files that are open for writing
        os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """Flush a directory's entries to disk (fsync), if the system supports it."""
    with contextlib.suppress(OSError):  # Windows cannot open directories
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def move_into_place(source: Path, target: Path) -> None:
    """Sync a finished file, give it the permissions of the user's umask, and rename it to ``target``."""
    sync_file(source)
    mask = os.umask(0)
    os.umask(mask)
    source.chmod(0o666 & ~mask)
    os.replace(source, target)


def move_tree_into_place(source: Path, target: Path) -> None:
    """Rename a finished file or directory to ``target``; merge a directory into an existing one file by file.

    Other files in the target directory are kept. Each file appears atomically.
    """
    if source.is_dir():
        files = [path for path in sorted(source.rglob("*")) if path.is_file()]
        with contextlib.suppress(OSError):  # the target exists and is not empty: another process may have created it
            os.rename(source, target)
            return
        for path in files:
            destination = target / path.relative_to(source)
            destination.parent.mkdir(parents=True, exist_ok=True)
            move_into_place(path, destination)
    else:
        move_into_place(source, target)


@contextlib.contextmanager
def atomic_path(target: Path, error: Callable[[str], Exception] | None = None, sweep: bool = False) -> Iterator[Path]:
    """Yield a temporary path to write to; on success it replaces ``target``, on failure ``target`` is unchanged.

    Args:
        target: the file to create or replace. Its directory is created if missing.
        error: exception type raised instead of an OSError, with a message that names the file and the reason.
        sweep: see `staging_directory`.
    """
    try:
        with staging_directory(target.parent, sweep) as staging:
            yield staging / target.name
            move_into_place(staging / target.name, target)
    except OSError as problem:
        if error is None:
            raise
        raise error(f"{target} can't be written: {reason_of(problem)}") from problem


def write_atomic(
    path: Path, content: bytes | str, error: Callable[[str], Exception] | None = None, sweep: bool = False
) -> None:
    """Write bytes, or text as UTF-8, atomically; see `atomic_path`."""
    with atomic_path(path, error, sweep) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def check_regular_file(path: Path, max_bytes: int | None = None) -> None:
    """Raise an OSError if an existing path is not a regular file: opening a FIFO or a device could wait forever.

    Args:
        path: the path.
        max_bytes: largest size; a sparse file of any size takes no space on the disk.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    if max_bytes is not None and status.st_size > max_bytes:
        raise OSError(errno.EFBIG, f"it has {status.st_size:,} bytes, more than {max_bytes:,}", str(path))


def check_inside(path: Path, directory: Path) -> None:
    """Raise an OSError if a path, after following symbolic links, is outside of a directory.

    Writing to a link in a directory from a stranger would change a file of the user's elsewhere.
    """
    real = Path(os.path.realpath(path))  # unlike Path.resolve, it accepts a loop of links
    if not real.is_relative_to(os.path.realpath(directory)):
        raise OSError(errno.EPERM, f"a symbolic link out of {directory}", str(path))


def reason_of(error: OSError) -> str:
    """Return the operating system's reason for an error, without number and path."""
    return error.strerror or str(error)
