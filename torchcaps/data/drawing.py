"""Pictures: images as colours, and figures written whole."""

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchcaps.data.errors import DataError, extra
from torchcaps.data.scratch import scratch

__all__ = ["KINDS", "as_rgb", "save_figure", "two_colours"]

KINDS = (".png", ".svg", ".pdf")


def as_rgb(image: Tensor) -> Tensor:
    """Return an image as red, green and blue in 0..1: a stereo pair side by side, odd ranges stretched."""
    image = image.float() / 255 if image.dtype == torch.uint8 else image.float()
    if image.min() < 0 or image.max() > 1:
        image = (image - image.min()) / (image.max() - image.min()).clamp(min=1e-6)
    if image.shape[0] == 2:
        image = torch.cat([image[:1], image[1:]], dim=2)
    return image.expand(3, -1, -1) if image.shape[0] == 1 else image


def two_colours(first: Tensor, second: Tensor) -> Tensor:
    """Return one image in orange and the other in blue, both where they overlap."""
    one, other = ((image / 255 if image.dtype == torch.uint8 else image).float()[0] for image in (first, second))
    orange, blue = (torch.tensor(colour)[:, None, None] for colour in ((1.0, 0.55, 0.1), (0.15, 0.6, 1.0)))
    return (one * orange + other * blue).clamp(max=1)


def save_figure(figure: Any, out: Path) -> None:
    """Write a figure into a file: whole or not at all."""
    try:
        with scratch(out.parent, sweep=False) as own:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Glyph .* missing")  # a box for a letter is no reason to complain
                # The same figure is the same file, so that a record of it changes when it does, and not each time.
                undated: dict[str, Any] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
                with extra("matplotlib", "figures").rc_context({"svg.hashsalt": "torchcaps"}):
                    figure.savefig(own / out.name, metadata=undated.get(out.suffix.lower()))
            os.replace(own / out.name, out)
    except OSError as error:
        raise DataError(f"{out} can't be written: {error.strerror or error}") from error
