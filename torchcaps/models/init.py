"""First values of weights, as the frameworks of the papers draw them."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from torchcaps.routing import Dynamic, Quadratic, Routing, Uniform

__all__ = [
    "caffe_xavier",
    "each_layer",
    "glorot_uniform",
    "he_normal",
    "steady_std",
    "truncated_normal",
    "truncated_normal_",
]

Plain = nn.Conv2d | nn.Linear


def truncated_normal_(tensor: Tensor, std: float) -> Tensor:
    """Fill with a normal distribution cut off at twice its deviation: TensorFlow's ``truncated_normal``."""
    return nn.init.trunc_normal_(tensor, std=std, a=-2 * std, b=2 * std)


@torch.no_grad()
def truncated_normal(layer: Plain, std: float, bias: float) -> None:
    """Draw a layer as the code of Sabour 2017 does: weights from a truncated normal, biases constant."""
    truncated_normal_(layer.weight, std)
    if layer.bias is not None:
        layer.bias.fill_(bias)


@torch.no_grad()
def he_normal(layer: Plain) -> None:
    """Keep the size of features through ReLUs: He 2015. Biases 0."""
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    if layer.bias is not None:
        layer.bias.zero_()


def steady_std(routing: Routing, n_children: int, n_parents: int, dim: int, gain: float) -> float | None:
    """Return the deviation of matrices for which squashed parents start neither near 0 nor near 1.

    A sum of ``I`` votes of children of length 1, each with the coupling ``c`` that the routing starts from, has a
    length of about ``c std sqrt(I D)``; this makes it ``gain``, whatever the number of children and parents.
    ``squash`` has no slope at 0, so with a fixed deviation many parents, or few children, would hardly move at first.
    Routings that start otherwise draw their matrices themselves: ``None``.

    With very many parents the votes themselves would be long, and agreement would grow without bound from iteration to
    iteration; so their length is kept to 1.
    """
    if isinstance(routing, Quadratic):
        coupling = abs(routing.initial)
    elif isinstance(routing, Dynamic | Uniform):
        coupling = 1 / (n_parents + (isinstance(routing, Dynamic) and routing.leak))
    else:
        return None
    return min(gain / (coupling * n_children**0.5), 1.0) / dim**0.5


@torch.no_grad()
def glorot_uniform(layer: Plain) -> None:
    """Draw a layer as Keras does: Glorot uniform, biases 0."""
    nn.init.xavier_uniform_(layer.weight)
    if layer.bias is not None:
        layer.bias.zero_()


@torch.no_grad()
def caffe_xavier(layer: Plain) -> None:
    """Draw a layer as Caffe's Xavier filler does: uniform within ``sqrt(3 / fan_in)``, biases 0."""
    bound = (3 / layer.weight[0].numel()) ** 0.5
    layer.weight.uniform_(-bound, bound)
    if layer.bias is not None:
        layer.bias.zero_()


def each_layer(module: nn.Module, draw: Callable[[Plain], None]) -> None:
    """Draw every convolution and every linear layer of a module; on the meta device there is nothing to draw."""
    for layer in module.modules():
        if isinstance(layer, Plain) and not layer.weight.is_meta:
            draw(layer)
