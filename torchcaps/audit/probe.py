"""Calls of the audited module: batches, outputs as lists of tensors, and inputs of its layers."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from torchcaps.nn import CapsuleStack

__all__ = [
    "MAX_DIFFERENCE",
    "AuditArgumentError",
    "LayerInputs",
    "Probe",
    "call_layer",
    "captured_inputs",
    "first_tensor",
    "largest_difference",
    "one_line",
]

MAX_DIFFERENCE = 1e-4  # of equal mathematics in another order, in float32, relative to max(1, |y|)

LayerInputs = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments


def largest_difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest difference of two lists of tensors, relative to ``max(1, |y|)``.

    It is infinite if only one of two values is NaN or infinite; equal values, and NaN in both, have none.
    """
    largest = 0.0
    for a, b in zip(found, expected, strict=True):
        if a.shape != b.shape:
            return float("inf")
        if a.numel():
            a, b = a.detach().double(), b.detach().double()
            difference = ((a - b).abs() / b.abs().clamp(min=1)).nan_to_num(nan=float("inf"))
            largest = max(largest, float(difference.masked_fill((a == b) | (a.isnan() & b.isnan()), 0).max()))
    return largest


class AuditArgumentError(ValueError):
    """An argument of an audit does not fit the module; a ValueError of the module itself is a finding instead."""


def one_line(error: Exception) -> str:
    """Return type and message of an exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


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
            raise AuditArgumentError(
                f"example_input must be a floating-point tensor with two images or more, got {got}"
            )
        if not bool(torch.isfinite(example).all()):
            raise AuditArgumentError("example_input must be finite, got NaN or infinite values")
        if labels is not None:
            _check_labels(labels, len(example))
        if any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
            raise AuditArgumentError("module has lazy parameters without a shape: call it once before the audit")
        try:
            self.module = copy.deepcopy(module).cpu()
            self.unused = copy.deepcopy(self.module)
        except Exception as error:
            raise AuditArgumentError(f"module can't be copied, as an audit does: {one_line(error)}") from error
        self.example, self.labels = example.detach().clone(), labels
        self.needs_labels = False

    def check_call(self, with_labels: bool = False) -> None:
        """Call the module once, and with labels; raise a ValueError if it fails or has no output to examine."""
        self.module.eval()
        try:
            with torch.no_grad():
                value = self.call(self.example, None)
        except Exception as error:
            if isinstance(error, TypeError) and self.labels is not None and not self.needs_labels:
                self.needs_labels = True  # also in evaluation
                self.check_call(with_labels)
                return
            shape = list(self.example.shape)
            raise AuditArgumentError(
                f"the module can't be called with example_input {shape} (pass labels= if it needs them): "
                f"{one_line(error)}"
            ) from error
        if with_labels:
            try:
                copy.deepcopy(self.module).train()(self.example.clone(), self.labels)
            except Exception as error:
                raise AuditArgumentError(
                    f"the module can't be called with images and labels in training mode; labels must be in the format "
                    f"that it expects: {one_line(error)}"
                ) from error
        if not self.outputs(value, len(self.example)):
            raise AuditArgumentError(
                f"the module must return floating-point tensors with one row per image ({len(self.example)}), in any "
                f"structure of tuples, lists and dicts, got {_describe(value)}"
            )

    def restart(self) -> "Probe":
        """Return a probe of a new copy of the module, which was not called yet."""
        probe = Probe(self.unused, self.example, self.labels)
        probe.needs_labels = self.needs_labels
        return probe

    def evaluate(self, images: Tensor, labels: Tensor | None = None) -> list[Tensor]:
        """Return the outputs in evaluation mode: all floating-point tensors with one row per image."""
        self.module.eval()
        with torch.no_grad():
            return self.outputs(self.call(images, labels), len(images))

    def call(self, images: Tensor, labels: Tensor | None) -> Any:
        """Call the module, with labels if they are given, on a copy of the images, which it may overwrite."""
        if labels is None and self.needs_labels and self.labels is not None:
            labels = self.labels[: len(images)]
        return self.module(images.clone()) if labels is None else self.module(images.clone(), labels)

    @staticmethod
    def outputs(value: Any, n_images: int) -> list[Tensor]:
        """Return the floating-point tensors of an output that have one row per image."""
        tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        return [tensor for tensor in tensors if tensor.dim() and len(tensor) == n_images]


def _check_labels(labels: Any, n_images: int) -> None:
    """Raise an AuditArgumentError for labels of another number, or that can't be exchanged for others."""
    if not isinstance(labels, Tensor) or not labels.dim() or len(labels) != n_images:
        got = list(labels.shape) if isinstance(labels, Tensor) else type(labels).__name__
        raise AuditArgumentError(f"labels must be a tensor with one row for each of the {n_images} images, got {got}")
    if bool((labels == labels[:1]).all()):
        raise AuditArgumentError("labels must not all be equal: the audit exchanges them and compares the outputs")


def _describe(value: Any) -> str:
    leaves = pytree.tree_leaves(value)
    kinds = [f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__ for x in leaves]
    return ", ".join(kinds[:4]) or "nothing"


def captured_inputs(probe: Probe, names: Sequence[str]) -> dict[str, LayerInputs]:
    """Return the arguments of submodules in one call, in evaluation mode.

    Args:
        probe: the module.
        names: names of submodules; the empty name is the module itself.
    """
    inputs: dict[str, LayerInputs] = {}
    modules = dict(probe.module.named_modules())
    handles = []
    stacks = [m for m in modules.values() if isinstance(m, CapsuleStack) and m.schedule == "concurrent"]
    for stack in stacks:
        stack.schedule = "sequential"  # a concurrent stack does not call its layers, only their steps
    for name in names:
        if name not in modules:
            known = ", ".join(repr(n) for n in list(modules)[1:12])
            raise AuditArgumentError(f"the module has no submodule {name!r}: its submodules are {known}")
        handles.append(modules[name].register_forward_pre_hook(_recorder(inputs, name), with_kwargs=True))
    try:
        probe.evaluate(probe.example)
    finally:
        for handle in handles:
            handle.remove()
        for stack in stacks:
            stack.schedule = "concurrent"
    for name in names:
        if name not in inputs:
            raise AuditArgumentError(f"the submodule {name!r} was not called")
    return inputs


def _recorder(inputs: dict[str, LayerInputs], name: str) -> Callable[..., None]:
    """Return a forward pre-hook that stores the arguments of a module's first call as ``inputs[name]``."""

    def record(_: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        inputs.setdefault(name, (arguments, options))

    return record


def call_layer(layer: nn.Module, inputs: LayerInputs) -> list[Tensor]:
    """Return the floating-point tensors of a layer's output, without gradients."""
    arguments, options = inputs
    with torch.no_grad():
        value = layer(*arguments, **options)
        return [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor) and t.is_floating_point()]


def first_tensor(value: Any) -> Tensor:
    """Return the first floating-point tensor of an output."""
    return next(t for t in pytree.tree_leaves(value) if isinstance(t, Tensor) and t.is_floating_point())
