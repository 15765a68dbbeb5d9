"""Checks of named layers: order of the children, shifts of the grid, and positions of primary capsules.

Modules of others order their axes differently. The axes are found by their sizes, and a check fails only if no possible
layout has the invariant.
"""

import copy
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from torchcaps.audit.probe import (
    MAX_DIFFERENCE,
    AuditArgumentError,
    LayerInputs,
    Probe,
    call_layer,
    captured_inputs,
    first_tensor,
    largest_difference,
)
from torchcaps.audit.report import AuditVerdict, Finding, make_finding

__all__ = ["Permuted", "Strides", "permutation_invariance", "primary_positions", "translation_equivariance"]

N_CAPSULES_PROBED = 24
# Functions whose values depend on several positions, in modules and outside of them, by axes of their output.
WINDOWED = {
    4: ("conv2d", "conv_transpose2d", "pool2d", "group_norm", "instance_norm"),
    3: ("unfold",),
}

Permuted = Mapping[str, Mapping[str, Sequence[int]]]
Strides = Mapping[str, int | tuple[int, int]]
Axes = tuple[int, int]


def permutation_invariance(probe: Probe, layers: Permuted) -> Finding:
    """Permute the children of layers, together with their parameters; the parents must not change.

    Args:
        probe: the module.
        layers: for each layer its parameters and buffers with child axes: ``{"digits": {"weight": [0]}}``.
    """
    largest, worst, counts = 0.0, "", []
    for name, inputs in captured_inputs(probe, list(layers)).items():
        layer = copy.deepcopy(probe.module.get_submodule(name))
        expected = call_layer(layer, inputs)
        n_children = _count_children(layer, name, layers[name], _tensors(inputs))
        order = torch.randperm(n_children, generator=torch.Generator().manual_seed(0))
        moved = pytree.tree_map(functools.partial(_permute_children, order=order), inputs)
        with torch.no_grad():
            for tensor, axes in _child_tensors(layer, name, layers[name]):
                for axis in axes:
                    tensor.copy_(tensor.index_select(axis, order))
        difference = largest_difference(call_layer(layer, moved), expected)
        counts.append(f"the {n_children} children of {name!r}")
        if difference >= largest:
            largest, worst = difference, name
    return make_finding(
        "permutation_invariance",
        largest <= MAX_DIFFERENCE,
        f"permuted {', '.join(counts)} and their matrices",
        f"the parents of {worst!r} change by {largest:.1e}",
        "routing is a sum over children: an order that matters means that a view has mixed up axes",
        difference=largest,
    )


def _tensors(inputs: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]


def _got(tensors: Sequence[Tensor]) -> str:
    return f"got {list(tensors[0].shape)}" if tensors else "got no tensor"


def _child_tensors(
    layer: nn.Module, name: str, axes: Mapping[str, Sequence[int]]
) -> Iterator[tuple[Tensor, Sequence[int]]]:
    """Yield the named parameters and buffers of a layer with their axes of children."""
    named = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    for key, value in axes.items():
        if key not in named:
            known = ", ".join(named)
            raise AuditArgumentError(f"permuted: {name!r} has no parameter {key!r}: its parameters are {known}")
        shape = list(named[key].shape)
        if any(not -len(shape) <= axis < len(shape) for axis in value):
            raise AuditArgumentError(f"permuted: axes {list(value)} of {name}.{key} {shape} do not exist")
        yield named[key], value


def _count_children(layer: nn.Module, name: str, axes: Mapping[str, Sequence[int]], tensors: Sequence[Tensor]) -> int:
    """Return the number of children: the size of the parameters' axes of children, or that of the input's axis 1."""
    if not tensors or tensors[0].dim() < 3:
        raise AuditArgumentError(f"permuted: the input of {name!r} must be [B, children, ...], {_got(tensors)}")
    sizes = {tensor.shape[axis] for tensor, value in _child_tensors(layer, name, axes) for axis in value}
    shape = tensors[0].shape
    possible = [math.prod(shape[1:4])] if len(shape) == 5 else []
    possible += shape[1:]
    if not sizes:
        return possible[0]
    if len(sizes) > 1 or not sizes & set(possible):
        raise AuditArgumentError(
            f"permuted: the axes of children of {name!r} have the sizes {sorted(sizes)}; all must have the number of "
            f"children of its input {list(shape)}"
        )
    return sizes.pop()


