"""Measurement of what the dimensions of a capsule represent: width, height, slant, ink and position of a digit."""

from typing import Any

import torch
from torch import Tensor

from torchcaps.models import Network
from torchcaps.reproduce.runner import MeasurementContext, first_of_each_class
from torchcaps.training import TrainedRun

__all__ = ["PROPERTIES", "digit_properties", "measure_width_dimension"]

PROPERTIES = ("width", "height", "slant", "ink", "x", "y")
AMOUNT = 0.25  # the largest perturbation of Sabour 2017, figure 4
N_ROTATIONS = 10  # number of random bases
MIN_RESPONSE = 1.0  # of a dimension that represents a property, in standard deviations
MIN_FRACTION = 0.5  # of the sum of its responses in all properties


def digit_properties(images: Tensor) -> Tensor:
    """Return the `PROPERTIES` of digits from the moments of their ink.

    With the covariance ``(σ_xx, σ_xy, σ_yy)`` of the ink's position, the slant is ``σ_xy / σ_yy``, the width
    ``sqrt(σ_xx - σ_xy² / σ_yy)`` (after the slant is removed) and the height ``sqrt(σ_yy)``; ``x`` and ``y`` are the
    centre of the ink, ``ink`` its sum.

    Shapes:
        ``[..., H, W] -> [..., 6]``

    >>> bar = torch.zeros(9, 9)
    >>> bar[4, 2:7] = 1  # horizontal, five pixels wide
    >>> [round(value, 2) for value in digit_properties(bar).tolist()]
    [1.41, 0.0, 0.0, 5.0, 4.0, 4.0]
    """
    images = images.double().clamp_min(0)
    rows, columns = (torch.arange(n, dtype=torch.float64) for n in images.shape[-2:])
    ink = images.sum((-2, -1))
    weight = images / ink.clamp_min(1e-12)[..., None, None]
    y, x = (weight.sum(-1) * rows).sum(-1), (weight.sum(-2) * columns).sum(-1)
    down, right = rows - y[..., None], columns - x[..., None]  # [..., H], [..., W]
    xx, yy = (weight.sum(-2) * right.square()).sum(-1), (weight.sum(-1) * down.square()).sum(-1)
    xy = torch.einsum("...hw,...h,...w->...", weight, down, right)
    slant = xy / yy.clamp_min(1e-6)
    width = (xx - slant * xy).clamp_min(0).sqrt()
    return torch.stack([width, yy.sqrt(), slant, ink, x, y], dim=-1)


def measure_width_dimension(
    context: MeasurementContext, net: TrainedRun, n_images: int = 2_000, n_per_class: int = 20
) -> dict[str, Any]:
    """Measure whether one dimension of a class capsule represents the width of its digit (Sabour 2017, section 5.1).

    A dimension of the labelled capsule is perturbed by -0.25 and by 0.25 and decoded. Its response in a property is the
    difference between the two reconstructions, averaged over the images of a class and divided by the standard
    deviation of the property among the test images of the class. A dimension represents the width of a class if its
    response in the width is at least 1 and at least half of the sum of its responses. The same is measured along
    random orthonormal directions, as a control: if those represent the width as often, dimensions are not special.

    Args:
        context: context of the measurement.
        net: the network.
        n_images: number of test images that the standard deviations are computed from.
        n_per_class: number of images of each class that are perturbed.

    Returns:
        for dimensions and, with the prefix ``random_``, for random directions: ``width_classes``, the percentage of
        classes with a dimension that represents the width; ``width_response``, the largest response in the width,
        averaged over classes; ``width_fraction``, the percentage of that dimension's responses that is width.
    """
    batch = context.test_batch(net, n_images)
    spread = _class_spread(batch.targets, batch.labels)
    chosen = first_of_each_class(batch.labels, n_per_class)
    with torch.no_grad():
        output = net.model(batch.images[chosen])
    assert output.capsules is not None
    pose, labels = output.capsules.pose, batch.labels[chosen]
    dim = pose.shape[-1]
    responses = _responses(net.model, pose, labels, torch.eye(dim), spread)
    generator = torch.Generator().manual_seed(context.seed)
    random = []
    for _ in range(N_ROTATIONS):
        directions = torch.linalg.qr(torch.randn(dim, dim, generator=generator)).Q
        random.append(_summarize(_responses(net.model, pose, labels, directions, spread)))
        context.progress()
    return {
        **_summarize(responses),
        **{f"random_{name}": sum(one[name] for one in random) / N_ROTATIONS for name in random[0]},
        "width_classes_images": len(responses),
        "random_width_classes_images": len(responses) * N_ROTATIONS,
        "responses": responses,
        "n": len(chosen),
    }


def _class_spread(targets: Tensor, labels: Tensor) -> dict[int, Tensor]:
    """Return the standard deviation of each property among the images of a class, ``[6]`` by class."""
    values = digit_properties(targets.mean(1))
    return {label: values[labels == label].std(0, correction=0).clamp_min(1e-6) for label in labels.unique().tolist()}


def _responses(model: Network, pose: Tensor, labels: Tensor, directions: Tensor, spread: dict[int, Tensor]) -> Tensor:
    """Return the responses of all properties along each direction.

    Shapes:
        pose ``[B, classes, D]``, labels ``[B]``, directions ``[K, D] -> [present classes, K, 6]``
    """
    rows = torch.arange(len(pose))
    changes = []
    for direction in directions:
        ends = []
        for amount in (-AMOUNT, AMOUNT):
            moved = pose.clone()
            moved[rows, labels] += amount * direction
            with torch.no_grad():
                ends.append(digit_properties(model.decode(moved, labels).mean(1)))  # type: ignore[operator]
        changes.append(ends[1] - ends[0])
    change = torch.stack(changes, dim=1)  # [B, K, 6]
    return torch.stack([change[labels == label].mean(0) / std for label, std in sorted(spread.items())])


def _summarize(responses: Tensor) -> dict[str, float]:
    """Return how the width is represented, from responses ``[classes, K, 6]``."""
    size = responses.abs()
    width = size[..., 0]
    represents = (width >= MIN_RESPONSE) & (width >= MIN_FRACTION * size.sum(-1))
    best = width.argmax(1)
    totals = size.sum(-1)[torch.arange(len(size)), best]
    return {
        "width_classes": 100 * float(represents.any(1).double().mean()),
        "width_response": float(width.amax(1).mean()),
        "width_fraction": 100 * float((width.amax(1) / totals.clamp_min(1e-12)).mean()),
    }
