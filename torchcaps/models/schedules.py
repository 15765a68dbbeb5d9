"""How a learning rate changes over training: the papers' schedules, each a factor of the first rate."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from torchcaps._core.serialize import polymorphic
from torchcaps._core.validation import check_fields, check_range

__all__ = ["Constant", "Exponential", "Inverse", "LRSchedule", "Milestones", "OneCycle", "Product", "TimeDecay"]


@polymorphic
@dataclass(frozen=True)
class LRSchedule(ABC):
    """A learning rate's way through training."""

    def __post_init__(self) -> None:
        check_fields(self)

    @abstractmethod
    def factor(self, step: int, epoch: int = 0, total: int | None = None) -> float:
        """Return what the first rate is multiplied by.

        Args:
            step: updates of the weights before this one, 0 at first.
            epoch: passes over the training set before this one, 0 at first.
            total: updates of the whole training, where the schedule needs to know.
        """


@dataclass(frozen=True)
class Constant(LRSchedule):
    """The same rate all the way."""

    def factor(self, step: int, epoch: int = 0, total: int | None = None) -> float:
        """Return 1."""
        return 1.0


@dataclass(frozen=True)
class Exponential(LRSchedule):
    """``factor ** (step / period)``, at least ``floor``: Sabour 2017's 0.96 for every 2,000 steps.

    Args:
        decay: what a period multiplies the rate by.
        period: in steps.
        floor: the least factor.
        staircase: only at whole periods, as Caffe's ``step`` policy; the code of Sabour 2017 decays at every step.
    """

    decay: float = 0.96
    period: int = 2000
    floor: float = 0.0
    staircase: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "decay", 0, 1, strict=True)
        check_range(self, "period", 1)

    def factor(self, step: int, epoch: int = 0, total: int | None = None) -> float:
        """Decay by the step.

        >>> round(Exponential(0.96, 2000).factor(1000), 6)  # 0.96 ** 0.5
        0.979796
        """
        periods = step // self.period if self.staircase else step / self.period
        return max(self.floor, self.decay**periods)


@dataclass(frozen=True)
class Milestones(LRSchedule):
    """Multiplied by ``decay`` at each of these epochs: Tsai 2020, a tenth at 150 and 250 of 350."""

    epochs: tuple[int, ...] = (150, 250)
    decay: float = 0.1

    def factor(self, step: int, epoch: int = 0, total: int | None = None) -> float:
        """Decay by the epoch."""
        return self.decay ** sum(epoch >= milestone for milestone in self.epochs)


@dataclass(frozen=True)
class TimeDecay(LRSchedule):
    """``1 / (1 + rate * step)``: the ``decay`` of Keras' optimisers, Choi 2019."""

    rate: float = 1e-4

    def factor(self, step: int, epoch: int = 0, total: int | None = None) -> float:
        """Decay by the step.

        >>> TimeDecay(1e-4).factor(10_000)
        0.5
        """
        return 1 / (1 + self.rate * step)


@dataclass(frozen=True)
class Inverse(LRSchedule):
    """``(1 + gamma * step) ** -power``: Caffe's ``inv`` policy, Chen 2019."""

    gamma: float = 1e-4
    power: float = 0.75

    def factor(self, step: int, epoch: int = 0, total: int | None = None) -> float:
        """Decay by the step."""
        return (1 + self.gamma * step) ** -self.power


@dataclass(frozen=True)
class OneCycle(LRSchedule):
    """Up from ``first`` to 1 in the first ``warmup`` of training, then down to ``last``, along cosines.

    For short trainings: it reaches in minutes what a decay by steps takes hours for.
    """

    warmup: float = 0.3
    first: float = 0.04
    last: float = 1e-4

    def factor(self, step: int, epoch: int = 0, total: int | None = None) -> float:
        """Follow the two cosines; it must know how many steps there will be."""
        if total is None:
            raise ValueError("OneCycle needs to know the number of steps of the whole training: give total=")
        peak = max(1.0, self.warmup * total)
        if step < peak:
            return self.first + (1 - self.first) * (1 - math.cos(math.pi * step / peak)) / 2
        done = min(1.0, (step - peak) / max(1.0, total - 1 - peak))
        return self.last + (1 - self.last) * (1 + math.cos(math.pi * done)) / 2


@dataclass(frozen=True)
class Product(LRSchedule):
    """Two schedules at once, multiplied."""

    first: LRSchedule
    second: LRSchedule

    def factor(self, step: int, epoch: int = 0, total: int | None = None) -> float:
        """Multiply the two factors."""
        return self.first.factor(step, epoch, total) * self.second.factor(step, epoch, total)
