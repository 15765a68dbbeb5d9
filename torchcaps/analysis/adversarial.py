"""Images changed by a hair to mislead a model: FGSM, BIM and PGD within a largest change of a pixel.

Everything is in the scale of the images as the model takes them. With pixels in 0..1 a change of 8 grey levels is
8/255, and the bounds are 0 and 1. Chen 2019 feeds bytes / 256: there the top is 255/256 and 8 grey levels are 8/256. Of
images with their mean taken off the bounds are tensors, ``0 - mean`` and ``255/256 - mean``; of those divided by a
deviation ``eps`` is divided by it too.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from torchcaps._core.labels import as_multi_hot, split_labels
from torchcaps.analysis.common import Progress, evaluating
from torchcaps.models import Network

__all__ = ["Limit", "LossName", "bim", "fgsm", "frozen", "label_sets", "pgd"]

Limit = float | Tensor  # a number, or a tensor that fits beside the images
LossName = Literal["cross_entropy", "own"]


def fgsm(
    model: Network,
    images: Tensor,
    labels: Tensor,
    eps: Limit = 8 / 255,
    low: Limit = 0.0,
    high: Limit = 1.0,
    loss: LossName = "cross_entropy",
    batch_size: int = 128,
    progress: Progress | None = None,
) -> Tensor:
    """Return images moved by ``eps`` along the sign of the loss's gradient: Goodfellow 2015, section 4.

    ``x' = clip(x + eps sign(grad L(x, y)), low, high)``

    Args:
        model: whose gradients are used, in evaluation mode; it is left as it was found.
        images: ``[B, C, H, W]``, as the model takes them.
        labels: as the model takes them.
        eps: the largest change of a pixel, in the images' scale.
        low: the least value of a pixel, in the images' scale.
        high: the largest.
        loss: ``"cross_entropy"`` of the scores, whatever they are, as a transfer attack wants it. ``"own"``: the
            part of the model's training loss that is about scores; where a margin is met there is no gradient, and a
            pixel without a gradient stays.
        batch_size: images at a time.
        progress: called after each piece.
    """
    ball = _Ball(images, eps, low, high)

    def once(part: Tensor, hot: Tensor) -> Tensor:
        return _step(model, part, hot, part, eps, ball, loss)

    return _in_pieces(model, images, labels, loss, batch_size, progress, once)


def bim(
    model: Network,
    images: Tensor,
    labels: Tensor,
    eps: Limit = 8 / 255,
    steps: int = 10,
    step_size: Limit | None = None,
    low: Limit = 0.0,
    high: Limit = 1.0,
    loss: LossName = "cross_entropy",
    batch_size: int = 128,
    progress: Progress | None = None,
) -> Tensor:
    """Return images moved in small steps, never further than ``eps``: the basic iterative method, Kurakin 2017.

    There are ``steps`` of ``step_size``, by default ``2.5 eps / steps``, with which any place within ``eps`` can be
    reached. The other arguments are those of `fgsm`.
    """
    ball, size = _Ball(images, eps, low, high), _step_size(eps, steps, step_size)

    def walk(part: Tensor, hot: Tensor) -> Tensor:
        return _walk(model, part, hot, part, steps, size, ball, loss)

    return _in_pieces(model, images, labels, loss, batch_size, progress, walk)


def pgd(
    model: Network,
    images: Tensor,
    labels: Tensor,
    eps: Limit = 8 / 255,
    steps: int = 10,
    step_size: Limit | None = None,
    restarts: int = 1,
    seed: int = 0,
    low: Limit = 0.0,
    high: Limit = 1.0,
    loss: LossName = "cross_entropy",
    batch_size: int = 128,
    progress: Progress | None = None,
) -> Tensor:
    """Return images moved as by `bim`, but from random places within ``eps``: projected gradients, Madry 2018.

    Of several ``restarts`` each image keeps the one after which its true classes score least beside the others. Starts
    are a function of ``seed`` and the image's place alone. The other arguments are those of `bim`.
    """
    ball, size = _Ball(images, eps, low, high), _step_size(eps, steps, step_size)
    if restarts < 1:
        raise ValueError(f"restarts must be 1 or more, got {restarts}")
    chances = [torch.Generator().manual_seed(seed * 1_000_003 + number) for number in range(restarts)]

    def best(part: Tensor, hot: Tensor) -> Tensor:
        kept, least = part, torch.full((len(part),), torch.inf, dtype=part.dtype)
        for chance in chances:
            start = part + eps * (2 * torch.rand(part.shape, generator=chance, dtype=part.dtype) - 1)
            found = _walk(model, part, hot, ball.back(part, start), steps, size, ball, loss)
            margin = _margin(model, found, hot)
            better = margin < least
            kept = torch.where(better[:, None, None, None], found, kept)
            least = torch.where(better, margin, least)
        return kept

    return _in_pieces(model, images, labels, loss, batch_size, progress, best)


@contextlib.contextmanager
def frozen(model: Network) -> Iterator[None]:
    """Let gradients pass through a model, in evaluation mode, to its images alone; leave it as it was found."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        with evaluating(model, gradients=True), torch.enable_grad():
            yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def label_sets(model: Network, labels: Tensor) -> Tensor:
    """Return a one for each class that is in an image: ``[B, classes]``."""
    if model.n_objects is None:
        return as_multi_hot(labels, model.spec.classes).long()
    return split_labels(labels, model.spec.classes, model.n_objects)[1].long()


