"""State of a run: counters, best validation result and stop reason, as stored in checkpoints."""

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from torchcaps._core.validation import check_fields, check_range
from torchcaps.training.errors import CheckpointError

__all__ = ["BestResult", "StopReason", "TrainState"]


class StopReason(StrEnum):
    """Why a run ended. Checkpoints, ``results.json`` and records store the value."""

    MAX_EPOCHS = "max_epochs"
    MAX_STEPS = "max_steps"
    MAX_MINUTES = "max_minutes"
    EARLY_STOPPING = "early_stopping"
    TARGET_ACCURACY = "target_accuracy"
    INTERRUPTED = "interrupted"
    DIVERGED = "diverged"


@dataclass
class BestResult:
    """Best evaluation on the validation set so far.

    Args:
        accuracy, loss: on the validation set. Of equal accuracies the lower loss is better.
        step, epoch: training progress at that evaluation.
    """

    accuracy: float = -1.0
    loss: float = float("inf")
    step: int = 0
    epoch: float = 0.0

    def is_worse_than(self, accuracy: float, loss: float) -> bool:
        """Return whether another result is better than this one."""
        return (accuracy, -loss) > (self.accuracy, -self.loss)


@dataclass
class TrainState:
    """Progress of a run.

    Args:
        epoch: completed epochs.
        batch: completed batches of the current epoch.
        step: completed optimizer steps.
        seconds: training time over all sessions.
        planned_steps: total number of steps that fits into ``max_minutes``; 0 if not estimated.
        planned_minutes: the ``max_minutes`` of that estimate.
        logged_step: step of the last row in ``metrics.csv``.
        grad_norm: gradient norm of the last step.
        evals_since_best: evaluations since the best one, for early stopping.
        best: best evaluation on the validation set.
        counts: training loss and accuracy counts since the last row.
        stop_reason: ``None`` while the run is not finished.
    """

    epoch: int = 0
    batch: int = 0
    step: int = 0
    seconds: float = 0.0
    planned_steps: int = 0
    planned_minutes: float = 0.0
    logged_step: int = 0
    grad_norm: float = 0.0
    evals_since_best: int = 0
    best: BestResult = field(default_factory=BestResult)
    counts: dict[str, Any] = field(default_factory=dict)
    stop_reason: StopReason | None = None

    def fractional_epoch(self, batches_per_epoch: int) -> float:
        """Return the progress in epochs: 0.5 in the middle of the first."""
        return self.epoch + self.batch / batches_per_epoch

    def to_plain(self) -> dict[str, Any]:
        """Return the JSON-compatible form that a checkpoint stores."""
        return asdict(self)

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> "TrainState":
        """Restore the state of a checkpoint."""
        try:
            reason = values["stop_reason"]
            changes = {
                "best": BestResult(**values["best"]),
                "stop_reason": None if reason is None else StopReason(reason),
            }
            state = cls(**{**values, **changes})
            for part in (state, state.best):
                check_fields(part)
            for name in ("epoch", "batch", "step", "planned_steps", "logged_step", "evals_since_best"):
                check_range(state, name, 0)
            if not isinstance(state.counts, dict):
                raise TypeError(f"TrainState: counts must be a mapping, got {state.counts!r}")
            return state
        except (TypeError, KeyError, ValueError) as error:
            raise CheckpointError(f"the checkpoint has no valid training state: {error}") from error
