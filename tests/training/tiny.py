"""A data set and a model as a user defines them, named by import path, small enough to train in a second."""

import os
import signal
import time
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from torchcaps.data import Dataset, DataSpec, ImageSet, LoadRequest, create_dataset
from torchcaps.models import Sabour2017
from torchcaps.training import run as training_run
from torchcaps.training.trainer import Trainer

# Environment variables for tests that run commands.
SIGNAL_VARIABLE = "TORCHCAPS_TEST_SIGNAL"  # "RANK STEP SIGNAL self|parent", see `install_signal`
NO_FIGURES_VARIABLE = "TORCHCAPS_TEST_NO_FIGURES"  # drawing takes longer than the runs


@dataclass(frozen=True)
class FewDigits(DataSpec):
    """A subset of the embedded digits.

    Args:
        train, test: number of images.
    """

    title: ClassVar[str] = "some of the embedded digits"

    train: int = 70
    test: int = 30

    def load(self, request: LoadRequest) -> Dataset:
        if SIGNAL_VARIABLE in os.environ:
            install_signal()
        if NO_FIGURES_VARIABLE in os.environ:
            training_run.draw_run = lambda *_: []
        digits = create_dataset("digits", request.split)
        assert isinstance(digits, ImageSet)
        count = self.train if request.split == "train" else self.test
        # Every class, and not in the order of classes.
        indices = torch.arange(count) * (len(digits) // max(1, count) // 2 * 2 + 1) % len(digits)
        subset = digits.subset(indices)
        return ImageSet("few", request.split, subset.images, subset.labels, subset.classes)


DATA = "tests.training.tiny.FewDigits"


def install_signal() -> None:
    """Send a signal from a training step, for tests of several processes: no test has to wait for a step."""
    rank, step, number, receiver = os.environ.pop(SIGNAL_VARIABLE).split()
    train_step = Trainer._train_step

    def send(self: Trainer, batch: Any) -> None:
        if self.state.step == int(step) and self.engine.rank == int(rank):
            parent = os.getppid()
            os.kill(os.getpid() if receiver == "self" else parent, signal.Signals[number])
            while number == "SIGKILL" and os.getppid() == parent:  # no further step before the parent has died
                time.sleep(0.01)
        train_step(self, batch)

    Trainer._train_step = send  # type: ignore[method-assign]


@dataclass(frozen=True, kw_only=True)
class Narrow(Sabour2017):
    """CapsNet with very few channels."""

    width: int = 4
    types: int = 2
    primary_dim: int = 4
    dim: int = 4
    hidden: tuple[int, ...] = (8,)


MODEL = "tests.training.tiny.Narrow"
# Choi 2019 with very few channels: dropout and batch norm.
CHOI = {"width": 4, "types": 2, "primary_dim": 4, "dim": 4, "hidden": (8,)}
