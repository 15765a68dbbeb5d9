"""State of a run: counters, best validation result and stop reason, as stored in checkpoints; its result."""

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from torch import Tensor

from torchcaps._core.validation import check_fields, check_range
from torchcaps.training.errors import CheckpointError
from torchcaps.training.evaluation import Evaluation

__all__ = ["BestResult", "StopReason", "TrainResult", "TrainState"]


class StopReason(StrEnum):
    """Why a run ended. Checkpoints, ``results.json`` and records store the value.

    >>> StopReason("max_epochs") is StopReason.MAX_EPOCHS
    True
    """

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


@dataclass(frozen=True)
class TrainResult:
    """Result of a finished run.

    Args:
        path: the run directory.
        stop_reason: the stop criterion that was met.
        epochs, steps, seconds: length of the training.
        eval_weights: weights that the recipe evaluates: ``"last"``, ``"best"`` or ``"ema"``.
        test_results: evaluation on the test set, by kind of weights; empty without a test set.
        names_own_code: as `RunSpec.names_own_code`.

    >>> TrainResult(Path("runs/a"), StopReason.MAX_EPOCHS, 1.0, 40, 2.5, "last", {}).stop_reason.value
    'max_epochs'
    """

    path: Path
    stop_reason: StopReason
    epochs: float
    steps: int
    seconds: float
    eval_weights: str
    test_results: dict[str, Evaluation]
    names_own_code: bool = False

    @property
    def test(self) -> Evaluation | None:
        """Evaluation of the recipe's weights on the test set."""
        return self.test_results.get(self.eval_weights)

    @property
    def correct(self) -> Tensor | None:
        """Whether each test image is classified correctly by the recipe's weights: bool ``[n]``, in data set order."""
        return self.test.correct if self.test is not None else None
