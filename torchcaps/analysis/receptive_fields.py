"""Centres and size of the receptive fields of capsules, in pixels of the image."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from torchcaps.models import CapsuleNetwork
from torchcaps.nn.sizes import as_padding, as_pair, resolve_padding
from torchcaps.votes import Wiring

__all__ = ["receptive_field_centers", "receptive_field_size"]


def receptive_field_centers(
    model: CapsuleNetwork, wirings: Sequence[Wiring], primary_grid: tuple[int, ...]
) -> list[tuple[float, ...]]:
    """Return the centres of the receptive fields of each layer's children as (first row, step, first column, step).

    Convolutions without padding stop short of the edge: the positions of a 6x6 grid over 28x28 pixels all lie near its
    middle.

    Args:
        model: a capsule network.
        wirings: of its capsule layers, the lowest first.
        primary_grid: grid of the primary capsules. If the convolutions in front of them do not lead to this grid, the
            front has modules that are not known here, and all entries are empty.
    """
    height, width = model.spec.image[1:]
    start, step = [0.0, 0.0], [1.0, 1.0]
    for window in _windows(model.front):
        kernel, stride = as_pair(window.kernel_size, "kernel_size"), as_pair(window.stride, "stride")
        padding = resolve_padding(as_padding(window.padding), (height, width), kernel, stride)
        height = (height + padding[0] + padding[1] - kernel[0]) // stride[0] + 1
        width = (width + padding[2] + padding[3] - kernel[1]) // stride[1] + 1
        _compose(start, step, kernel, stride, padding)
    if (height, width) != primary_grid:
        return [() for _ in wirings]
    centers: list[tuple[float, ...]] = []
    for wiring in wirings:
        centers.append((start[0], step[0], start[1], step[1]))
        _compose(start, step, wiring.kernel, wiring.stride, wiring.padding)
    return centers


def receptive_field_size(model: CapsuleNetwork) -> tuple[int, int]:
    """Return height and width of the receptive field of a primary capsule, in pixels.

    >>> import torchcaps
    >>> receptive_field_size(torchcaps.create_model("capsnet_small"))
    (17, 17)
    """
    size, step = [1, 1], [1, 1]
    for window in _windows(model.front):
        kernel, stride = as_pair(window.kernel_size, "kernel_size"), as_pair(window.stride, "stride")
        for axis in (0, 1):
            size[axis] += (kernel[axis] - 1) * step[axis]
            step[axis] *= stride[axis]
    return size[0], size[1]


def _windows(front: nn.Sequential) -> Iterator[Any]:
    """Yield the modules with a sliding window, in order; of a residual block the convolutions, not the shortcut."""
    for module in front:
        if hasattr(module, "kernel_size"):
            yield module
        else:
            yield from (inner for inner in module.children() if isinstance(inner, nn.Conv2d))


def _compose(start: list[float], step: list[float], kernel: Any, stride: Any, padding: Any) -> None:
    """Update first centre and step, of rows and columns, for one more window."""
    for axis in (0, 1):
        start[axis] += step[axis] * ((kernel[axis] - 1) / 2 - padding[2 * axis])
        step[axis] *= stride[axis]
