"""How figures look: legible in print, and for readers who don't see red and green apart."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchcaps.data.drawing import as_rgb, save_figure
from torchcaps.data.errors import extra

__all__ = ["COLOURS", "MARKERS", "new_figure", "save", "show_image", "tidy"]

# Okabe and Ito's colours, which stay apart in every kind of colour vision; markers and dashes tell them in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def new_figure(width: float, height: float, layout: str | None = "constrained") -> Any:
    """Return an empty figure, its size in inches."""
    return extra("matplotlib.figure", "drawing").Figure(figsize=(width, height), dpi=150, layout=layout)


def tidy(axes: Any, title: str = "", x: str = "", y: str = "") -> None:
    """Give axes a title and labels, and take away what nobody reads."""
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def show_image(axes: Any, image: Tensor) -> None:
    """Show an image ``[C, H, W]`` without axes."""
    axes.imshow(as_rgb(torch.as_tensor(image)).permute(1, 2, 0).numpy(), interpolation="nearest")
    axes.set_axis_off()


def save(figure: Any, out: Path | str) -> None:
    """Write a figure, whole or not at all; the name's ending says as what: .png, .svg or .pdf."""
    save_figure(figure, Path(out))
