"""Weight initialisation as in the frameworks that the papers used: TensorFlow, Keras and Caffe."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from torchcaps.routing import Dynamic, Quadratic, Routing, Uniform
from torchcaps.routing.self_attention import TRUNCATED_STD

__all__ = [
    "caffe_xavier",
    "glorot_normal",
    "glorot_uniform",
    "he_normal",
    "init_layers",
    "keras_he_normal",
    "squash_std",
    "truncated_normal",
    "truncated_normal_",
]

ConvOrLinear = nn.Conv2d | nn.Linear


def truncated_normal_(tensor: Tensor, std: float) -> Tensor:
    """Fill with a normal distribution truncated at two standard deviations: TensorFlow's ``truncated_normal``."""
    return nn.init.trunc_normal_(tensor, std=std, a=-2 * std, b=2 * std)


@torch.no_grad()
def truncated_normal(layer: ConvOrLinear, std: float, bias: float) -> None:
    """Initialise a layer as the code of Sabour 2017: truncated normal weights, constant biases."""
    truncated_normal_(layer.weight, std)
    if layer.bias is not None:
        layer.bias.fill_(bias)


@torch.no_grad()
def he_normal(layer: ConvOrLinear) -> None:
    """Initialise a layer as He 2015, which keeps the variance of features through ReLUs; biases 0."""
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    if layer.bias is not None:
        layer.bias.zero_()


@torch.no_grad()
def keras_he_normal(layer: ConvOrLinear) -> None:
    """Initialise a layer as Keras' ``he_normal``: variance 2 / fan_in, truncated at two deviations; biases 0."""
    truncated_normal(layer, (2 / layer.weight[0].numel()) ** 0.5 / TRUNCATED_STD, 0.0)


@torch.no_grad()
def glorot_normal(layer: ConvOrLinear) -> None:
    """Initialise a layer as Keras' ``glorot_normal``: truncated at two deviations; biases 0."""
    fan_out, fan_in = layer.weight.shape[:2]
    area = layer.weight[0, 0].numel()
    truncated_normal(layer, (2 / (area * (fan_in + fan_out))) ** 0.5 / TRUNCATED_STD, 0.0)


@torch.no_grad()
def glorot_uniform(layer: ConvOrLinear) -> None:
    """Initialise a layer as Keras: Glorot uniform weights, biases 0."""
    nn.init.xavier_uniform_(layer.weight)
    if layer.bias is not None:
        layer.bias.zero_()


@torch.no_grad()
def caffe_xavier(layer: ConvOrLinear) -> None:
    """Initialise a layer as Caffe's Xavier filler: uniform within ``sqrt(3 / fan_in)``, biases 0."""
    bound = (3 / layer.weight[0].numel()) ** 0.5
    layer.weight.uniform_(-bound, bound)
    if layer.bias is not None:
        layer.bias.zero_()


def init_layers(module: nn.Module, init: Callable[[ConvOrLinear], None]) -> None:
    """Apply ``init`` to every convolution and linear layer of a module, except on the meta device."""
    for layer in module.modules():
        if isinstance(layer, ConvOrLinear) and not layer.weight.is_meta:
            init(layer)


def squash_std(routing: Routing, n_children: int, n_parents: int, dim: int, gain: float) -> float | None:
    """Return the standard deviation of transformation matrices for squashed parents of medium initial length.

    ``squash`` has zero slope at length 0 and saturates at 1, so with a fixed standard deviation many parents or few
    children would get vanishing gradients at first. The weighted sum of ``I`` votes of children of length 1, each with
    the initial coupling ``c`` of the routing, has a length of about ``c std sqrt(I D)``. The returned standard
    deviation makes this equal to ``gain`` for any number of children and parents, but keeps the length of a single
    vote at 1 or below: with very many parents, agreement would otherwise grow without bound over the iterations.

    Returns:
        The standard deviation, or ``None`` for routings that initialise their matrices themselves.
    """
    if isinstance(routing, Quadratic):
        coupling = abs(routing.initial)
    elif isinstance(routing, Dynamic):
        coupling = 1.0 if routing.normalize == "maxmin" else 1 / (n_parents + routing.leak)
    elif isinstance(routing, Uniform):
        coupling = 1 / (n_parents if routing.over == "parents" else n_children)
    else:
        return None
    return min(gain / (coupling * n_children**0.5), 1.0) / dim**0.5
