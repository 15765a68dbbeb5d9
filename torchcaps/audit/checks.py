"""The checks of an audit. Each tries one thing and returns a `Finding`."""

import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchcaps.audit.probe import AuditArgumentError, Probe, call_layer, captured_inputs, flat_pose, largest_difference
from torchcaps.audit.report import AuditVerdict, Finding

__all__ = [
    "batch_independence",
    "batch_of_one",
    "coupling_sums",
    "decoder_labels",
    "determinism",
    "finite_values",
    "length_range",
    "parameter_gradients",
    "permutation_invariance",
    "primary_positions",
    "translation_equivariance",
]

MAX_DIFFERENCE = 1e-4  # of equal mathematics in another order, in float32, relative to max(1, |y|)
MAX_BATCH_EFFECT = 1e-6  # of the other images: the arithmetic is the same
SCALES = {"zero": 0.0, "tiny": 1e-30, "large": 1e3}
N_CAPSULES_PROBED = 24

Permuted = Mapping[str, Mapping[str, Sequence[int]]]


def _judge(check: str, is_good: bool, tried: str, result: str, why: str, **numbers: float) -> Finding:
    return Finding(check, AuditVerdict.PASSED if is_good else AuditVerdict.FAILED, tried, result, why, numbers)


def batch_independence(probe: Probe) -> Finding:
    """Replace all images of a batch but the first, and differentiate its outputs by them: both must give nothing.

    The derivative also finds an influence that is still small because the weights are.
    """
    images = probe.example
    others = torch.cat([images[:1], 1 - images[1:].flip(0)])
    difference = largest_difference([t[:1] for t in probe.evaluate(others)], [t[:1] for t in probe.evaluate(images)])
    images = images.clone().requires_grad_()
    outputs = [t[:1] for t in probe.outputs(probe.call(images, None), len(images)) if t.requires_grad]
    gradient = 0.0
    if outputs:
        (found,) = torch.autograd.grad(_functional(outputs), images, allow_unused=True)
        gradient = 0.0 if found is None else float(found[1:].abs().max())
    return _judge(
        "batch_independence",
        difference <= MAX_BATCH_EFFECT and not gradient > 0,
        "replaced all images of a batch but the first, and differentiated its outputs by them, in evaluation mode",
        f"the outputs of the first image change by {difference:.1e}; their derivative by the others is {gradient:.1e}",
        "the prediction for an image must not depend on the images that happen to be evaluated with it",
        difference=difference,
        gradient=gradient,
    )


def batch_of_one(probe: Probe) -> Finding:
    """Evaluate one image alone; it must work and give the same outputs as in a batch."""
    tried = "evaluated the first image alone and in a batch"
    why = "a squeeze() or a view with a fixed batch size fails for single images, or in the last batch of an epoch"
    expected = [t[:1] for t in probe.evaluate(probe.example)]
    try:
        found = probe.evaluate(probe.example[:1])
    except Exception as error:
        return _judge("batch_of_one", False, tried, f"{type(error).__name__}: {str(error)[:100]}", why)
    if len(found) != len(expected):
        return _judge("batch_of_one", False, tried, "an output has lost its batch axis", why)
    difference = largest_difference(found, expected)
    result = f"the outputs differ by {difference:.1e}"
    return _judge("batch_of_one", difference <= MAX_DIFFERENCE, tried, result, why, difference=difference)


def determinism(probe: Probe) -> Finding:
    """Evaluate the same batch twice; the outputs must be bit-equal."""
    first, second = probe.evaluate(probe.example), probe.evaluate(probe.example)
    difference = largest_difference(second, first)
    return _judge(
        "determinism",
        difference == 0,
        "evaluated the same batch twice, in evaluation mode",
        f"the outputs differ by {difference:.1e}",
        "dropout or random couplings in evaluation make reported accuracies irreproducible",
        difference=difference,
    )


