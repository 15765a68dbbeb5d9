"""Residual backbones: what Tsai 2020 puts before its capsules, and the ResNet-18 it compares with."""

import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps.models.builder import Layers

__all__ = ["BasicBlock", "add_resnet"]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with batch norm around a shortcut: He 2016, for CIFAR.

    The shortcut is a 1x1 convolution with batch norm where shape changes. A stride is taken before it, by leaving out
    places, which is the same: oneDNN's gradient of a strided 1x1 convolution of four channels, channels last, writes
    beyond its memory on processors with AVX2 alone (torch 2.13).

    Shapes:
        ``[B, C, H, W] -> [B, C', ceil(H / stride), ceil(W / stride)]``
    """

    def __init__(self, before: int, channels: int, stride: int = 1) -> None:
        super().__init__()
        self.stride = stride
        self.conv1 = nn.Conv2d(before, channels, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Sequential()
        if stride != 1 or before != channels:
            self.shortcut = nn.Sequential(nn.Conv2d(before, channels, 1, bias=False), nn.BatchNorm2d(channels))

    def forward(self, features: Tensor) -> Tensor:
        """Add what the convolutions make to what the shortcut lets through."""
        inner = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(features)))))
        return F.relu(inner + self.shortcut(features[..., :: self.stride, :: self.stride]))


def add_resnet(layers: Layers, stages: tuple[tuple[int, int], ...], stem: int = 64) -> None:
    """Add a stem of one 3x3 convolution and stages of (channels, blocks), each but the first of stride 2."""
    layers.conv("stem", stem, 3, padding=1, bias=False)
    layers.batch_norm()
    layers.relu()
    for number, (channels, n_blocks) in enumerate(stages, start=1):
        for block in range(n_blocks):
            stride = 2 if number > 1 and block == 0 else 1
            layers.block(
                f"stage{number}block{block + 1}", BasicBlock(layers.channels, channels, stride), channels, stride
            )
