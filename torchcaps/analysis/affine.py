"""Accuracy under affine transformations: rotation, scale, shear and shift. The question of Sabour 2017, section 5.2."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchcaps._core.plotting import COLORS, MARKERS, new_figure, save_figure, style_axes
from torchcaps._core.registry import check_name
from torchcaps._core.stats import wilson_interval
from torchcaps.analysis.common import Progress, evaluate_predictions
from torchcaps.analysis.registry import Analysis, Column, NoOptions, Subject, Summary, register_analysis
from torchcaps.data.geometry import affine_matrix, warp_affine
from torchcaps.models import Network

__all__ = [
    "AMOUNTS",
    "TRANSFORMATIONS",
    "AffineSweep",
    "affine_sweep",
    "draw_affine",
    "rotate",
    "scale",
    "shear",
    "shift",
    "transform",
]


def rotate(images: Tensor, degrees: float) -> Tensor:
    """Rotate images counter-clockwise about their centre; bilinear, padded with zeros.

    Shapes:
        ``[B, C, H, W] -> [B, C, H, W]``
    """
    return _apply_affine(images, angle=degrees)


def scale(images: Tensor, factor: float) -> Tensor:
    """Enlarge (above 1) or shrink images about their centre; bilinear, padded with zeros."""
    if not 0 < factor < math.inf:
        raise ValueError(f"scale must be a finite factor above 0, got {factor}")
    return _apply_affine(images, factor=factor)


def shear(images: Tensor, slope: float) -> Tensor:
    """Shift each row to the right by ``slope`` times its distance below the centre; bilinear, padded with zeros."""
    return _apply_affine(images, slope=slope)


def shift(images: Tensor, right: float = 0.0, down: float = 0.0) -> Tensor:
    """Shift images by pixels, padded with zeros; whole pixels are exact, fractions bilinear."""
    if right != int(right) or down != int(down):
        return _apply_affine(images, offset=(down, right))
    height, width = images.shape[-2:]
    x, y = (max(-size, min(size, int(step))) for size, step in ((width, right), (height, down)))
    return F.pad(images, (x, -x, y, -y))  # negative padding crops


def _apply_affine(
    images: Tensor,
    angle: float = 0.0,
    slope: float = 0.0,
    factor: float = 1.0,
    offset: tuple[float, float] = (0.0, 0.0),
) -> Tensor:
    """Return all images under one affine map; the identity returns the same tensor."""
    if (angle, slope, factor, offset) == (0.0, 0.0, 1.0, (0.0, 0.0)):
        return images
    parameters = [torch.tensor([value], dtype=torch.float64) for value in (angle, slope, factor, factor)]
    matrix = affine_matrix(*parameters).expand(len(images), 2, 2)
    moved = torch.tensor([offset], dtype=torch.float64).expand(len(images), 2)
    return warp_affine(images.float(), matrix, moved, (images.shape[-2], images.shape[-1])).to(images.dtype)


# Transformations with one parameter each.
TRANSFORMATIONS: Mapping[str, Callable[[Tensor, float], Tensor]] = MappingProxyType(
    {
        "rotation": rotate,
        "scale": scale,
        "shear": shear,
        "shift": lambda images, pixels: shift(images, pixels, pixels),
        "shift_x": lambda images, pixels: shift(images, right=pixels),
        "shift_y": lambda images, pixels: shift(images, down=pixels),
    }
)
AMOUNTS: Mapping[str, tuple[float, ...]] = MappingProxyType(
    {
        "rotation": (-60, -45, -30, -15, 0, 15, 30, 45, 60),
        "scale": (0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.3, 1.4),
        "shear": (-0.6, -0.45, -0.3, -0.15, 0, 0.15, 0.3, 0.45, 0.6),
        "shift": (-8, -6, -4, -2, 0, 2, 4, 6, 8),
        "shift_x": (-8, -6, -4, -2, 0, 2, 4, 6, 8),
        "shift_y": (-8, -6, -4, -2, 0, 2, 4, 6, 8),
    }
)
UNITS = {
    "rotation": ("rotation", "degrees, counter-clockwise"),
    "scale": ("scale", "factor"),
    "shear": ("shear", "pixels to the right per pixel down"),
    "shift": ("diagonal shift", "pixels to the right and down"),
    "shift_x": ("horizontal shift", "pixels to the right"),
    "shift_y": ("vertical shift", "pixels down"),
}


def transform(images: Tensor, kind: str, amount: float) -> Tensor:
    """Apply one of `TRANSFORMATIONS`; pixels from outside the image are zero.

    ``"rotation"`` by degrees counter-clockwise, ``"scale"`` by a factor, ``"shear"`` by pixels to the right per pixel
    below the centre, ``"shift"`` by pixels to the right and as many down, ``"shift_x"`` to the right, ``"shift_y"``
    down.

    Shapes:
        ``[B, C, H, W] -> [B, C, H, W]``

    >>> transform(torch.tensor([[[[1.0, 2, 3]]]]), "shift_x", 1).tolist()
    [[[[0.0, 1.0, 2.0]]]]
    """
    if not math.isfinite(amount):
        raise ValueError(f"amount of {kind!r} must be a finite number, got {amount}")
    return TRANSFORMATIONS[check_name(kind, TRANSFORMATIONS, "kind")](images, amount)


@dataclass(frozen=True)
class AffineSweep:
    """Accuracy by kind and amount of an affine transformation.

    Args:
        kinds: the transformations; the fields below have one entry for each.
        amounts: their amounts.
        n_correct: number of correctly classified images at each amount.
        accuracy: as a fraction of the images.
        low, high: bounds of its 95 % Wilson interval.
        n: number of images.

    >>> import torch, torchcaps
    >>> model = torchcaps.create_model("capsnet_small", width=4, types=2, hidden=(8,))
    >>> images, labels = torch.rand(4, 1, 28, 28), torch.arange(4)
    >>> from torchcaps.analysis import affine_sweep
    >>> result = affine_sweep(model, images, labels, kinds=("shift",), amounts={"shift": (0.0, 2.0)})
    >>> result.kinds, len(result.accuracy[0])
    (('shift',), 2)
    """

    kinds: tuple[str, ...]
    amounts: tuple[tuple[float, ...], ...]
    n_correct: tuple[tuple[int, ...], ...]
    accuracy: tuple[tuple[float, ...], ...]
    low: tuple[tuple[float, ...], ...]
    high: tuple[tuple[float, ...], ...]
    n: int


def affine_sweep(
    model: Network,
    images: Tensor,
    labels: Tensor,
    kinds: Sequence[str] = ("rotation", "scale", "shear", "shift"),
    amounts: Mapping[str, Sequence[float]] | None = None,
    batch_size: int = 128,
    progress: Progress | None = None,
) -> AffineSweep:
    """Measure the accuracy on rotated, scaled, sheared and shifted images, one transformation and amount at a time.

    Sabour 2017, section 5.2, measures robustness to affine transformations on affNIST, which mixes all four. A
    prediction is correct by the criterion of the model's paper.

    Args:
        model: any network.
        images: ``[B, C, H, W]``, as the model takes them; transformed images are padded with zeros.
        labels: as the model takes them.
        kinds: names of `TRANSFORMATIONS`; `transform` defines them.
        amounts: by kind; by default those of `AMOUNTS`.
        batch_size: images per forward pass.
        progress: called after each batch of each amount.

    >>> import torch, torchcaps
    >>> model = torchcaps.create_model("capsnet_small", width=4, types=2, hidden=(8,))
    >>> images, labels = torch.rand(4, 1, 28, 28), torch.arange(4)
    >>> result = affine_sweep(model, images, labels, kinds=("rotation",), amounts={"rotation": (-10.0, 0.0, 10.0)})
    >>> result.n, result.amounts
    (4, ((-10.0, 0.0, 10.0),))
    """
    amounts = amounts or {}
    for kind in (*kinds, *amounts):
        check_name(kind, TRANSFORMATIONS, "kind")
    for kind in amounts:
        if kind not in kinds:
            raise ValueError(f"amounts must be given for the requested kinds only, {tuple(kinds)}, got {kind!r}")
    values = tuple(tuple(float(amount) for amount in amounts.get(kind, AMOUNTS[kind])) for kind in kinds)
    if not kinds or not all(values):
        raise ValueError(f"kinds and amounts must not be empty, got {tuple(kinds)} and {values}")
    if images.dim() != 4 or len(images) == 0:
        raise ValueError(f"images must be [B, C, H, W] with at least one image, got {list(images.shape)}")
    if len(labels) != len(images):
        raise ValueError(f"labels must have one entry per image ({len(images)}), got {len(labels)}")
    n_correct = []
    for kind, row in zip(kinds, values, strict=True):
        n_correct.append(
            tuple(_count_correct(model, images, labels, kind, amount, batch_size, progress) for amount in row)
        )
    n = len(images)
    bounds = [[wilson_interval(count, n) for count in row] for row in n_correct]
    return AffineSweep(
        kinds=tuple(kinds),
        amounts=values,
        n_correct=tuple(n_correct),
        accuracy=tuple(tuple(count / n for count in row) for row in n_correct),
        low=tuple(tuple(low for low, _ in row) for row in bounds),
        high=tuple(tuple(high for _, high in row) for row in bounds),
        n=n,
    )


def _count_correct(
    model: Network,
    images: Tensor,
    labels: Tensor,
    kind: str,
    amount: float,
    batch_size: int,
    progress: Progress | None,
) -> int:
    """Count correctly classified images under a transformation; one batch at a time is transformed."""
    n_correct = 0
    for part, part_labels in zip(images.split(batch_size), labels.split(batch_size), strict=True):
        transformed = transform(part, kind, amount)
        n_correct += int(evaluate_predictions(model, transformed, part_labels, batch_size, progress)[0].sum())
    return n_correct


# Figure -------------------------------------------------------------------------------------------------------------


def draw_affine(results: Mapping[str, AffineSweep], out: Path | str, title: str = "") -> None:
    """Draw accuracy by amount, one panel per transformation and one curve with its 95 % interval per model.

    Args:
        results: by the name of the model; all of the same transformations.
        out: the file, .png, .svg or .pdf.
        title: above the figure.

    >>> import torch, torchcaps
    >>> model = torchcaps.create_model("capsnet_small", width=4, types=2, hidden=(8,))
    >>> images, labels = torch.rand(4, 1, 28, 28), torch.arange(4)
    >>> result = affine_sweep(model, images, labels, kinds=("rotation",), amounts={"rotation": (-10.0, 0.0, 10.0)})
    >>> draw_affine({"capsnet_small": result}, "affine.png")
    """
    sweeps = list(results.values())
    if not sweeps:
        raise ValueError("results must contain at least one sweep, got none")
    kinds = sweeps[0].kinds
    if any(sweep.kinds != kinds for sweep in sweeps):
        raise ValueError(f"results must be of the same kinds, got {[sweep.kinds for sweep in sweeps]}")
    columns = min(2, len(kinds))
    rows = math.ceil(len(kinds) / columns)
    figure = new_figure(3.6 * columns, 2.5 * rows + (0.7 if len(results) > 1 else 0.2))
    grid: Any = figure.subplots(rows, columns, sharey=True, squeeze=False)
    panels = [axes for row in grid for axes in row]
    for n, axes in enumerate(panels):
        if n >= len(kinds):
            axes.set_axis_off()
            continue
        for model_index, (label, sweep) in enumerate(results.items()):
            style = model_index % len(COLORS)
            order = sorted(range(len(sweep.amounts[n])), key=sweep.amounts[n].__getitem__)
            amounts, accuracy, low, high = (
                [values[n][index] for index in order]
                for values in (sweep.amounts, sweep.accuracy, sweep.low, sweep.high)
            )
            percent = [100 * value for value in accuracy]
            axes.plot(amounts, percent, color=COLORS[style], marker=MARKERS[style], markersize=4, label=label)
            bounds = ([100 * value for value in side] for side in (low, high))
            axes.fill_between(amounts, *bounds, color=COLORS[style], alpha=0.2, linewidth=0)
        name, unit = UNITS[kinds[n]]
        style_axes(axes, name, unit, "accuracy, %" if n % columns == 0 else "")
        axes.set_ylim(-2, 102)
    if len(results) > 1:
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(3, len(labels)), frameon=False)
    if title:
        figure.suptitle(title, fontsize=11)
    save_figure(figure, out)


# Declaration --------------------------------------------------------------------------------------------------------


def _run(subjects: Sequence[Subject], options: NoOptions) -> dict[str, AffineSweep]:
    """Measure the accuracy of each model on transformed images."""
    results = {}
    for subject in subjects:
        batch = subject.batch()
        n_amounts = sum(len(AMOUNTS[kind]) for kind in ("rotation", "scale", "shear", "shift"))
        results[subject.name] = affine_sweep(
            subject.model,
            batch.images,
            batch.labels,
            batch_size=subject.batch_size,
            progress=subject.track(n_amounts * subject.n_batches()),
        )
    return results


def _summarize(results: Mapping[str, AffineSweep], classes: Sequence[str]) -> Summary:
    """Return the summary table: accuracy without transformation, mean and lowest, by run and transformation."""
    rows: dict[str, dict[str, Any]] = {}
    for name, result in results.items():
        for n, kind in enumerate(result.kinds):
            accuracy, amounts = result.accuracy[n], result.amounts[n]
            lowest = min(range(len(accuracy)), key=accuracy.__getitem__)
            rows[kind if len(results) == 1 else f"{name}, {kind}"] = {
                "untransformed": accuracy[amounts.index(1.0 if kind == "scale" else 0.0)],
                "mean": sum(accuracy) / len(accuracy),
                "lowest": accuracy[lowest],
                "interval": (result.low[n][lowest], result.high[n][lowest]),
                "lowest_at": amounts[lowest],
                "amounts": amounts,
                "accuracy": accuracy,
                "low": result.low[n],
                "high": result.high[n],
            }
    columns = {
        "untransformed": Column("untransformed", "percent"),
        "mean": Column("mean", "percent"),
        "lowest": Column("lowest", "percent"),
        "interval": Column("95 % interval", "interval"),
        "lowest_at": Column("at", "g"),
    }
    first = next(iter(results.values()))
    units = "; ".join(f"{UNITS[kind][0]}: {UNITS[kind][1]}" for kind in first.kinds)
    return Summary("accuracy on transformed images", first.n, "transformation", columns, rows, (f"Amounts: {units}.",))


AFFINE = register_analysis(
    Analysis(
        "affine",
        "accuracy on rotated, scaled, sheared and shifted images",
        _run,
        _summarize,
        lambda results, out, title, classes: draw_affine(results, out, title),
        compares_models=True,
    )
)
