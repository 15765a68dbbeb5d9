"""From a layer to the papers' loops: its numbers as nested lists, its routing as a function of them."""

import importlib
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from tests.contract.cases import Case
from tests.reference import dynamic
from tests.reference.sites import Parents, Site, conv_sites, dense_sites
from torchcaps.capsules import Capsules
from torchcaps.nn.layers import CapsuleLayer


def loops_of(case: Case) -> Any:
    """The reference of a routing: tests/reference/<its name>.py."""
    return importlib.import_module(f"tests.reference.{type(case.routing).name()}")


def sites_of(case: Case, numbers: dict[str, Any], image: int) -> list[Site]:
    """The votes of one image. ``numbers``: children, weight, bias and coefficients as nested lists, by name."""
    pose = numbers["children.pose"][image]
    activation = numbers["children.activation"]
    activation = None if activation is None else activation[image]
    rows = {"vector": 1, "matrix": 2}[case.pose]
    common = (pose, activation, numbers["weight"], numbers["bias"], rows)
    if case.geometry == "dense":
        return dense_sites(*common)
    options = case.options()
    kernel = options["kernel_size"]
    kernel = kernel if isinstance(kernel, tuple) else (kernel, kernel)
    padding = {"same": (1, 1, 1, 1)}.get(options["padding"]) or (options["padding"],) * 4
    stride = (options["stride"],) * 2
    return conv_sites(*common, kernel, stride, padding, type(case.routing).slots == "type")


def numbers_of(layer: CapsuleLayer, children: Capsules) -> dict[str, Any]:
    tensors: dict[str, Tensor | None] = {"weight": layer.weight, "bias": layer.bias}
    tensors |= {f"children.{name}": tensor for name, tensor in children._asdict().items()}
    tensors |= {f"coefficients.{name}": tensor for name, tensor in layer.p().items()}
    return {name: None if tensor is None else tensor.tolist() for name, tensor in tensors.items()}


def run_loops(case: Case, numbers: dict[str, Any], frozen: list[Any] | None = None) -> list[list[Parents]]:
    """Route every image by the papers' loops. ``frozen``: see `freeze`."""
    choice = {field.name: getattr(case.routing, field.name) for field in fields(case.routing)}
    p = {name.split(".")[1]: value for name, value in numbers.items() if name.startswith("coefficients.")}
    found = []
    for image in range(len(numbers["children.pose"])):
        more = {} if frozen is None else {"frozen": frozen[image]}
        found.append(loops_of(case).route(sites_of(case, numbers, image), p, **choice, **more))
    return found


def freeze(case: Case, numbers: dict[str, Any]) -> list[Any] | None:
    """What a routing takes as constant when it is differentiated: the agreements, with gradient="last"."""
    if getattr(case.routing, "gradient", "full") != "last":
        return None
    r: Any = case.routing
    p = {name.split(".")[1]: value for name, value in numbers.items() if name.startswith("coefficients.")}
    images = range(len(numbers["children.pose"]))
    return [
        dynamic.agreements(sites_of(case, numbers, image), p, r.iterations, r.leak, r.prior, r.bias)
        for image in images
    ]


def stacked(found: list[list[Parents]], what: str, like: Tensor) -> Tensor:
    """One quantity of all images and sites as a tensor of the layer's shape."""
    values = [[getattr(site, what) for site in image] for image in found]
    return torch.tensor(values, dtype=torch.float64).reshape(like.shape)
