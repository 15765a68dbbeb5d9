"""Learning-rate schedules of the papers, each a factor of the initial learning rate."""

import dataclasses
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from torchcaps._core.serialize import polymorphic
from torchcaps._core.validation import check_fields, check_range

__all__ = [
    "Constant",
    "Cosine",
    "Exponential",
    "Inverse",
    "LRSchedule",
    "Milestones",
    "OneCycle",
    "Product",
    "TimeDecay",
]


@polymorphic()
@dataclass(frozen=True)
class LRSchedule(ABC):
    """Base class: factor of the initial learning rate over training."""

    def __post_init__(self) -> None:
        check_fields(self)

    @abstractmethod
    def factor(self, step: int, epoch: int = 0, total: int | None = None) -> float:
        """Return the factor of the initial learning rate.

        Args:
            step: number of optimiser steps before this one.
            epoch: number of completed epochs.
            total: number of steps of the complete training; only `Cosine` and `OneCycle` need it.
        """

    def rescale(self, factor: float) -> "LRSchedule":
        """Return the schedule that runs through the same factors in ``factor`` times the number of steps and epochs.

        A schedule of fixed steps or epochs overrides this; one of ``step / total`` does not depend on the length.
        """
        return self


@dataclass(frozen=True)
class Constant(LRSchedule):
    """Constant learning rate."""

    def factor(self, step: int, epoch: int = 0, total: int | None = None) -> float:
        """Return 1."""
        return 1.0


@dataclass(frozen=True)
class Exponential(LRSchedule):
    """Exponential decay ``decay ** (step / period)``, at least ``floor``: Sabour 2017 (0.96 per 2,000 steps).

    Args:
        decay: factor per period.
        period: number of steps.
        floor: smallest factor.
        staircase: decay once per period, as Caffe's ``step`` policy, instead of at every step.
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
        """Return the factor of a step.

        >>> round(Exponential(0.96, 2000).factor(1000), 6)  # 0.96 ** 0.5
        0.979796
        """
        periods = step // self.period if self.staircase else step / self.period
        return max(self.floor, self.decay**periods)

    def rescale(self, factor: float) -> "Exponential":
        """Return the schedule with another period."""
        return dataclasses.replace(self, period=max(1, round(factor * self.period)))


@dataclass(frozen=True)
class Milestones(LRSchedule):
    """Multiplication by ``decay`` at each of the given epochs: Tsai 2020 (0.1 at epochs 150 and 250 of 350)."""

    epochs: tuple[int, ...] = (150, 250)
    decay: float = 0.1

    def factor(self, step: int, epoch: int = 0, total: int | None = None) -> float:
        """Return the factor of an epoch."""
        return self.decay ** sum(epoch >= milestone for milestone in self.epochs)

    def rescale(self, factor: float) -> "Milestones":
        """Return the schedule with other epochs, rounded down.

        >>> Milestones((150, 250)).rescale(0.5).epochs
        (75, 125)
        """
        return dataclasses.replace(self, epochs=tuple(int(factor * epoch) for epoch in self.epochs))


@dataclass(frozen=True)
class TimeDecay(LRSchedule):
    """Time decay ``1 / (1 + rate * step)``, the ``decay`` of Keras' optimisers: Choi 2019."""

    rate: float = 1e-4

    def factor(self, step: int, epoch: int = 0, total: int | None = None) -> float:
        """Return the factor of a step.

        >>> TimeDecay(1e-4).factor(10_000)
        0.5
        """
        return 1 / (1 + self.rate * step)

    def rescale(self, factor: float) -> "TimeDecay":
        """Return the schedule with another rate."""
        return dataclasses.replace(self, rate=self.rate / factor)


@dataclass(frozen=True)
class Inverse(LRSchedule):
    """Inverse decay ``(1 + gamma * step) ** -power``, Caffe's ``inv`` policy: Chen 2019."""

    gamma: float = 1e-4
    power: float = 0.75

    def factor(self, step: int, epoch: int = 0, total: int | None = None) -> float:
        """Return the factor of a step."""
        return (1 + self.gamma * step) ** -self.power

    def rescale(self, factor: float) -> "Inverse":
        """Return the schedule with another ``gamma``."""
        return dataclasses.replace(self, gamma=self.gamma / factor)


@dataclass(frozen=True)
class OneCycle(LRSchedule):
    """Cosine warm-up from ``first`` to 1, then cosine decay to ``last``; for short training runs.

    Args:
        warmup: fraction of training for the warm-up.
        first: initial factor.
        last: final factor.
    """

    warmup: float = 0.3
    first: float = 0.04
    last: float = 1e-4

    def factor(self, step: int, epoch: int = 0, total: int | None = None) -> float:
        """Return the factor of a step; raise a ValueError without ``total``."""
        if total is None:
            raise ValueError("total must be given for OneCycle: the number of steps of the complete training")
        peak = max(1.0, self.warmup * total)
        if step < peak:
            return self.first + (1 - self.first) * (1 - math.cos(math.pi * step / peak)) / 2
        progress = min(1.0, (step - peak) / max(1.0, total - 1 - peak))
        return self.last + (1 - self.last) * (1 + math.cos(math.pi * progress)) / 2


@dataclass(frozen=True)
class Cosine(LRSchedule):
    """Linear warm-up, then cosine decay to ``last``: Loshchilov and Hutter 2017, eq. 5, without restarts.

    Args:
        warmup: fraction of training for the warm-up.
        last: final factor.
    """

    warmup: float = 0.0
    last: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "warmup", 0, 1)
        check_range(self, "last", 0, 1)

    def factor(self, step: int, epoch: int = 0, total: int | None = None) -> float:
        """Return the factor of a step; raise a ValueError without ``total``.

        >>> [round(Cosine().factor(step, total=5), 3) for step in range(5)]
        [1.0, 0.854, 0.5, 0.146, 0.0]
        >>> [Cosine(warmup=0.5).factor(step, total=8) for step in range(4)]
        [0.25, 0.5, 0.75, 1.0]
        """
        if total is None:
            raise ValueError("total must be given for Cosine: the number of steps of the complete training")
        n_warmup = int(self.warmup * total)
        if step < n_warmup:
            return (step + 1) / n_warmup
        progress = min(1.0, (step - n_warmup) / max(1, total - 1 - n_warmup))
        return self.last + (1 - self.last) * (1 + math.cos(math.pi * progress)) / 2


@dataclass(frozen=True)
class Product(LRSchedule):
    """Product of two schedules."""

    first: LRSchedule
    second: LRSchedule

    def factor(self, step: int, epoch: int = 0, total: int | None = None) -> float:
        """Return the product of both factors."""
        return self.first.factor(step, epoch, total) * self.second.factor(step, epoch, total)

    def rescale(self, factor: float) -> "Product":
        """Return the product of both schedules, rescaled."""
        return Product(self.first.rescale(factor), self.second.rescale(factor))
