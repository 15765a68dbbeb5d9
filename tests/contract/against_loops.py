"""From a layer to the papers' loops: its numbers as nested lists, its routing as a function of them."""

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


def loops_of(name: str) -> Any:
    """The reference of a routing: tests/reference/<its name>.py."""
    return importlib.import_module(f"tests.reference.{name}")


def numbers_of(layer: CapsuleLayer, children: Capsules) -> dict[str, Any]:
    """Children, weight, bias and coefficients as nested lists, by name."""
    tensors: dict[str, Tensor | None] = {"weight": layer.weight, "bias": layer.bias}
    tensors |= {f"children.{name}": tensor for name, tensor in children._asdict().items()}
    tensors |= {f"coefficients.{name}": tensor for name, tensor in layer.coefficients.named().items()}
    return {name: None if tensor is None else tensor.tolist() for name, tensor in tensors.items()}


def sites_of(layer: CapsuleLayer, numbers: dict[str, Any], image: int) -> list[Site]:
    """The votes of one image."""
    pose, activation = numbers["children.pose"][image], numbers["children.activation"]
    activation = None if activation is None else activation[image]
    common = (pose, activation, numbers["weight"], numbers["bias"], layer.geometry.rows)
    if not isinstance(layer, ConvCapsules):
        return dense_sites(*common)
    kernel, stride = layer.kernel_size, layer.stride
    if layer.padding == "same":
        rows, columns = len(pose), len(pose[0])
        padding = tensorflow_same(rows, kernel[0], stride[0]) + tensorflow_same(columns, kernel[1], stride[1])
    else:
        padding = (layer.padding[0],) * 2 + (layer.padding[1],) * 2
    return conv_sites(*common, kernel, stride, padding, type(layer.routing).slot_kind == "type")


def coefficients_of(numbers: dict[str, Any]) -> dict[str, Any]:
    return {name.split(".")[1]: value for name, value in numbers.items() if name.startswith("coefficients.")}


def run_loops(layer: CapsuleLayer, numbers: dict[str, Any], frozen: list[Any] | None = None) -> list[list[Parents]]:
    """Route every image by the papers' loops. ``frozen``: see `freeze`."""
    choice = {field.name: getattr(layer.routing, field.name) for field in fields(layer.routing)}
    loops, p = loops_of(type(layer.routing).name()), coefficients_of(numbers)
    found = []
    for image in range(len(numbers["children.pose"])):
        more = {} if frozen is None else {"frozen": frozen[image]}
        found.append(loops.route(sites_of(layer, numbers, image), p, **choice, **more))
    return found


def freeze(layer: CapsuleLayer, numbers: dict[str, Any]) -> list[Any] | None:
    """What a routing takes as constant when it is differentiated: the agreements, with gradient="last"."""
    r: Any = layer.routing
    if getattr(r, "gradient", "full") != "last":
        return None
    p, images = coefficients_of(numbers), range(len(numbers["children.pose"]))
    return [
        dynamic.agreements(sites_of(layer, numbers, image), p, r.iterations, r.leak, r.prior, r.bias)
        for image in images
    ]


def stacked(found: list[list[Parents]], what: str, like: Tensor) -> Tensor:
    """One quantity of all images and sites as a tensor of the layer's shape."""
    values = [[getattr(site, what) for site in image] for image in found]
    return torch.tensor(values, dtype=torch.float64).reshape(like.shape)


def layer_difference(layer: CapsuleLayer, children: Capsules) -> float:
    """The largest difference of a layer's poses and activations from the papers' loops, over the largest value."""
    found = run_loops(layer, numbers_of(layer, layer.check_children(children)))
    apart = []
    for what, ours in layer(children)._asdict().items():
        if ours is not None:
            expected = stacked(found, what, ours)
            apart.append(float((ours.detach().double() - expected).abs().max() / expected.abs().max()))
    return max(apart)
