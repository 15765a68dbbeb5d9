"""Figures of a training run: learning curves, confusion matrix, reconstructions, capsule dimensions, predictions."""

import itertools
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchcaps._core.files import atomic_path
from torchcaps._core.optional import import_optional
from torchcaps._core.plotting import as_rgb, new_figure, overlay_two_colors, save_figure, style_axes
from torchcaps.capsules import Capsules
from torchcaps.data import Batch, DataError, Dataset, Loader
from torchcaps.models import CapsuleNetwork, Network
from torchcaps.training.evaluation import Measures
from torchcaps.training.predict import Prediction
from torchcaps.training.setup import some_of

__all__ = [
    "draw_confusion",
    "draw_curves",
    "draw_dimensions",
    "draw_prediction",
    "draw_reconstructions",
    "draw_run",
    "write_image",
]

CORRECT_COLOR, INCORRECT_COLOR = "#1a7f37", "#c62828"
SPLIT_COLORS = {"train": "#9e9e9e", "val": "#1565c0", "test": "#ef6c00"}
MAX_IMAGES = 2000  # test images that are searched for incorrectly classified ones
COLUMNS = 10  # images per row
OFFSETS = [round(-0.25 + 0.05 * n, 2) for n in range(11)]  # Sabour 2017, figure 4


def draw_run(
    rows: list[dict[str, Any]],
    model: Network,
    loader: Loader | None,
    result: Measures | None,
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
    draw_curves(rows, paths[0], name)
    if loader is None:
        return paths
    paths.append(directory / "reconstructions.png")
    draw_reconstructions(model, loader, paths[-1], f"{name}: ")
    if isinstance(model, CapsuleNetwork) and model.decoder is not None and model.n_objects == 1:
        paths.append(directory / "dimensions.png")
        draw_dimensions(model, loader, paths[-1], f"{name}: ")
    if result is not None and result.confusion:
        paths.append(directory / "confusion.png")
        title = f"{name}: {result.n_right:,} of {result.n:,} correct"
        draw_confusion(result, loader.dataset.classes, paths[-1], title)
    return paths


def draw_curves(rows: list[dict[str, Any]], out: Path, title: str = "") -> None:
    """Draw loss, error rate and learning rate against epochs.

    Args:
        rows: metrics, see `torchcaps.training.logging.COLUMNS`.
        out: the file.
        title: of the figure.
    """
    figure = new_figure(9, 3.4)
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
    for axes, label in ((loss_axes, "loss"), (error_axes, "error rate, %"), (lr_axes, "learning rate")):
        axes.set_xlim(left=0)
        style_axes(axes, label, "epoch")
    for axes in (loss_axes, error_axes):
        low, high = axes.get_ylim()
        if low > 0 and high / low > 20:
            axes.set_yscale("log")
        elif axes is error_axes:
            axes.set_ylim(bottom=0)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=9)
    if title:
        figure.suptitle(title, fontsize=11)
    save_figure(figure, out)


def draw_confusion(result: Measures, classes: tuple[str, ...], out: Path, title: str = "") -> None:
    """Draw the confusion matrix; the color scale shows the incorrect predictions only.

    Args:
        result: an evaluation with a confusion matrix.
        classes: names.
        out: the file.
        title: of the figure (default: the number of correct images).
    """
    matrix = torch.tensor(result.confusion)
    n = len(classes)
    side = min(14.0, 2.2 + 0.42 * n)
    figure = new_figure(side + 0.6, side)
    axes = figure.subplots()
    incorrect = matrix.clone().fill_diagonal_(0)
    image = axes.imshow(incorrect.numpy(), cmap="Reds", vmin=0, vmax=max(1, int(incorrect.max())))
    names = [name if len(name) <= 14 else name[:13] + "…" for name in classes]
    size = 9 if n <= 20 else 5
    axes.set_xticks(range(n), names, rotation=90 if max(map(len, names)) > 2 else 0, fontsize=size)
    axes.set_yticks(range(n), names, fontsize=size)
    for row, column in itertools.product(range(n), repeat=2) if n <= 30 else ():
        count = int(matrix[row, column])
        if count:
            is_dark = row != column and count > 0.6 * int(incorrect.max())
            color = CORRECT_COLOR if row == column else "white" if is_dark else "#333333"
            size = 8 if n <= 15 else 5
            axes.text(column, row, str(count), ha="center", va="center", fontsize=size, color=color)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")
    bar = figure.colorbar(image, ax=axes, label="incorrect images", shrink=0.7)
    bar.locator = import_optional("matplotlib.ticker", "drawing").MaxNLocator(integer=True)
    bar.update_ticks()
    axes.set_title(title or f"{result.n_right:,} of {result.n:,} correct", fontsize=10)
    save_figure(figure, out)


