"""Calls of the audited module: batches, outputs as lists of tensors, and inputs of its layers."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchcaps.nn import CapsuleStack

__all__ = ["Probe", "call_layer", "captured_inputs", "flat_pose", "largest_difference"]


def largest_difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest difference of two lists of tensors, relative to ``max(1, |y|)``; infinite for NaN."""
    largest = 0.0
    for a, b in zip(found, expected, strict=True):
        if a.shape != b.shape:
            return float("inf")
        if a.numel():
            difference = (a.detach().double() - b.detach().double()).abs() / b.detach().double().abs().clamp(min=1)
            value = float(difference.max())
            largest = max(largest, value if value == value else float("inf"))
    return largest


class Probe:
    """Copy of a module with the inputs to try it with.

    Args:
        module: the module; it is not changed.
        example: input of the module, with the images on its first axis.
        labels: further argument for training, if the module takes one.
    """

    def __init__(self, module: nn.Module, example: Tensor, labels: Tensor | None) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
        if not isinstance(example, Tensor) or not example.is_floating_point() or example.dim() < 2 or len(example) < 2:
            got = f"{example.dtype} {list(example.shape)}" if isinstance(example, Tensor) else type(example).__name__
            raise ValueError(f"example_input must be a floating-point tensor with two images or more, got {got}")
        if labels is not None and len(labels) != len(example):
            raise ValueError(f"labels must have one row for each of the {len(example)} images, got {len(labels)}")
        self.module = copy.deepcopy(module).cpu()
        self.example, self.labels = example.detach().clone(), labels

    def evaluate(self, images: Tensor, labels: Tensor | None = None) -> list[Tensor]:
        """Return the outputs in evaluation mode: all floating-point tensors with one row per image."""
        self.module.eval()
        with torch.no_grad():
            return self.outputs(self.call(images, labels), len(images))

    def call(self, images: Tensor, labels: Tensor | None) -> Any:
        """Call the module, with labels if they are given."""
        return self.module(images) if labels is None else self.module(images, labels)

    @staticmethod
    def outputs(value: Any, n_images: int) -> list[Tensor]:
        """Return the floating-point tensors of an output that have one row per image."""
        tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        return [tensor for tensor in tensors if tensor.dim() and len(tensor) == n_images]


def captured_inputs(probe: Probe, names: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """Return the positional inputs of submodules in one call, in evaluation mode.

    Args:
        probe: the module.
        names: names of submodules; the empty name is the module itself.
    """
    inputs: dict[str, tuple[Any, ...]] = {}
    modules = dict(probe.module.named_modules())
    handles = []
    stacks = [m for m in modules.values() if isinstance(m, CapsuleStack) and m.schedule == "concurrent"]
    for stack in stacks:
        stack.schedule = "sequential"  # a concurrent stack does not call its layers, only their steps
    for name in names:
        if name not in modules:
            known = ", ".join(repr(n) for n in list(modules)[1:12])
            raise ValueError(f"the module has no submodule {name!r}: its submodules are {known}")
        handles.append(modules[name].register_forward_pre_hook(_recorder(inputs, name)))
    try:
        probe.evaluate(probe.example)
    finally:
        for handle in handles:
            handle.remove()
        for stack in stacks:
            stack.schedule = "concurrent"
    for name in names:
        if name not in inputs:
            raise ValueError(f"the submodule {name!r} was not called")
    return inputs


def _recorder(inputs: dict[str, tuple[Any, ...]], name: str) -> Callable[..., None]:
    def record(_: nn.Module, arguments: tuple[Any, ...]) -> None:
        inputs.setdefault(name, arguments)

    return record


def call_layer(layer: nn.Module, inputs: tuple[Any, ...]) -> list[Tensor]:
    """Return the floating-point tensors of a layer's output, without gradients."""
    with torch.no_grad():
        return [t for t in pytree.tree_leaves(layer(*inputs)) if isinstance(t, Tensor) and t.is_floating_point()]


def flat_pose(value: Any) -> Tensor:
    """Return the poses of a layer's output as ``[B, capsules, D]``: its first floating-point tensor."""
    pose = next(t for t in pytree.tree_leaves(value) if isinstance(t, Tensor) and t.is_floating_point())
    return pose if pose.dim() == 3 else pose.flatten(1, -2)
