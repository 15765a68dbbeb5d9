"""Primary capsules: a convolution whose channels are grouped into poses."""

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps._core.validation import check_finite, check_float
from torchcaps.capsules import Capsules
from torchcaps.nn.activations import ActivationName, make_activation
from torchcaps.nn.conv import Convolution, DepthwiseConvolution
from torchcaps.nn.sizes import Pair, as_count, as_padding, as_pair, resolve_padding

__all__ = ["PrimaryCapsules"]


class PrimaryCapsules(nn.Module):
    """Primary capsules: Sabour 2017, section 4. A capsule is ``dim`` *consecutive channels at one position*.

    Channel ``type * dim + d`` of the convolution is element ``d`` of that capsule type. Popular code reshapes the
    channels-first tensor instead, which mixes neighbouring positions.

    Args:
        in_channels: number of input channels.
        types, dim: number of capsule types per position, and their pose size.
        kernel_size, stride: kernel size and stride of the convolution.
        padding: an int, a pair, or ``"same"`` with the convention of TensorFlow.
        bias: whether the convolution has a bias (not in Tsai 2020).
        relu: apply a ReLU to the channels before grouping (Choi 2019, Chen 2019).
        activation: ``"squash"`` (Sabour 2017), ``"exp_squash"`` (Chen 2019), ``"layer_norm"`` with a learned
            gain (Tsai 2020), ``"capsule"``: an affine map per type, then tanh (Choi 2019), ``"none"``
            (Hinton 2018), or a module.
        scale: factor of the input: ``s = scale W x + b``. The authors' code of Sabour 2017 routes the single input
            equally to all types, which amounts to ``1 / types``.
        activations: also compute an activation per capsule by a second convolution and a sigmoid (Hinton 2018).
        depthwise: convolve each channel with one kernel of its own (Mazzia 2021): a capsule then reads ``dim``
            channels only, and ``in_channels`` must be ``types * dim``.
        norm: batch normalisation of poses and activations, after which these have no bias of their own: of each channel
            of the poses (``"channel"``, Hahn 2019), or of all elements of a type together (``"type"``, Ribeiro 2020);
            or of the features before each of the two convolutions (``"input"``, Heinsen 2019).
        device, dtype: of the parameters, as in `torch.nn.Conv2d`.

    Shapes:
        ``[B, C, H, W] ->`` pose ``[B, H', W', types, dim]``, activation ``[B, H', W', types]`` or ``None``

    >>> import torch
    >>> PrimaryCapsules(256, 32, 8, kernel_size=9, stride=2)(torch.randn(2, 256, 20, 20)).pose.shape
    torch.Size([2, 6, 6, 32, 8])
    """

    def __init__(
        self,
        in_channels: int,
        types: int,
        dim: int,
        kernel_size: int | Pair,
        stride: int | Pair = 1,
        padding: int | Pair | Literal["same"] = 0,
        *,
        bias: bool = True,
        relu: bool = False,
        activation: ActivationName | nn.Module = "squash",
        scale: float = 1.0,
        activations: bool = False,
        depthwise: bool = False,
        norm: Literal["none", "channel", "type", "input"] = "none",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.types: int = as_count(types, "types")
        self.dim: int = as_count(dim, "dim")
        self.padding: Pair | Literal["same"] = as_padding(padding)
        self.relu = relu
        if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale < math.inf:
            raise ValueError(f"scale must be greater than 0 and finite, got {scale!r}")
        self.scale = scale
        self.kernel_size: Pair = as_pair(kernel_size, "kernel_size")
        self.stride: Pair = as_pair(stride, "stride")
        as_count(in_channels, "in_channels")
        window: dict[str, Any] = {"kernel_size": self.kernel_size, "stride": self.stride}
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.pose: nn.Conv2d
        if depthwise:
            if in_channels != types * dim:
                raise ValueError(
                    f"in_channels must be types * dim = {types * dim} with depthwise=True, since each channel becomes "
                    f"one pose element, got {in_channels}"
                )
            self.pose = DepthwiseConvolution(in_channels, **window, bias=bias, **options)
        else:
            self.pose = Convolution(in_channels, types * dim, **window, bias=bias, **options)
        if norm not in ("none", "channel", "type", "input"):
            raise ValueError(f"norm must be 'none', 'channel', 'type' or 'input', got {norm!r}")
        has_bias = norm in ("none", "input")
        self.activity: nn.Conv2d | None = (
            nn.Conv2d(in_channels, types, **window, bias=has_bias, **options) if activations else None
        )
        self.norm = norm
        self.pose_norm = self.activity_norm = None
        if norm == "type":
            self.pose_norm = nn.BatchNorm3d(types, **options)
        elif norm != "none":
            self.pose_norm = nn.BatchNorm2d(in_channels if norm == "input" else types * dim, **options)
        if norm != "none" and activations:
            self.activity_norm = nn.BatchNorm2d(in_channels if norm == "input" else types, **options)
        self.activation: nn.Module = make_activation(activation, types, dim, **options)

    def forward(self, features: Tensor) -> Capsules:
        """Return the capsules of a feature map."""
        self._check(features)
        grid = (features.shape[2], features.shape[3])
        kernel = self.kernel_size
        top, bottom, left, right = resolve_padding(self.padding, grid, kernel, self.stride)
        padded = (grid[0] + top + bottom, grid[1] + left + right)
        if kernel[0] > padded[0] or kernel[1] > padded[1]:
            raise ValueError(
                f"kernel_size must fit into the features, got {kernel[0]}x{kernel[1]} for {grid[0]}x{grid[1]} "
                f"padded to {padded[0]}x{padded[1]}"
            )
        if self.scale != 1:
            features = features * self.scale
        if any((top, bottom, left, right)):
            features = F.pad(features, (left, right, top, bottom))  # zeros, also for the statistics of norm="input"
        if self.pose_norm is None:
            channels = self.pose(features)
        elif self.norm == "input":
            channels = self.pose(self.pose_norm(features))
        else:
            channels = self.pose(features)
            if self.norm == "type":
                channels = self.pose_norm(channels.unflatten(1, (self.types, self.dim))).flatten(1, 2)
            else:
                channels = self.pose_norm(channels)
        if self.relu:
            channels = channels.relu()
        # [B, types * dim, H', W'] -> [B, H', W', types, dim]: split the channel axis, then move both parts.
        pose = channels.unflatten(1, (self.types, self.dim)).permute(0, 3, 4, 1, 2)
        activation = None
        if self.activity is not None:
            if self.activity_norm is None:
                activity = self.activity(features)
            elif self.norm == "input":
                activity = self.activity(self.activity_norm(features))
            else:
                activity = self.activity_norm(self.activity(features))
            activation = activity.sigmoid().permute(0, 2, 3, 1)
        return Capsules(self.activation(pose), activation)

    def _check(self, features: Tensor) -> None:
        """Raise an error if the features have another shape or dtype than the layer's, or non-finite values."""
        check_float(features, "features")
        if features.dim() != 4 or features.shape[1] != self.pose.in_channels:
            raise ValueError(f"features must be [B, {self.pose.in_channels}, H, W], got {list(features.shape)}")
        check_finite(features, "features")
