"""Capsule networks as others write them: other orders of axes than ours, correct or with one fault."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def squash(x: Tensor, dim: int = -1) -> Tensor:
    """Return the squash with an epsilon inside of the square root."""
    square = x.square().sum(dim, keepdim=True)
    return square / (1 + square) * x / torch.sqrt(square + 1e-8)


class UnitsFirstPrimary(nn.Module):
    """One convolution per unit; capsules ``[B, 8, I]``."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList([nn.Conv2d(6, 3, 5, 2) for _ in range(8)])

    def forward(self, x: Tensor) -> Tensor:
        return squash(torch.stack([unit(x) for unit in self.units], 1).view(len(x), 8, -1), 1)


class AcrossPositionsPrimary(UnitsFirstPrimary):
    """The view of a channels-last tensor as units first: a capsule has values of many positions."""

    def forward(self, x: Tensor) -> Tensor:
        values = torch.cat([unit(x) for unit in self.units], 1).permute(0, 2, 3, 1)
        return squash(values.reshape(len(x), 8, -1), 1)


class UnitsFirstDigits(nn.Module):
    """Dynamic routing from ``[B, 8, I]`` to ``[B, 10, 8, 1]``, with the transforms ``[1, I, J, D, K]``."""

    couplings: Tensor

    def __init__(self, children: int) -> None:
        super().__init__()
        self.W = nn.Parameter(0.2 * torch.randn(1, children, 10, 8, 8))

    def initial_logits(self, votes: Tensor) -> Tensor:
        return torch.zeros(*votes.shape[:3])

    def forward(self, x: Tensor) -> Tensor:
        votes = torch.matmul(self.W, x.transpose(1, 2)[:, :, None, :, None])
        logits = self.initial_logits(votes)
        for t in range(3):
            coupling = logits.softmax(2)
            v = squash((coupling[..., None, None] * votes).sum(1), 2)
            if t < 2:
                logits = logits + (votes * v[:, None]).sum((3, 4))
        self.couplings = coupling.detach()
        return v


class KeptLogits(UnitsFirstDigits):
    """Logits of the first batch are kept for all later ones."""

    kept: Tensor | None = None

    def initial_logits(self, votes: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = votes.detach().sum((0, 3, 4))[None]
        return self.kept.expand(len(votes), -1, -1)


class UnitsFirst(nn.Module):
    """CapsNet with units first, and one-hot labels that mask the decoder in training."""

    primary_class: type[nn.Module] = UnitsFirstPrimary
    digits_class: type[nn.Module] = UnitsFirstDigits

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 5)
        self.primary = self.primary_class()
        self.digits = self.digits_class(3 * 4 * 4)
        self.decoder = nn.Sequential(nn.Linear(80, 12), nn.ReLU(inplace=True), nn.Linear(12, 225), nn.Sigmoid())

    def lengths(self, v: Tensor, target: Tensor | None) -> Tensor:
        return (v.square().sum((2, 3)) + 1e-9).sqrt()

    def forward(self, x: Tensor, target: Tensor | None = None) -> tuple[Tensor, Tensor]:
        v = self.digits(self.primary(F.relu(self.conv(x), inplace=True)))
        lengths = self.lengths(v, target)
        mask = target if target is not None and self.training else torch.eye(10)[lengths.argmax(1)]
        return lengths, self.decoder((v.squeeze(-1) * mask[..., None]).flatten(1))


class UsesAnyLabels(UnitsFirst):
    """Masks the decoder by the label whenever it gets one."""

    def forward(self, x: Tensor, target: Tensor | None = None) -> tuple[Tensor, Tensor]:
        lengths, reconstruction = super().forward(x)
        if target is not None:
            v = self.digits(self.primary(F.relu(self.conv(x))))
            reconstruction = self.decoder((v.squeeze(-1) * target[..., None]).flatten(1))
        return lengths, reconstruction


class LabelledLengths(UnitsFirst):
    """The label raises the length of its capsule by one percent, also in evaluation."""

    def lengths(self, v: Tensor, target: Tensor | None) -> Tensor:
        lengths = super().lengths(v, target)
        return lengths if target is None else lengths * (0.98 + 0.01 * target)


