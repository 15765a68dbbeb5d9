"""Bars: horizontal and vertical bars."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from torchcaps.data.base import Dataset, DataSpec, ImageSet, ImageShape, LoadRequest
from torchcaps.data.registry import register_dataset


@dataclass(frozen=True)
class Bars(DataSpec):
    """Horizontal and vertical bars on a square canvas.

    Args:
        brightness: gray level of the bars.
    """

    title: ClassVar[str] = "horizontal and vertical bars"
    shape: ClassVar[ImageShape | None] = (1, 28, 28)
    n_classes: ClassVar[int | None] = 2

    brightness: int = 200

    def load(self, request: LoadRequest) -> Dataset:
        images = torch.zeros(48, 1, 28, 28, dtype=torch.uint8)
        for index in range(48):
            (images[index, 0] if index % 2 else images[index, 0].T)[index // 2 : index // 2 + 3] = self.brightness
        return ImageSet(request.name, request.split, images, torch.arange(48) % 2, ["vertical", "horizontal"])


register_dataset("bars", Bars())
