"""Figure of the couplings of a trained network: maps of each iteration, and their entropy."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchcaps._core.plotting import COLORS, MARKERS, new_figure, save_figure, show_image, style_axes
from torchcaps.analysis.common import round_robin_indices

if TYPE_CHECKING:
    from torchcaps.analysis.couplings import CouplingMaps, LayerCouplings

__all__ = ["NEARLY_UNIFORM", "draw_couplings", "is_nearly_uniform"]

NEARLY_UNIFORM_ENTROPY = 0.99  # normalised; above it couplings differ little from those without routing
LABEL_CHARACTERS = 16  # of a class name over an image
NEARLY_UNIFORM = "routing is nearly uniform: the couplings differ little from equal ones, as without routing"


def draw_couplings(
    result: "CouplingMaps", out: Path | str, title: str = "", n: int = 4, classes: Sequence[str] | None = None
) -> None:
    """Draw ``n`` images with their maps at every iteration, and the entropy of every layer by iteration.

    Purple is below the uniform coupling, orange above; the line is the outline of the foreground. Each position is
    drawn around the centre of its receptive field.

    Args:
        result: the return value of `coupling_maps`.
        out: the file, .png, .svg or .pdf.
        title: above the figure.
        n: number of images.
        classes: class names, by default their indices.

    >>> import torch, torchcaps
    >>> model = torchcaps.create_model("capsnet_small", width=4, types=2, hidden=(8,))
    >>> images, labels = torch.rand(4, 1, 28, 28), torch.arange(4)
    >>> from torchcaps.analysis import coupling_maps
    >>> draw_couplings(coupling_maps(model, images), "couplings.png", n=1)
    """
    mapped = next((layer for layer in result.layers if layer.maps is not None), None)
    has_entropy = any(layer.entropy is not None for layer in result.layers)
    n = min(n, len(result.images))
    n_iterations = 0 if mapped is None or mapped.maps is None else mapped.maps.shape[1]
    maps_width = 1.3 * (1 + n_iterations) + 0.9 if mapped else 0.0
    entropy_width = 6.4 if has_entropy else 2.6
    figure = new_figure(maps_width + entropy_width, max(3.4, 1.3 * n + 0.7 if mapped else 0))
    if title:
        figure.suptitle(title, fontsize=11)
    if mapped is not None:
        left, right = figure.subfigures(1, 2, width_ratios=[maps_width, entropy_width])
        _draw_maps(left, result, mapped, n, classes)
        _draw_entropy(right, result, has_entropy)
    else:
        _draw_entropy(figure, result, has_entropy)
    save_figure(figure, out)


def _draw_maps(
    figure: Any, result: "CouplingMaps", layer: "LayerCouplings", n: int, classes: Sequence[str] | None
) -> None:
    """Draw one row per image: the image, then its coupling map of each iteration."""
    assert layer.maps is not None
    selected = round_robin_indices(result.classes, torch.ones(len(result.classes)))[:n]
    maps = layer.maps[selected].float()
    grid = figure.subplots(n, 1 + maps.shape[1], squeeze=False)
    largest = max(float((maps - layer.uniform).abs().max()), 1e-6)
    height, width = result.images.shape[2:]
    if layer.centers:
        top, row_step, left, column_step = layer.centers
    else:  # unknown: spread over the whole image
        row_step, column_step = height / maps.shape[2], width / maps.shape[3]
        top, left = (row_step - 1) / 2, (column_step - 1) / 2
    rows, columns = maps.shape[2:]
    extent = (
        left - column_step / 2,
        left + column_step * (columns - 0.5),
        top + row_step * (rows - 0.5),
        top - row_step / 2,
    )
    heat_map = None
    for row, index in enumerate(selected):
        image = result.images[index]
        grey = image.float().mean(0)
        middle = float(grey.min() + grey.max()) / 2
        for column, axes in enumerate(grid[row]):
            if column == 0:
                show_image(axes, image[:1] if len(image) == 2 else image)
                label = int(result.classes[index])
                name = f"class {label}" if classes is None else classes[label]
                axes.set_title(textwrap.fill(name, LABEL_CHARACTERS), fontsize=9)
                continue
            colors = {"cmap": "PuOr_r", "vmin": layer.uniform - largest, "vmax": layer.uniform + largest}
            heat_map = axes.imshow(maps[row, column - 1].numpy(), extent=extent, interpolation="nearest", **colors)
            if grey.max() > grey.min():
                axes.contour(grey.numpy(), levels=[middle], colors="k", linewidths=0.8, linestyles="solid")
            axes.set_xlim(-0.5, width - 0.5)
            axes.set_ylim(height - 0.5, -0.5)
            axes.set_xticks([])
            axes.set_yticks([])
            axes.set_facecolor("#cccccc")
            if row == 0:
                axes.set_title(f"iteration {column}", fontsize=9)
    bar = figure.colorbar(heat_map, ax=grid[:, 1:], shrink=0.9, aspect=30, pad=0.02)
    uniform = f" (uniform: {layer.uniform:.2g})" if layer.couples else ""
    bar.set_label(f"couplings to the class, sum per position{uniform}", fontsize=9)
    bar.ax.tick_params(labelsize=8)


def _draw_entropy(figure: Any, result: "CouplingMaps", has_entropy: bool) -> None:
    """Draw mean and standard deviation of the entropy by iteration, from 0 to 1 and magnified, and missing values."""
    reasons: dict[str, list[str]] = {}
    for layer in result.layers:
        if layer.entropy is None:
            reasons.setdefault(layer.why_no_entropy, []).append(layer.name)
    lines = [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]
    if all(layer.maps is None for layer in result.layers):
        lines.append(f"no maps of {result.layers[-1].name}: {result.layers[-1].why_no_maps}")
    if is_nearly_uniform(result):
        lines.append(NEARLY_UNIFORM)
    text = "\n".join(textwrap.fill(line, 90 if has_entropy else 34) for line in lines)
    if not has_entropy:
        axes = figure.subplots()
        axes.set_axis_off()
        axes.text(0.5, 0.5, text, transform=axes.transAxes, fontsize=8, ha="center", va="center")
        return
    lowest, n_iterations = 0.99, 1
    whole, magnified = figure.subplots(1, 2)
    for index, layer in enumerate(result.layers):
        if layer.entropy is None:
            continue
        mean, std = layer.entropy.mean(0), layer.entropy.std(0, correction=0)
        lowest, n_iterations = min(lowest, float((mean - std).min())), max(n_iterations, len(mean))
        color, marker = COLORS[index % len(COLORS)], MARKERS[index % len(MARKERS)]
        style = {"color": color, "marker": marker, "capsize": 3, "label": f"{layer.name} ({float(mean[-1]):.4f})"}
        for axes in (whole, magnified):
            axes.errorbar(range(1, len(mean) + 1), mean.tolist(), std.tolist(), **style)
    span = 1 - lowest
    for axes, title in ((whole, "from 0 to 1"), (magnified, "magnified")):
        style_axes(axes, title, "routing iteration")
        axes.set_xlim(0.7, n_iterations + 0.3)
        axes.set_xticks(range(1, n_iterations + 1))
    whole.set_ylabel("normalised entropy (1: uniform, 0: one-hot)")
    magnified.set_ylabel("normalised entropy")
    whole.set_ylim(0, 1.05)
    magnified.set_ylim(lowest - 0.1 * span, 1 + 0.05 * span)
    whole.legend(frameon=False, fontsize=8, title="mean ± std over images (last mean)", title_fontsize=8)
    if text:
        figure.suptitle(text, fontsize=8)


def is_nearly_uniform(result: "CouplingMaps") -> bool:
    """Return whether the couplings of every layer with an entropy are nearly uniform after the last iteration."""
    last = [float(layer.entropy.mean(0)[-1]) for layer in result.layers if layer.entropy is not None]
    return bool(last) and min(last) > NEARLY_UNIFORM_ENTROPY