def finite_values(probe: Probe) -> Finding:
    """Compute outputs and gradients for zero, tiny and large inputs; all must be finite.

    Zeros are also tried without biases, as they are often initialised: only then are poses exactly zero.
    """
    problems, rejected = [], []
    unbiased = Probe(probe.module, probe.example, probe.labels)
    unbiased.needs_labels = probe.needs_labels
    with torch.no_grad():
        for name, parameter in unbiased.module.named_parameters():
            if name.rpartition(".")[2].startswith("bias"):
                parameter.zero_()
    cases = [(name, scale, probe) for name, scale in SCALES.items()]
    for name, scale, tried in [("example", 1.0, probe), *cases, ("zero without biases", 0.0, unbiased)]:
        tried.module.eval()
        images = (tried.example * scale).requires_grad_()
        try:
            outputs = tried.outputs(tried.call(images, None), len(images))
        except ValueError as error:  # a module may reject inputs outside of its domain
            rejected.append(f"{name}: rejected ({str(error)[:60]})")
            continue
        bad = sum(int((~torch.isfinite(t)).sum()) for t in outputs)
        leaves = [images, *(p for p in tried.module.parameters() if p.requires_grad)]
        differentiable = [t for t in outputs if t.requires_grad]
        gradients = (
            torch.autograd.grad(_functional(differentiable), leaves, allow_unused=True) if differentiable else ()
        )
        bad_gradients = sum(int((~torch.isfinite(g)).sum()) for g in gradients if g is not None)
        if bad or bad_gradients:
            problems.append(f"{name}: {bad} values and {bad_gradients} gradient values are NaN or infinite")
    return _judge(
        "finite_values",
        not problems,
        "outputs and gradients for the example, for zeros (also with all biases at zero), scaled by 1e-30 and by 1,000",
        "; ".join(problems or rejected) or "all finite",
        "the norm in the squash is NaN at zero without care: one black image then destroys all weights",
        n_problems=len(problems),
    )


def parameter_gradients(probe: Probe) -> Finding:
    """Compute gradients in training mode; each parameter must receive one that is not zero."""
    module = probe.module.train()
    module.zero_grad()
    outputs = probe.outputs(probe.call(probe.example, probe.labels), len(probe.example))
    differentiable = [t for t in outputs if t.requires_grad]
    if differentiable:
        _functional(differentiable).backward()
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    missing = [name for name, p in parameters.items() if p.grad is None or not bool(p.grad.abs().max() > 0)]
    module.zero_grad()
    result = f"{len(missing)} of {len(parameters)} parameters receive none: {', '.join(missing[:4])}"
    return _judge(
        "parameter_gradients",
        not missing,
        "gradients of a random functional of all outputs, in training mode",
        result if missing else f"all {len(parameters)} trainable parameters receive one",
        "a detached branch or an unused layer is never trained, and the parameter count is wrong",
        n_missing=len(missing),
        n_parameters=len(parameters),
    )


def _functional(outputs: list[Tensor]) -> Tensor:
    """Return a random linear functional of tensors."""
    generator = torch.Generator().manual_seed(0)
    total = torch.zeros(())
    for tensor in outputs:
        total = total + (tensor.float() * torch.randn(tensor.shape, generator=generator)).sum()
    return total


def permutation_invariance(probe: Probe, layers: Permuted) -> Finding:
    """Permute the children of layers, together with their parameters; the parents must not change.

    Args:
        probe: the module.
        layers: for each layer its parameters and buffers with child axes: ``{"digits": {"weight": [0]}}``.
    """
    largest, worst = 0.0, ""
    for name, inputs in captured_inputs(probe, list(layers)).items():
        layer = copy.deepcopy(probe.module.get_submodule(name))
        expected = call_layer(layer, inputs)
        tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
        if not tensors or tensors[0].dim() < 3:
            raise AuditArgumentError(f"permuted: the input of {name!r} must be [B, children, ...], {_got(tensors)}")
        n_children = math.prod(tensors[0].shape[1:-1]) if tensors[0].dim() == 5 else tensors[0].shape[1]
        order = torch.randperm(n_children, generator=torch.Generator().manual_seed(0))
        moved = pytree.tree_map(functools.partial(_permute_children, order=order), inputs)
        with torch.no_grad():
            for key, axes in layers[name].items():
                tensor = _child_tensor(layer, name, key, axes, n_children)
                for axis in axes:
                    tensor.copy_(tensor.index_select(axis, order))
        difference = largest_difference(call_layer(layer, moved), expected)
        if difference >= largest:
            largest, worst = difference, name
    return _judge(
        "permutation_invariance",
        largest <= MAX_DIFFERENCE,
        f"permuted the children of {', '.join(map(repr, layers))} and their matrices",
        f"the parents of {worst!r} change by {largest:.1e}",
        "routing is a sum over children: an order that matters means that a view has mixed up axes",
        difference=largest,
    )


def _got(tensors: Sequence[Tensor]) -> str:
    return f"got {list(tensors[0].shape)}" if tensors else "got no tensor"


