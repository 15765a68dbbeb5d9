"""When a run ends: stop criteria, training time, and the number of steps that fits into a time limit."""

from collections.abc import Callable

from torchcaps.models.recipe import Recipe
from torchcaps.training.config import RunSpec
from torchcaps.training.state import StopReason, TrainState

__all__ = ["Timer", "find_stop_reason", "needs_total_steps", "total_steps"]

PLANNING_STEPS = 20  # steps whose speed predicts how many fit into max_minutes
TRAINING_FRACTION = 0.95  # of max_minutes; the rest is for evaluations


class Timer:
    """Training time of a run, over all of its sessions.

    Args:
        clock: returns seconds, such as `time.monotonic`.
        seconds: training time of earlier sessions.
        step: completed steps at the start of this session.
    """

    def __init__(self, clock: Callable[[], float], seconds: float = 0.0, step: int = 0) -> None:
        self.clock, self.earlier_seconds, self.first_step = clock, seconds, step
        self.start = self.saved = clock()

    @property
    def seconds(self) -> float:
        """Training time so far, earlier sessions included."""
        return self.earlier_seconds + self.clock() - self.start

    @property
    def seconds_since_save(self) -> float:
        """Time since the last call of `mark_saved`."""
        return self.clock() - self.saved

    def mark_saved(self) -> None:
        """Restart `seconds_since_save`."""
        self.saved = self.clock()

    def estimate_steps(self, step: int, max_minutes: float) -> int | None:
        """Return how many steps the run will have done after ``max_minutes``.

        The estimate is made once per session, from the speed of its first steps; otherwise this returns ``None``.
        """
        if step - self.first_step != PLANNING_STEPS:
            return None
        steps_per_second = PLANNING_STEPS / max(self.clock() - self.start, 1e-6)
        remaining = int((TRAINING_FRACTION * 60 * max_minutes - self.seconds) * steps_per_second)
        return step + max(1, remaining)


def total_steps(recipe: Recipe, state: TrainState, batches_per_epoch: int) -> int:
    """Return the number of steps of the whole run, at most those planned for its time limit."""
    total = recipe.steps or (recipe.epochs or 1) * batches_per_epoch
    return min(total, state.planned_steps) if state.planned_steps else total


def needs_total_steps(recipe: Recipe) -> bool:
    """Return whether the learning rate schedule depends on the number of steps of the run."""
    try:
        recipe.lr_schedule.factor(0, 0, None)
    except ValueError:
        return True
    return False


def find_stop_reason(
    spec: RunSpec, state: TrainState, total: int, max_seconds: Callable[[], float]
) -> StopReason | None:
    """Return the stop criterion that the run has met, if any.

    Args:
        spec: its criteria.
        state: its progress.
        total: its number of steps.
        max_seconds: returns the training time, the maximum over all processes. Called only if the run has a time limit.
    """
    if state.step >= total:
        if state.planned_steps and state.step >= state.planned_steps:
            return StopReason.MAX_MINUTES
        return StopReason.MAX_STEPS if spec.recipe.steps else StopReason.MAX_EPOCHS
    if spec.max_minutes is not None and max_seconds() >= 60 * spec.max_minutes:
        return StopReason.MAX_MINUTES
    if spec.early_stopping_patience is not None and state.evals_since_best >= spec.early_stopping_patience:
        return StopReason.EARLY_STOPPING
    if spec.target_accuracy is not None and state.best.accuracy >= spec.target_accuracy:
        return StopReason.TARGET_ACCURACY
    return None
