"""Helpers shared by the analyses: evaluation mode, batched forward passes, predictions, requirement checks."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torchcaps._core.labels import as_multi_hot, check_class_indices, split_labels
from torchcaps.capsules import Capsules
from torchcaps.models import CapsuleNetwork, Network, Output
from torchcaps.nn.layers import CapsuleLayer

__all__ = [
    "Progress",
    "SaveState",
    "batched_outputs",
    "capsule_layers",
    "eval_mode",
    "evaluate_predictions",
    "first_labels",
    "multi_hot_labels",
    "require_capsules",
    "require_decoder",
    "round_robin_indices",
    "traced_outputs",
]

Progress = Callable[[], object]  # called after each unit of work
SaveState = Callable[[Callable[[], dict[str, Any]]], object]  # called with a function that returns the state to resume


@contextlib.contextmanager
def eval_mode(model: Network, gradients: bool = False) -> Iterator[None]:
    """Context manager: evaluation mode, by default without gradients; restores the previous mode on exit."""
    was_training = model.training
    model.eval()
    try:
        with contextlib.nullcontext() if gradients else torch.no_grad():
            yield
    finally:
        model.train(was_training)


def batched_outputs(
    model: Network,
    images: Tensor,
    labels: Tensor | None = None,
    batch_size: int = 128,
    trace: bool = False,
    progress: Progress | None = None,
) -> Iterator[Output]:
    """Yield the model's outputs batch by batch, in evaluation mode and without gradients."""
    with eval_mode(model):
        for start in range(0, len(images), batch_size):
            part = slice(start, start + batch_size)
            yield model(images[part], None if labels is None else labels[part], trace=trace)
            if progress is not None:
                progress()


def traced_outputs(
    model: CapsuleNetwork, images: Tensor, batch_size: int, progress: Progress | None = None
) -> Iterator[tuple[int, Output, list[Capsules]]]:
    """Yield start index, output with its trace, and the capsules of every layer, batch by batch.

    The list of capsules starts with the primary capsules and ends with the class capsules: entry ``n`` has the children
    of capsule layer ``n``, and entry ``n + 1`` its parents.
    """
    primary: list[Capsules] = []

    def record(module: nn.Module, inputs: Any, output: Any) -> None:
        primary.append(output)

    handle = model.front.register_forward_hook(record)
    try:
        with eval_mode(model):
            for start in range(0, len(images), batch_size):
                primary.clear()
                output = model(images[start : start + batch_size], trace=True)
                yield start, output, [*primary, *(trace.states[-1].capsules() for trace in output.trace)]
                if progress is not None:
                    progress()
    finally:
        handle.remove()


def capsule_layers(model: CapsuleNetwork) -> dict[str, CapsuleLayer]:
    """Return the capsule layers by name, the lowest first."""
    return dict(model.capsules.layers.named_children())  # type: ignore[arg-type]


def evaluate_predictions(
    model: Network, images: Tensor, labels: Tensor, batch_size: int = 128, progress: Progress | None = None
) -> tuple[Tensor, Tensor]:
    """Return whether each image is classified correctly (`Network.is_correct`), and the prediction.

    Shapes:
        bool ``[B]``; predicted classes as zeros and ones ``[B, classes]``
    """
    outputs = batched_outputs(model, images, batch_size=batch_size, progress=progress)
    scores = torch.cat([output.scores for output in outputs])
    return model.is_correct(scores, labels.to(scores.device)).cpu(), model.predict_multi_hot(scores).long().cpu()


def multi_hot_labels(model: Network, labels: Tensor) -> Tensor:
    """Return labels as zeros and ones: ``[B]``, ``[B, objects]`` or ``[B, classes] -> [B, classes]``."""
    if model.n_objects is None:
        return as_multi_hot(labels, model.spec.classes).long()
    return split_labels(labels, model.spec.classes, model.n_objects)[1].long()


def first_labels(model: Network, labels: Tensor, n_images: int) -> Tensor:
    """Return one class index per image: its label, or the first one if it has several.

    Shapes:
        ``[B]``, ``[B, objects]`` or zeros and ones ``[B, classes] -> [B]``
    """
    if not isinstance(labels, Tensor) or labels.dim() == 0 or len(labels) != n_images:
        got = list(labels.shape) if isinstance(labels, Tensor) else type(labels).__name__
        raise ValueError(f"labels must be a tensor with one entry per image ({n_images}), got {got}")
    if labels.dim() == 1:
        return check_class_indices(labels, model.spec.classes)
    if model.n_objects is None:  # any number of objects: the lowest class index that is present
        return labels.to(torch.uint8).argmax(1)
    indices = split_labels(labels, model.spec.classes, model.n_objects)[0]
    return indices if indices.dim() == 1 else indices[:, 0]


def round_robin_indices(labels: Tensor, mask: Tensor) -> list[int]:
    """Return the indices of the images in ``mask``, one of each (first) label in turn.

    >>> round_robin_indices(torch.tensor([3, 3, 1]), torch.tensor([True, True, True]))
    [2, 0, 1]
    """
    counts: dict[int, int] = {}
    order = []
    for index in mask.nonzero()[:, 0].tolist():
        label = int(labels[index].flatten()[0])
        counts[label] = counts.get(label, 0) + 1
        order.append((counts[label], label, index))
    return [index for _, _, index in sorted(order)]


def require_capsules(model: Network, analysis: str) -> CapsuleNetwork:
    """Return a model that has class capsules; raise a ValueError for any other."""
    if not isinstance(model, CapsuleNetwork):
        raise ValueError(
            f"{analysis} needs class capsules, but {model.name} is a convolutional network without capsules"
        )
    return model


def require_decoder(model: Network, analysis: str) -> CapsuleNetwork:
    """Return a model that has a decoder; raise a ValueError for any other."""
    capsules = require_capsules(model, analysis)
    if capsules.decoder is None:
        if model.n_objects is None:
            advice = ": models for any number of objects per image have none"
        else:
            advice = ": train it with --reconstruction true"
        raise ValueError(f"{analysis} needs a decoder, but {model.name} was built without one{advice}")
    return capsules
