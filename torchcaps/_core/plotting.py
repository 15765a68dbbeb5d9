"""Figures: one style, legible in print and to colour-blind readers, written atomically."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchcaps._core.files import reason_of, staging_directory
from torchcaps._core.optional import import_optional

__all__ = [
    "COLORS",
    "FIGURE_SUFFIXES",
    "MARKERS",
    "as_rgb",
    "new_figure",
    "overlay_two_colors",
    "save_figure",
    "show_image",
    "style_axes",
]

FIGURE_SUFFIXES = (".png", ".svg", ".pdf")
# The palette of Okabe and Ito, distinct in every kind of colour vision; markers and dashes distinguish lines in grey.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def as_rgb(image: Tensor) -> Tensor:
    """Return an image as RGB in 0..1: grey repeated, a stereo pair side by side, values outside 0..1 rescaled."""
    image = image.float() / 255 if image.dtype == torch.uint8 else image.float()
    if image.min() < 0 or image.max() > 1:
        image = (image - image.min()) / (image.max() - image.min()).clamp(min=1e-6)
    if image.shape[0] == 2:
        image = torch.cat([image[:1], image[1:]], dim=2)
    return image.expand(3, -1, -1) if image.shape[0] == 1 else image


def overlay_two_colors(first: Tensor, second: Tensor) -> Tensor:
    """Overlay two grey images, the first in orange and the second in blue."""
    one, other = ((image / 255 if image.dtype == torch.uint8 else image).float()[0] for image in (first, second))
    orange, blue = (torch.tensor(color)[:, None, None] for color in ((1.0, 0.55, 0.1), (0.15, 0.6, 1.0)))
    return (one * orange + other * blue).clamp(max=1)


def new_figure(width: float, height: float, layout: str | None = "constrained") -> Any:
    """Return an empty matplotlib figure, its size in inches."""
    return import_optional("matplotlib.figure", "drawing").Figure(figsize=(width, height), dpi=150, layout=layout)


def style_axes(axes: Any, title: str = "", x: str = "", y: str = "") -> None:
    """Set title and axis labels, add a light grid and remove the top and right spines."""
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


def _show_dollar_signs(figure: Any) -> None:
    """Draw all text as it is: dollar signs in class names would start mathematical notation, which can be invalid.

    The labels of logarithmic axes are mathematical notation.
    """
    text_class = import_optional("matplotlib.text", "drawing").Text
    axes = [axis for each in figure.axes for axis in (each.xaxis, each.yaxis) if axis.get_scale() == "log"]
    formulas = {id(label) for axis in axes for label in axis.get_ticklabels(which="both")}
    for text in figure.findobj(text_class):
        if id(text) not in formulas:
            text.set_parse_math(False)


def save_figure(figure: Any, out: Path | str, error: Callable[[str], Exception] = ValueError) -> None:
    """Write a figure atomically; the suffix selects the format (.png, .svg or .pdf).

    Args:
        figure: a matplotlib figure.
        out: the file.
        error: exception type if the file can't be written.
    """
    out = Path(out)
    try:
        with staging_directory(out.parent, sweep=False) as staging:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Glyph .* missing")  # a missing glyph is drawn as a box
                # No dates and no random ids: an unchanged figure is an unchanged file.
                undated: dict[str, Any] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
                with import_optional("matplotlib", "figures").rc_context({"svg.hashsalt": "torchcaps"}):
                    _show_dollar_signs(figure)
                    figure.savefig(staging / out.name, metadata=undated.get(out.suffix.lower()))
            os.replace(staging / out.name, out)
    except OSError as problem:
        raise error(f"{out} can't be written: {reason_of(problem)}") from problem
