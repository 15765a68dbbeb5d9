"""Reconstructions from the capsule of the label and from that of the prediction: Sabour 2017, Figure 3."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchcaps._core.labels import split_labels
from torchcaps._core.plotting import new_figure, overlay_two_colors, save_figure, show_image
from torchcaps._core.stats import wilson_interval
from torchcaps.analysis.common import Progress, batched_outputs, eval_mode, require_decoder, round_robin_indices
from torchcaps.analysis.registry import Analysis, Column, NoOptions, Subject, Summary, register_analysis
from torchcaps.models import Network
from torchcaps.models.heads import SharedClassifier

__all__ = ["Reconstructions", "draw_reconstructions", "reconstruct", "show_objects"]


@dataclass(frozen=True)
class Reconstructions:
    """Images with their reconstructions by label and by prediction.

    Shapes:
        images ``[B, C, H, W]``; labels, predictions ``[B]``, or ``[B, K]`` for ``K`` objects per image, correct
        predictions at the positions of their labels; targets, by_label, by_prediction ``[B, C, H, W]`` or
        ``[B, K, C, H, W]``; correct ``[B]``, bool; confidence ``[B]``, the (mean) score of the predicted classes;
        error_by_label, error_by_prediction ``[B]``, squared error summed over an image

    >>> import torch, torchcaps
    >>> model = torchcaps.create_model("capsnet_small", width=4, types=2, hidden=(8,))
    >>> images, labels = torch.rand(4, 1, 28, 28), torch.arange(4)
    >>> from torchcaps.analysis import reconstruct
    >>> result = reconstruct(model, images, labels)
    >>> result.by_label.shape
    torch.Size([4, 1, 28, 28])
    """

    images: Tensor
    targets: Tensor
    labels: Tensor
    predictions: Tensor
    by_label: Tensor
    by_prediction: Tensor
    correct: Tensor
    confidence: Tensor
    error_by_label: Tensor
    error_by_prediction: Tensor


def reconstruct(
    model: Network,
    images: Tensor,
    labels: Tensor,
    targets: Tensor | None = None,
    batch_size: int = 128,
    progress: Progress | None = None,
) -> Reconstructions:
    """Decode the capsule of the label and that of the prediction, all others masked: Sabour 2017, Figure 3.

    Args:
        model: a capsule network with a decoder.
        images: ``[B, C, H, W]``, as the model takes them.
        labels: ``[B]``, or ``[B, K]`` for ``K`` objects per image.
        targets: the reconstruction targets, by default the images; for several objects each of them alone,
            ``[B, K, C, H, W]``.
        batch_size: images per forward pass.
        progress: called after each batch.

    >>> import torchcaps
    >>> model = torchcaps.create_model("capsnet_small", width=4, types=2, hidden=(8,))
    >>> list(reconstruct(model, torch.rand(2, 1, 28, 28), torch.tensor([3, 8])).by_label.shape)
    [2, 1, 28, 28]
    """
    network = require_decoder(model, "reconstruction")
    if len(images) == 0:
        raise ValueError("images must contain at least one image, got none")
    indices = split_labels(labels, network.spec.classes, network.n_objects or 1)[0]
    if len(indices) != len(images):
        raise ValueError(f"labels must have one entry per image ({len(images)}), got {list(labels.shape)}")
    shape = (*indices.shape, *network.spec.image)
    if targets is None:
        if indices.dim() == 2:
            raise ValueError(f"targets must be given for several objects per image: each alone, {list(shape)}")
        targets = images
    if targets.shape != shape:
        raise ValueError(f"targets must be {list(shape)}, got {list(targets.shape)}")
    poses, all_scores = [], []
    for output in batched_outputs(network, images, None, batch_size, progress=progress):
        assert output.capsules is not None
        poses.append(output.capsules.pose)
        all_scores.append(output.scores)
    scores = torch.cat(all_scores)
    predictions = network.predict(scores, indices if indices.dim() == 2 else None).cpu()
    with eval_mode(network):
        by_label, by_prediction = (
            torch.cat(
                [
                    network.decode(pose, part)
                    for pose, part in zip(poses, selected.to(scores.device).split(batch_size), strict=True)
                ]
            ).cpu()
            for selected in (indices, predictions)
        )
    scores = scores.cpu()
    if isinstance(network.head, SharedClassifier):
        scores = scores.softmax(-1)  # logits of different images are not comparable
    confidence = scores.gather(1, predictions.reshape(len(scores), -1)).mean(1)
    correct = (predictions == indices.cpu()).reshape(len(images), -1).all(1)
    targets = targets.cpu()
    errors = [(decoded - targets).pow(2).flatten(1).sum(1) for decoded in (by_label, by_prediction)]
    return Reconstructions(
        images.cpu(), targets, indices.cpu(), predictions, by_label, by_prediction, correct, confidence, *errors
    )


# Figure -------------------------------------------------------------------------------------------------------------


def show_objects(axes: Any, image: Tensor) -> None:
    """Show an image ``[C, H, W]``, or two objects ``[2, C, H, W]`` overlaid in two colours."""
    if image.dim() == 4:
        image = overlay_two_colors(image[0], image[1]) if len(image) > 1 else image[0]
    show_image(axes, image)


def draw_reconstructions(
    result: Reconstructions, out: Path | str, title: str = "", n: int = 10, counts: tuple[int, int] | None = None
) -> None:
    """Draw inputs above outputs, with label, prediction and reconstruction target (l, p, r): Sabour 2017, Figure 3.

    First up to ``n`` correctly classified images, then up to ``n / 2`` incorrect ones, the most confident first, each
    reconstructed by its label and by its prediction.

    Args:
        result: the return value of `reconstruct`.
        out: the file, .png, .svg or .pdf.
        title: above the figure.
        n: columns, 2 or more.
        counts: number of correct images and of all images, if ``result`` has a selection of them only.

    >>> import torch, torchcaps
    >>> model = torchcaps.create_model("capsnet_small", width=4, types=2, hidden=(8,))
    >>> draw_reconstructions(reconstruct(model, torch.rand(4, 1, 28, 28), torch.arange(4)), "fig.png")
    """
    if n < 2:
        raise ValueError(f"n must be 2 columns or more, got {n}")
    correct = round_robin_indices(result.labels, result.correct)[:n]
    incorrect = (~result.correct).nonzero()[:, 0]
    incorrect = incorrect[result.confidence[incorrect].argsort(descending=True, stable=True)].tolist()
    columns = [[(index, result.labels[index], result.by_label[index]) for index in correct]]
    columns.append([])
    for index in incorrect[: n // 2]:
        columns[1].append((index, result.labels[index], result.by_label[index]))
        columns[1].append((index, result.predictions[index], result.by_prediction[index]))
    several = result.labels.dim() == 2
    side, gap, left = (1.0 if several else 0.75), (0.62 if several else 0.36), 0.62
    width = left + side * max(n, 6) + 0.1
    tops = [0.36 + gap, 0.36 + gap + 2 * side + gap + 0.4]
    height = tops[1] + (2 * side + 0.1 if columns[1] else 0.15 - gap)
    figure = new_figure(width, height, layout=None)

    def write(x: float, y: float, text: str, **options: Any) -> None:
        figure.text(x / width, 1 - y / height, text, fontsize=8, **options)

    n_correct, n_images = counts or (int(result.correct.sum()), len(result.correct))
    heading = f"{n_correct:,} of {n_images:,} images correct"
    write(width / 2, 0.06, f"{title}: {heading}" if title else heading, ha="center", va="top")
    write(0.08, 0.3, "correct; (l, p, r): label, prediction, reconstructed class", va="top")
    heading = f"incorrect: {n_images - n_correct:,}, the most confident first, reconstructed by label and by prediction"
    write(0.08, tops[1] - gap - 0.1, heading if incorrect else "incorrect: none", va="top")
    if not correct:
        write(left, tops[0] + side, "none", va="center")
    for top, group in zip(tops, columns, strict=True):
        if group:
            write(0.08, top + side / 2, "input", va="center")
            write(0.08, top + 1.5 * side, "output", va="center")
        for column, (index, target, decoded) in enumerate(group):
            x = left + side * column
            names = [_join_indices(value) for value in (result.labels[index], result.predictions[index], target)]
            lines = "\n".join(f"{letter} {name}" for letter, name in zip("lpr", names, strict=True))
            write(x + side / 2, top - 0.04, lines if several else f"({', '.join(names)})", ha="center", va="bottom")
            for row, image in enumerate((result.images[index], decoded)):
                box = (x / width, 1 - (top + side * (row + 1)) / height, 0.94 * side / width, 0.94 * side / height)
                show_objects(figure.add_axes(box), image)
    save_figure(figure, out)


def _join_indices(indices: Tensor) -> str:
    return str(int(indices)) if indices.dim() == 0 else "+".join(str(index) for index in indices.tolist())


# Declaration --------------------------------------------------------------------------------------------------------


def _run(subject: Subject, options: NoOptions) -> Reconstructions:
    """Reconstruct the subject's images from the capsules of their labels and of the predictions."""
    batch = subject.batch()
    return reconstruct(
        subject.model,
        batch.images,
        batch.labels,
        batch.targets,
        subject.batch_size,
        subject.track(subject.n_batches()),
    )


