"""Directory of a run: its files, and a lock that lets one run at a time write to it."""

import contextlib
import io
import os
import shutil
from pathlib import Path
from typing import Self
from weakref import WeakSet

from torchcaps._core.files import STAGING_PREFIX, check_inside, check_regular_file, reason_of, write_atomic
from torchcaps._core.optional import import_optional
from torchcaps._core.registry import UntrustedCodeError
from torchcaps.training.checkpoint import Checkpoint, read_checkpoint
from torchcaps.training.config import RunSpec
from torchcaps.training.errors import CheckpointError, RunError, RunInUseError
from torchcaps.training.settings_file import read_settings

try:
    import fcntl
except ImportError:  # Windows has no flock; there, only the check for an empty directory keeps two runs apart
    fcntl = None  # type: ignore[assignment]

__all__ = ["RunDirectory"]

CONFIG = "config.yaml"
_LOCKED: "WeakSet[RunDirectory]" = WeakSet()
HEADER = "# All settings of this run. Train with the same settings: torchcaps train --config {path}\n"


class RunDirectory:
    """Directory of a run. As a context manager it releases the lock on exit.

    Args:
        path: the directory.

    Attributes:
        config: all settings of the run, ``config.yaml``. A directory with this file is a run directory.
        metrics: one row per evaluation, ``metrics.csv``.
        results: results at the end of the run, ``results.json``.
        figures: directory of figures.
        last, previous, best: checkpoints: the newest, the one before it, and the one with the best validation result.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path: Path = Path(path).expanduser()
        self.config: Path = self.path / CONFIG
        self.metrics: Path = self.path / "metrics.csv"
        self.results: Path = self.path / "results.json"
        self.figures: Path = self.path / "figures"
        checkpoints = self.path / "checkpoints"
        self.last, self.previous, self.best = (
            checkpoints / f"{name}.safetensors" for name in ("last", "previous", "best")
        )
        self._lock: io.FileIO | None = None

    @classmethod
    def create(cls, path: str | os.PathLike[str] | None, name: str) -> "RunDirectory":
        """Create the directory of a new run and lock it.

        Args:
            path: the directory, empty or missing; ``None`` creates ``runs/NAME-1``, or the next free number.
            name: name of the run.
        """
        try:
            if path is None:
                return cls(_create_numbered(Path("runs"), name))
            directory = cls(path)
            directory.path.mkdir(parents=True, exist_ok=True)
            directory._check_empty()
            directory.lock()
            try:
                directory._check_empty()  # another run may have been created before the lock was taken
            except ValueError:
                directory.release()
                raise
        except OSError as error:
            location = "runs" if path is None else path
            raise RunError(f"the run directory can't be created in {location}: {reason_of(error)}") from error
        return directory

    def _check_empty(self) -> None:
        """Raise if the directory contains a run or other files."""
        if self.config.exists():
            raise RunInUseError(
                f"{self.path} already contains a run: resume it with --resume {self.path}, or choose another directory"
            )
        if any(entry.name != "lock" and not entry.name.startswith(STAGING_PREFIX) for entry in self.path.iterdir()):
            raise ValueError(f"{self.path} is not empty: choose a new directory for the run")

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "RunDirectory":
        """Return an existing run directory; raise a ValueError if the path is not one."""
        directory = cls(path)
        if not os.fspath(path) or not directory.path.exists():
            raise ValueError(f"{os.fspath(path)!r} is not a run directory: it does not exist")
        if directory.path.is_file() or not directory.config.exists():
            raise ValueError(f"{path} is not a run directory: it has no {CONFIG}, which 'torchcaps train' writes")
        return directory

    def lock(self) -> None:
        """Lock the directory until `release` or the end of this process; raise if another process has locked it."""
        if self._lock is not None:
            return
        self.check_links()
        try:
            if (self.path / "lock").exists():
                check_regular_file(self.path / "lock")
            lock = io.FileIO(self.path / "lock", "a+")
        except OSError as error:
            raise RunError(f"{self.path} is not writable: {reason_of(error)}") from error
        if fcntl is not None:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                lock.seek(0)
                owner = lock.read().decode(errors="replace").strip() or "unknown"
                lock.close()
                raise RunInUseError(f"{self.path} is in use by another training process (PID {owner})") from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n".encode())
        self._lock = lock
        _LOCKED.add(self)

    def check_links(self) -> None:
        """Raise a `RunError` if a file or directory that a run writes is a symbolic link out of the run directory."""
        for path in [*self.path.iterdir(), *self.last.parent.glob("*"), *self.figures.glob("*")]:
            try:
                check_inside(path, self.path)
            except OSError as error:
                raise RunError(f"{path} must not be written: it is {reason_of(error)}; replace it by a copy") from error

    def is_locked(self) -> bool:
        """Return whether a process has locked the directory; the lock of a dead process does not count."""
        if fcntl is None:
            return False
        try:
            check_regular_file(self.path / "lock")
            with (self.path / "lock").open() as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # it does not exist
            return False
        return False

    def release(self) -> None:
        """Release the lock, if this process has it."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None
            _LOCKED.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def remove_staging(self) -> None:
        """Remove incomplete files that a killed process has left."""
        for path in [*self.path.glob(f"{STAGING_PREFIX}*"), *self.path.glob(f"*/{STAGING_PREFIX}*")]:
            shutil.rmtree(path, ignore_errors=True)

    def write_config(self, spec: RunSpec) -> None:
        """Write all settings of the run."""
        yaml = import_optional("yaml", "a run's configuration")
        text = yaml.safe_dump(spec.to_plain(), sort_keys=False, allow_unicode=True)
        write_atomic(self.config, HEADER.format(path=self.config) + text, RunError)

    def read_config(self, trust_remote_code: bool = False) -> RunSpec:
        """Return the settings of the run.

        Args:
            trust_remote_code: as for `RunSpec.from_plain`.
        """
        values = read_settings(self.config)
        try:
            return RunSpec.from_plain(values, trust_remote_code)
        except UntrustedCodeError as error:
            raise ValueError(f"{self.config}: {error}") from error
        except (ValueError, TypeError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{self.config} is not the configuration of a run: {reason}") from error

    def newest_checkpoint(self, max_bytes: int | None = None) -> tuple[Checkpoint | None, list[str]]:
        """Return the newest intact checkpoint, if any, and the problems of newer ones.

        Args:
            max_bytes: as for `read_checkpoint`.
        """
        problems = []
        for path in (self.last, self.previous):
            if path.exists():
                try:
                    return read_checkpoint(path, max_bytes=max_bytes), problems
                except CheckpointError as error:
                    problems.append(str(error))
        return None, problems

    def set_aside(self, path: Path) -> None:
        """Rename a damaged checkpoint to ``.broken``, so that it can't replace the intact one before it."""
        with contextlib.suppress(OSError):
            os.replace(path, path.with_suffix(".broken"))


def _create_numbered(parent: Path, name: str) -> Path:
    """Create ``parent/name-N`` with the first N that does not exist; safe if several processes do this at once."""
    parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        with contextlib.suppress(FileExistsError):
            path = parent / f"{name}-{number}"
            path.mkdir()
            return path
        number += 1


def _release_inherited_locks() -> None:
    """Close the locks of the parent in a forked process: a lock is held until no process has the file open."""
    for directory in list(_LOCKED):
        directory.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_inherited_locks)
