"""How far recognition holds when images are turned, scaled, sheared and shifted."""

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
from torchcaps.analysis.common import Progress, outputs
from torchcaps.data.geometry import affine_matrix, warp_affine
from torchcaps.metrics import wilson_interval
from torchcaps.models import Network

__all__ = [
    "AMOUNTS",
    "KINDS",
    "AffineSweep",
    "affine_sweep",
    "draw_affine",
    "rotated",
    "scaled",
    "sheared",
    "shifted",
    "transformed",
]


def rotated(images: Tensor, degrees: float) -> Tensor:
    """Return images turned counter-clockwise about their middle, bilinearly resampled, zeros coming in.

    Shapes:
        ``[B, C, H, W] -> [B, C, H, W]``
    """
    return _mapped(images, angle=degrees)


def scaled(images: Tensor, factor: float) -> Tensor:
    """Return images larger (over 1) or smaller about their middle, bilinearly resampled, zeros coming in."""
    if not 0 < factor < math.inf:
        raise ValueError(f"scale must be a factor over 0, got {factor}")
    return _mapped(images, factor=factor)


def sheared(images: Tensor, share: float) -> Tensor:
    """Return images whose rows move to the right by a share of how far below the middle they are."""
    return _mapped(images, shear=share)


def shifted(images: Tensor, right: float = 0.0, down: float = 0.0) -> Tensor:
    """Return images moved by pixels, zeros coming in: whole pixels exactly, parts of one bilinearly resampled."""
    if right != int(right) or down != int(down):
        return _mapped(images, shift=(down, right))
    height, width = images.shape[-2:]
    x, y = (max(-side, min(side, int(step))) for side, step in ((width, right), (height, down)))
    return F.pad(images, (x, -x, y, -y))  # a negative padding takes away


def _mapped(
    images: Tensor,
    angle: float = 0.0,
    shear: float = 0.0,
    factor: float = 1.0,
    shift: tuple[float, float] = (0.0, 0.0),
) -> Tensor:
    """Return all images under one affine map; where that is none, the very same images."""
    if (angle, shear, factor, shift) == (0.0, 0.0, 1.0, (0.0, 0.0)):
        return images
    numbers = [torch.tensor([value], dtype=torch.float64) for value in (angle, shear, factor, factor)]
    matrix = affine_matrix(*numbers).expand(len(images), 2, 2)
    moved = torch.tensor([shift], dtype=torch.float64).expand(len(images), 2)
    return warp_affine(images.float(), matrix, moved, (images.shape[-2], images.shape[-1])).to(images.dtype)


