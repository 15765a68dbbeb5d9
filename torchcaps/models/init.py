"""First values of weights, as the frameworks of the papers draw them."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

__all__ = ["caffe_xavier", "each_layer", "glorot_uniform", "truncated_normal", "truncated_normal_"]

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
    """Draw every convolution and every linear layer of a module."""
    for layer in module.modules():
        if isinstance(layer, Plain):
            draw(layer)
