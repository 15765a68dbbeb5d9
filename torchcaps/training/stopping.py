"""When a run ends: stop criteria, training time, and the number of steps that fits into a time limit."""

from collections.abc import Callable

from torchcaps.models.recipe import Recipe
from torchcaps.training.config import RunSpec
from torchcaps.training.state import StopReason, TrainState

__all__ = ["Timer", "find_stop_reason", "total_steps"]

FIRST_PLAN_STEPS = 4  # steps of a session before its first plan for max_minutes
ROUNDING = 1e-6  # of a step, so that a clock's rounding errors do not cost one
MAX_MARKS = 128  # of which the speed is measured, per session


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
        self.marks = [(step, self.start)]  # steps and times from which the speed is measured

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

    def seconds_per_step(self, step: int) -> float | None:
        """Return the time per step in the second half of this session, evaluations included; ``None`` without a step.

        Older steps are ignored, so that the estimate follows a machine that becomes faster or slower.
        """
        if step <= self.first_step:
            return None
        now = self.clock()
        middle = (self.start + now) / 2
        while len(self.marks) > 1 and self.marks[1][1] <= middle:
            del self.marks[0]
        first, time = self.marks[0]
        if step > self.marks[-1][0] and now - self.marks[-1][1] >= (now - self.start) / MAX_MARKS:
            self.marks.append((step, now))
        return (now - time) / (step - first) if step > first else None

    def estimate_steps(self, step: int, max_minutes: float) -> int | None:
        """Return how many steps the run will have done after ``max_minutes``, at the speed of `seconds_per_step`.

        ``None`` in the first steps of a session, whose speed is not representative.
        """
        seconds = self.seconds_per_step(step)
        if seconds is None or step - self.first_step < FIRST_PLAN_STEPS:
            return None
        remaining = (60 * max_minutes - self.seconds) / max(seconds, 1e-9)
        return step + max(0, int(remaining + ROUNDING))

    def seconds_left(self, step: int, total: int) -> float | None:
        """Return the estimated time until step ``total``; ``None`` before the first step of the session."""
        seconds = self.seconds_per_step(step)
        return None if seconds is None else seconds * max(0, total - step)


def total_steps(recipe: Recipe, state: TrainState, batches_per_epoch: int) -> int:
    """Return the number of steps of the whole run, at most those planned for its time limit."""
    total = recipe.steps or (recipe.epochs or 1) * batches_per_epoch
    return min(total, state.planned_steps) if state.planned_steps else total


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
