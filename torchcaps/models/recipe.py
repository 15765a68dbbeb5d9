"""Training settings of a model: loss, optimiser, learning-rate schedule and data."""

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchcaps._core.labels import split_labels
from torchcaps._core.serialize import setting
from torchcaps._core.validation import FieldError, check_fields, check_range
from torchcaps.losses import ClassLoss, MarginLoss, MultiLabelLoss, ReconstructionLoss, Reduction, SpreadLoss
from torchcaps.models.heads import Output
from torchcaps.models.schedules import Constant, LRSchedule

__all__ = ["LossConfig", "Objective", "OptimizerConfig", "Recipe"]

ADAMW_WEIGHT_DECAY = 0.01  # torch's default


@dataclass(frozen=True)
class LossConfig:
    """Losses of the scores and of the reconstruction, with their settings.

    Args:
        name: loss of the scores: ``"margin"`` (Sabour 2017), ``"spread"`` (Hinton 2018), ``"cross_entropy"``, or
            ``"binary"``, a binary cross-entropy per class for images with several labels.
        label_smoothing: label smoothing of the cross-entropy, in 0..1.
        positive_margin: margin of the present classes in `torchcaps.losses.MarginLoss`.
        reduction: weighting of the classes in `torchcaps.losses.MarginLoss`: ``"paper"`` or ``"official"``.
        margin_schedule: schedule of the margin in `torchcaps.losses.SpreadLoss`.
        margin_steps: number of steps in which the linear margin schedule reaches its maximum.
        reconstruction_reduction: combination of the pixels in `torchcaps.losses.ReconstructionLoss`: ``"sum"``,
            ``"mean"`` or ``"half"``.
        reconstruction_weight: factor of the reconstruction loss, if the model has a decoder.

    >>> import torch
    >>> from torchcaps.models import Output
    >>> loss = LossConfig("cross_entropy").make()
    >>> loss(Output(torch.zeros(2, 4)), torch.tensor([0, 3]))  # log 4
    tensor(1.3863)
    """

    name: Literal["margin", "spread", "cross_entropy", "binary"] = "margin"
    positive_margin: float = 0.9
    reduction: Literal["paper", "official"] = "paper"
    margin_schedule: Literal["linear", "sigmoid", "constant"] = "linear"
    margin_steps: int = 50_000
    reconstruction_reduction: Literal["sum", "mean", "half"] = "sum"
    reconstruction_weight: float = 0.0005
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        check_range(self, "margin_steps", 1)
        check_range(self, "reconstruction_weight", 0)
        check_range(self, "label_smoothing", 0, 1)

    def make(self, n_objects: int | None = 1, reduction: Reduction = "mean") -> "Objective":
        """Build the loss for images with ``n_objects`` objects each (``None``: any number).

        Args:
            n_objects: number of objects per image.
            reduction: over the images of a batch: ``"mean"``, ``"sum"`` or ``"none"``.
        """
        scores: nn.Module
        if self.name == "margin":
            scores = MarginLoss(self.positive_margin, weighting=self.reduction, reduction=reduction)
        elif self.name == "spread":
            scores = SpreadLoss(self.margin_schedule, self.margin_steps, reduction=reduction)
        elif self.name == "cross_entropy":
            scores = ClassLoss(label_smoothing=self.label_smoothing, reduction=reduction)
        else:
            scores = MultiLabelLoss(reduction=reduction)
        reconstruction = ReconstructionLoss(
            self.reconstruction_reduction, self.reconstruction_weight, reduction=reduction
        )
        return Objective(scores, reconstruction, n_objects)


