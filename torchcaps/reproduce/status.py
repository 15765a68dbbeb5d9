"""Status of records: done, running with the estimated time left, waiting or failed.

Everything is read from the records and the working directory, so that any process can ask while others execute. A
record is running if a process holds the lock of its directory; the operating system releases the lock of a process that
dies.
"""

import enum
import json
import time
from dataclasses import dataclass
from pathlib import Path

from torchcaps._core.files import write_atomic
from torchcaps.reproduce.planner import missing_datasets
from torchcaps.reproduce.schema import Run
from torchcaps.reproduce.store import RecordKey, RecordStore
from torchcaps.training import RunSpec
from torchcaps.training.checkpoint import read_checkpoint_state
from torchcaps.training.errors import RunError
from torchcaps.training.run_dir import RunDirectory
from torchcaps.training.state import TrainState
from torchcaps.training.stopping import total_steps

__all__ = ["FailureNote", "RecordState", "RecordStatus", "RunProgress", "record_status", "run_progress"]

MAX_CHECKPOINT_AGE_S = 300.0  # of a run that progresses: checkpoints are saved every minute


class RecordState(enum.StrEnum):
    """State of a record; the values are those of ``torchcaps reproduce status --json``."""

    DONE = "done"
    RUNNING = "running"
    WAITING = "waiting"
    FAILED = "failed"


@dataclass(frozen=True)
class RunProgress:
    """Progress of a training run at its last checkpoint.

    Args:
        step, total: completed and planned optimizer steps; a run with a target accuracy may stop before the last.
        seconds: training time so far.
        saved_at: time of the checkpoint, in seconds since the epoch.
    """

    step: int
    total: int
    seconds: float
    saved_at: float

    def seconds_left(self, now: float) -> float | None:
        """Return the estimated time left at the speed so far, without the last evaluation; ``None`` if unknown.

        The time since the checkpoint counts as training, up to `MAX_CHECKPOINT_AGE_S`: a run may be suspended.

        Args:
            now: present time, in seconds since the epoch.

        >>> RunProgress(step=100, total=400, seconds=50.0, saved_at=1_000.0).seconds_left(now=1_030.0)
        120.0
        """
        if not self.step:
            return None
        left = (self.total - self.step) * self.seconds / self.step
        return max(0.0, left - min(max(0.0, now - self.saved_at), MAX_CHECKPOINT_AGE_S))


@dataclass(frozen=True)
class RecordStatus:
    """Status of a record.

    Args:
        key: the record.
        state: its state.
        progress: progress of a run that is running or was stopped.
        seconds_left: estimated time left of a running run.
        detail: why it failed, or the data sets that it lacks.
    """

    key: RecordKey
    state: RecordState
    progress: RunProgress | None = None
    seconds_left: float | None = None
    detail: str = ""


class FailureNote:
    """File with the reason why a job failed; removed when the job is submitted again.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of(cls, key: RecordKey, store: RecordStore) -> "FailureNote":
        """Return the note of a record."""
        return cls(store.work / "jobs" / f"{key.name(store.scale)}.failed")

    def write(self, reason: str) -> None:
        """Write the reason."""
        write_atomic(self.path, json.dumps({"reason": reason}) + "\n", RunError)

    def read(self) -> str | None:
        """Return the reason; ``None`` if the job has not failed."""
        try:
            return str(json.loads(self.path.read_text(encoding="utf-8"))["reason"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def clear(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)


def run_progress(directory: RunDirectory) -> RunProgress | None:
    """Return the progress of a run at its newest checkpoint; ``None`` if it has none."""
    for path in (directory.last, directory.previous):  # the newest one is renamed while the next is written
        state = read_checkpoint_state(path)
        if state is None:
            continue
        try:
            saved_at, run = path.stat().st_mtime, TrainState.from_plain(state["run"])
            recipe = RunSpec.from_plain(state["config"]).recipe
            batches_per_epoch = -(-state["n_images"] // recipe.batch_size)
        except (OSError, KeyError, TypeError, ValueError, RunError):
            continue
        return RunProgress(run.step, total_steps(recipe, run, batches_per_epoch), run.seconds, saved_at)
    return None


def record_status(
    key: RecordKey, store: RecordStore, data_dir: str | None = None, now: float | None = None
) -> RecordStatus:
    """Return the status of a record.

    Args:
        key: the record.
        store: the records and the working directory.
        data_dir: the data directory.
        now: present time in seconds since the epoch (default: that of the clock).
    """
    directory = store.run_directory(key)
    is_running, record = directory.is_locked(), store.read(key)
    if record is not None and not is_running:  # a run with a record may be repeated for its weights
        return RecordStatus(key, RecordState.DONE)
    progress = run_progress(directory) if isinstance(key.source, Run) else None
    if is_running:
        left = None if progress is None else progress.seconds_left(time.time() if now is None else now)
        return RecordStatus(key, RecordState.RUNNING, progress, left)
    if (problem := store.problems.get(str(store.path(key)))) is not None:
        return RecordStatus(key, RecordState.FAILED, progress, detail=problem)
    if (reason := FailureNote.of(key, store).read()) is not None:
        return RecordStatus(key, RecordState.FAILED, progress, detail=reason)
    missing = missing_datasets(key.source, store.scale, data_dir)
    detail = f"missing data: {', '.join(missing)}" if missing else ""
    return RecordStatus(key, RecordState.WAITING, progress, detail=detail)
