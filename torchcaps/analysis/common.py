"""What analyses share: a model asked in pieces and left as it was found, and refusals that say why."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from torchcaps.models import CapsuleNetwork, Network, Output

__all__ = ["Keep", "Progress", "evaluating", "outputs", "require_capsules", "require_decoder"]

Progress = Callable[[], object]  # called after each piece of work
Keep = Callable[[Callable[[], dict[str, Any]]], object]  # called with what gives the state to go on from


@contextlib.contextmanager
def evaluating(model: Network, gradients: bool = False) -> Iterator[None]:
    """Put a model into evaluation mode, by default without gradients, and back as it was."""
    was_training = model.training
    model.eval()
    try:
        with contextlib.nullcontext() if gradients else torch.no_grad():
            yield
    finally:
        model.train(was_training)


def outputs(
    model: Network,
    images: Tensor,
    labels: Tensor | None = None,
    batch_size: int = 128,
    trace: bool = False,
    progress: Progress | None = None,
) -> Iterator[Output]:
    """Give what a model makes of images, piece by piece."""
    with evaluating(model):
        for start in range(0, len(images), batch_size):
            part = slice(start, start + batch_size)
            yield model(images[part], None if labels is None else labels[part], trace=trace)
            if progress is not None:
                progress()


def require_capsules(model: Network, what: str) -> CapsuleNetwork:
    """Return a model with class capsules; raise for one that has none."""
    if not isinstance(model, CapsuleNetwork):
        raise ValueError(f"{what} needs class capsules, and {model.name} is a convolutional network without any")
    return model


def require_decoder(model: Network, what: str) -> CapsuleNetwork:
    """Return a model with a decoder; raise for one that has none."""
    capsules = require_capsules(model, what)
    if capsules.decoder is None:
        able = model.n_objects is not None  # a decoder draws the objects that it is told of
        advice = ": train it with --reconstruction true" if able else ", since its images have any number of objects"
        raise ValueError(f"{what} needs a decoder, and {model.name} was built without one{advice}")
    return capsules
