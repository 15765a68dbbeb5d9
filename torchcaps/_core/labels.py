"""Label formats of losses, metrics and decoders: class indices or multi-hot rows."""

import torch
from torch import Tensor

from torchcaps._core.values import check_value, index_of_first, is_readable

__all__ = ["as_multi_hot", "check_class_indices", "one_hot", "split_labels"]

INTEGER_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def check_class_indices(labels: Tensor, n_classes: int, name: str = "labels") -> Tensor:
    """Return class indices as int64; raise if the dtype is not an integer or an index is outside ``0..n_classes-1``.

    The range is not checked if values can't be read: inside a compiled graph or ``vmap``, on the meta device.
    """
    if not isinstance(labels, Tensor):
        raise TypeError(f"{name} must be a tensor of class indices, got {type(labels).__name__}")
    if labels.dtype not in INTEGER_DTYPES:
        raise TypeError(f"{name} must be integers (torch.int64), got {labels.dtype}")
    if is_readable(labels) and labels.numel():

        def describe(index: float) -> Exception | None:
            if 0 <= index < n_classes:
                return None
            return ValueError(f"{name} must be in 0..{n_classes - 1}, got {int(index)}")

        # Required: an index outside of the range would end the process of an accelerator in a failed assertion.
        check_value(lambda: _most_extreme(labels), describe, labels.device, required=True)
    return labels.long()


def _most_extreme(labels: Tensor) -> Tensor:
    """Return the smallest label if it is negative, otherwise the largest."""
    least, largest = torch.aminmax(labels)
    return torch.where(least < 0, least, largest)


def _first_other_than_0_1(labels: Tensor) -> Tensor:
    """Return the first value that is neither 0 nor 1; 0 if there is none."""
    first = index_of_first((labels != 0) & (labels != 1))
    return torch.where(first < 0, 0, labels.flatten().take(first.clamp_min(0)).float())


def _first_count_other_than(n_objects: int, hot: Tensor) -> Tensor:
    """Return the number of classes of the first image that has another number of them; else ``n_objects``."""
    counts = hot.sum(1)
    first = index_of_first(counts != n_objects)
    return torch.where(first < 0, n_objects, counts.take(first.clamp_min(0))) if len(hot) else torch.tensor(n_objects)


def one_hot(indices: Tensor, n_classes: int) -> Tensor:
    """Return class indices as one-hot rows, int64; unlike `torch.nn.functional.one_hot`, this reads no values.

    Shapes:
        ``[...] -> [..., classes]``
    """
    return (indices.unsqueeze(-1) == torch.arange(n_classes, device=indices.device)).long()


def as_multi_hot(labels: Tensor, n_classes: int, name: str = "labels") -> Tensor:
    """Return labels as multi-hot rows: 1 for every class of an image, 0 elsewhere.

    Shapes:
        class indices ``[B]``, or multi-hot ``[B, classes]`` of any dtype ``-> [B, classes]``
    """
    if isinstance(labels, Tensor) and labels.dim() == 2:
        if labels.shape[1] != n_classes:
            raise ValueError(f"{name} must have one column for each of the {n_classes} classes, got {labels.shape[1]}")
        if is_readable(labels) and labels.numel():

            def describe(value: float) -> Exception | None:
                if value in (0, 1):
                    return None
                return ValueError(f"{name} with one column per class must contain only 0 and 1, got {value:g}")

            check_value(lambda: _first_other_than_0_1(labels), describe, labels.device, required=True)
        return labels
    if isinstance(labels, Tensor) and labels.dim() != 1:
        raise ValueError(f"{name} must be class indices [B] or multi-hot rows [B, classes], got {list(labels.shape)}")
    return one_hot(check_class_indices(labels, n_classes, name), n_classes)


def split_labels(labels: Tensor, n_classes: int, n_objects: int = 1, name: str = "labels") -> tuple[Tensor, Tensor]:
    """Return labels in both formats: the class indices of each image's objects, and multi-hot rows.

    An image with several objects (MultiMNIST) is labelled either by their class indices ``[B, objects]``, in the order
    of the objects, or by multi-hot rows ``[B, classes]``, from which the indices are returned in ascending order. If
    both have the same shape, integers are read as class indices.

    Shapes:
        ``[B]``, ``[B, objects]`` or ``[B, classes] ->`` indices ``[B]`` or ``[B, objects]``, and ``[B, classes]``
    """
    if not isinstance(labels, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(labels).__name__}")
    if labels.dim() == 1 and n_objects == 1:
        return check_class_indices(labels, n_classes, name), as_multi_hot(labels, n_classes, name)
    if labels.dim() == 2 and labels.shape[1] == n_objects > 1 and labels.dtype in INTEGER_DTYPES:
        indices = check_class_indices(labels, n_classes, name)
        present = one_hot(indices, n_classes).amax(1)
        if is_readable(labels):

            def describe_repetition(image: float) -> Exception | None:
                """Return the error for the index of an image with a repeated class, ``None`` for a negative index."""
                if image < 0:
                    return None
                return ValueError(
                    f"{name} must name {n_objects} different classes for each image, got the same class twice"
                )

            is_repeated = present.sum(1) != n_objects
            check_value(lambda: index_of_first(is_repeated), describe_repetition, labels.device, required=True)
        return indices, present
    if labels.dim() == 2 and labels.shape[1] == n_classes:
        hot = as_multi_hot(labels, n_classes, name)
        if is_readable(hot):

            def describe_count(n_labels: float) -> Exception | None:
                """Return the error for an image with this many classes, ``None`` if there are ``n_objects``."""
                if n_labels == n_objects:
                    return None
                return ValueError(
                    f"{name} must name {n_objects} of {n_classes} classes for each image, got an image with "
                    f"{int(n_labels)}"
                )

            check_value(lambda: _first_count_other_than(n_objects, hot), describe_count, hot.device, required=True)
        indices = hot.to(torch.uint8).topk(n_objects, dim=1).indices.sort(1).values
        return (indices[:, 0] if n_objects == 1 else indices), hot
    expected = "[B]" if n_objects == 1 else f"[B, {n_objects}]"
    raise ValueError(
        f"{name} must be class indices {expected} or multi-hot rows [B, {n_classes}], got {list(labels.shape)}"
    )