class Objective(nn.Module):
    """Loss of a model: loss of the scores plus, if the model has a decoder, loss of the reconstruction.

    Args:
        scores: loss of the scores.
        reconstruction: loss of the reconstruction.
        n_objects: number of objects per image; ``None``: any number, with multi-hot labels ``[B, classes]``.

    Shapes:
        labels: class indices ``[B]`` or ``[B, objects]``, or multi-hot ``[B, classes]``.
        targets: ``[B, C, H, W]``, or ``[B, objects, C, H, W]`` for several objects.

    >>> import torch, torchcaps
    >>> model = torchcaps.create_model("capsnet_small")
    >>> images, labels = torch.rand(2, 1, 28, 28), torch.tensor([3, 7])
    >>> model.loss()(model(images, labels), labels, images).backward()
    """

    def __init__(self, scores: nn.Module, reconstruction: ReconstructionLoss, n_objects: int | None = 1) -> None:
        super().__init__()
        self.scores = scores
        self.reconstruction = reconstruction
        self.n_objects = n_objects

    def forward(self, output: Output, labels: Tensor, targets: Tensor | None = None, step: float = math.inf) -> Tensor:
        """Return the loss.

        Args:
            output: output of the model.
            labels: labels of the images.
            targets: images to reconstruct; required if the model has a decoder.
            step: number of optimiser steps so far, on which the margin of the spread loss depends.
        """
        if not isinstance(output, Output):
            raise TypeError(f"output must be the Output of a model, got {type(output).__name__}")
        indices = present = labels
        if self.n_objects is not None:
            indices, present = split_labels(labels, output.scores.shape[1], self.n_objects)
        if isinstance(self.scores, SpreadLoss):
            loss = self.scores(output.scores, indices, step)
        else:
            loss = self.scores(output.scores, indices if isinstance(self.scores, ClassLoss) else present)
        if output.reconstruction is None:
            return loss
        if targets is None:
            raise ValueError(
                "targets must be given since this model has a decoder: the images to reconstruct; "
                "create_model(..., reconstruction=False) builds it without decoder"
            )
        return loss + self.reconstruction(output.reconstruction, targets)


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimiser with its hyperparameters.

    Args:
        name: ``"adam"``, ``"adamw"``, ``"radam"``, ``"sgd"`` or ``"rmsprop"``.
        lr: initial learning rate; with `OneCycle` and `Cosine` the highest one.
        momentum: momentum of SGD; for RMSprop the smoothing constant ``alpha`` (Keras' ``rho``). Adam, AdamW and
            RAdam ignore it.
        weight_decay: L2 penalty as in `torch.optim`; with AdamW the decoupled weight decay, which is usually 0.01.
        eps: term added to the denominator in Adam, AdamW, RAdam and RMSprop.
        beta2: smoothing constant of the squared gradients in Adam, AdamW and RAdam; the others ignore it.

    >>> import torch
    >>> optimizer = OptimizerConfig("sgd", lr=0.1, momentum=0.9).make([torch.nn.Parameter(torch.zeros(2))])
    >>> type(optimizer).__name__
    'SGD'
    """

    name: Literal["adam", "adamw", "radam", "sgd", "rmsprop"] = "adam"
    lr: float = 1e-3
    momentum: float = 0.9
    weight_decay: float = 0.0
    eps: float = 1e-8
    beta2: float = 0.999

    def __post_init__(self) -> None:
        check_fields(self)
        check_range(self, "lr", 0, strict=True)
        for name in ("momentum", "weight_decay", "eps"):
            check_range(self, name, 0)
        if not 0 <= self.beta2 < 1:
            raise FieldError(self, "beta2", f"must be at least 0 and below 1, got {self.beta2}")

    def replace(self, **fields: Any) -> "OptimizerConfig":
        """Return the settings with some fields changed; a change to AdamW also sets its usual weight decay.

        >>> OptimizerConfig().replace(name="adamw").weight_decay
        0.01
        """
        if fields.get("name") == "adamw" and self.name != "adamw":
            fields = {"weight_decay": ADAMW_WEIGHT_DECAY, **fields}
        return dataclasses.replace(self, **fields)

    @property
    def n_states(self) -> int:
        """Number of values the optimiser stores per parameter."""
        if self.name in ("adam", "adamw", "radam"):
            return 2
        return 1 if self.name == "rmsprop" or self.momentum else 0

    def make(self, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        """Build the optimiser."""
        if self.name == "adam":
            betas = (0.9, self.beta2)
            return torch.optim.Adam(parameters, self.lr, betas, eps=self.eps, weight_decay=self.weight_decay)
        if self.name == "adamw":
            betas = (0.9, self.beta2)
            return torch.optim.AdamW(parameters, self.lr, betas, eps=self.eps, weight_decay=self.weight_decay)
        if self.name == "radam":
            betas = (0.9, self.beta2)
            return torch.optim.RAdam(parameters, self.lr, betas, eps=self.eps, weight_decay=self.weight_decay)
        if self.name == "sgd":
            return torch.optim.SGD(parameters, self.lr, momentum=self.momentum, weight_decay=self.weight_decay)
        return torch.optim.RMSprop(
            parameters, self.lr, alpha=self.momentum, eps=self.eps, weight_decay=self.weight_decay
        )


@dataclass(frozen=True)
class Recipe:
    """Training settings of a model, by default those of its paper.

    Args:
        loss: losses of the scores and of the reconstruction.
        optimizer: optimiser with its hyperparameters.
        lr_schedule: factor of the initial learning rate over training.
        batch_size: number of images per optimiser step.
        epochs: number of passes over the training set (mutually exclusive with ``steps``).
        steps: number of optimiser steps (mutually exclusive with ``epochs``).
        ascents: number of `torchcaps.routing.Quadratic.ascend` steps after every ``descents`` optimiser steps: n_r of
            Yang 2021, Algorithm 1; 1 for any model with that routing, otherwise 0.
        descents: number of optimiser steps, each with a batch of its own, before the ascents: n_b of Algorithm 1. The
            ascents use the last batch.
        ascent_lr: learning rate of the ascent: ``"scheduled"`` multiplies it by the factor of ``lr_schedule``,
            ``"constant"`` does not. A constant one under a decaying learning rate of the weights loses classes: the
            ascent shrinks coefficients, and the weights no longer compensate.
        reuse_children: take the ascent steps from the children of the descent's forward pass instead of running the
            layers below again with the updated weights (`torchcaps.routing.Quadratic.record_children`).
        data: name of the training set.
        test_data: name of the test set, if it is not the test split of ``data``.
        augmentation: name of the paper's preprocessing pipeline.
        val_fraction: fraction of the training set used as validation set, at least 0 and below 1.
        eval_weights: weights that are evaluated and loaded after training: ``"last"``, ``"best"`` (highest validation
            accuracy) or ``"ema"`` (exponential moving average).
        class_weights: weight of each image in the training loss: ``"none"``, or ``"balanced"``, inversely proportional
            to the number of training images of its class, so that all classes count equally.
        note: settings the paper does not specify, and the values chosen for them.

    >>> import torchcaps
    >>> recipe = torchcaps.create_model("sabour2017_mnist").recipe
    >>> recipe.optimizer.name, recipe.batch_size, recipe.augmentation
    ('adam', 128, 'sabour2017.mnist')
    """

    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    lr_schedule: LRSchedule = Constant()
    batch_size: int = 128
    epochs: int | None = setting(None, resumable=True)
    steps: int | None = setting(None, resumable=True)
    ascents: int = 0
    descents: int = 1
    ascent_lr: Literal["scheduled", "constant"] = "scheduled"
    reuse_children: bool = False
    data: str = ""
    test_data: str = setting("", resumable=True)
    augmentation: str = ""
    val_fraction: float = 0.0
    eval_weights: Literal["last", "best", "ema"] = setting("last", resumable=True)
    class_weights: Literal["none", "balanced"] = "none"
    note: str = setting("", identity=False, resumable=True)

    def __post_init__(self) -> None:
        check_fields(self)
        check_range(self, "batch_size", 1)
        check_range(self, "ascents", 0)
        check_range(self, "descents", 1)
        check_range(self, "epochs", 1)
        check_range(self, "steps", 1)
        if not 0 <= self.val_fraction < 1:
            raise FieldError(self, "val_fraction", f"must be at least 0 and below 1, got {self.val_fraction}")
        if self.epochs is not None and self.steps is not None:
            raise ValueError(
                f"Recipe: epochs and steps are mutually exclusive, got epochs={self.epochs} and steps={self.steps}"
            )

    def lr_at(self, step: int, epoch: int = 0, total: int | None = None) -> float:
        """Return the learning rate of a step.

        Args:
            step: number of optimiser steps before this one.
            epoch: number of completed epochs.
            total: number of steps of the complete training, needed by `OneCycle` and `Cosine`;
                defaults to ``self.steps``.
        """
        total = self.steps if total is None else total
        return self.optimizer.lr * self.lr_schedule.factor(step, epoch, total)
