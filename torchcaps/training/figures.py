"""Figures of a training run and of predictions: learning curves, confusion matrix, and two analyses of the network."""

import itertools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchcaps._core.files import atomic_path
from torchcaps._core.optional import import_optional
from torchcaps._core.plotting import as_rgb, new_figure, overlay_two_colors, save_figure, style_axes
from torchcaps.analysis.registry import ANALYSES, Subject, run_analysis
from torchcaps.data import DataError, Loader
from torchcaps.data.own import DataLoaderBatches
from torchcaps.models import CapsuleNetwork, Network
from torchcaps.training.evaluation import Evaluation
from torchcaps.training.prediction import Prediction
from torchcaps.training.setup import limit_images

__all__ = [
    "best_row",
    "draw_confusion",
    "draw_learning_curves",
    "draw_prediction",
    "draw_run",
    "write_image",
]

CORRECT_COLOR = "#1a7f37"
MIN_ERROR_SCALE_PERCENT = 20.0  # end of the colour scale of incorrect predictions, of the true class
SPLIT_COLORS = {"train": "#9e9e9e", "val": "#1565c0", "test": "#ef6c00"}


def draw_run(
    rows: list[dict[str, Any]],
    model: Network,
    loader: Loader | DataLoaderBatches | None,
    result: Evaluation | None,
    directory: Path,
    name: str,
) -> list[Path]:
    """Draw all figures of a run; return their paths.

    Args:
        rows: its metrics.
        model: with the weights to be shown.
        loader: of the test set, if there is one.
        result: evaluation on the test set.
        directory: for the figures.
        name: title.
    """
    paths = [directory / "curves.png"]
    draw_learning_curves(rows, paths[0], name)
    if loader is None:
        return paths
    analyses = ["predictions"]
    if isinstance(model, CapsuleNetwork) and model.decoder is not None and model.n_objects == 1:
        analyses.append("perturbation")
    for analysis in analyses:
        subset = limit_images(loader.dataset, ANALYSES.get(analysis).n_images)
        images = Loader(subset, loader.batch_size, pipeline=loader.pipeline, train=False, device=loader.device)
        report = run_analysis(analysis, Subject(name, model, images, batch_size=loader.batch_size))
        paths += report.draw(directory / f"{analysis}.png")
    if result is not None and result.confusion:
        paths.append(directory / "confusion.png")
        title = f"{name}: {result.n_correct:,} of {result.n:,} correct"
        draw_confusion(result, loader.dataset.classes, paths[-1], title)
    return paths


def draw_learning_curves(rows: list[dict[str, Any]], out: Path, title: str = "") -> None:
    """Draw loss, error rate and learning rate against epochs; the epoch with the best validation accuracy is marked.

    Args:
        rows: metrics, see `torchcaps.training.logging.COLUMNS`.
        out: the file.
        title: of the figure.
    """
    figure = new_figure(10.5, 3.6)
    loss_axes, error_axes, lr_axes = figure.subplots(1, 3)
    for split, color in SPLIT_COLORS.items():
        losses = [(row["epoch"], row[f"{split}_loss"]) for row in rows]
        accuracies = [(row["epoch"], row[f"{split}_accuracy"]) for row in rows]
        errors = [(epoch, 100 * (1 - value)) for epoch, value in accuracies if value is not None]
        for axes, points in ((loss_axes, losses), (error_axes, errors)):
            points = [(epoch, value) for epoch, value in points if value is not None]
            if points:
                axes.plot(*zip(*points, strict=True), color=color, marker=".", label=split)
    lr_axes.plot([row["epoch"] for row in rows], [row["lr"] for row in rows], color="#555555", marker=".")
    best = best_row(rows)
    for axes, title_, label in (
        (loss_axes, "loss", "mean loss per image"),
        (error_axes, "error rate", "incorrect images, %"),
        (lr_axes, "learning rate", "learning rate"),
    ):
        axes.set_xlim(left=0)
        style_axes(axes, title_, "epoch", label)
        if best is not None and axes is not lr_axes:
            label = f"best val: epoch {round(best['epoch'], 2):g}"
            axes.axvline(best["epoch"], color=SPLIT_COLORS["val"], linewidth=1, linestyle="--", label=label)
    for axes in (loss_axes, error_axes):
        low, high = axes.get_ylim()
        if low > 0 and high / low > 20:
            axes.set_yscale("log")
        elif axes is error_axes:
            axes.set_ylim(bottom=0)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=8)
    if title:
        figure.suptitle(title, fontsize=11)
    save_figure(figure, out)


