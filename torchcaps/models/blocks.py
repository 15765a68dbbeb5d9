"""Residual blocks and ResNet backbones, for the networks of Tsai 2020 and their ResNet-18 baseline."""

import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps.models.builder import Layers

__all__ = ["BasicBlock", "add_resnet"]


class BasicBlock(nn.Module):
    """Residual block of two 3x3 convolutions with batch normalisation: He 2016, for CIFAR.

    If the shape changes, the shortcut is a 1x1 convolution with batch normalisation. Its stride is applied by slicing
    the input, which is equivalent: the gradient of a strided 1x1 convolution of four channels in channels-last format
    writes out of bounds in oneDNN on processors with AVX2 only (torch 2.13).

    Args:
        in_channels: channels of the input.
        channels: channels of the output.
        stride: stride of the first convolution and of the shortcut.
        projection: if the shape changes, the shortcut has weights; otherwise it takes every ``stride``-th position and
            pads the channels with zeros (option A of He 2016).

    Shapes:
        ``[B, C, H, W] -> [B, C', ceil(H / stride), ceil(W / stride)]``
    """

    def __init__(self, in_channels: int, channels: int, stride: int = 1, projection: bool = True) -> None:
        super().__init__()
        self.stride = stride
        self.n_padded: int = 0 if projection else channels - in_channels
        self.conv1: nn.Conv2d = nn.Conv2d(in_channels, channels, 3, stride, 1, bias=False)
        self.norm1: nn.BatchNorm2d = nn.BatchNorm2d(channels)
        self.conv2: nn.Conv2d = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm2: nn.BatchNorm2d = nn.BatchNorm2d(channels)
        self.shortcut = nn.Sequential()
        if projection and (stride != 1 or in_channels != channels):
            self.shortcut: nn.Sequential = nn.Sequential(
                nn.Conv2d(in_channels, channels, 1, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, features: Tensor) -> Tensor:
        """Return the ReLU of the convolutions plus the shortcut."""
        residual = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(features)))))
        features = features[..., :: self.stride, :: self.stride]
        if self.n_padded:
            half = self.n_padded // 2
            features = F.pad(features, (0, 0, 0, 0, half, self.n_padded - half))
        return F.relu(residual + self.shortcut(features))


def add_resnet(layers: Layers, stages: tuple[tuple[int, int], ...], stem: int = 64, *, projection: bool = True) -> None:
    """Append a stem of one 3x3 convolution and stages of residual blocks.

    Args:
        layers: layers to append to.
        stages: (channels, blocks) of each stage; all but the first have stride 2.
        stem: channels of the stem.
        projection: of each `BasicBlock`.
    """
    layers.conv("stem", stem, 3, padding=1, bias=False)
    layers.batch_norm()
    layers.relu()
    for stage, (channels, n_blocks) in enumerate(stages, start=1):
        for block in range(n_blocks):
            stride = 2 if stage > 1 and block == 0 else 1
            layers.block(
                f"stage{stage}block{block + 1}",
                BasicBlock(layers.channels, channels, stride, projection),
                channels,
                stride,
            )