def _summarize(result: Reconstructions, classes: Sequence[str]) -> Summary:
    """Return the summary table: mean reconstruction errors of correctly and of incorrectly classified images."""
    rows: dict[str, dict[str, Any]] = {}
    for name, mask in (("correct", result.correct), ("incorrect", ~result.correct)):
        errors = (result.error_by_label, result.error_by_prediction)
        means = [float(error[mask].mean()) if bool(mask.any()) else None for error in errors]
        rows[name] = {"images": int(mask.sum()), "error_by_label": means[0], "error_by_prediction": means[1]}
    columns = {
        "images": Column("images", ",d"),
        "error_by_label": Column("error by label", ".2f"),
        "error_by_prediction": Column("error by prediction", ".2f"),
    }
    n_images, n_correct = len(result.correct), rows["correct"]["images"]
    low, high = wilson_interval(n_correct, n_images)
    notes = (
        f"Accuracy {100 * n_correct / n_images:.2f} % (95 % interval {100 * low:.2f} to {100 * high:.2f} %).",
        "Errors are squared errors, summed over an image and averaged over images.",
    )
    details = {"accuracy": n_correct / n_images, "interval": (low, high)}
    title = "reconstruction error by label and by prediction"
    return Summary(title, n_images, "prediction", columns, rows, notes, details)


RECONSTRUCTION = register_analysis(
    Analysis(
        "reconstruction",
        "reconstructions from the capsules of label and prediction, correct and incorrect images",
        _run,
        _summarize,
        lambda result, out, title, classes: draw_reconstructions(result, out, title),
        n_images=1_000,
    )
)