def draw_reconstructions(model: Network, loader: Loader, out: Path, title: str = "") -> None:
    """Draw test images above their reconstructions: correctly classified ones first, then incorrect ones.

    Args:
        model: a network; without a decoder, only the images are drawn.
        loader: of the test set.
        out: the file.
        title: prefix of the title.
    """
    batch, output = _run_on_some(model, loader)
    correct = model.is_correct(output, batch.labels)
    rows = []
    for indices in (round_robin_indices(batch.labels, correct), round_robin_indices(batch.labels, ~correct)):
        rows += [indices[start : start + COLUMNS] for start in range(0, min(len(indices), 2 * COLUMNS), COLUMNS)]
    decoded = output.reconstruction
    lines = 2 if decoded is not None else 1
    figure = new_figure(COLUMNS * 0.95 + 0.2, len(rows) * (lines * 0.95 + 0.3) + 0.7, layout=None)
    height = figure.get_size_inches()[1]
    figure.subplots_adjust(left=0.01, right=0.99, bottom=0.02, top=1 - 0.8 / height, hspace=0.35)
    outer = figure.add_gridspec(len(rows), 1, hspace=0.3)
    for position, row in enumerate(rows):
        grid = outer[position].subgridspec(lines, COLUMNS, hspace=0.04, wspace=0.06).subplots(squeeze=False)
        for axes in grid.flat:
            axes.set_axis_off()
        for column, index in enumerate(row):
            use_target = decoded is not None and model.n_objects == 1
            _show(grid[0][column], batch.targets[index] if use_target else batch.images[index])
            text = _label_text(model, loader.dataset, output.scores[index], batch.labels[index])
            color = CORRECT_COLOR if correct[index] else INCORRECT_COLOR
            grid[0][column].set_title(text, fontsize=8, color=color, pad=3)
            if decoded is not None:
                _show(grid[1][column], decoded[index])
    legend = "Top: images. Bottom: reconstructions. " if lines == 2 else ""
    counts = f"{int(correct.sum()):,} of {len(correct):,} correct."
    colors = "Green: correct. Red: incorrect, true → predicted class."
    figure.suptitle(f"{title}{counts}\n{legend}{colors}", fontsize=10, y=1 - 0.08 / height, va="top")
    save_figure(figure, out)


def round_robin_indices(labels: Tensor, mask: Tensor) -> list[int]:
    """Return the indices of the images in ``mask``, one of each label in turn."""
    by_label: dict[str, list[int]] = {}
    for index in mask.nonzero()[:, 0].tolist():
        by_label.setdefault(str(labels[index].tolist()), []).append(index)
    rounds = itertools.zip_longest(*(by_label[key] for key in sorted(by_label)))
    return [index for turn in rounds for index in turn if index is not None]


