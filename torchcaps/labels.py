"""Labels as the losses, metrics and decoders take them: class numbers, or a one for every label of an image."""

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["as_multi_hot", "check_class_numbers", "split_labels"]

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


def split_labels(labels: Tensor, n_classes: int, n_objects: int = 1, name: str = "labels") -> tuple[Tensor, Tensor]:
    """Return labels both ways: the class numbers of each image's objects, and a one for every class that is there.

    An image with several objects (MultiMNIST) is labelled by their class numbers ``[B, objects]``, in the order of the
    objects, or by zeros and ones ``[B, classes]``, from which the numbers come in rising order. Where both have the
    same shape, whole numbers are read as class numbers.

    Shapes:
        ``[B]``, ``[B, objects]`` or ``[B, classes] ->`` numbers ``[B]`` or ``[B, objects]``, and ``[B, classes]``
    """
    if not isinstance(labels, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(labels).__name__}")
    if labels.dim() == 1 and n_objects == 1:
        return check_class_numbers(labels, n_classes, name), as_multi_hot(labels, n_classes, name)
    if labels.dim() == 2 and labels.shape[1] == n_objects > 1 and labels.dtype in INTEGERS:
        numbers = check_class_numbers(labels, n_classes, name)
        present = F.one_hot(numbers, n_classes).amax(1)
        if not torch.compiler.is_compiling() and not labels.is_meta and bool((present.sum(1) != n_objects).any()):
            raise ValueError(f"{name} must name {n_objects} different classes for each image, got one named twice")
        return numbers, present
    if labels.dim() == 2 and labels.shape[1] == n_classes:
        hot = as_multi_hot(labels, n_classes, name)
        counts = hot.sum(1)
        if not torch.compiler.is_compiling() and not hot.is_meta and bool((counts != n_objects).any()):
            found = int(counts[counts != n_objects][0])
            raise ValueError(
                f"{name} must name {n_objects} of {n_classes} classes for each image, got one with {found}"
            )
        numbers = hot.to(torch.uint8).topk(n_objects, dim=1).indices.sort(1).values
        return (numbers[:, 0] if n_objects == 1 else numbers), hot
    wanted = "[B]" if n_objects == 1 else f"[B, {n_objects}]"
    raise ValueError(
        f"{name} must be class numbers {wanted} or zeros and ones [B, {n_classes}], got {list(labels.shape)}"
    )
