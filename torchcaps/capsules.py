"""What flows between layers, and the letters for its axes.

The axis legend, for every file of the package:

====  =====================================================================
``B``  batch
``G``  the children's grid, ``*G = (H, W)``; absent where there is no grid
``L``  the parents' grid, ``*L``; absent in a dense layer
``N``  child types: capsules at one place of the grid
``I``  vote slots of one site: the children that one place of ``L`` reads
``J``  parents (dense) or parent types (convolutional)
``K``  a child's pose size; ``D``  a parent's pose size
``A``  rows of a pose seen as a matrix ``[A, X]``: 1 for vector poses
``X``  columns of a child's matrix; ``Y`` columns of a parent's
====  =====================================================================

Poses are stored flat, row by row: only the transform that makes votes knows that they are matrices.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchcaps.activations import length

__all__ = [
    "Capsules",
    "as_capsules",
    "make_saveable",
    "refuse_nan",
    "refuse_negative",
    "refuse_nonfinite",
    "require_float",
    "without_autocast",
]


class Capsules(NamedTuple):
    """Capsules: a pose each, and in some papers an activation beside it.

    Shapes:
        pose: ``[B, *G, N, K]`` on a grid, ``[B, I, K]`` without one.
        activation: the pose's shape less its last axis, or ``None`` where the pose's length is the activation.
    """

    pose: Tensor
    activation: Tensor | None = None

    def length(self, normalized: bool = False) -> Tensor:
        """Return the length of each pose; ``normalized`` divides it by ``sqrt(K)`` (Choi 2019, section 3.4)."""
        return length(self.pose, normalized)

    def flatten(self) -> "Capsules":
        """Drop the grid: the capsules of all places in one row, in the order (row, column, type)."""
        if self.pose.dim() == 3:
            return self
        activation = None if self.activation is None else self.activation.flatten(1)
        return Capsules(self.pose.flatten(1, -2), activation)


def make_saveable(kind: type, name: str) -> None:
    """Let exported programs that return this named tuple be saved; an older torch that can't do it is left alone."""
    register = getattr(pytree, "_register_namedtuple", None)
    if register is not None:
        register(kind, serialized_type_name=name)


make_saveable(Capsules, "torchcaps.Capsules")


def as_capsules(value: "Capsules | Tensor", name: str = "capsules") -> Capsules:
    """Take a bare pose tensor for capsules without activations; refuse everything else by name."""
    if isinstance(value, Capsules):
        capsules = value
    elif isinstance(value, Tensor):
        capsules = Capsules(value)
    else:
        raise TypeError(f"{name} must be Capsules or a pose tensor, got {type(value).__name__}")
    pose, activation = capsules
    require_float(pose, f"{name}.pose")
    if activation is not None:
        require_float(activation, f"{name}.activation")
    if activation is not None and activation.shape != pose.shape[:-1]:
        raise ValueError(
            f"{name}.activation must have the pose's shape less its last axis, {list(pose.shape[:-1])}, "
            f"got {list(activation.shape)}"
        )
    return capsules


def require_float(value: Tensor, name: str) -> None:
    """Raise where a value is no floating-point tensor."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{name} must be a floating-point tensor, got {kind}")


def without_autocast(like: Tensor) -> AbstractContextManager[object]:
    """Compute in the dtype of the tensors themselves, on the device of ``like``, whatever autocast is around."""
    device = like.device.type
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()


def refuse_nonfinite(tensor: Tensor | None, name: str) -> None:
    """Raise where a tensor holds NaN or infinities: routing would spread them over every parent.

    Costs one pass over the children, far less than the votes. Skipped inside a compiled or exported graph,
    which can't raise on a value.
    """
    if tensor is None or torch.compiler.is_compiling() or tensor.is_meta:
        return
    if bool(torch.isfinite(tensor.detach().sum())):
        return  # one pass; a sum that is not finite may also be one that overflowed
    finite = torch.isfinite(tensor.detach())
    if not bool(finite.all()):
        wrong = tensor.numel() - int(finite.sum())
        raise ValueError(f"{name} must hold finite numbers, got {wrong} NaN or infinite of {tensor.numel()} values")


def refuse_nan(values: Tensor, name: str) -> None:
    """Raise where a score is no floating-point number: NaN compares as false, so a broken model would get a score."""
    require_float(values, name)
    if torch.compiler.is_compiling() or values.is_meta:
        return
    n_wrong = int(torch.isnan(values.detach()).sum())
    if n_wrong:
        raise ValueError(f"{name} must hold numbers, got {n_wrong} NaN of {values.numel()} values")


def refuse_negative(activation: Tensor | None, name: str) -> None:
    """Raise where an activation is negative: it is the probability that something is there."""
    if activation is None or torch.compiler.is_compiling() or activation.is_meta or activation.numel() == 0:
        return
    least = float(activation.detach().min())
    if least < 0:
        raise ValueError(f"{name} must not be negative, got {least:g}")
