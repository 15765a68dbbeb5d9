"""Predictions of any network on test images, correct and incorrect, with reconstructions if it has a decoder."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from torchcaps._core.plotting import new_figure, save_figure
from torchcaps._core.stats import wilson_interval
from torchcaps.analysis.common import (
    Progress,
    batched_outputs,
    multi_hot_labels,
    round_robin_indices,
)
from torchcaps.analysis.reconstruction import show_objects
from torchcaps.analysis.registry import Analysis, Column, NoOptions, Subject, Summary, register_analysis
from torchcaps.models import Network

__all__ = ["Predictions", "draw_predictions", "predict_images"]

CORRECT_COLOR, INCORRECT_COLOR = "#1a7f37", "#c62828"
IMAGES_PER_ROW, MAX_ROWS = 10, 2  # of correct images, and of incorrect ones
LABEL_CHARACTERS = 13  # per line above an image


@dataclass(frozen=True)
class Predictions:
    """Predictions on images.

    Shapes:
        images ``[B, C, H, W]``: the images, or the reconstruction targets if there is one object per image and the
        model has a decoder; true, predicted ``[B, classes]``: bool; correct ``[B]``: bool, by the criterion of the
        model's paper; reconstructions ``[B, C, H, W]``, ``[B, K, C, H, W]`` or ``None``

    >>> import torch, torchcaps
    >>> model = torchcaps.create_model("capsnet_small", width=4, types=2, hidden=(8,))
    >>> images, labels = torch.rand(4, 1, 28, 28), torch.arange(4)
    >>> from torchcaps.analysis import predict_images
    >>> result = predict_images(model, images, labels)
    >>> result.predicted.shape, result.correct.shape
    (torch.Size([4, 10]), torch.Size([4]))
    """

    images: Tensor
    true: Tensor
    predicted: Tensor
    correct: Tensor
    reconstructions: Tensor | None


def predict_images(
    model: Network,
    images: Tensor,
    labels: Tensor,
    targets: Tensor | None = None,
    batch_size: int = 128,
    progress: Progress | None = None,
) -> Predictions:
    """Return the predictions of a model and, if it has a decoder, the reconstructions from the predicted capsules.

    Args:
        model: any network.
        images: ``[B, C, H, W]``, as the model takes them.
        labels: as the model takes them.
        targets: the images before colours were normalised, to be shown next to the reconstructions; by default the
            images.
        batch_size: images per forward pass.
        progress: called after each batch.

    >>> import torchcaps
    >>> model = torchcaps.create_model("capsnet_small", width=4, types=2, hidden=(8,))
    >>> result = predict_images(model, torch.rand(4, 1, 28, 28), torch.arange(4))
    >>> result.predicted.sum(1).tolist(), list(result.reconstructions.shape)
    ([1, 1, 1, 1], [4, 1, 28, 28])
    """
    if len(images) == 0 or len(labels) != len(images):
        raise ValueError(f"images and labels must have the same length above 0, got {len(images)} and {len(labels)}")
    true = multi_hot_labels(model, labels).bool().cpu()
    predicted, correct, decoded = [], [], []
    for output, part in zip(
        batched_outputs(model, images, labels, batch_size, progress=progress), labels.split(batch_size), strict=True
    ):
        correct.append(model.is_correct(output, part).cpu())
        predicted.append(model.predict_multi_hot(output).cpu())
        if output.reconstruction is not None:
            decoded.append(output.reconstruction.float().cpu())
    shown = images if targets is None or not decoded or model.n_objects != 1 else targets
    return Predictions(
        images=shown.float().cpu(),
        true=true,
        predicted=torch.cat(predicted),
        correct=torch.cat(correct),
        reconstructions=torch.cat(decoded) if decoded else None,
    )


# Figure -------------------------------------------------------------------------------------------------------------


def draw_predictions(
    result: Predictions, out: Path | str, title: str = "", classes: Sequence[str] | None = None
) -> None:
    """Draw correct predictions, then incorrect ones, one of each class in turn, above their reconstructions.

    Args:
        result: the return value of `predict_images`.
        out: the file, .png, .svg or .pdf.
        title: above the figure.
        classes: class names, by default their indices.

    >>> import torch, torchcaps
    >>> model = torchcaps.create_model("capsnet_small", width=4, types=2, hidden=(8,))
    >>> draw_predictions(predict_images(model, torch.rand(4, 1, 28, 28), torch.arange(4)), "fig.png")
    """
    first_labels = result.true.to(torch.uint8).argmax(1)
    rows = []
    for mask in (result.correct, ~result.correct):
        indices = round_robin_indices(first_labels, mask)[: MAX_ROWS * IMAGES_PER_ROW]
        rows += [indices[start : start + IMAGES_PER_ROW] for start in range(0, len(indices), IMAGES_PER_ROW)]
    n_lines = 1 if result.reconstructions is None else 2
    labels = {i: _label(result.true[i], result.predicted[i], classes) for row in rows for i in row}
    label_height = 0.13 * max((label.count("\n") for label in labels.values()), default=0)  # of the further lines
    height = len(rows) * (n_lines * 0.95 + 0.3 + label_height) + 0.7 + label_height
    figure = new_figure(IMAGES_PER_ROW * 0.95 + 0.2, height, layout=None)
    top = 1 - (0.8 + label_height) / height
    figure.subplots_adjust(left=0.01, right=0.99, bottom=0.02, top=top, hspace=0.35)
    outer = figure.add_gridspec(len(rows), 1, hspace=0.3 + label_height / (n_lines * 0.95))
    for row_index, row in enumerate(rows):
        grid = outer[row_index].subgridspec(n_lines, IMAGES_PER_ROW, hspace=0.04, wspace=0.06).subplots(squeeze=False)
        for axes in grid.flat:
            axes.set_axis_off()
        for column, index in enumerate(row):
            show_objects(grid[0][column], result.images[index])
            color = CORRECT_COLOR if result.correct[index] else INCORRECT_COLOR
            grid[0][column].set_title(labels[index], fontsize=8, color=color, pad=3)
            if result.reconstructions is not None:
                show_objects(grid[1][column], result.reconstructions[index])
    heading = f"{title}: " if title else ""
    heading += f"{int(result.correct.sum()):,} of {len(result.correct):,} correct"
    legend = "green: correct; red: incorrect, true class → predicted class"
    legend += "; lower rows: reconstructions" if n_lines == 2 else ""
    figure.suptitle(f"{heading}\n{legend}", fontsize=10, y=1 - 0.08 / height, va="top")
    save_figure(figure, out)


def _label(true: Tensor, predicted: Tensor, classes: Sequence[str] | None) -> str:
    """Return the true classes, followed by the predicted ones if they differ."""
    shown = [str(n) for n in range(len(true))] if classes is None else classes
    names = ["+".join(shown[int(n)] for n in hot.nonzero()[:, 0].tolist()) or "none" for hot in (true, predicted)]
    if names[0] == names[1]:
        return textwrap.fill(names[0], LABEL_CHARACTERS)
    text = "→".join(names)
    if len(text) <= LABEL_CHARACTERS:
        return text
    return "\n".join(textwrap.fill(part, LABEL_CHARACTERS) for part in (names[0], f"→ {names[1]}"))


# Declaration --------------------------------------------------------------------------------------------------------


def _run(subject: Subject, options: NoOptions) -> Predictions:
    """Predict the classes of the subject's images."""
    batch = subject.batch()
    return predict_images(
        subject.model,
        batch.images,
        batch.labels,
        batch.targets,
        subject.batch_size,
        subject.track(subject.n_batches()),
    )