# What the three share ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Ball:
    """How far from its image a place may be."""

    images: Tensor
    eps: Limit
    low: Limit
    high: Limit

    def __post_init__(self) -> None:
        if not isinstance(self.images, Tensor) or not self.images.is_floating_point():
            raise TypeError("images must be a tensor of floating-point numbers, as the model takes them")
        if not bool((torch.as_tensor(self.eps) >= 0).all()):
            raise ValueError(f"eps must be 0 or more, got {self.eps}")
        if bool((self.images < self.low).any() or (self.images > self.high).any()):
            raise ValueError(
                f"images must lie within low and high, and reach from {float(self.images.min()):.4g} to "
                f"{float(self.images.max()):.4g}: give the bounds of images as the model takes them, eps in their scale"
            )

    def back(self, images: Tensor, place: Tensor) -> Tensor:
        """Return a place to within ``eps`` of the image, and to within the bounds of pixels."""
        low, high, eps = (torch.as_tensor(limit, dtype=images.dtype) for limit in (self.low, self.high, self.eps))
        place = torch.minimum(torch.maximum(place, images - eps), images + eps)
        return torch.minimum(torch.maximum(place, low), high)


def _step_size(eps: Limit, steps: int, step_size: Limit | None) -> Limit:
    if steps < 1:
        raise ValueError(f"steps must be 1 or more, got {steps}")
    if step_size is None:
        return 2.5 * eps / steps
    if not bool((torch.as_tensor(step_size) > 0).all()):
        raise ValueError(f"step_size must be above 0, got {step_size}")
    return step_size


def _in_pieces(
    model: Network,
    images: Tensor,
    labels: Tensor,
    loss: LossName,
    batch_size: int,
    progress: Progress | None,
    change: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Change images piece by piece."""
    if loss not in ("cross_entropy", "own"):
        raise ValueError(f"loss must be 'cross_entropy' or 'own', got {loss!r}")
    if len(labels) != len(images):
        raise ValueError(f"labels must be one for each of {len(images)} images, got {len(labels)}")
    hot = label_sets(model, labels)
    changed = []
    with frozen(model):
        for start in range(0, len(images), batch_size):
            part = slice(start, start + batch_size)
            changed.append(change(images[part].detach(), hot[part]))
            if progress is not None:
                progress()
    return torch.cat(changed) if changed else images.clone()


def _walk(
    model: Network, images: Tensor, hot: Tensor, place: Tensor, steps: int, size: Limit, ball: _Ball, loss: LossName
) -> Tensor:
    for _ in range(steps):
        place = _step(model, images, hot, place, size, ball, loss)
    return place


def _step(
    model: Network, images: Tensor, hot: Tensor, place: Tensor, size: Limit, ball: _Ball, loss: LossName
) -> Tensor:
    """Move a place along the sign of its gradient, and back to where it may be."""
    return ball.back(images, place + size * _gradient(model, place, hot, loss).sign())


def _gradient(model: Network, place: Tensor, hot: Tensor, loss: LossName) -> Tensor:
    place = place.detach().requires_grad_()
    output = model(place)
    if loss == "own":
        labels = hot if model.n_objects is None else split_labels(hot, hot.shape[1], model.n_objects)[0]
        value = model.loss()(output._replace(reconstruction=None), labels)
    else:
        share = hot / hot.sum(1, keepdim=True).clamp(min=1)
        value = F.cross_entropy(output.scores, share.to(output.scores.dtype), reduction="sum")
    return torch.autograd.grad(value, place)[0]


@torch.no_grad()
def _margin(model: Network, images: Tensor, hot: Tensor) -> Tensor:
    """Return by how much the least score of a true class is above the largest of the others: ``[B]``."""
    scores, there = model(images).scores, hot == 1
    least = torch.where(there, scores, torch.inf).amin(1)
    return (least - torch.where(there, -torch.inf, scores).amax(1)).to(images.dtype)