def _child_tensor(layer: nn.Module, name: str, key: str, axes: Sequence[int], n_children: int) -> Tensor:
    """Return a parameter or buffer of a layer, whose axes of children are checked."""
    named = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    if key not in named:
        raise AuditArgumentError(f"permuted: {name!r} has no parameter {key!r}: its parameters are {', '.join(named)}")
    shape = list(named[key].shape)
    if any(not -len(shape) <= axis < len(shape) or shape[axis] != n_children for axis in axes):
        raise AuditArgumentError(
            f"permuted: axes {list(axes)} of {name}.{key} {shape} must have the size {n_children}, one row per child"
        )
    return named[key]


def _permute_children(tensor: Any, order: Tensor) -> Any:
    """Permute the children of a tensor ``[B, I, ...]``, ``[B, H, W, N, K]`` or ``[B, H, W, N]``."""
    if not isinstance(tensor, Tensor):
        return tensor
    if tensor.shape[1] == len(order):
        return tensor[:, order]
    n_axes = 5 if math.prod(tensor.shape[1:4]) == len(order) else tensor.dim()
    flat = tensor.flatten(1, min(3, n_axes - 1))
    return flat[:, order].view_as(tensor)


def translation_equivariance(probe: Probe, layers: Mapping[str, int]) -> Finding:
    """Shift the input of layers by their stride; the output must shift by one position.

    The input is zero except in the middle of the grid, so that the shift loses nothing and padding makes no difference.

    Args:
        probe: the module.
        layers: stride of each layer, by its name.
    """
    largest, worst = 0.0, None
    for name, inputs in captured_inputs(probe, list(layers)).items():
        layer, stride = probe.module.get_submodule(name), layers[name]
        leaves, structure = pytree.tree_flatten(inputs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not tensors or tensors[0].dim() < 4 or stride < 1:
            raise AuditArgumentError(
                f"translated: {name!r} must have a stride of at least 1, got {stride}, and an input [B, C, H, W] or "
                f"[B, H, W, types, dim], {_got(tensors)}"
            )
        axes = _grid_axes(tensors)
        centered = [_keep_center(x, axes, stride) if isinstance(x, Tensor) else x for x in leaves]
        if any(x is None for x, leaf in zip(centered, leaves, strict=True) if isinstance(leaf, Tensor)):
            continue  # the grid is too small to shift
        shifted = [x.roll((stride, stride), axes) if isinstance(x, Tensor) else x for x in centered]
        before = call_layer(layer, pytree.tree_unflatten(centered, structure))
        after = call_layer(layer, pytree.tree_unflatten(shifted, structure))
        out_axes = _grid_axes(before)
        for a, b in zip(after, before, strict=True):
            for axis in out_axes:
                a, b = a.narrow(axis, 1, a.shape[axis] - 1), b.narrow(axis, 0, b.shape[axis] - 1)
            difference = largest_difference([a], [b]) if a.numel() else 0.0
            if a.numel() and difference >= largest:
                largest, worst = difference, name
    if worst is None:
        reason = "all grids are too small for a shift"
        return Finding("translation_equivariance", AuditVerdict.NOT_CHECKED, "", reason, "")
    return _judge(
        "translation_equivariance",
        largest <= MAX_DIFFERENCE,
        f"shifted the input of {', '.join(map(repr, layers))} by the stride",
        f"the output of {worst!r} differs from the shifted one by {largest:.1e}",
        "a convolutional layer that scrambles positions loses the relation of poses to the image",
        difference=largest,
    )


def _grid_axes(tensors: Sequence[Tensor]) -> tuple[int, int]:
    """Return the axes of the grid: of capsules ``[B, H, W, N, K]``, otherwise of features ``[B, C, H, W]``."""
    return (1, 2) if any(tensor.dim() == 5 for tensor in tensors) else (2, 3)


def _keep_center(tensor: Tensor, axes: tuple[int, int], stride: int) -> Tensor | None:
    """Set all but the middle of the grid to zero; return ``None`` if the grid is too small to shift it."""
    mask = torch.zeros_like(tensor)
    region = mask
    for axis in axes:
        size = tensor.shape[axis]
        start = max(1, size // 3)
        stop = max(start + 1, size - start - stride)
        if stop + stride > size:
            return None
        region = region.narrow(axis, start, stop - start)
    region.fill_(1)
    return tensor * mask


def primary_positions(probe: Probe, layer: str) -> Finding:
    """Find the pixels of the feature map that single capsules depend on; they must fit into one window.

    Args:
        probe: the module.
        layer: name of the primary capsule layer, whose input is a feature map ``[B, C, H, W]``.
    """
    leaves, structure = pytree.tree_flatten(captured_inputs(probe, [layer])[layer])
    index = next((i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)), None)
    if index is None or leaves[index].dim() != 4:
        got = _got([] if index is None else [leaves[index]])
        raise AuditArgumentError(f"primary: the input of {layer!r} must be a feature map [B, C, H, W], {got}")
    module = probe.module.get_submodule(layer)
    kernels = [m.kernel_size for m in module.modules() if isinstance(m, nn.Conv2d)]
    features = leaves[index][:1].detach().clone().requires_grad_()
    arguments, options = pytree.tree_unflatten([*leaves[:index], features, *leaves[index + 1 :]], structure)
    pose = flat_pose(module(*arguments, **options))
    limit = [max((k[axis] for k in kernels), default=1) for axis in (0, 1)]  # type: ignore[index]
    step = max(1, pose.shape[1] // N_CAPSULES_PROBED)
    largest = [0, 0]
    for index in range(step // 2, pose.shape[1], step):
        (gradient,) = torch.autograd.grad(pose[0, index].sum(), features, retain_graph=True)
        support = gradient[0].abs().sum(0) > 0
        for axis in (0, 1):
            used = support.any(1 - axis).nonzero()
            if len(used):
                largest[axis] = max(largest[axis], int(used.max() - used.min()) + 1)
    return _judge(
        "primary_positions",
        largest[0] <= limit[0] and largest[1] <= limit[1],
        f"computed which positions of the feature map single capsules of {layer!r} depend on",
        f"a capsule depends on {largest[0]}x{largest[1]} positions, its kernel has {limit[0]}x{limit[1]}",
        "a capsule is one position's channels; a view of a channels-first tensor groups neighbouring positions instead",
        rows=largest[0],
        columns=largest[1],
    )


def coupling_sums(couplings: Sequence[tuple[str, Tensor, int]]) -> Finding:
    """Sum couplings over the claimed axis; the sums must be 1.

    Args:
        couplings: name, tensor and axis of each.
    """
    largest, worst, least = 0.0, "", math.inf
    for name, tensor, axis in couplings:
        total = tensor.detach().double().sum(axis)
        difference = largest_difference([total], [torch.ones_like(total)])
        least = min(least, float(tensor.min()))
        if difference >= largest:
            largest, worst = difference, name
    axes = ", ".join(sorted({str(axis) for _, _, axis in couplings}))
    return _judge(
        "coupling_sums",
        largest <= MAX_DIFFERENCE and least >= 0,
        f"summed {len(couplings)} tensors of couplings over the claimed axis ({axes})",
        f"sums differ from 1 by {largest:.1e} ({worst}); the least coupling is {least:.1e}",
        "a softmax over the wrong axis makes children compete for a parent instead of parents for a child",
        difference=largest,
        least=least,
    )


def decoder_labels(probe: Probe) -> Finding:
    """Evaluate with other labels; no output may change."""
    assert probe.labels is not None
    labels = probe.labels
    other = labels.flip(0) if not torch.equal(labels.flip(0), labels) else labels.roll(1, 0)
    difference = largest_difference(probe.evaluate(probe.example, other), probe.evaluate(probe.example, labels))
    return _judge(
        "decoder_labels",
        difference <= MAX_DIFFERENCE,
        "exchanged the labels in evaluation mode",
        f"the outputs change by {difference:.1e}",
        "a decoder that is masked by the label at test time shows reconstructions that the network could not know",
        difference=difference,
    )


def length_range(probe: Probe, lengths: Callable[[Any], Tensor]) -> Finding:
    """Compute lengths for several scales of the input; they must be in [0, 1)."""
    least, most, problems = math.inf, -math.inf, []
    probe.module.eval()
    for name, scale in {"example": 1.0, **SCALES}.items():
        try:
            with torch.no_grad():
                output = probe.call(probe.example * scale, None)
        except ValueError:  # a module may reject inputs outside of its domain
            continue
        values = lengths(output)
        least, most = min(least, float(values.min())), max(most, float(values.max()))
        if not bool(torch.isfinite(values).all()):
            problems.append(name)
    tolerance = 1e-6  # rounding of a length that is almost 1
    return _judge(
        "length_range",
        not problems and least >= 0 and most <= 1 + tolerance,
        "lengths for the example, for zero, tiny and large images",
        f"lengths are in [{least:.4g}, {most:.4g}]" + (f", not finite for {', '.join(problems)}" if problems else ""),
        "the length is read as the probability that an entity is present, and the margin loss needs this range",
        least=least,
        most=most,
    )
