"""The two networks of an auxiliary-classifier GAN (Odena 2017) in the shape that Chen 2019 takes."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps.models.init import each_layer, glorot_uniform, truncated_normal_

__all__ = ["LATENT", "Discriminator", "Generator"]

LATENT = 100
SIDE = 28  # of the images: what two doublings make of a 7x7 grid
SLOPE, DROPOUT = 0.2, 0.3


def _glorot_normal(weight: Tensor) -> None:
    """Draw weights as Keras' ``glorot_normal``: a truncated normal; both fans count."""
    window = weight[0, 0].numel() if weight.dim() > 2 else 1
    truncated_normal_(weight, (2 / ((weight.shape[0] + weight.shape[1]) * window)) ** 0.5)


def scaled(channels: int, width: float) -> int:
    """Return a number of channels for a net of another width."""
    return max(1, round(channels * width))


class Generator(nn.Module):
    """Noise and a class to an image in -1..1: the generator of Keras' ``examples/mnist_acgan.py``.

    Noise times the class's embedding, number by number; fully-connected to 3x3 with 384 channels; transposed 5x5
    convolutions to 7x7 with 192, 14x14 with 96, and the image. ReLU, at the end tanh.

    Args:
        classes: how many.
        width: what the numbers of channels are multiplied by.

    Shapes:
        noise ``[B, 100]``, labels ``[B] -> [B, 1, 28, 28]``
    """

    def __init__(self, classes: int = 10, width: float = 1.0) -> None:
        super().__init__()
        first, second, third = (scaled(channels, width) for channels in (384, 192, 96))
        self.embedding = nn.Embedding(classes, LATENT)
        self.dense = nn.Linear(LATENT, first * 9)
        self.up1 = nn.ConvTranspose2d(first, second, 5)
        self.up2 = nn.ConvTranspose2d(second, third, 5, stride=2, padding=1)
        self.up3 = nn.ConvTranspose2d(third, 1, 5, stride=2, padding=1)
        each_layer(self, glorot_uniform)
        with torch.no_grad():
            _glorot_normal(self.embedding.weight)
            for layer in (self.up1, self.up2, self.up3):
                _glorot_normal(layer.weight)
                assert layer.bias is not None
                layer.bias.zero_()

    def forward(self, noise: Tensor, labels: Tensor) -> Tensor:
        """Make images."""
        grid = self.dense(noise * self.embedding(labels)).relu().unflatten(1, (-1, 3, 3))
        grid = self.up1(grid).relu()
        grid = _one_less(self.up2(grid)).relu()
        return _one_less(self.up3(grid)).tanh()


def _one_less(grid: Tensor) -> Tensor:
    """Cut off the last row and column: TensorFlow's SAME, of three rows too many, takes one before and two behind."""
    return grid[..., :-1, :-1]


class Discriminator(nn.Module):
    """An image in -1..1 to the logit of being real and the logits of its class: that of the same example.

    3x3 convolutions of 32 (stride 2), 64, 128 (stride 2) and 256 channels, each with a leaky ReLU and dropout.

    Shapes:
        ``[B, 1, 28, 28] ->`` ``[B]`` and ``[B, classes]``
    """

    def __init__(self, classes: int = 10, width: float = 1.0) -> None:
        super().__init__()
        sizes = [1, *(scaled(channels, width) for channels in (32, 64, 128, 256))]
        self.convs = nn.ModuleList(
            nn.Conv2d(before, after, 3, stride=stride, padding=1 if stride == 1 else 0)
            for before, after, stride in zip(sizes, sizes[1:], (2, 1, 2, 1), strict=False)
        )
        features = sizes[-1] * (SIDE // 4) ** 2
        self.real, self.classes = nn.Linear(features, 1), nn.Linear(features, classes)
        each_layer(self, glorot_uniform)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Judge images."""
        grid = images
        for conv in self.convs:
            if conv.stride == (2, 2):
                grid = F.pad(grid, (0, 1, 0, 1))  # TensorFlow's SAME: the odd row and column behind
            grid = F.dropout(F.leaky_relu(conv(grid), SLOPE), DROPOUT, self.training)
        features = grid.flatten(1)
        return self.real(features).squeeze(1), self.classes(features)
