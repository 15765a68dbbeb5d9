"""What a loader gives: images, their labels, and what a decoder is to reconstruct."""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Batch"]


class Batch(NamedTuple):
    """A batch of a data set.

    Args:
        images: ``[B, C, H, W]``. Bytes as a data set gives them, numbers as a loader does: what the network sees.
        labels: class numbers, ``[B]`` or ``[B, objects]``; zeros and ones ``[B, classes]`` where the number of objects
            differs from image to image.
        targets: what a decoder is to reconstruct, in 0..1: the images as they were moved, cropped and flipped, but
            before their colours were changed; ``[B, objects, C, H, W]`` where there are several objects, each alone,
            in the order of ``labels`` (for zeros and ones: of the classes, blank where there is none).
        indices: where each image stands in its data set, ``[B]``.
    """

    images: Tensor
    labels: Tensor
    targets: Tensor
    indices: Tensor

    def to(self, device: torch.device | str) -> "Batch":
        """Return the batch on a device; targets that are the images stay so, and indices, which only the host reads,
        stay where they are.
        """
        images = self.images.to(device)
        targets = images if self.targets is self.images else self.targets.to(device)
        return Batch(images, self.labels.to(device), targets, self.indices)
