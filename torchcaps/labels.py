"""Labels as the losses, metrics and decoders take them: class numbers, or a one for every label of an image."""

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["as_multi_hot", "check_class_numbers"]

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def check_class_numbers(labels: Tensor, n_classes: int, name: str = "labels") -> Tensor:
    """Return class numbers as int64; refuse other types, and numbers outside ``0 .. n_classes - 1``.

    The range is not looked at inside a compiled graph, which can't raise on a value.
    """
    if not isinstance(labels, Tensor):
        raise TypeError(f"{name} must be a tensor of class numbers, got {type(labels).__name__}")
    if labels.dtype not in INTEGERS:
        raise TypeError(f"{name} must be whole numbers (torch.int64), got {labels.dtype}")
    if not torch.compiler.is_compiling() and labels.numel() and not labels.is_meta:
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= n_classes:
            raise ValueError(f"{name} must lie in 0..{n_classes - 1}, got {low if low < 0 else high}")
    return labels.long()


def as_multi_hot(labels: Tensor, n_classes: int, name: str = "labels") -> Tensor:
    """Return a one for every label of an image and zeros elsewhere.

    Shapes:
        class numbers ``[B]``, or already multi-hot ``[B, classes]`` of any type ``-> [B, classes]``
    """
    if isinstance(labels, Tensor) and labels.dim() == 2:
        if labels.shape[1] != n_classes:
            raise ValueError(f"{name} must have one column for each of the {n_classes} classes, got {labels.shape[1]}")
        if not torch.compiler.is_compiling() and not labels.is_meta and not bool(((labels == 0) | (labels == 1)).all()):
            other = labels[(labels != 0) & (labels != 1)][0].item()
            raise ValueError(f"{name} with a column for each class must hold zeros and ones only, got {other}")
        return labels
    if isinstance(labels, Tensor) and labels.dim() != 1:
        raise ValueError(f"{name} must be [B] class numbers or [B, classes] zeros and ones, got {list(labels.shape)}")
    return F.one_hot(check_class_numbers(labels, n_classes, name), n_classes)
