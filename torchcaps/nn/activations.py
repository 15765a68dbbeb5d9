"""Capsule nonlinearities as modules, and a factory that builds them by name."""

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
    """`squash` as a module: Sabour 2017, eq. 1.

    >>> import torch
    >>> Squash()(torch.tensor([3.0, 4.0])).norm()  # 25 / 26
    tensor(0.9615)
    """

    def forward(self, pose: Tensor) -> Tensor:
        """Squash poses ``[..., D]``."""
        return squash(pose)


class ExpSquash(nn.Module):
    """`exp_squash` as a module: Chen 2019.

    >>> import torch
    >>> ExpSquash()(torch.tensor([3.0, 4.0])).norm()  # 1 - exp(-5)
    tensor(0.9933)
    """

    def forward(self, pose: Tensor) -> Tensor:
        """Squash poses ``[..., D]``."""
        return exp_squash(pose)


class CapsuleActivation(nn.Module):
    """Capsule activation, an affine map per capsule type followed by tanh: Choi 2019, eq. 9.

    ``u_n = tanh(K_n s_n + k_n)``

    Args:
        types: number of capsule types, ``N``.
        dim: pose size, ``D``.
        device, dtype: of the parameters, as in `torch.nn.Linear`.

    Shapes:
        ``[..., N, D] -> [..., N, D]``

    >>> import torch
    >>> CapsuleActivation(types=4, dim=8)(torch.randn(2, 6, 6, 4, 8)).shape
    torch.Size([2, 6, 6, 4, 8])
    """

    def __init__(
        self, types: int, dim: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.matrix: nn.Parameter = nn.Parameter(torch.empty(types, dim, dim, device=device, dtype=dtype))
        self.offset: nn.Parameter = nn.Parameter(torch.empty(types, dim, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise as Keras does: Glorot uniform, zero offset."""
        bound = (3 / self.matrix.shape[-1]) ** 0.5
        self.matrix.uniform_(-bound, bound)
        self.offset.zero_()

    def forward(self, pose: Tensor) -> Tensor:
        """Activate poses ``[..., N, D]``."""
        # Positions are merged into the batch: ONNX has no einsum whose ellipsis one operand lacks.
        product = torch.einsum("snd,nde->sne", pose.unsqueeze(0).flatten(0, -3), self.matrix)
        return torch.tanh(product.view_as(pose) + self.offset)


def make_activation(
    name: ActivationName | nn.Module,
    types: int,
    dim: int,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Return the activation module of a name for ``types`` capsule types of size ``dim``; pass modules through."""
    if isinstance(name, nn.Module):
        return name
    if name == "squash":
        return Squash()
    if name == "exp_squash":
        return ExpSquash()
    if name == "layer_norm":
        return nn.LayerNorm(dim, device=device, dtype=dtype)
    if name == "capsule":
        return CapsuleActivation(types, dim, device=device, dtype=dtype)
    if name == "none":
        return nn.Identity()
    raise ValueError(
        f"activation must be 'squash', 'exp_squash', 'layer_norm', 'capsule', 'none' or a module, got {name!r}"
    )