def _permute_children(tensor: Any, order: Tensor) -> Any:
    """Permute the children of a tensor ``[B, I, ...]``, ``[B, H, W, N, K]``, ``[B, H, W, N]`` or ``[B, K, I]``."""
    if not isinstance(tensor, Tensor) or tensor.dim() < 2:
        return tensor
    if tensor.shape[1] == len(order):
        return tensor[:, order]
    for n_axes in (3, 2):  # [B, H, W, N, ...] and [B, H, W, ...]
        if tensor.dim() > n_axes and math.prod(tensor.shape[1 : n_axes + 1]) == len(order):
            return tensor.flatten(1, n_axes)[:, order].view_as(tensor)
    axis = next((axis for axis in range(2, tensor.dim()) if tensor.shape[axis] == len(order)), None)
    return tensor if axis is None else tensor.index_select(axis, order)


def translation_equivariance(probe: Probe, layers: Strides) -> Finding:
    """Shift the input of layers by their stride, down and to the right; the output must shift by one position.

    The input is zero except in the middle of the grid, so that the shift loses nothing and padding makes no difference.

    Args:
        probe: the module.
        layers: stride of each layer, by its name.
    """
    largest, worst, tried = 0.0, "", []
    for name, inputs in captured_inputs(probe, list(layers)).items():
        layer, value = probe.module.get_submodule(name), layers[name]
        strides = (value, value) if isinstance(value, int) else tuple(value)
        tensors = _tensors(inputs)
        if not tensors or max(tensor.dim() for tensor in tensors) < 4 or len(strides) != 2 or min(strides) < 1:
            raise AuditArgumentError(
                f"translated: {name!r} must have a stride of at least 1, got {value}, and an input with a grid, such "
                f"as [B, C, H, W] or [B, H, W, types, dim], {_got(tensors)}"
            )
        found = _least_difference(layer, name, inputs, strides)
        if found is None:
            continue  # the grid is too small to shift
        difference, axes = found
        tried.append(f"axes {axes[0]} and {axes[1]} of the input {list(tensors[0].shape)} of {name!r}")
        if difference >= largest:
            largest, worst = difference, name
    if not tried:
        reason = "all grids are too small for a shift"
        return Finding("translation_equivariance", AuditVerdict.NOT_CHECKED, "", reason, "")
    return make_finding(
        "translation_equivariance",
        largest <= MAX_DIFFERENCE,
        f"shifted {', '.join(tried)} by the stride",
        f"the output of {worst!r} differs from the shifted one by {largest:.1e}",
        "a convolutional layer that scrambles positions loses the relation of poses to the image",
        difference=largest,
    )


def _least_difference(layer: nn.Module, name: str, inputs: LayerInputs, strides: Axes) -> tuple[float, Axes] | None:
    """Return the least difference among all possible layouts, with the axes of the input; ``None`` for small grids."""
    found: list[tuple[float, Axes]] = []
    usual, *others = _layouts(_tensors(inputs))
    for axes in (usual, *others):
        if any(stop + stride > size for size, stride, _, stop in _centers(_tensors(inputs), axes, strides)):
            continue
        centered = pytree.tree_map(functools.partial(_keep_center, axes=axes, strides=strides), inputs)
        before = call_layer(layer, centered)
        if max((tensor.dim() for tensor in before), default=0) < 4:
            raise AuditArgumentError(f"translated: the output of {name!r} must have a grid, {_got(before)}")
        shifted = [
            call_layer(layer, pytree.tree_map(functools.partial(_roll, axis=axis, stride=stride), centered))
            for axis, stride in zip(axes, strides, strict=True)
        ]
        # Equality in another than the usual layout means nothing, if the output does not depend on the shift.
        depends = all(largest_difference(after, before) > MAX_DIFFERENCE for after in shifted)
        for index, out_axes in enumerate(_layouts(before)):
            if depends or (axes == usual and index == 0):
                moved = zip(out_axes, shifted, strict=True)
                found.append((max(_difference_after_shift(before, after, axis) for axis, after in moved), axes))
        if found and min(found)[0] <= MAX_DIFFERENCE:
            break
    return min(found, default=None)