def best_row(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the row with the highest validation accuracy, of equal ones that with the lowest loss, if there is one."""
    scored = [row for row in rows if row["val_accuracy"] is not None]
    return max(scored, key=lambda row: (row["val_accuracy"], -row["val_loss"])) if scored else None


def draw_confusion(result: Evaluation, classes: tuple[str, ...], out: Path, title: str = "") -> None:
    """Draw the confusion matrix: counts, coloured by their fraction of the true class, correct ones in green.

    The scale of the incorrect predictions ends at a fifth of the class or above, so that a few errors stay pale.

    Args:
        result: an evaluation with a confusion matrix.
        classes: names.
        out: the file.
        title: of the figure (default: the number of correct images).
    """
    matrix = torch.tensor(result.confusion)
    n = len(classes)
    percent = 100 * matrix / matrix.sum(1, keepdim=True).clamp_min(1)
    diagonal = torch.eye(n, dtype=torch.bool)
    worst = max(MIN_ERROR_SCALE_PERCENT, float(percent[~diagonal].max()) if n > 1 else 0.0)
    longest = max(map(len, classes))
    side = min(14.0, 2.6 + 0.45 * n)
    margin = min(4.0, 0.07 * longest)
    figure = new_figure(side + margin + 1.4, side + (margin if longest > 2 else 0))
    axes = figure.subplots()
    masked = {"correct": percent.where(diagonal, torch.nan), "incorrect": percent.where(~diagonal, torch.nan)}
    scales = {"incorrect": ("Reds", worst), "correct": ("Greens", 100.0)}
    for kind, (colors, most) in scales.items():
        image = axes.imshow(masked[kind].numpy(), cmap=colors, vmin=0, vmax=most)
        figure.colorbar(image, ax=axes, label=f"{kind}, % of the true class", shrink=0.7)
    size = 9 if n <= 20 else 5
    axes.set_xticks(range(n), classes, rotation=90 if longest > 2 else 0, fontsize=size)
    axes.set_yticks(range(n), classes, fontsize=size)
    for row, column in itertools.product(range(n), repeat=2) if n <= 30 else ():
        count = int(matrix[row, column])
        if count:
            is_dark = float(percent[row, column]) > 0.6 * (100 if row == column else worst)
            size = 8 if n <= 15 else 5
            color = "white" if is_dark else "#333333"
            axes.text(column, row, str(count), ha="center", va="center", fontsize=size, color=color)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")
    axes.set_title(title or f"{result.n_correct:,} of {result.n:,} correct", fontsize=10)
    save_figure(figure, out)


def _show(axes: Any, image: Tensor) -> None:
    """Show an image ``[C, H, W]``, or two objects ``[2, C, H, W]`` in two colors."""
    axes.imshow(_to_rgb(image.float()).permute(1, 2, 0).clamp(0, 1).numpy(), interpolation="nearest")


def _to_rgb(image: Tensor) -> Tensor:
    """Return an image as RGB ``[3, H, W]`` in 0..1: of two objects ``[2, C, H, W]``, an overlay in two colors."""
    if image.ndim == 4:
        image = overlay_two_colors(*image[:2]) if len(image) > 1 else image[0]
    return as_rgb(image)


def draw_prediction(prediction: Prediction, classes: tuple[str, ...], out: Path) -> None:
    """Draw the model's input, its reconstruction and the scores of the classes.

    Args:
        prediction: of one image.
        classes: names.
        out: the file.
    """
    images = [("input", prediction.image)]
    if prediction.reconstruction is not None:
        images.append(("reconstruction", prediction.reconstruction))
    figure = new_figure(2.2 * len(images) + 3.2 + 0.06 * max(map(len, classes)), 2.7)
    axes = figure.subplots(1, len(images) + 1, width_ratios=[1] * len(images) + [1.4])
    for image_axes, (title, image) in zip(axes, images, strict=False):
        _show(image_axes, image)
        image_axes.set_axis_off()
        image_axes.set_title(title, fontsize=9)
    order = sorted(range(len(classes)), key=lambda index: -prediction.scores[index])[:12]
    order = sorted(order) if len(classes) <= 12 else order
    colors = [CORRECT_COLOR if classes[index] in prediction.classes else "#9e9e9e" for index in order]
    axes[-1].barh(range(len(order)), [prediction.scores[index] for index in order], color=colors)
    axes[-1].set_yticks(range(len(order)), [classes[index] for index in order], fontsize=8)
    axes[-1].invert_yaxis()
    axes[-1].set_xlim(0, 1)
    axes[-1].set_xlabel("score", fontsize=8)
    axes[-1].spines[["top", "right"]].set_visible(False)
    axes[-1].set_title(" and ".join(prediction.classes) or "no class", fontsize=10)
    save_figure(figure, out)


def write_image(image: Tensor, out: Path) -> None:
    """Write an image as PNG, one file pixel per image pixel; two objects in two colors."""
    pixels = (_to_rgb(image).clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous()
    picture = import_optional("PIL.Image", "writing images").fromarray(pixels.numpy())
    with atomic_path(out, DataError) as temporary:
        picture.save(temporary)
