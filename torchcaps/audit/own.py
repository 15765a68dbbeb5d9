"""Claims of the models and layers of torchcaps: arguments of an audit, derived from their structure."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torchcaps.models import CapsuleNetwork, Network
from torchcaps.models.heads import LogActivationHead, SharedClassifier
from torchcaps.nn import ConvCapsules, DenseCapsules, PrimaryCapsules
from torchcaps.nn.layers import CapsuleLayer
from torchcaps.routing.base import Trace

__all__ = ["Claims", "claims_of", "example_labels"]


@dataclass
class Claims:
    """Arguments of an audit.

    Args:
        permuted: layers with the child axes of their parameters.
        translated: strides of convolutional layers.
        primary: name of the primary capsule layer.
        couplings: function of the module and images that returns name, tensor and axis of each coupling.
        lengths: function of the output that returns lengths or activations.
        unclaimed: reasons for invariants that no layer claims, by name of the check.
    """

    permuted: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    translated: dict[str, int | tuple[int, int]] = field(default_factory=dict)
    primary: str | None = None
    couplings: Callable[[nn.Module, Tensor], list[tuple[str, Tensor, int]]] | None = None
    lengths: Callable[[Any], Tensor] | None = None
    unclaimed: dict[str, str] = field(default_factory=dict)


def claims_of(module: nn.Module) -> Claims:
    """Return the claims of a model, or of the capsule layers inside of another module."""
    claims = Claims()
    for name, layer in module.named_modules():
        if isinstance(layer, PrimaryCapsules):
            claims.primary = name
            claims.translated[name] = layer.stride
        elif isinstance(layer, CapsuleLayer):
            _add_layer(claims, name, layer)
    if isinstance(module, CapsuleNetwork):
        claims.couplings = _network_couplings if _normalised(module) else None
        if isinstance(module.head, SharedClassifier) and not module.head.sigmoid:
            claims.unclaimed["length_range"] = "its scores are logits of a shared classifier, not lengths"
        elif isinstance(module.head, LogActivationHead):
            claims.unclaimed["length_range"] = "its scores are log-probabilities, not lengths"
        else:
            reasons = [r for layer in _layers(module).values() if (r := layer.routing.unclaimed().get("length_range"))]
            if reasons:
                claims.unclaimed["length_range"] = reasons[-1]
            else:
                claims.lengths = lambda output: output.scores
    elif isinstance(module, Network):
        reason = "it is a convolutional network without capsules"
        names = ("coupling_sums", "length_range", "permutation_invariance", "primary_positions")
        claims.unclaimed |= dict.fromkeys((*names, "decoder_labels"), reason)
    elif isinstance(module, CapsuleLayer) and module.routing.coupling_axis is not None:
        claims.couplings = _layer_couplings
    # A reason is listed only if no layer has the invariant: the others are checked.
    for check, found in (("permutation_invariance", claims.permuted), ("translation_equivariance", claims.translated)):
        if found:
            claims.unclaimed.pop(check, None)
    if claims.couplings is not None:
        claims.unclaimed.pop("coupling_sums", None)
    return claims


def _add_layer(claims: Claims, name: str, layer: CapsuleLayer) -> None:
    """Add the invariances that a capsule layer claims, and the reasons for those that it does not."""
    reasons = layer.routing.unclaimed()
    if isinstance(layer, DenseCapsules):
        if "permutation_invariance" not in reasons:
            claims.permuted[name] = _child_axes(layer)
        reasons.pop("translation_equivariance", None)  # there is no grid
    elif isinstance(layer, ConvCapsules):
        if layer.weights == "position":
            reasons["translation_equivariance"] = f"{name!r} has matrices of its own at every position"
        if any("L" in c.axes for c in layer.routing.coefficients(layer.geometry).values()):
            reasons["translation_equivariance"] = f"{name!r} has coefficients of its own at every position"
        reads_activations = layer.routing.presence == "activation" or getattr(layer.routing, "activations", False)
        if not name and layer.padding not in (0, (0, 0)) and reads_activations:
            # the layer alone is called with poses: its children then have activation 1, but the padding has 0
            reasons["translation_equivariance"] = (
                "without activations, the padding is absent but children of zeros are not"
            )
        if layer.routing.competition == "global" and tuple(layer.kernel_size) != (1, 1):
            reasons["translation_equivariance"] = f"in {name!r}, children at the border compete in fewer windows"
        if "translation_equivariance" not in reasons:
            claims.translated[name] = layer.stride
    claims.unclaimed |= reasons


def _child_axes(layer: DenseCapsules) -> dict[str, list[int]]:
    """Return the axes of children of a layer's tensors."""
    axes: dict[str, list[int]] = {}
    if not layer.geometry.shared:
        axes["weight"] = [0]
        if layer.bias is not None:
            axes["bias"] = [0]
    for name, coefficient in layer.routing.coefficients(layer.geometry).items():
        if "I" in coefficient.axes:
            letters = [letter for letter in coefficient.axes if letter != "L"]  # a dense layer has no grid
            axes[f"coefficients.{name}"] = [i for i, letter in enumerate(letters) if letter == "I"]
    return axes


def _layers(model: CapsuleNetwork) -> dict[str, CapsuleLayer]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, CapsuleLayer)}


def _normalised(model: CapsuleNetwork) -> bool:
    return any(_coupling_axis(layer) is not None for layer in _layers(model).values())


def _coupling_axis(layer: CapsuleLayer) -> int | None:
    """Return the axis over which the couplings ``[B, *L, I, J]`` of a layer sum to 1; ``None`` if there is none."""
    reasons = layer.routing.unclaimed()
    if "coupling_sums" in reasons or layer.routing.coupling_axis is None:
        return None
    if layer.routing.competition == "global" and isinstance(layer, ConvCapsules):
        return None  # the sum is over the parents at all positions
    return -1 if layer.routing.coupling_axis == "parents" else -2


def _network_couplings(module: nn.Module, images: Tensor) -> list[tuple[str, Tensor, int]]:
    """Return name, couplings and the axis that sums to 1, for each iteration of the layers with such an axis."""
    assert isinstance(module, CapsuleNetwork)
    traces: tuple[Trace, ...] = module(images, trace=True).trace
    found = []
    for (name, layer), trace in zip(_layers(module).items(), traces, strict=True):
        found += _of_trace(name, layer, trace)
    return found


def _layer_couplings(module: nn.Module, children: Tensor) -> list[tuple[str, Tensor, int]]:
    assert isinstance(module, CapsuleLayer)
    return _of_trace("layer", module, module(children, trace=True)[1])


def _of_trace(name: str, layer: CapsuleLayer, trace: Trace) -> list[tuple[str, Tensor, int]]:
    """Return name, couplings and the axis that sums to 1, for each iteration with couplings; none without such axis."""
    axis = _coupling_axis(layer)
    if axis is None:
        return []
    couplings = enumerate(trace.couplings, start=1)
    return [(f"{name}, iteration {t}", coupling, axis) for t, coupling in couplings if coupling is not None]


def example_labels(model: Network, n_images: int) -> Tensor:
    """Return labels in the format of a model."""
    first = torch.arange(n_images) % model.spec.classes
    if model.n_objects is None:
        return nn.functional.one_hot(first, model.spec.classes)
    if model.n_objects == 1:
        return first
    return torch.stack([(first + k) % model.spec.classes for k in range(model.n_objects)], dim=1)
