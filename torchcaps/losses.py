"""Loss functions of the papers.

Each computes one loss per image. ``reduction`` combines them as in `torch.nn`: ``"mean"`` over the batch (default),
``"sum"``, or ``"none"`` for the losses ``[B]`` themselves. How the classes or pixels of an image are combined differs
between the papers and is an argument of its own (`MarginLoss`: ``weighting``, `ReconstructionLoss`: ``pixels``).
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps._core.labels import as_multi_hot, check_class_indices, one_hot
from torchcaps._core.validation import check_no_nan
from torchcaps.capsules import Capsules, as_capsules

__all__ = ["ClassLoss", "MarginLoss", "MultiLabelLoss", "ReconstructionLoss", "SpreadLoss"]

Reduction = Literal["none", "mean", "sum"]


class MarginLoss(nn.Module):
    """Margin loss on capsule lengths: Sabour 2017, eq. 4.

    ``L_k = T_k max(0, m+ - |v_k|)² + lambda (1 - T_k) max(0, |v_k| - m-)²``

    Args:
        positive, negative: the margins ``m+`` and ``m-``. The released nets of Chen 2019 have ``m+`` 0.7 or 0.6.
        down_weight: ``lambda``, the weight of absent classes.
        weighting: of the classes of an image. ``"paper"``: their sum. ``"official"``: half their mean, as in the
            authors' code. For ten classes that is a twentieth of the paper's value, so that a reconstruction loss
            weighs twenty times as much relative to it.
        reduction: over the images of the batch: ``"mean"``, ``"sum"`` or ``"none"``.

    Shapes:
        lengths ``[B, J]`` or `Capsules` (their activations, otherwise their lengths), labels ``[B]`` or multi-hot
        ``[B, J] -> []``, or ``[B]`` with ``reduction="none"``

    >>> lengths, labels = torch.tensor([[0.9, 0.1], [0.5, 0.5]]), torch.tensor([0, 0])
    >>> MarginLoss(reduction="none")(lengths, labels)
    tensor([0.0000, 0.2400])
    >>> MarginLoss()(Capsules(torch.randn(2, 10, 16)), labels).shape
    torch.Size([])
    """

    def __init__(
        self,
        positive: float = 0.9,
        negative: float = 0.1,
        down_weight: float = 0.5,
        *,
        weighting: Literal["paper", "official"] = "paper",
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__()
        if not 0 <= negative < positive:
            raise ValueError(f"negative must be at least 0 and below positive={positive}, got {negative}")
        self.positive = positive
        self.negative = negative
        self.down_weight = down_weight
        self.weighting: str = _check_choice(weighting, "weighting", ("paper", "official"))
        self.reduction: str = _check_reduction(reduction)

    def extra_repr(self) -> str:
        """Return the settings for ``repr``."""
        margins = f"positive={self.positive}, negative={self.negative}"
        names = f"weighting={self.weighting!r}, reduction={self.reduction!r}"
        return f"{margins}, down_weight={self.down_weight}, {names}"

    def forward(self, lengths: Tensor | Capsules, labels: Tensor) -> Tensor:
        """Return the loss."""
        lengths = _as_scores(lengths, labels, "lengths")
        present = as_multi_hot(labels, lengths.shape[1]).to(lengths.dtype)
        missing = (self.positive - lengths).relu() ** 2
        surplus = (lengths - self.negative).relu() ** 2
        losses = present * missing + self.down_weight * (1 - present) * surplus
        if self.weighting == "paper":
            return _reduce(losses.sum(-1), self.reduction)
        if self.reduction == "mean":
            return 0.5 * losses.mean()  # one mean over images and classes: the rounding of recorded results
        return _reduce(0.5 * losses.mean(-1), self.reduction)


class SpreadLoss(nn.Module):
    """Spread loss on activations with an increasing margin: Hinton 2018, eq. 3.

    ``L = Σ_{i≠t} max(0, m - (a_t - a_i))²``

    Args:
        schedule: schedule of the margin m. ``"linear"``: from 0.2 to 0.9 over ``steps`` (the paper). ``"sigmoid"``:
            ``0.2 + 0.79 sigmoid(min(10, step / 50000 - 4))`` (the authors, on OpenReview). ``"constant"``: 0.9.
        steps: number of training steps over which the linear margin increases.
        reduction: over the images of the batch: ``"mean"``, ``"sum"`` or ``"none"``.

    Shapes:
        activations ``[B, J]`` or `Capsules` (their activations, otherwise their lengths), labels ``[B] -> []``, or
        ``[B]`` with ``reduction="none"``

    >>> activations, labels = torch.tensor([[0.9, 0.1, 0.2]]), torch.tensor([0])
    >>> loss = SpreadLoss()
    >>> loss(activations, labels, step=0), loss(activations, labels, step=50_000)
    (tensor(0.), tensor(0.0500))
    """

    def __init__(
        self,
        schedule: Literal["linear", "sigmoid", "constant"] = "linear",
        steps: int = 50_000,
        *,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__()
        self.schedule: str = _check_choice(schedule, "schedule", ("linear", "sigmoid", "constant"))
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}")
        self.steps = steps
        self.reduction: str = _check_reduction(reduction)

    def margin(self, step: float) -> float:
        """Return the margin at a training step."""
        if not step >= 0:
            raise ValueError(f"step must be at least 0, got {step}")
        if self.schedule == "linear":
            return 0.2 + 0.7 * min(1.0, step / self.steps)
        if self.schedule == "sigmoid":
            return 0.2 + 0.79 / (1 + math.exp(-min(10.0, step / 50_000 - 4)))
        return 0.9

    def extra_repr(self) -> str:
        """Return the settings for ``repr``."""
        return f"schedule={self.schedule!r}, steps={self.steps}, reduction={self.reduction!r}"

    def forward(self, activations: Tensor | Capsules, labels: Tensor, step: float = math.inf) -> Tensor:
        """Return the loss with the margin of a training step; default: the final margin."""
        activations = _as_scores(activations, labels, "activations")
        labels = check_class_indices(labels, activations.shape[1])
        if labels.dim() != 1:
            raise ValueError(f"labels must be class indices [B], one target class per image, got {list(labels.shape)}")
        margin = self.margin(step)
        target = activations.gather(1, labels.unsqueeze(1))
        losses = (margin - (target - activations)).relu() ** 2
        others = one_hot(labels, activations.shape[1]) == 0
        return _reduce(torch.where(others, losses, 0).sum(-1), self.reduction)


class ReconstructionLoss(nn.Module):
    """Squared error of reconstructed images, for one or several targets per image: Sabour 2017, section 4.1.

    Args:
        pixels: combination of the pixels of an image: ``"sum"`` (Sabour 2017), ``"mean"`` (Choi 2019), or ``"half"``,
            half the sum (Caffe's EuclideanLoss, Chen 2019). Several targets are summed.
        weight: factor of the loss: 0.0005 with the margin loss of Sabour 2017; 0.3 with the mean in Choi 2019.
        reduction: over the images of the batch: ``"mean"``, ``"sum"`` or ``"none"``.

    Shapes:
        images and targets ``[B, C, H, W]``, or ``[B, K, C, H, W]`` with ``K`` targets per image ``-> []``, or ``[B]``
        with ``reduction="none"``

    >>> ReconstructionLoss()(torch.zeros(2, 1, 28, 28), torch.ones(2, 1, 28, 28))  # 0.0005 * 784
    tensor(0.3920)
    """

    def __init__(
        self,
        pixels: Literal["sum", "mean", "half"] = "sum",
        weight: float = 0.0005,
        *,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__()
        self.pixels: str = _check_choice(pixels, "pixels", ("sum", "mean", "half"))
        self.weight = weight
        self.reduction: str = _check_reduction(reduction)

    def extra_repr(self) -> str:
        """Return the settings for ``repr``."""
        return f"pixels={self.pixels!r}, weight={self.weight}, reduction={self.reduction!r}"

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        """Return the weighted loss."""
        check_no_nan(images, "images")
        check_no_nan(targets, "targets")
        if images.dim() not in (4, 5) or images.shape != targets.shape:
            raise ValueError(
                f"images and targets must both be [B, C, H, W] or [B, K, C, H, W], got {list(images.shape)} and "
                f"{list(targets.shape)}"
            )
        errors = ((images - targets) ** 2).flatten(-3)  # [B, (K,) C * H * W]
        losses = errors.mean(-1) if self.pixels == "mean" else errors.sum(-1)
        if self.pixels == "half":
            losses = losses / 2
        if losses.dim() == 2:
            losses = losses.sum(-1)
        return self.weight * _reduce(losses, self.reduction)


class ClassLoss(nn.Module):
    """Cross-entropy on logits, the loss of Tsai 2020 and of the convolutional baselines.

    Args:
        label_smoothing: fraction of the target that is distributed over all classes, as in `torch.nn.CrossEntropyLoss`.
        reduction: over the images of the batch: ``"mean"``, ``"sum"`` or ``"none"``.

    Shapes:
        logits ``[B, J]``, labels ``[B] -> []``, or ``[B]`` with ``reduction="none"``

    >>> scores, labels = torch.tensor([[2.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 1])
    >>> ClassLoss()(scores, labels)
    tensor(0.1269)
    """

    def __init__(self, *, label_smoothing: float = 0.0, reduction: Reduction = "mean") -> None:
        super().__init__()
        if not 0 <= label_smoothing <= 1:
            raise ValueError(f"label_smoothing must be in 0..1, got {label_smoothing}")
        self.label_smoothing = label_smoothing
        self.reduction: str = _check_reduction(reduction)

    def extra_repr(self) -> str:
        """Return the settings for ``repr``."""
        return f"label_smoothing={self.label_smoothing}, reduction={self.reduction!r}"

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss."""
        _check_logits(logits, labels)
        if labels.dim() != 1:
            raise ValueError(
                f"labels must be class indices [B], got {list(labels.shape)}: use MultiLabelLoss for several"
            )
        indices = check_class_indices(labels, logits.shape[1])
        return F.cross_entropy(logits, indices, reduction=self.reduction, label_smoothing=self.label_smoothing)


class MultiLabelLoss(nn.Module):
    """Binary cross-entropy on logits, mean over classes, for several labels per image: Tsai 2020, appendix B.2.

    Args:
        reduction: over the images of the batch: ``"mean"``, ``"sum"`` or ``"none"``.

    Shapes:
        logits ``[B, J]``, labels ``[B]`` or multi-hot ``[B, J] -> []``, or ``[B]`` with ``reduction="none"``

    >>> logits, labels = torch.tensor([[2.0, -2.0, 2.0]]), torch.tensor([[1, 0, 1]])
    >>> MultiLabelLoss()(logits, labels)
    tensor(0.1269)
    """

    def __init__(self, *, reduction: Reduction = "mean") -> None:
        super().__init__()
        self.reduction: str = _check_reduction(reduction)

    def extra_repr(self) -> str:
        """Return the settings for ``repr``."""
        return f"reduction={self.reduction!r}"

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss."""
        _check_logits(logits, labels)
        present = as_multi_hot(labels, logits.shape[1]).to(logits.dtype)
        if self.reduction == "mean":
            return F.binary_cross_entropy_with_logits(logits, present)
        losses = F.binary_cross_entropy_with_logits(logits, present, reduction="none").mean(-1)
        return _reduce(losses, self.reduction)


def _reduce(losses: Tensor, reduction: str) -> Tensor:
    """Combine the losses of the images, ``[B]``."""
    if reduction == "none":
        return losses
    return losses.mean() if reduction == "mean" else losses.sum()


def _as_scores(value: Tensor | Capsules, labels: Tensor, name: str) -> Tensor:
    """Return scores ``[B, classes]``: of capsules their activations, or their lengths if they have none."""
    if isinstance(value, Capsules):
        capsules = as_capsules(value).flatten()
        value = capsules.length() if capsules.activation is None else capsules.activation
    elif isinstance(value, Tensor) and value.dim() == 3:
        raise ValueError(
            f"{name} must be [B, classes] or Capsules, got the shape of poses, {list(value.shape)}: pass "
            "Capsules(pose), or length(pose) of torchcaps.nn"
        )
    _check_scores(value, labels, name)
    return value


def _check_logits(logits: Tensor, labels: Tensor) -> None:
    """Raise if logits are not ``[B, classes]`` or the number of labels differs."""
    if isinstance(logits, Capsules):
        raise TypeError(
            "logits must be a tensor [B, classes], got Capsules, whose lengths are not logits: use MarginLoss, or "
            "compute logits from the poses"
        )
    _check_scores(logits, labels, "logits")


def _check_scores(scores: Tensor, labels: Tensor, name: str) -> None:
    """Raise if scores are not ``[B, classes]`` or the number of labels differs."""
    check_no_nan(scores, name)
    if scores.dim() != 2:
        raise ValueError(f"{name} must be [B, classes], got {list(scores.shape)}")
    if not isinstance(labels, Tensor):
        raise TypeError(f"labels must be a tensor, got {type(labels).__name__}")
    if labels.dim() == 0 or labels.shape[0] != scores.shape[0]:
        raise ValueError(f"labels must have {scores.shape[0]} entries, one per image, got {list(labels.shape)}")


def _check_choice(value: str, name: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
    return value


def _check_reduction(value: str) -> str:
    return _check_choice(value, "reduction", ("none", "mean", "sum"))
