"""What a paper trains a model with: the loss, the optimiser, the schedule, the data."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from torchcaps._core.labels import split_labels
from torchcaps._core.validation import check_fields, check_range
from torchcaps.losses import ClassLoss, MarginLoss, MultiLabelLoss, ReconstructionLoss, SpreadLoss
from torchcaps.models.output import Output
from torchcaps.models.schedules import Constant, Schedule

__all__ = ["LossChoice", "Objective", "OptimizerChoice", "Recipe"]


@dataclass(frozen=True)
class LossChoice:
    """Which losses, and how they are weighed.

    Args:
        scores: ``"margin"`` (Sabour 2017), ``"spread"`` (Hinton 2018), ``"cross_entropy"``, or ``"binary"``: a
            cross-entropy for each class, for images with several labels.
        positive, reduction: of `torchcaps.losses.MarginLoss`.
        margin: schedule of `torchcaps.losses.SpreadLoss`; ``margin_steps``: how long its linear one grows.
        pixels, weight: of `torchcaps.losses.ReconstructionLoss`, where the model has a decoder.
    """

    scores: Literal["margin", "spread", "cross_entropy", "binary"] = "margin"
    positive: float = 0.9
    reduction: Literal["paper", "official"] = "paper"
    margin: Literal["linear", "sigmoid", "constant"] = "linear"
    margin_steps: int = 50_000
    pixels: Literal["sum", "mean", "half"] = "sum"
    weight: float = 0.0005

    def __post_init__(self) -> None:
        check_fields(self)
        check_range(self, "margin_steps", 1)
        check_range(self, "weight", 0)

    def make(self, n_objects: int | None = 1) -> "Objective":
        """Build the loss for images with so many objects each; ``None``: with any number."""
        scores: nn.Module
        if self.scores == "margin":
            scores = MarginLoss(self.positive, reduction=self.reduction)
        elif self.scores == "spread":
            scores = SpreadLoss(self.margin, self.margin_steps)
        else:
            scores = ClassLoss() if self.scores == "cross_entropy" else MultiLabelLoss()
        return Objective(scores, ReconstructionLoss(self.pixels, self.weight), n_objects)


class Objective(nn.Module):
    """The loss of a model's output: that of its scores, and that of its reconstruction where it has one.

    Args:
        scores: the loss of the scores.
        reconstruction: the loss of decoded images.
        n_objects: objects in each image; ``None``: any number, and labels are zeros and ones ``[B, classes]``.

    Shapes:
        labels as the model takes them, class numbers or zeros and ones; targets ``[B, C, H, W]``, or ``[B, objects,
        C, H, W]`` for several objects.

    >>> import torch, torchcaps
    >>> model = torchcaps.create_model("capsnet_small")
    >>> images, labels = torch.rand(2, 1, 28, 28), torch.tensor([3, 7])
    >>> model.loss()(model(images, labels), labels, images).backward()
    """

    def __init__(self, scores: nn.Module, reconstruction: ReconstructionLoss, n_objects: int | None = 1) -> None:
        super().__init__()
        self.scores, self.reconstruction, self.n_objects = scores, reconstruction, n_objects

    def forward(self, output: Output, labels: Tensor, targets: Tensor | None = None, step: float = math.inf) -> Tensor:
        """Return the loss at a training step, which the margin of the spread loss depends on."""
        if not isinstance(output, Output):
            raise TypeError(f"output must be what the model returns, an Output, got {type(output).__name__}")
        numbers = present = labels
        if self.n_objects is not None:
            numbers, present = split_labels(labels, output.scores.shape[1], self.n_objects)
        if isinstance(self.scores, SpreadLoss):
            loss = self.scores(output.scores, numbers, step)
        else:
            loss = self.scores(output.scores, numbers if isinstance(self.scores, ClassLoss) else present)
        if output.reconstruction is None:
            return loss
        if targets is None:
            raise ValueError(
                "targets must be given, the images that the decoder is to reconstruct, since this model has one; "
                "create_model(..., reconstruction=False) builds it without"
            )
        return loss + self.reconstruction(output.reconstruction, targets)


@dataclass(frozen=True)
class OptimizerChoice:
    """Which optimiser, and with which numbers.

    Args:
        kind: ``"adam"``, ``"sgd"`` or ``"rmsprop"``.
        rate: the first learning rate.
        momentum: of SGD; for RMSprop the decay of its mean square (Keras' rho).
        weight_decay: as each of them takes it.
        epsilon: of Adam and RMSprop.
    """

    kind: Literal["adam", "sgd", "rmsprop"] = "adam"
    rate: float = 1e-3
    momentum: float = 0.9
    weight_decay: float = 0.0
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        check_fields(self)
        check_range(self, "rate", 0, strict=True)
        for name in ("momentum", "weight_decay", "epsilon"):
            check_range(self, name, 0)

    @property
    def n_states(self) -> int:
        """How many numbers the optimiser keeps beside each parameter."""
        if self.kind == "adam":
            return 2
        return 1 if self.kind == "rmsprop" or self.momentum else 0

    def make(self, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        """Build the optimiser."""
        if self.kind == "adam":
            return torch.optim.Adam(parameters, self.rate, eps=self.epsilon, weight_decay=self.weight_decay)
        if self.kind == "sgd":
            return torch.optim.SGD(parameters, self.rate, momentum=self.momentum, weight_decay=self.weight_decay)
        return torch.optim.RMSprop(
            parameters, self.rate, alpha=self.momentum, eps=self.epsilon, weight_decay=self.weight_decay
        )


@dataclass(frozen=True)
class Recipe:
    """How a model is trained, by default as its paper did.

    Args:
        loss, optimizer, schedule: see there.
        batch_size: images in a batch.
        epochs, steps: how long; one of them is given.
        ascents: steps of `torchcaps.routing.Quadratic.ascend` after each of the optimiser's: 1 in Yang 2021,
            Algorithm 1, for any model with that routing, otherwise none.
        data: the training set; ``test_data``: what it is tested on, where that is another one.
        augmentation: the name of the paper's pipeline.
        validate: the share of the training images that is held out to choose a checkpoint by.
        weights: which weights are the result: the ``"last"``, the ``"best"`` by the images held out, or the
            ``"average"`` of all, the late ones weighing most.
        note: what the paper leaves open, and what was chosen.
    """

    loss: LossChoice = LossChoice()
    optimizer: OptimizerChoice = OptimizerChoice()
    schedule: Schedule = Constant()
    batch_size: int = 128
    epochs: int | None = None
    steps: int | None = None
    ascents: int = 0
    data: str = ""
    test_data: str = ""
    augmentation: str = ""
    validate: float = 0.0
    weights: Literal["last", "best", "average"] = "last"
    note: str = ""

    def __post_init__(self) -> None:
        check_fields(self)
        check_range(self, "batch_size", 1)
        check_range(self, "ascents", 0)
        check_range(self, "epochs", 1)
        check_range(self, "steps", 1)
        if not 0 <= self.validate < 1:
            raise ValueError(f"Recipe: validate must be a share, 0 or more and below 1, got {self.validate}")
        if self.epochs is not None and self.steps is not None:
            raise ValueError(f"Recipe: give epochs or steps, not both, got {self.epochs} and {self.steps}")

    def rate(self, step: int, epoch: int = 0, total: int | None = None) -> float:
        """Return the learning rate of a step; a schedule over the whole training needs its ``total`` of steps."""
        return self.optimizer.rate * self.schedule.factor(step, epoch, total if total is not None else self.steps)
