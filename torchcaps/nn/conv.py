"""2-D convolutions with fast paths: for small batches, and for depthwise kernels that cover the complete input."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps.nn.sizes import Pair
from torchcaps.votes.dispatch import uses_window_product

__all__ = ["Convolution", "DepthwiseConvolution"]


class Convolution(nn.Conv2d):
    """``nn.Conv2d`` without padding; small batches with many weights are computed as one matrix product of all windows.

    torch's convolution reorders its weights at every call, which for one image of Sabour 2017 takes half of the time;
    the matrix product reads them in place.

    Attributes:
        plain: if True, always use torch's convolution.
    """

    plain = False

    def forward(self, input: Tensor) -> Tensor:
        """Return the convolution of ``input``."""
        if self.plain or not self._uses_window_product(input):
            return super().forward(input)
        (k0, k1), (s0, s1) = self.kernel_size, self.stride
        windows = input.unfold(2, k0, s0).unfold(3, k1, s1)  # [B, C, H', W', k0, k1]
        rows = windows.permute(0, 2, 3, 1, 4, 5).flatten(3)  # [B, H', W', C * k0 * k1]
        return F.linear(rows, self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)

    def _uses_window_product(self, images: Tensor) -> bool:
        """Return whether `forward` computes a matrix product: few images, many weights, inference on a CPU."""
        return (
            uses_window_product(images.shape[0], self.weight.numel())  # first: a traced graph is for any batch size
            and images.dim() == 4
            and (self.padding, self.dilation, self.groups) == ((0, 0), (1, 1), 1)
            and images.device.type == "cpu"
            and not torch.is_grad_enabled()
            and not torch.is_autocast_enabled("cpu")
        )


class DepthwiseConvolution(nn.Conv2d):
    """Depthwise convolution without padding: one kernel per channel.

    A kernel that covers the complete input is computed as an elementwise product and a sum over positions.

    Args:
        channels: number of input and output channels.
        kernel_size, stride, bias, options: as in ``nn.Conv2d``.

    Attributes:
        plain: if True, always use torch's convolution.
    """

    plain = False

    def __init__(self, channels: int, kernel_size: Pair, stride: Pair, *, bias: bool = True, **options: Any) -> None:
        super().__init__(channels, channels, kernel_size, stride, groups=channels, bias=bias, **options)

    def forward(self, input: Tensor) -> Tensor:
        """Return the convolution of ``input``."""
        if self.plain or tuple(input.shape[-2:]) != tuple(self.kernel_size):
            return super().forward(input)
        total = (input * self.weight.squeeze(1)).sum((-2, -1), keepdim=True)
        return total if self.bias is None else total + self.bias[:, None, None]
