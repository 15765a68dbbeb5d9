"""The folder of a run: what lies in it, and that one process group at a time writes there."""

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any, Self

from torchcaps._core.files import STAGING_PREFIX, move_into_place, staging_directory
from torchcaps._core.optional import import_optional
from torchcaps.training.checkpoint import Checkpoint, read_checkpoint
from torchcaps.training.config import RunSpec
from torchcaps.training.errors import CheckpointError, RunError, RunInUseError

try:
    import fcntl
except ImportError:  # Windows: two runs in one folder are then kept apart by its being empty at the start only
    fcntl = None  # type: ignore[assignment]

__all__ = ["RunFolder"]

CONFIG = "config.yaml"
HEADER = "# Everything that decides this run. Train again like this: torchcaps train --config {path}\n"


class RunFolder:
    """The folder of a run.

    Attributes:
        path: where it is.
        config: the resolved configuration, ``config.yaml``, which is what makes a folder a run.
        metrics: one row for each look at the run, ``metrics.csv``.
        last, previous, best: checkpoints: the newest, the one before it, and the best on the images held out.
        figures: directory of the figures.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).expanduser()
        self.config = self.path / CONFIG
        self.metrics = self.path / "metrics.csv"
        self.results = self.path / "results.json"
        self.figures = self.path / "figures"
        checkpoints = self.path / "checkpoints"
        self.last, self.previous, self.best = (
            checkpoints / f"{name}.safetensors" for name in ("last", "previous", "best")
        )
        self._lock: Any = None

    @classmethod
    def new(cls, path: str | os.PathLike[str] | None, name: str) -> "RunFolder":
        """Make a folder for a new run: the one that is named, or a fresh one below ``runs``."""
        try:
            if path is None:
                return cls(_fresh(Path("runs"), name))
            folder = cls(path)
            folder.path.mkdir(parents=True, exist_ok=True)
            folder.refuse_full()
            folder.hold()
            try:
                folder.refuse_full()  # again: another run may have been quicker
            except ValueError:
                folder.release()
                raise
        except OSError as error:
            where = "runs" if path is None else path
            raise RunError(f"the run's folder can't be made in {where}: {error.strerror or error}") from error
        return folder

    def refuse_full(self) -> None:
        """Refuse a folder for a new run that has something in it."""
        if self.config.exists():
            raise RunInUseError(
                f"{self.path} holds a run already: go on with it by --resume {self.path}, or name another folder"
            )
        if any(entry.name != "lock" and not entry.name.startswith(STAGING_PREFIX) for entry in self.path.iterdir()):
            raise ValueError(f"{self.path} is not empty: name a new folder for the run")

    @classmethod
    def existing(cls, path: str | os.PathLike[str]) -> "RunFolder":
        """Return the folder of a run that was begun; refuse what is none."""
        folder = cls(path)
        if not os.fspath(path) or not folder.path.exists():
            raise ValueError(f"{os.fspath(path)!r} is no run: there is no such folder")
        if folder.path.is_file() or not folder.config.exists():
            raise ValueError(f"{path} is no run: there is no {CONFIG} in it, as in those that 'torchcaps train' makes")
        return folder

    def hold(self) -> None:
        """Keep other runs out of the folder until this process ends; refuse where one is at work there."""
        if self._lock is not None:
            return
        try:
            lock = (self.path / "lock").open("a+")
        except OSError as error:
            raise RunError(f"{self.path} can't be written: {error.strerror or error}") from error
        if fcntl is not None:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                lock.seek(0)
                owner = lock.read().strip()
                lock.close()
                raise RunInUseError(f"{self.path} is in use: process {owner or '?'} trains there") from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        self._lock = lock

    def release(self) -> None:
        """Let others in again."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def sweep(self) -> None:
        """Remove what a killed process has left half-written."""
        for left in [*self.path.glob(f"{STAGING_PREFIX}*"), *self.path.glob(f"*/{STAGING_PREFIX}*")]:
            shutil.rmtree(left, ignore_errors=True)

    def write_text(self, path: Path, text: str) -> None:
        """Write a file whole or not at all."""
        try:
            with staging_directory(path.parent, sweep=False) as own:
                (own / path.name).write_text(text, encoding="utf-8")
                move_into_place(own / path.name, path)
        except OSError as error:
            raise RunError(f"{path} can't be written: {error.strerror or error}") from error

    def write_config(self, spec: RunSpec) -> None:
        """Write what the run is, all of it resolved."""
        text = import_optional("yaml", "a run's configuration").safe_dump(
            spec.to_plain(), sort_keys=False, allow_unicode=True
        )
        self.write_text(self.config, HEADER.format(path=self.config) + text)

    def read_config(self) -> RunSpec:
        """Return what the run is."""
        yaml = import_optional("yaml", "a run's configuration")
        try:
            values = yaml.safe_load(self.config.read_text(encoding="utf-8"))
            if not isinstance(values, dict):
                raise ValueError("it is no list of settings")
            return RunSpec.from_plain(values)
        except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{self.config} is no configuration of a run: {reason}") from error

    def newest(self) -> tuple[Checkpoint | None, list[str]]:
        """Return the newest checkpoint that is whole, and what is wrong with those that are not."""
        problems = []
        for path in (self.last, self.previous):
            if path.exists():
                try:
                    return read_checkpoint(path), problems
                except CheckpointError as error:
                    problems.append(str(error))
        return None, problems

    def set_aside(self, path: Path) -> None:
        """Rename a broken checkpoint, so that it doesn't take the place of the good one before it."""
        with contextlib.suppress(OSError):
            os.replace(path, path.with_suffix(".broken"))


def _fresh(runs: Path, name: str) -> Path:
    """Make a folder that nobody else has: ``runs/name-1``, or the next number."""
    runs.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        with contextlib.suppress(FileExistsError):
            path = runs / f"{name}-{number}"
            path.mkdir()
            return path
        number += 1
