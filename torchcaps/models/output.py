"""What every model returns."""

from typing import NamedTuple

from torch import Tensor

from torchcaps.capsules import Capsules, register_pytree
from torchcaps.routing.base import Trace

__all__ = ["Output"]


class Output(NamedTuple):
    """What a model makes of a batch of images.

    Shapes:
        scores: ``[B, classes]``, in the paper's meaning: lengths, normalised lengths, activations or logits. The
            largest is the prediction.
        capsules: the class capsules, ``[B, classes, D]``; ``None`` for a network without any.
        reconstruction: ``[B, C, H, W]``, or ``[B, objects, C, H, W]`` for images with several objects; ``None``
            without a decoder.
        trace: with ``trace=True`` one `torchcaps.routing.Trace` for each capsule layer: its couplings at every
            iteration.
    """

    scores: Tensor
    capsules: Capsules | None = None
    reconstruction: Tensor | None = None
    trace: tuple[Trace, ...] | None = None


register_pytree(Output, "torchcaps.models.Output")
