"""Where a run stands: what a checkpoint holds beside the weights."""

from dataclasses import asdict, dataclass, field
from typing import Any

from torchcaps.training.errors import CheckpointError

__all__ = ["Best", "State"]


@dataclass
class Best:
    """The best look at the images held out so far.

    Args:
        accuracy, loss: there; of equal accuracies the lower loss is better.
        step, epoch: when.
    """

    accuracy: float = -1.0
    loss: float = float("inf")
    step: int = 0
    epoch: float = 0.0

    def beaten_by(self, accuracy: float, loss: float) -> bool:
        """Return whether another result is better."""
        return (accuracy, -loss) > (self.accuracy, -self.loss)


@dataclass
class State:
    """Where a run stands.

    Args:
        epoch: epochs done.
        number: batches done of the one that runs.
        step: updates of the weights.
        seconds: time spent, over all sessions.
        plan: steps that the schedule is laid out for, where the time decides; 0: not known yet.
        planned_for: the minutes that it was laid out for.
        reported: the step of the last row of the metrics.
        gradient_norm: of the last step.
        waited: looks at the images held out since the best.
        best: that one.
        tally: counts of the epoch that runs.
        ended: why the run is over; empty while it is not.
    """

    epoch: int = 0
    number: int = 0
    step: int = 0
    seconds: float = 0.0
    plan: int = 0
    planned_for: float = 0.0
    reported: int = 0
    gradient_norm: float = 0.0
    waited: int = 0
    best: Best = field(default_factory=Best)
    tally: dict[str, Any] = field(default_factory=dict)
    ended: str = ""

    def plain(self) -> dict[str, Any]:
        """Return it as a checkpoint keeps it."""
        return asdict(self)

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> "State":
        """Return what a checkpoint kept."""
        try:
            return cls(**{**values, "best": Best(**values["best"])})
        except (TypeError, KeyError) as error:
            raise CheckpointError(f"the checkpoint does not say where its run stands: {error}") from error
