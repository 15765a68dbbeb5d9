"""Residual blocks of capsule layers: Peer 2021 and the code of MoCapsNet."""

from collections.abc import Iterable

from torch import Tensor, nn

from torchcaps._core.validation import check_float
from torchcaps.capsules import Capsules, as_capsules
from torchcaps.nn.layers import CapsuleLayer

__all__ = ["ResidualCapsules"]


class ResidualCapsules(nn.Module):
    """Residual block of capsule layers, from the code of Peer 2021: ``x + f(x)`` for each of its layers.

    There is no squash after the sum, so lengths can exceed 1. With ``momentum`` (Momentum ResNet, as in MoCapsNet)::

        m = momentum * m + (1 - momentum) f(x),  x = x + m

    Args:
        layers: layers whose parents have the shape of their children; two in the authors' code.
        momentum: at least 0 and below 1; ``None``: plain residuals.

    Shapes:
        capsules ``->`` capsules of the same shape, with the activations of the last layer, if it has any

    >>> import torch
    >>> from torchcaps.nn import DenseCapsules
    >>> block = ResidualCapsules([DenseCapsules(6, 8, 6, 8, routing="dynamic") for _ in range(2)])
    >>> block(torch.randn(2, 6, 8)).pose.shape
    torch.Size([2, 6, 8])
    """

    def __init__(self, layers: Iterable[CapsuleLayer], momentum: float | None = None) -> None:
        super().__init__()
        given = list(layers)
        for layer in given:
            if not isinstance(layer, CapsuleLayer):
                raise TypeError(f"layers must be capsule layers, got {type(layer).__name__}")
        if not given:
            raise ValueError("layers must contain at least one capsule layer, got none")
        if momentum is not None and not 0 <= momentum < 1:
            raise ValueError(f"momentum must be at least 0 and below 1, or None, got {momentum}")
        self.layers: nn.ModuleList = nn.ModuleList(given)
        self.momentum = momentum

    def extra_repr(self) -> str:
        """Return the momentum for ``repr``."""
        return f"momentum={self.momentum}"

    def forward(self, capsules: Capsules | Tensor) -> Capsules:
        """Return the capsules after all layers."""
        now, speed = as_capsules(capsules), None
        check_float(now.pose, "capsules.pose")
        for layer in self.layers:
            parents = layer(now)
            if parents.pose.shape != now.pose.shape:
                raise ValueError(
                    f"layers must keep the shape of the capsules, since they are added: got children "
                    f"{list(now.pose.shape[1:])} and parents {list(parents.pose.shape[1:])}"
                )
            change = parents.pose
            if self.momentum is not None:
                change = (1 - self.momentum) * change
                speed = change = change if speed is None else self.momentum * speed + change
            now = Capsules(now.pose + change, parents.activation)
        return now