# What an image can undergo, by one number each.
KINDS: Mapping[str, Callable[[Tensor, float], Tensor]] = MappingProxyType(
    {
        "rotation": rotated,
        "scale": scaled,
        "shear": sheared,
        "shift": lambda images, pixels: shifted(images, pixels, pixels),
        "shift_x": lambda images, pixels: shifted(images, right=pixels),
        "shift_y": lambda images, pixels: shifted(images, down=pixels),
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
AXES = {
    "rotation": ("rotation", "degrees, counter-clockwise"),
    "scale": ("scale", "factor"),
    "shear": ("shear", "pixels to the right for each one down"),
    "shift": ("shift", "pixels to the right, and as many down"),
    "shift_x": ("horizontal shift", "pixels to the right"),
    "shift_y": ("vertical shift", "pixels down"),
}


def transformed(images: Tensor, kind: str, amount: float) -> Tensor:
    """Return images under a transformation of `KINDS`; pixels from outside the image are zero.

    ``"rotation"`` by degrees counter-clockwise, ``"scale"`` by a factor, ``"shear"`` by a share of the distance below
    the middle to the right, ``"shift"`` by pixels right and as many down, ``"shift_x"`` right, ``"shift_y"`` down.

    Shapes:
        ``[B, C, H, W] -> [B, C, H, W]``
    """
    if not math.isfinite(amount):
        raise ValueError(f"the amount of {kind!r} must be a finite number, got {amount}")
    return KINDS[check_name(kind, KINDS, "kind")](images, amount)


@dataclass(frozen=True)
class AffineSweep:
    """How many images a model recognises under affine transformations.

    Args:
        kinds: the transformations. All that follows has one entry for each of them.
        amounts: how much of it.
        n_right: images that were recognised at each amount.
        accuracy: their share. low, high: its 95 % interval by Wilson's formula.
        n: how many images in all.
    """

    kinds: tuple[str, ...]
    amounts: tuple[tuple[float, ...], ...]
    n_right: tuple[tuple[int, ...], ...]
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
    """Measure recognition of images that are turned, scaled, sheared, shifted, one at a time and by degrees.

    The question of Sabour 2017, section 5.2 (robustness to affine transformations), asked of any images and taken
    apart: affNIST mixes all four. Images are counted as right as the model's paper does.

    Args:
        model: any model.
        images: ``[B, C, H, W]`` as the model takes them; what comes in from outside is zero.
        labels: as the model takes them.
        kinds: of `KINDS`; `transformed` says what each does.
        amounts: how much, by kind; `AMOUNTS` for those that are not named.
        batch_size: images at a time.
        progress: called after every ``batch_size`` images, for each amount of each kind.
    """
    amounts = amounts or {}
    for kind in (*kinds, *amounts):
        check_name(kind, KINDS, "kind")
    for kind in amounts:
        if kind not in kinds:
            raise ValueError(f"amounts must be of the kinds that are asked for, {tuple(kinds)}, got some of {kind!r}")
    chosen = tuple(tuple(float(amount) for amount in amounts.get(kind, AMOUNTS[kind])) for kind in kinds)
    if not kinds or not all(chosen):
        raise ValueError("kinds and amounts must name one or more, got none")
    if images.dim() != 4 or len(images) == 0:
        raise ValueError(f"images must be [B, C, H, W], one or more, got {list(images.shape)}")
    if len(labels) != len(images):
        raise ValueError(f"labels must be one for each of {len(images)} images, got {len(labels)}")
    n_right = []
    for kind, values in zip(kinds, chosen, strict=True):
        n_right.append(tuple(_count(model, images, labels, kind, amount, batch_size, progress) for amount in values))
    n = len(images)
    bounds = [[wilson_interval(count, n) for count in row] for row in n_right]
    return AffineSweep(
        kinds=tuple(kinds),
        amounts=chosen,
        n_right=tuple(n_right),
        accuracy=tuple(tuple(count / n for count in row) for row in n_right),
        low=tuple(tuple(low for low, _ in row) for row in bounds),
        high=tuple(tuple(high for _, high in row) for row in bounds),
        n=n,
    )


def _count(
    model: Network,
    images: Tensor,
    labels: Tensor,
    kind: str,
    amount: float,
    batch_size: int,
    progress: Progress | None,
) -> int:
    """Return how many images are recognised when transformed; a batch at a time, so that they need not all be kept."""
    n_right = 0
    for start in range(0, len(images), batch_size):
        part = transformed(images[start : start + batch_size], kind, amount)
        truth = labels[start : start + batch_size]
        for output in outputs(model, part, batch_size=batch_size, progress=progress):
            n_right += int(model.is_correct(output.scores.float().cpu(), truth.cpu()).sum())
    return n_right


def draw_affine(results: Mapping[str, AffineSweep], out: Path | str, title: str = "") -> None:
    """Draw accuracy by amount, a panel for each kind and a curve with its interval for each model.

    Args:
        results: by the name of the model; all of the same kinds.
        out: the file, .png, .svg or .pdf.
        title: over the figure.
    """
    sweeps = list(results.values())
    if not sweeps:
        raise ValueError("results must hold one sweep or more, got none")
    kinds = sweeps[0].kinds
    if any(sweep.kinds != kinds for sweep in sweeps):
        raise ValueError(f"results must all be of the same kinds, got {[sweep.kinds for sweep in sweeps]}")
    columns = min(2, len(kinds))
    rows = math.ceil(len(kinds) / columns)
    figure = new_figure(3.6 * columns, 2.5 * rows + (0.7 if len(results) > 1 else 0.2))
    grid: Any = figure.subplots(rows, columns, sharey=True, squeeze=False)
    panels = [axes for row in grid for axes in row]
    for n, axes in enumerate(panels):
        if n >= len(kinds):
            axes.set_axis_off()
            continue
        for number, (label, sweep) in enumerate(results.items()):
            style = number % len(COLORS)
            order = sorted(range(len(sweep.amounts[n])), key=sweep.amounts[n].__getitem__)
            amounts, accuracy, low, high = (
                [values[n][place] for place in order]
                for values in (sweep.amounts, sweep.accuracy, sweep.low, sweep.high)
            )
            percent = [100 * value for value in accuracy]
            axes.plot(amounts, percent, color=COLORS[style], marker=MARKERS[style], markersize=4, label=label)
            bounds = ([100 * value for value in side] for side in (low, high))
            axes.fill_between(amounts, *bounds, color=COLORS[style], alpha=0.2, linewidth=0)
        name, unit = AXES[kinds[n]]
        style_axes(axes, name, unit, "accuracy, %" if n % columns == 0 else "")
        axes.set_ylim(-2, 102)
    if len(results) > 1:
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(3, len(labels)), frameon=False)
    if title:
        figure.suptitle(title, fontsize=11)
    save_figure(figure, out)