def _layouts(tensors: Sequence[Tensor]) -> list[Axes]:
    """Return the pairs of axes that can be the grid, the usual one first: of ``[B, C, H, W]`` or ``[B, H, W, ...]``."""
    n_axes = max(tensor.dim() for tensor in tensors)
    usual = (2, 3) if n_axes == 4 else (1, 2)
    return [usual, *(pair for pair in itertools.pairwise(range(1, n_axes)) if pair != usual)]


def _centers(tensors: Sequence[Tensor], axes: Axes, strides: Axes) -> Iterator[tuple[int, int, int, int]]:
    """Yield size, stride, start and stop of the middle of the grid along both axes of each tensor."""
    for tensor in tensors:
        if tensor.dim() > axes[1]:
            for axis, stride in zip(axes, strides, strict=True):
                size = tensor.shape[axis]
                start = max(1, size // 3)
                yield size, stride, start, max(start + 1, size - start - stride)


def _keep_center(tensor: Any, axes: Axes, strides: Axes) -> Any:
    """Set all but the middle of the grid to zero."""
    if not isinstance(tensor, Tensor) or tensor.dim() <= axes[1]:
        return tensor
    mask = torch.zeros_like(tensor)
    region = mask
    for axis, (_, _, start, stop) in zip(axes, _centers([tensor], axes, strides), strict=True):
        region = region.narrow(axis, start, stop - start)
    region.fill_(1)
    return tensor * mask


def _roll(tensor: Any, axis: int, stride: int) -> Any:
    return tensor.roll(stride, axis) if isinstance(tensor, Tensor) and tensor.dim() > axis else tensor


def _difference_after_shift(before: Sequence[Tensor], after: Sequence[Tensor], axis: int) -> float:
    """Return the largest difference of outputs that should be shifted by one position along an axis."""
    largest = 0.0
    for a, b in zip(after, before, strict=True):
        if a.dim() > axis and a.shape == b.shape and a.shape[axis] > 1:
            size = a.shape[axis] - 1
            largest = max(largest, largest_difference([a.narrow(axis, 1, size)], [b.narrow(axis, 0, size)]))
    return largest


class _RecordWindows(TorchFunctionMode):
    """Context manager: record the outputs of functions whose values depend on several positions.

    Args:
        layer: its convolution modules are recorded however they compute their outputs, also by a product and a sum.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []
        self._convolutions = [module for module in layer.modules() if isinstance(module, nn.Conv2d)]

    def __enter__(self) -> Self:
        def record(module: nn.Module, inputs: Any, output: Tensor) -> None:
            self.outputs.append(output)

        self._hooks = [module.register_forward_hook(record) for module in self._convolutions]
        return super().__enter__()

    def __exit__(self, *details: object) -> None:
        super().__exit__(*details)
        for hook in self._hooks:
            hook.remove()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        value = func(*args, **(kwargs or {}))
        names = WINDOWED.get(value.dim(), ()) if isinstance(value, Tensor) else ()
        if any(name in getattr(func, "__name__", "") for name in names):
            self.outputs.append(value)
        return value


def primary_positions(probe: Probe, layer: str) -> Finding:
    """Find the positions of the feature map that single capsules depend on; they must fit into one window.

    The window is that of one position of the layer's convolutions, and 1x1 without any.

    Args:
        probe: the module.
        layer: name of the primary capsule layer, whose input is a feature map ``[B, C, H, W]``.
    """
    leaves, structure = pytree.tree_flatten(captured_inputs(probe, [layer])[layer])
    index = next((i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)), None)
    if index is None or leaves[index].dim() != 4:
        got = _got([] if index is None else [leaves[index]])
        raise AuditArgumentError(f"primary: the input of {layer!r} must be a feature map [B, C, H, W], {got}")
    features = leaves[index][:1].detach().clone().requires_grad_()
    arguments, options = pytree.tree_unflatten([*leaves[:index], features, *leaves[index + 1 :]], structure)
    module = probe.module.get_submodule(layer)
    with _RecordWindows(module) as windows:
        pose = first_tensor(module(*arguments, **options))
    grid: tuple[int, ...] = (1, 1)
    limit = (1, 1)
    for values in windows.outputs:
        if values.requires_grad and len(values) == 1:
            grid = tuple(values.shape[2:])
            middle = values[(0, slice(None), *(size // 2 for size in grid))]
            limit = _maximum(limit, _extent(middle, features))
    found = {axis: _capsule_extent(pose, axis, features, limit) for axis in _pose_axes(pose.shape, grid)}
    axis, largest = next(((a, x) for a, x in found.items() if _fits(x, limit)), next(iter(found.items())))
    return make_finding(
        "primary_positions",
        _fits(largest, limit),
        f"computed which positions of the feature map single capsules of {layer!r} depend on, the elements along axis "
        f"{axis} of its output {list(pose.shape)}",
        f"a capsule depends on {largest[0]}x{largest[1]} positions, its kernel has {limit[0]}x{limit[1]}",
        "a capsule is one position's channels; a view of a channels-first tensor groups neighbouring positions instead",
        rows=largest[0],
        columns=largest[1],
    )


def _pose_axes(shape: Sequence[int], grid: Sequence[int]) -> list[int]:
    """Return the axes of an output that can contain the elements of a pose, the usual one first: the last.

    Args:
        shape: shape of the output.
        grid: number of positions of the layer's convolution, rows and columns.
    """
    axes = [axis for axis in range(1, len(shape)) if shape[axis] > 1]
    if not axes:
        return [len(shape) - 1]
    sizes = [shape[axis] for axis in axes]
    others: list[int] = []
    if len(axes) == 2 and sizes[0] < sizes[1]:  # [B, K, I]
        others = axes[:1]
    elif len(axes) > 2 and sizes[-2:] == list(grid) != sizes[-3:-1]:  # [B, C, H, W] and [B, N, K, H, W]
        others = axes[:-2]
    return [axes[-1], *others]


def _capsule_extent(pose: Tensor, axis: int, features: Tensor, limit: Axes) -> Axes:
    """Return rows and columns of the features that single capsules, along an axis of the output, depend on."""
    capsules = pose.movedim(axis, -1).flatten(0, -2)
    step, largest = max(1, len(capsules) // N_CAPSULES_PROBED), (0, 0)
    for index in range(step // 2, len(capsules), step):
        largest = _maximum(largest, _extent(capsules[index], features))
        if not _fits(largest, limit):
            break
    return largest


def _extent(values: Tensor, features: Tensor) -> Axes:
    """Return how many rows and columns of the features (first image) values depend on, by their gradient."""
    (gradient,) = torch.autograd.grad(values.sum(), features, retain_graph=True, allow_unused=True)
    if gradient is None:
        return 0, 0
    support = gradient[0].abs().sum(0) > 0
    used = [support.any(1 - axis).nonzero() for axis in (0, 1)]
    rows, columns = (int(x.max() - x.min()) + 1 if len(x) else 0 for x in used)
    return rows, columns


def _maximum(a: Axes, b: Axes) -> Axes:
    return max(a[0], b[0]), max(a[1], b[1])


def _fits(extent: Axes, limit: Axes) -> bool:
    return extent[0] <= limit[0] and extent[1] <= limit[1]
