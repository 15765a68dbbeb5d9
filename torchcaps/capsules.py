"""`Capsules`, the value that flows between layers, and the legend of axis letters.

The axis legend, used in every file of the package:

====  =====================================================================
``B``  batch
``G``  the children's grid, ``*G = (H, W)``; absent if there is no grid
``L``  the parents' grid, ``*L``; absent in a dense layer
``N``  child types: capsules at one grid position
``I``  vote slots of one site: the children that one position of ``L`` reads
``J``  parents (dense) or parent types (convolutional)
``K``  size of a child's pose; ``D``  size of a parent's pose
``A``  rows of a pose viewed as a matrix ``[A, X]``: 1 for vector poses
``X``  columns of a child's matrix; ``Y`` columns of a parent's
====  =====================================================================

Poses are stored flat, in row-major order: only the transform that computes votes knows that they are matrices.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchcaps._core.validation import check_float
from torchcaps.functional import length

__all__ = ["Capsules", "as_capsules", "disable_autocast", "register_pytree"]


class Capsules(NamedTuple):
    """A batch of capsules: one pose each and, in some papers, a separate activation.

    Shapes:
        pose: ``[B, *G, N, K]`` on a grid, ``[B, I, K]`` without one.
        activation: the pose's shape without its last axis, or ``None`` if the length of the pose is the activation.

    >>> import torch
    >>> capsules = Capsules(torch.tensor([[[0.6, 0.8], [0.0, 0.1]]]))
    >>> capsules.length()
    tensor([[1.0000, 0.1000]])
    """

    pose: Tensor
    activation: Tensor | None = None

    def length(self, normalized: bool = False) -> Tensor:
        """Return the length of each pose; ``normalized`` divides it by ``sqrt(K)`` (Choi 2019, section 3.5)."""
        return length(self.pose, normalized)

    def flatten(self) -> "Capsules":
        """Merge grid and types into one axis, in the order (row, column, type)."""
        if self.pose.dim() == 3:
            return self
        activation = None if self.activation is None else self.activation.flatten(1)
        return Capsules(self.pose.flatten(1, -2), activation)


def register_pytree(cls: type, name: str) -> None:
    """Make a named tuple serialisable in exported programs under a fixed name; no-op on a torch without support."""
    register = getattr(pytree, "_register_namedtuple", None)
    if register is not None:
        register(cls, serialized_type_name=name)


register_pytree(Capsules, "torchcaps.Capsules")


def as_capsules(value: "Capsules | Tensor", name: str = "capsules") -> Capsules:
    """Return `Capsules`; a bare pose tensor becomes capsules without activations. Shapes and dtypes are checked."""
    if isinstance(value, Capsules):
        capsules = value
    elif isinstance(value, Tensor):
        capsules = Capsules(value)
    else:
        raise TypeError(f"{name} must be Capsules or a pose tensor, got {type(value).__name__}")
    pose, activation = capsules
    check_float(pose, f"{name}.pose")
    if activation is not None:
        check_float(activation, f"{name}.activation")
    if activation is not None and activation.shape != pose.shape[:-1]:
        raise ValueError(
            f"{name}.activation must have the pose's shape without its last axis, {list(pose.shape[:-1])}, "
            f"got {list(activation.shape)}"
        )
    return capsules


def disable_autocast(like: Tensor) -> AbstractContextManager[object]:
    """Context manager that computes in the tensors' own dtype on the device of ``like``, also inside autocast."""
    device = like.device.type
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()
