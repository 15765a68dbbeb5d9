"""Adversarial attacks within an L-infinity ball: FGSM, BIM and PGD.

``eps`` and the bounds ``low`` and ``high`` are in the scale of the images that the model takes. For pixels in 0..1 a
change of 8 grey levels is 8/255, and the bounds are 0 and 1. Chen 2019 uses bytes / 256: 8 grey levels are 8/256 and
the upper bound is 255/256. After mean subtraction the bounds are tensors, ``0 - mean`` and ``255/256 - mean``; after
division by a standard deviation ``eps`` is divided by it too. `torchcaps.analysis.PixelNetwork` takes pixels in 0..1
for any preprocessing.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from torchcaps._core.labels import split_labels
from torchcaps.analysis.common import Progress, eval_mode, multi_hot_labels
from torchcaps.models import Network

__all__ = ["AttackLoss", "Bound", "bim", "fgsm", "frozen", "pgd"]

Bound = float | Tensor  # a number, or a tensor that broadcasts against the images
AttackLoss = Literal["cross_entropy", "training"]


def fgsm(
    model: Network,
    images: Tensor,
    labels: Tensor,
    eps: Bound = 8 / 255,
    low: Bound = 0.0,
    high: Bound = 1.0,
    loss: AttackLoss = "cross_entropy",
    batch_size: int = 128,
    progress: Progress | None = None,
) -> Tensor:
    """Return adversarial images by the fast gradient sign method: Goodfellow 2015, section 4.

    ``x' = clip(x + eps sign(grad L(x, y)), low, high)``

    Args:
        model: the network whose gradients are used, in evaluation mode; its state is restored.
        images: ``[B, C, H, W]``, as the model takes them.
        labels: as the model takes them.
        eps: the largest change of a pixel, in the scale of the images.
        low: the smallest value of a pixel.
        high: the largest value of a pixel.
        loss: ``"cross_entropy"`` of the scores, of any kind, as usual for transfer attacks. ``"training"``: the model's
            training loss without its reconstruction term; its gradient vanishes if all margins are met, and a pixel
            without gradient does not change.
        batch_size: images per forward pass.
        progress: called after each batch.

    >>> import torchcaps
    >>> model = torchcaps.create_model("capsnet_small", width=4, types=2, hidden=(8,))
    >>> images = torch.rand(2, 1, 28, 28)
    >>> changed = fgsm(model, images, torch.tensor([3, 8]), eps=0.1)
    >>> bool((changed - images).abs().max() <= 0.1 + 1e-6)
    True
    """
    ball = _Ball(images, eps, low, high)

    def attack_batch(clean: Tensor, hot: Tensor) -> Tensor:
        return _step(model, clean, hot, clean, eps, ball, loss)

    return _attack_batches(model, images, labels, loss, batch_size, progress, attack_batch)


def bim(
    model: Network,
    images: Tensor,
    labels: Tensor,
    eps: Bound = 8 / 255,
    steps: int = 10,
    step_size: Bound | None = None,
    low: Bound = 0.0,
    high: Bound = 1.0,
    loss: AttackLoss = "cross_entropy",
    batch_size: int = 128,
    progress: Progress | None = None,
) -> Tensor:
    """Return adversarial images by the basic iterative method: Kurakin 2017, section 2.2.

    ``steps`` FGSM steps of ``step_size``, each followed by a projection onto the ball of radius ``eps``. The default
    step size, ``2.5 eps / steps``, can reach any point of the ball. The other arguments are those of `fgsm`.

    >>> import torch, torchcaps
    >>> model = torchcaps.create_model("capsnet_small", width=4, types=2, hidden=(8,))
    >>> images, labels = torch.rand(4, 1, 28, 28), torch.arange(4)
    >>> changed = bim(model, images, labels, eps=0.1, steps=2)
    >>> bool((changed - images).abs().max() <= 0.1 + 1e-6)
    True
    """
    ball, size = _Ball(images, eps, low, high), _step_size(eps, steps, step_size)

    def attack_batch(clean: Tensor, hot: Tensor) -> Tensor:
        return _iterate(model, clean, hot, clean, steps, size, ball, loss)

    return _attack_batches(model, images, labels, loss, batch_size, progress, attack_batch)


def pgd(
    model: Network,
    images: Tensor,
    labels: Tensor,
    eps: Bound = 8 / 255,
    steps: int = 10,
    step_size: Bound | None = None,
    restarts: int = 1,
    seed: int = 0,
    low: Bound = 0.0,
    high: Bound = 1.0,
    loss: AttackLoss = "cross_entropy",
    batch_size: int = 128,
    progress: Progress | None = None,
) -> Tensor:
    """Return adversarial images by projected gradient descent: Madry 2018, section 2.1.

    As `bim`, but from a uniformly random point of the ball. Of several ``restarts`` each image keeps the one with the
    smallest margin between the scores of its true classes and of the others. Starts depend on ``seed`` and the index of
    the image alone. The other arguments are those of `bim`.

    >>> import torch, torchcaps
    >>> model = torchcaps.create_model("capsnet_small", width=4, types=2, hidden=(8,))
    >>> images, labels = torch.rand(4, 1, 28, 28), torch.arange(4)
    >>> changed = pgd(model, images, labels, eps=0.1, steps=2)
    >>> bool((changed - images).abs().max() <= 0.1 + 1e-6)
    True
    """
    ball, size = _Ball(images, eps, low, high), _step_size(eps, steps, step_size)
    if restarts < 1:
        raise ValueError(f"restarts must be 1 or more, got {restarts}")
    generators = [torch.Generator().manual_seed(seed * 1_000_003 + restart) for restart in range(restarts)]

    def attack_batch(clean: Tensor, hot: Tensor) -> Tensor:
        """Return, for each image, the result with the lowest margin over all random starts."""
        best, lowest = clean, clean.new_full((len(clean),), torch.inf)
        for generator in generators:
            noise = torch.rand(clean.shape, generator=generator, dtype=clean.dtype).to(clean.device)
            start = clean + eps * (2 * noise - 1)
            candidate = _iterate(model, clean, hot, ball.project(clean, start), steps, size, ball, loss)
            margin = _margin(model, candidate, hot)
            better = margin < lowest
            best = torch.where(better[:, None, None, None], candidate, best)
            lowest = torch.where(better, margin, lowest)
        return best

    return _attack_batches(model, images, labels, loss, batch_size, progress, attack_batch)


@contextlib.contextmanager
def frozen(model: Network) -> Iterator[None]:
    """Context manager: evaluation mode with gradients for the input only; restores the model on exit."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trainable:
            parameter.requires_grad_(False)
        with eval_mode(model, gradients=True), torch.enable_grad():
            yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)