def _summarize(result: Predictions, classes: Sequence[str]) -> Summary:
    """Return the summary table: recall and precision, by class."""
    n_images, n_correct = len(result.correct), int(result.correct.sum())
    rows = {}
    for label in range(result.true.shape[1]):
        present, predicted = result.true[:, label], result.predicted[:, label]
        n_present, n_predicted, n_both = int(present.sum()), int(predicted.sum()), int((present & predicted).sum())
        rows[classes[label]] = {
            "images": n_present,
            "recall": n_both / n_present if n_present else None,
            "precision": n_both / n_predicted if n_predicted else None,
        }
    columns = {
        "images": Column("images", ",d"),
        "recall": Column("recall", "percent"),
        "precision": Column("precision", "percent"),
    }
    low, high = wilson_interval(n_correct, n_images)
    note = f"Accuracy {100 * n_correct / n_images:.2f} % (95 % interval {100 * low:.2f} to {100 * high:.2f} %)."
    details = {"accuracy": n_correct / n_images, "interval": (low, high)}
    return Summary("predictions by class", n_images, "class", columns, rows, (note,), details)


PREDICTIONS = register_analysis(
    Analysis(
        "predictions",
        "correct and incorrect predictions, with reconstructions if the network has a decoder",
        _run,
        _summarize,
        draw_predictions,
        n_images=2_000,
    )
)