class AcrossPositions(UnitsFirst):
    """`UnitsFirst` with `AcrossPositionsPrimary`."""

    primary_class = AcrossPositionsPrimary


class KeepsLogits(UnitsFirst):
    """`UnitsFirst` with `KeptLogits`."""

    digits_class = KeptLogits


class ChannelsLastPrimary(nn.Module):
    """Matrix capsules ``[B, H, W, types * 17]``, poses first, from two convolutions in a row, one of them dilated."""

    def __init__(self, channels: int, types: int) -> None:
        super().__init__()
        self.mix = nn.Conv2d(channels, channels, 3, dilation=2)
        self.pose, self.activation = nn.Conv2d(channels, types * 16, 3), nn.Conv2d(channels, types, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.mix(x))
        return torch.cat([self.pose(x), self.activation(x).sigmoid()], 1).permute(0, 2, 3, 1)


class ChannelsLastConv(nn.Module):
    """EM routing of matrix capsules in windows: ``[B, H, W, types * 17]`` to ``[B, H', W', parents * 17]``."""

    transposed = False

    def __init__(self, types: int, parents: int, size: int, stride: int) -> None:
        super().__init__()
        self.types, self.parents, self.size, self.stride = types, parents, size, stride
        self.beta_u, self.beta_a = nn.Parameter(torch.zeros(parents)), nn.Parameter(torch.zeros(parents))
        self.weights = nn.Parameter(0.5 * torch.randn(1, size * size * types, parents, 4, 4))

    def windows(self, x: Tensor) -> Tensor:
        """Return ``[B, H', W', size * size * types, ...]``."""
        x = x.unfold(1, self.size, self.stride).unfold(2, self.size, self.stride).movedim((-2, -1), (3, 4))
        return (x.transpose(1, 2) if self.transposed else x).flatten(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        n_values = self.types * 16
        pose = self.windows(x[..., :n_values].unflatten(-1, (self.types, 4, 4)))
        present = self.windows(x[..., n_values:])[..., None]
        batch, height, width = pose.shape[:3]
        votes = torch.matmul(pose.flatten(0, 2)[:, :, None], self.weights).flatten(-2)  # [B', I, J, 16]
        present = present.flatten(0, 2)
        assigned = torch.full(votes.shape[:3], 1 / self.parents)
        for t in range(2):
            weight = assigned * present
            total = weight.sum(1, keepdim=True)
            share = (weight / (total + 1e-8)).unsqueeze(-1)
            mean = (share * votes).sum(1, keepdim=True)
            variance = (share * (votes - mean).square()).sum(1, keepdim=True) + 1e-4
            cost = (self.beta_u[:, None] + 0.5 * variance.squeeze(1).log()) * total.transpose(1, 2)
            out = torch.sigmoid(1e-2 * (self.beta_a - cost.sum(2)))
            if t == 0:
                log_p = -((votes - mean).square() / (2 * variance) + 0.5 * variance.log()).sum(-1)
                assigned = (log_p + out.clamp(min=1e-8).log()[:, None]).softmax(2)
        return torch.cat([mean.flatten(1), out], 1).unflatten(0, (batch, height, width))


class TransposedConv(ChannelsLastConv):
    """Rows and columns of the windows are exchanged."""

    transposed = True


class ChannelsLast(nn.Module):
    """Matrix capsules in tensors with channels last."""

    conv_class: type[ChannelsLastConv] = ChannelsLastConv

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 6, 5, 2, 2), nn.BatchNorm2d(6), nn.ReLU())
        self.primary_caps = ChannelsLastPrimary(6, 3)
        self.conv_caps = self.conv_class(3, 4, 3, 1)
        self.class_caps = ChannelsLastConv(4, 5, 4, 1)

    def forward(self, x: Tensor) -> Any:
        return self.class_caps(self.conv_caps(self.primary_caps(self.conv(x))))[:, 0, 0, -5:]


class Transposed(ChannelsLast):
    """`ChannelsLast` with `TransposedConv`."""

    conv_class = TransposedConv
