"""Figures of universal perturbations: Chen 2019, supplement, Figure 1."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchcaps._core.plotting import COLORS, MARKERS, new_figure, save_figure, style_axes

if TYPE_CHECKING:
    from torchcaps.analysis.universal import UniversalPerturbation

__all__ = ["draw_universal", "draw_universal_sizes"]


def draw_universal(results: "Mapping[str, UniversalPerturbation]", out: Path | str, title: str = "") -> None:
    """Draw accuracy by generator iteration (Chen 2019, supplement, Figure 1) and the perturbations.

    >>> import torch, torchcaps
    >>> model = torchcaps.create_model("capsnet_small", width=4, types=2, hidden=(8,))
    >>> images, labels = torch.rand(4, 1, 28, 28), torch.arange(4)
    >>> from torchcaps.analysis import train_universal
    >>> result = train_universal(model, images, labels, images, labels, iterations=2, eval_interval=1, batch_size=4)
    >>> draw_universal({"capsnet_small": result}, "fig.png")
    """
    if not results:
        raise ValueError("results must contain at least one perturbation, got none")
    figure = new_figure(max(7.0, 2.2 * len(results)), 5.6)
    figure.suptitle(title)
    upper, lower = figure.subfigures(2, 1, height_ratios=(3.4, 2.2))
    axes = upper.subplots()
    for index, (name, result) in enumerate(results.items()):
        color, marker = COLORS[index % len(COLORS)], MARKERS[index % len(MARKERS)]
        percent = [100 * accuracy for accuracy in result.accuracy]
        axes.plot(result.iterations, percent, color=color, marker=marker, markersize=4, label=name)
        noise = 100 * result.random_noise_accuracy
        axes.axhline(noise, color=color, linestyle=(0, (1 + index, 2)), linewidth=1, label=f"{name}, random signs")
    style_axes(axes, x="generator iterations", y="accuracy, %")
    lowest = 100 * min(min(result.accuracy) for result in results.values())
    axes.set_ylim(0 if lowest < 60 else lowest - 2, 103 if lowest < 60 else 100.5)  # small drops stay visible
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    for axes, (name, result) in zip(lower.subplots(1, len(results), squeeze=False)[0], results.items(), strict=True):
        _show_perturbation(axes, result, name)
    save_figure(figure, out)


def draw_universal_sizes(
    results: "Mapping[str, Mapping[str, UniversalPerturbation]]",
    out: Path | str,
    title: str = "",
    rows: Sequence[Sequence[str]] | None = None,
) -> None:
    """Draw accuracy by generator iteration for several sizes: one panel per model, its perturbations below.

    Args:
        results: by model and by size, such as "8 levels".
        out: the file, .png, .svg or .pdf.
        title: above the figure.
        rows: models of each row of panels (default: all in one row).

    >>> import torch, torchcaps
    >>> model = torchcaps.create_model("capsnet_small", width=4, types=2, hidden=(8,))
    >>> images, labels = torch.rand(4, 1, 28, 28), torch.arange(4)
    >>> from torchcaps.analysis import train_universal
    >>> result = train_universal(model, images, labels, images, labels, iterations=2, eval_interval=1, batch_size=4)
    >>> draw_universal_sizes({"capsnet_small": {"32 levels": result}}, "fig.png")
    """
    if not results or not all(results.values()):
        raise ValueError("results must contain at least one perturbation for each model, got none")
    rows = [list(results)] if rows is None else rows
    figure = new_figure(max(7.0, 3.1 * max(map(len, rows))), 5.4 * len(rows))
    figure.suptitle(title)
    parts = figure.subfigures(2 * len(rows), 1, height_ratios=(3.4, 1.6) * len(rows))
    sizes = list(dict.fromkeys(size for by_size in results.values() for size in by_size))
    for index, row in enumerate(rows):
        _draw_row({name: results[name] for name in row}, sizes, parts[2 * index], parts[2 * index + 1])
    save_figure(figure, out)


def _draw_row(
    results: "Mapping[str, Mapping[str, UniversalPerturbation]]", all_sizes: Sequence[str], upper: Any, lower: Any
) -> None:
    """Draw a row of panels, one per model, and the perturbations below; a size has the same color in all rows."""
    panels = upper.subplots(1, len(results), sharey=True, squeeze=False)[0]
    for axes, (name, sizes) in zip(panels, results.items(), strict=True):
        for size, result in sizes.items():
            index = all_sizes.index(size)
            color, marker = COLORS[index % len(COLORS)], MARKERS[index % len(MARKERS)]
            percent = [100 * accuracy for accuracy in result.accuracy]
            axes.plot(result.iterations, percent, color=color, marker=marker, markersize=4, label=size)
            axes.axhline(100 * result.random_noise_accuracy, color=color, linestyle=":", linewidth=1.2)
        style_axes(axes, name, "generator iterations", "accuracy, %" if axes is panels[0] else "")
        axes.set_ylim(0, 103)
        axes.xaxis.get_major_locator().set_params(integer=True)
    panels[0].plot([], [], color="0.3", linestyle=":", linewidth=1.2, label="random signs")
    handles, labels = panels[0].get_legend_handles_labels()
    upper.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8, frameon=False)
    n_columns = max(map(len, results.values()))
    blocks = lower.subfigures(1, len(results), squeeze=False)[0]
    for block, sizes in zip(blocks, results.values(), strict=True):
        grid = block.subplots(1, n_columns, squeeze=False)[0]
        for axes in grid[len(sizes) :]:
            axes.set_axis_off()
        for axes, (size, result) in zip(grid, sizes.items(), strict=False):
            _show_perturbation(axes, result, "")
            axes.set_title(size, fontsize=8)


def _show_perturbation(axes: Any, result: "UniversalPerturbation", name: str) -> None:
    """Show a perturbation: grey is 0, black and white are ``-eps`` and ``eps``."""
    image = (result.perturbation / (2 * result.eps) + 0.5).clamp(0, 1)
    color = image.expand(3, -1, -1) if image.shape[0] == 1 else image[:3]
    if image.shape[0] == 2:  # a stereo pair
        color = torch.cat([image[:1], image[1:]], dim=2).expand(3, -1, -1)
    axes.imshow(color.permute(1, 2, 0).numpy(), interpolation="nearest")
    axes.set_title(f"{name}\nwithin ±{result.eps:.3g}", fontsize=8)
    axes.set_axis_off()