# Shared by the three attacks ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Ball:
    """The admissible points: within ``eps`` of an image, and within the bounds of a pixel."""

    images: Tensor
    eps: Bound
    low: Bound
    high: Bound

    def __post_init__(self) -> None:
        if not isinstance(self.images, Tensor) or not self.images.is_floating_point():
            got = self.images.dtype if isinstance(self.images, Tensor) else type(self.images).__name__
            raise TypeError(f"images must be a floating-point tensor, as the model takes them, got {got}")
        if not bool((torch.as_tensor(self.eps) >= 0).all()):
            raise ValueError(f"eps must be 0 or more, got {self.eps}")
        if bool((self.images < self.low).any() or (self.images > self.high).any()):
            raise ValueError(
                f"images must lie within low and high, got values from {float(self.images.min()):.4g} to "
                f"{float(self.images.max()):.4g}: pass low, high and eps in the scale of the images"
            )

    def project(self, images: Tensor, points: Tensor) -> Tensor:
        """Return the nearest admissible points."""
        limits = (self.low, self.high, self.eps)
        low, high, eps = (torch.as_tensor(limit, dtype=images.dtype, device=images.device) for limit in limits)
        points = torch.minimum(torch.maximum(points, images - eps), images + eps)
        return torch.minimum(torch.maximum(points, low), high)


def _step_size(eps: Bound, steps: int, step_size: Bound | None) -> Bound:
    """Return the step size; default: ``2.5 * eps / steps``."""
    if steps < 1:
        raise ValueError(f"steps must be 1 or more, got {steps}")
    if step_size is None:
        return 2.5 * eps / steps
    if not bool((torch.as_tensor(step_size) > 0).all()):
        raise ValueError(f"step_size must be above 0, got {step_size}")
    return step_size


def _attack_batches(
    model: Network,
    images: Tensor,
    labels: Tensor,
    loss: AttackLoss,
    batch_size: int,
    progress: Progress | None,
    attack_batch: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Apply ``attack_batch(images, multi-hot labels)`` to all images, batch by batch, with a frozen model."""
    if loss not in ("cross_entropy", "training"):
        raise ValueError(f"loss must be 'cross_entropy' or 'training', got {loss!r}")
    if len(labels) != len(images):
        raise ValueError(f"labels must have one entry per image ({len(images)}), got {len(labels)}")
    hot = multi_hot_labels(model, labels).to(images.device)
    changed = []
    with frozen(model):
        for start in range(0, len(images), batch_size):
            part = slice(start, start + batch_size)
            changed.append(attack_batch(images[part].detach(), hot[part]))
            if progress is not None:
                progress()
    return torch.cat(changed) if changed else images.clone()


def _iterate(
    model: Network, images: Tensor, hot: Tensor, points: Tensor, steps: int, size: Bound, ball: _Ball, loss: AttackLoss
) -> Tensor:
    """Return points after a number of steps."""
    for _ in range(steps):
        points = _step(model, images, hot, points, size, ball, loss)
    return points


def _step(
    model: Network, images: Tensor, hot: Tensor, points: Tensor, size: Bound, ball: _Ball, loss: AttackLoss
) -> Tensor:
    """Return points after one step along the sign of the gradient and the projection onto the ball."""
    return ball.project(images, points + size * _gradient(model, points, hot, loss).sign())


def _gradient(model: Network, points: Tensor, hot: Tensor, loss: AttackLoss) -> Tensor:
    """Return the gradient of the loss with respect to the images."""
    points = points.detach().requires_grad_()
    output = model(points)
    if loss == "training":
        labels = hot if model.n_objects is None else split_labels(hot, hot.shape[1], model.n_objects)[0]
        value = model.loss()(output._replace(reconstruction=None), labels)
    else:
        targets = hot / hot.sum(1, keepdim=True).clamp(min=1)
        value = F.cross_entropy(output.scores, targets.to(output.scores.dtype), reduction="sum")
    return torch.autograd.grad(value, points)[0]


@torch.no_grad()
def _margin(model: Network, images: Tensor, hot: Tensor) -> Tensor:
    """Return the lowest score of a true class minus the highest score of the others: ``[B]``."""
    scores, present = model(images).scores, hot == 1
    lowest = torch.where(present, scores, torch.inf).amin(1)
    return (lowest - torch.where(present, -torch.inf, scores).amax(1)).to(images.dtype)