def draw_dimensions(model: CapsuleNetwork, loader: Loader, out: Path, title: str = "") -> None:
    """Draw reconstructions with one dimension of the class capsule perturbed per row: Sabour 2017, figure 4.

    Poses whose length is divided by ``sqrt(D)`` (Choi 2019) are perturbed by ``sqrt(D)`` times as much, as in its
    figure 3.

    Args:
        model: a network with a decoder.
        loader: of the test set.
        out: the file.
        title: prefix of the title.
    """
    batch, output = _run_on_some(model, loader)
    correct = model.is_correct(output, batch.labels).nonzero()[:, 0]
    index = int(correct[len(correct) // 3]) if len(correct) else 0
    assert output.capsules is not None
    pose = output.capsules.pose[index].float()  # [classes, D]
    label = int(model.predict(output)[index])
    dim = pose.shape[-1]
    scale = math.sqrt(dim) if getattr(model.head, "normalized", False) else 1.0
    perturbed = pose.repeat(dim, len(OFFSETS), 1, 1)  # [D, offsets, classes, D]
    for d in range(dim):
        perturbed[d, :, label, d] += scale * torch.tensor(OFFSETS)
    labels = torch.full((dim * len(OFFSETS),), label)
    with torch.no_grad():
        weight = next(model.parameters())
        decoded = model.decode(Capsules(perturbed.flatten(0, 1).to(weight)), labels.to(weight.device)).cpu().float()
    figure = new_figure(len(OFFSETS) * 0.62 + 1.2, dim * 0.62 + 0.9)
    grid = figure.subplots(dim, len(OFFSETS), squeeze=False)
    for row in range(dim):
        for column, offset in enumerate(OFFSETS):
            axes = grid[row][column]
            _show(axes, decoded[row * len(OFFSETS) + column])
            axes.set_xticks([])
            axes.set_yticks([])
            axes.spines[:].set_visible(False)
            if row == 0:
                axes.set_title(f"{offset * scale:+.2g}" if offset else "0", fontsize=8)
            if column == 0:
                axes.set_ylabel(str(row), rotation=0, fontsize=8, labelpad=8, va="center")
    class_name = loader.dataset.classes[label]
    figure.suptitle(f"{title}class {class_name!r}, one capsule dimension perturbed per row", fontsize=10)
    save_figure(figure, out)


def _run_on_some(model: Network, loader: Loader) -> tuple[Batch, Any]:
    """Run the model on up to ``MAX_IMAGES`` images; return them and the outputs on the CPU."""
    model.eval()
    device = next(model.parameters()).device
    subset = some_of(loader.dataset, MAX_IMAGES)
    batches, outputs = [], []
    for batch in Loader(subset, loader.batch_size, pipeline=loader.pipeline, train=False).epoch(0):
        with torch.no_grad():
            outputs.append(model(batch.images.to(device), batch.labels.to(device)))
        batches.append(batch.to("cpu"))
    joined = Batch(*(torch.cat([getattr(b, name) for b in batches]) for name in Batch._fields))
    first = outputs[0]
    scores = torch.cat([o.scores for o in outputs]).cpu().float()
    decoded = capsules = None
    if first.reconstruction is not None:
        decoded = torch.cat([o.reconstruction for o in outputs]).cpu().float()
    if first.capsules is not None:
        capsules = Capsules(torch.cat([o.capsules.pose for o in outputs]).cpu())
    return joined, first._replace(scores=scores, reconstruction=decoded, capsules=capsules)


def _show(axes: Any, image: Tensor) -> None:
    """Show an image ``[C, H, W]``, or two objects ``[2, C, H, W]`` in two colors."""
    axes.imshow(_to_rgb(image.float()).permute(1, 2, 0).clamp(0, 1).numpy(), interpolation="nearest")


def _to_rgb(image: Tensor) -> Tensor:
    if image.ndim == 4:
        image = overlay_two_colors(*image[:2]) if len(image) > 1 else image[0]
    return as_rgb(image)


def _label_text(model: Network, dataset: Dataset, scores: Tensor, labels: Tensor) -> str:
    """Return the true class; followed by the predicted one, if the prediction is incorrect."""

    def names(indices: list[int]) -> str:
        return "+".join(dataset.classes[index][:8] for index in sorted(indices)) or "none"

    predicted = model.predict_multi_hot(scores.unsqueeze(0))[0].nonzero()[:, 0].tolist()
    if model.n_objects is None:
        true = labels.nonzero()[:, 0].tolist()
    else:
        true = [int(labels)] if model.n_objects == 1 else labels.tolist()
    return names(true) if set(true) == set(predicted) else f"{names(true)}→{names(predicted)}"


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
    figure = new_figure(2.2 * len(images) + 3.2, 2.6)
    axes = figure.subplots(1, len(images) + 1, width_ratios=[1] * len(images) + [1.4])
    for image_axes, (title, image) in zip(axes, images, strict=False):
        _show(image_axes, image)
        image_axes.set_axis_off()
        image_axes.set_title(title, fontsize=9)
    order = sorted(range(len(classes)), key=lambda index: -prediction.scores[index])[:12]
    order = sorted(order) if len(classes) <= 12 else order
    colors = [CORRECT_COLOR if classes[index] in prediction.classes else "#9e9e9e" for index in order]
    axes[-1].barh(range(len(order)), [prediction.scores[index] for index in order], color=colors)
    axes[-1].set_yticks(range(len(order)), [classes[index][:16] for index in order], fontsize=8)
    axes[-1].invert_yaxis()
    axes[-1].set_xlim(0, 1)
    axes[-1].spines[["top", "right"]].set_visible(False)
    axes[-1].set_title(" and ".join(prediction.classes) or "no class", fontsize=10)
    save_figure(figure, out)


def write_image(image: Tensor, out: Path) -> None:
    """Write an image as PNG, one file pixel per image pixel; two objects in two colors."""
    pixels = (_to_rgb(image).clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous()
    picture = import_optional("PIL.Image", "writing images").fromarray(pixels.numpy())
    with atomic_path(out, DataError) as temporary:
        picture.save(temporary)
