"""Figures of the alignment of capsules: Choi 2019, Table 3 and Figure 4."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchcaps._core.plotting import COLORS, new_figure, save_figure, style_axes

if TYPE_CHECKING:
    from torchcaps.analysis.alignment import Alignment

__all__ = ["draw_alignment", "draw_cosines"]


def draw_cosines(result: "Alignment", out: Path | str, title: str = "") -> None:
    """Draw the cosines between the directions of + and - as a histogram of 20 bins: Choi 2019, Figure 4.

    >>> import torch, torchcaps
    >>> model = torchcaps.create_model("capsnet_small", width=4, types=2, hidden=(8,))
    >>> from torchcaps.analysis import measure_alignment
    >>> result = measure_alignment(model, torch.rand(2, 1, 28, 28), torch.tensor([3, 8]))
    >>> draw_cosines(result, "fig.png")
    """
    figure = new_figure(5.2, 3.3)
    axes = figure.subplots()
    values = [result.cosines[:, kind][result.moved[:, kind]].tolist() for kind in range(3)]
    _, _, groups = axes.hist(
        values,
        bins=[(step - 10) / 10 for step in range(21)],
        stacked=True,
        color=COLORS[:3],
        label=["rotation", "x shift", "y shift"],
        edgecolor="white",
        linewidth=0.5,
    )
    for group, hatch in zip(groups, ("", "////", "...."), strict=True):
        for bar in group:
            bar.set_hatch(hatch)
    style_axes(axes, title, "cosine between the directions of + and −", "number of images")
    axes.set_xlim(-1, 1)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    save_figure(figure, out)


def draw_alignment(result: "Alignment", out: Path | str, title: str = "", classes: Sequence[str] | None = None) -> None:
    """Draw the alignment ratios by class and transformation as an annotated heat map: Choi 2019, Table 3.

    Args:
        result: the return value of `measure_alignment`.
        out: the file, .png, .svg or .pdf.
        title: above the figure.
        classes: class names, by default their indices.

    >>> import torch, torchcaps
    >>> model = torchcaps.create_model("capsnet_small", width=4, types=2, hidden=(8,))
    >>> from torchcaps.analysis import measure_alignment
    >>> result = measure_alignment(model, torch.rand(2, 1, 28, 28), torch.tensor([3, 8]))
    >>> draw_alignment(result, "fig.png")
    """
    if classes is not None and len(classes) != len(result.n):
        raise ValueError(f"classes must be {len(result.n)} names, got {len(classes)}")
    labels = [label for label, count in enumerate(result.n) if count]
    rows = [*(result.ratios[label].tolist() for label in labels), result.averages.tolist()]
    names = [*(str(label) if classes is None else classes[label] for label in labels), "average"]
    figure = new_figure(5.4, 1.7 + 0.3 * len(rows))
    axes = figure.subplots()
    lowest = min(0.9, math.floor(10 * min(map(min, rows))) / 10)
    heat_map = axes.imshow(rows, cmap="cividis", vmin=lowest, vmax=1, aspect="auto")
    for y, row in enumerate(rows):
        for x, value in enumerate(row):
            color = "black" if heat_map.norm(value) > 0.55 else "white"
            weight = "bold" if y == len(rows) - 1 else "normal"
            axes.text(x, y, f"{value:.2f}", ha="center", va="center", color=color, fontsize=9, fontweight=weight)
    axes.set_xticks(range(6), [name.replace("-", "−") for name in result.names])
    axes.set_yticks(range(len(rows)), names)
    axes.axhline(len(rows) - 1.5, color="white", linewidth=3)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    (mean, std), (column_mean, column_std) = result.reference, result.printed_reference
    caption = f"random vectors: {mean:.2f} ± {std:.2f}; by the axis of the printed value: {column_mean:.2f}"
    axes.set_xlabel(f"transformation (x, y: shift)\n{caption} ± {column_std:.2f}", fontsize=8, labelpad=8)
    axes.set_ylabel("class")
    axes.set_title(title or "alignment ratio", fontsize=10)
    figure.colorbar(heat_map, ax=axes, fraction=0.05, pad=0.02, label="alignment ratio")
    save_figure(figure, out)
