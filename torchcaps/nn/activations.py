"""The nonlinearities of capsules as modules, and by name."""

from typing import Literal

import torch
from torch import Tensor, nn

from torchcaps.functional import exp_squash, length, squash

__all__ = [
    "ActivationName",
    "CapsuleActivation",
    "ExpSquash",
    "Squash",
    "exp_squash",
    "length",
    "make_activation",
    "squash",
]

ActivationName = Literal["squash", "exp_squash", "layer_norm", "capsule", "none"]


class Squash(nn.Module):
    """`squash` as a module: Sabour 2017, eq. 1."""

    def forward(self, pose: Tensor) -> Tensor:
        """Squash poses ``[..., D]``."""
        return squash(pose)


class ExpSquash(nn.Module):
    """`exp_squash` as a module: Chen 2019, eq. 4."""

    def forward(self, pose: Tensor) -> Tensor:
        """Squash poses ``[..., D]``."""
        return exp_squash(pose)


class CapsuleActivation(nn.Module):
    """An affine map of each capsule type's own, then tanh: Choi 2019, eq. 8. ``u_n = tanh(K_n s_n + k_n)``.

    Args:
        types: capsule types, ``N``.
        dim: pose size, ``D``.

    Shapes:
        ``[..., N, D] -> [..., N, D]``
    """

    def __init__(self, types: int, dim: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.empty(types, dim, dim))
        self.offset = nn.Parameter(torch.empty(types, dim))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw as Keras does: Glorot uniform, biases 0."""
        bound = (3 / self.matrix.shape[-1]) ** 0.5
        self.matrix.uniform_(-bound, bound)
        self.offset.zero_()

    def forward(self, pose: Tensor) -> Tensor:
        """Activate poses ``[..., N, D]``."""
        return torch.tanh(torch.einsum("...nd,nde->...ne", pose, self.matrix) + self.offset)


def make_activation(name: ActivationName | nn.Module, types: int, dim: int) -> nn.Module:
    """Return the module of that name for capsules of so many types and that size; a module is returned as it is."""
    if isinstance(name, nn.Module):
        return name
    if name == "squash":
        return Squash()
    if name == "exp_squash":
        return ExpSquash()
    if name == "layer_norm":
        return nn.LayerNorm(dim)
    if name == "capsule":
        return CapsuleActivation(types, dim)
    if name == "none":
        return nn.Identity()
    raise ValueError(
        f"activation must be 'squash', 'exp_squash', 'layer_norm', 'capsule', 'none' or a module, got {name!r}"
    )
