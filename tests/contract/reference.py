"""Run the reference loops (tests/reference) on the values of a layer."""

import importlib
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from tests.reference import dynamic
from tests.reference.sites import Parents, Site, conv_sites, dense_sites, tensorflow_same
from torchcaps.capsules import Capsules
from torchcaps.nn import ConvCapsules
from torchcaps.nn.layers import CapsuleLayer


def reference_module(name: str) -> Any:
    """Import the reference loops of a routing, tests/reference/<registered name>.py."""
    return importlib.import_module(f"tests.reference.{name}")


def to_lists(layer: CapsuleLayer, children: Capsules) -> dict[str, Any]:
    """Return children, weight, bias and coefficients as nested lists, by name."""
    tensors: dict[str, Tensor | None] = {"weight": layer.weight, "bias": layer.bias}
    tensors |= {f"children.{name}": tensor for name, tensor in children._asdict().items()}
    tensors |= {f"coefficients.{name}": tensor for name, tensor in layer.coefficients.named().items()}
    return {name: None if tensor is None else tensor.tolist() for name, tensor in tensors.items()}


def make_sites(layer: CapsuleLayer, values: dict[str, Any], image: int) -> list[Site]:
    """Compute the votes of one image, by output position."""
    pose, activation = values["children.pose"][image], values["children.activation"]
    activation = None if activation is None else activation[image]
    common = (pose, activation, values["weight"], values["bias"], layer.geometry.rows)
    if not isinstance(layer, ConvCapsules):
        return dense_sites(*common)
    kernel, stride = layer.kernel_size, layer.stride
    if layer.padding == "same":
        rows, columns = len(pose), len(pose[0])
        padding = tensorflow_same(rows, kernel[0], stride[0]) + tensorflow_same(columns, kernel[1], stride[1])
    else:
        padding = (layer.padding[0],) * 2 + (layer.padding[1],) * 2
    return conv_sites(*common, kernel, stride, padding, type(layer.routing).slot_kind == "type")


def routing_coefficients(values: dict[str, Any]) -> dict[str, Any]:
    return {name.split(".")[1]: value for name, value in values.items() if name.startswith("coefficients.")}


def run_reference(
    layer: CapsuleLayer, values: dict[str, Any], agreements: list[Any] | None = None
) -> list[list[Parents]]:
    """Route every image by the reference loops; return the parents by image and output position.

    Args:
        layer: the layer, for its routing and geometry.
        values: the result of `to_lists`.
        agreements: constants for the agreements of dynamic routing; see `constant_agreements`.
    """
    options = {field.name: getattr(layer.routing, field.name) for field in fields(layer.routing)}
    module, coefficients = reference_module(type(layer.routing).name()), routing_coefficients(values)
    parents = []
    for image in range(len(values["children.pose"])):
        constants = {} if agreements is None else {"constant_agreements": agreements[image]}
        parents.append(module.route(make_sites(layer, values, image), coefficients, **options, **constants))
    return parents


def constant_agreements(layer: CapsuleLayer, values: dict[str, Any]) -> list[Any] | None:
    """Return the agreements that ``Dynamic(gradient="last")`` treats as constants; ``None`` for other routings."""
    r: Any = layer.routing
    if getattr(r, "gradient", "full") != "last":
        return None
    coefficients, images = routing_coefficients(values), range(len(values["children.pose"]))
    options = {field.name: getattr(r, field.name) for field in fields(r) if field.name != "gradient"}
    return [dynamic.agreements(make_sites(layer, values, image), coefficients, **options) for image in images]


def stack_field(parents: list[list[Parents]], field: str, like: Tensor) -> Tensor:
    """Return one field of the parents of all images and positions as a tensor of the layer's shape."""
    values = [[getattr(site, field) for site in image] for image in parents]
    return torch.tensor(values, dtype=torch.float64).reshape(like.shape)


def layer_difference(layer: CapsuleLayer, children: Capsules) -> float:
    """Return the largest difference of poses and activations from the reference, relative to the largest value."""
    reference = run_reference(layer, to_lists(layer, layer.check_children(children)))
    differences = []
    for field, actual in layer(children)._asdict().items():
        if actual is not None:
            expected = stack_field(reference, field, actual)
            differences.append(float((actual.detach().double() - expected).abs().max() / expected.abs().max()))
    return max(differences)
