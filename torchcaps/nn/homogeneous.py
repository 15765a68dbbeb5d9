"""Homogeneous vector capsules: class capsules without routing: Byerly 2021."""

import torch
from torch import Tensor, nn

from torchcaps._core.validation import check_finite, check_float, check_magnitude
from torchcaps.capsules import Capsules
from torchcaps.nn.sizes import Pair, as_count, as_pair

__all__ = ["BranchMerge", "HomogeneousCapsules", "ShiftNorm"]

MAX_EXPONENT_FRACTION = 0.4  # of values that are normalised: the sum of a million squares must be finite


class ShiftNorm(nn.Module):
    """Batch normalisation of the elements of the last axis, with a learned shift and no scale.

    Args:
        features: size of the last axis, or of the second axis of feature maps.
        eps: added to the variance.
        momentum: weight of a batch in the running statistics.
        channels_first: normalise the channels of feature maps ``[B, features, H, W]``.

    Domain: in training, values up to 2e15 in float32; larger ones raise a ValueError, because the
    running variance would overflow.

    Shapes:
        ``[..., features] -> [..., features]``

    >>> import torch
    >>> ShiftNorm(16)(torch.randn(8, 10, 16)).shape
    torch.Size([8, 10, 16])
    """

    def __init__(
        self, features: int, eps: float = 1e-3, momentum: float = 0.01, *, channels_first: bool = False
    ) -> None:
        super().__init__()
        kind = nn.BatchNorm2d if channels_first else nn.BatchNorm1d
        self.norm: nn.BatchNorm1d | nn.BatchNorm2d = kind(features, eps, momentum, affine=False)
        self.channels_first = channels_first
        self.shift: nn.Parameter = nn.Parameter(torch.zeros(features))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x``."""
        if self.training:
            dtype = self.shift.dtype  # of the running variance; with autocast it is wider than that of x
            limit = None if dtype is torch.float16 else torch.finfo(dtype).max ** MAX_EXPONENT_FRACTION
            check_magnitude(limit, "values that are normalised", "x", x)
        if self.channels_first:
            return self.norm(x) + self.shift[:, None, None]
        return self.norm(x.flatten(0, -2)).view_as(x) + self.shift


class HomogeneousCapsules(nn.Module):
    """Homogeneous vector capsules (HVC), class capsules without routing: Byerly 2021, after the authors' code.

    A capsule is the channels of a feature map at one position. Class ``j`` weights them elementwise and sums over the
    positions ``p``, then normalises over batch and classes (`ShiftNorm`) and applies a ReLU::

        y_jc = ReLU(norm(Σ_p x_cp W_jpc))

    There is no matrix product, no squash and no coupling. The score of a class is the length of its capsule.

    Args:
        channels: number of channels, the size of a capsule.
        grid: height and width of the feature map.
        parents: number of classes.
        eps, momentum: of the `ShiftNorm`. The authors' code has a momentum of 0.0003, with which running statistics
            are useless before about 10,000 steps.

    Shapes:
        ``[B, C, H, W] ->`` pose ``[B, J, C]``

    >>> import torch
    >>> HomogeneousCapsules(64, 22, 10)(torch.randn(2, 64, 22, 22)).pose.shape
    torch.Size([2, 10, 64])
    """

    def __init__(
        self, channels: int, grid: int | Pair, parents: int, *, eps: float = 1e-3, momentum: float = 0.01
    ) -> None:
        super().__init__()
        self.channels: int = as_count(channels, "channels")
        self.parents: int = as_count(parents, "parents")
        self.grid: Pair = as_pair(grid, "grid")
        self.weight: nn.Parameter = nn.Parameter(torch.empty(parents, self.grid[0] * self.grid[1], channels))
        self.norm: ShiftNorm = ShiftNorm(channels, eps, momentum)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise from ``N(0, 0.05)``, as in the authors' code."""
        if not self.weight.is_meta:
            self.weight.normal_(0, 0.05)

    def extra_repr(self) -> str:
        """Return the sizes for ``repr``."""
        return f"{self.channels}, grid={self.grid}, parents={self.parents}"

    def forward(self, features: Tensor) -> Capsules:
        """Return the class capsules of a feature map."""
        check_float(features, "features")
        if features.dim() != 4 or tuple(features.shape[1:]) != (self.channels, *self.grid):
            expected = f"[B, {self.channels}, {self.grid[0]}, {self.grid[1]}]"
            raise ValueError(f"features must be {expected}, got {list(features.shape)}")
        check_finite(features, "features")
        total = torch.einsum("bcp,jpc->bjc", features.flatten(2), self.weight)
        return Capsules(self.norm(total).relu())


class BranchMerge(nn.Module):
    """Class scores of several branches of a network, weighted, normalised over batch and classes, and summed.

    ``logit_j = Σ_k norm(w_k z_jk)``: Byerly 2021, after the authors' code.

    Args:
        branches: number of branches, ``K``.
        initial: initial branch weights: ``"one"``, or ``"normal"``: ``N(0, 0.05)``.
        learned: learn the weights; otherwise they stay as they are.
        eps, momentum: of the `ShiftNorm`.

    Shapes:
        ``[B, J, K] -> [B, J]``

    >>> import torch
    >>> BranchMerge(3)(torch.randn(8, 10, 3)).shape
    torch.Size([8, 10])
    """

    def __init__(
        self, branches: int, *, initial: str = "one", learned: bool = True, eps: float = 1e-3, momentum: float = 0.01
    ) -> None:
        super().__init__()
        if initial not in ("one", "normal"):
            raise ValueError(f"initial must be 'one' or 'normal', got {initial!r}")
        self.initial = initial
        self.weight: nn.Parameter = nn.Parameter(torch.ones(as_count(branches, "branches")), requires_grad=learned)
        self.norm: ShiftNorm = ShiftNorm(branches, eps, momentum)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the initial branch weights."""
        if self.initial == "normal" and not self.weight.is_meta:
            self.weight.normal_(0, 0.05)
        else:
            self.weight.fill_(1)

    def forward(self, scores: Tensor) -> Tensor:
        """Return the logits."""
        if scores.dim() != 3 or scores.shape[2] != len(self.weight):
            raise ValueError(f"scores must be [B, J, {len(self.weight)}], got {list(scores.shape)}")
        return self.norm(scores * self.weight).sum(-1)
