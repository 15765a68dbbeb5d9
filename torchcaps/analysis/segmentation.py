"""Segmentation of overlapping digits by their reconstructions: Sabour 2017, section 6 and Figure 5."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchcaps._core.plotting import new_figure, save_figure
from torchcaps._core.stats import wilson_interval
from torchcaps.analysis.common import Progress, batched_outputs, require_decoder, round_robin_indices
from torchcaps.analysis.reconstruction import reconstruct, show_objects
from torchcaps.analysis.registry import Analysis, Column, Subject, Summary, register_analysis
from torchcaps.models import Network

__all__ = ["Segmentation", "SegmentationOptions", "draw_segmentation", "intersection_over_union", "segment"]


@dataclass(frozen=True)
class Segmentation:
    """Objects of an image segmented by their reconstructions, and the scores.

    Shapes:
        images ``[B, C, H, W]``; labels, predictions ``[B, K]``, correct predictions at the positions of their labels;
        correct ``[B]``, bool; by_label, by_prediction ``[B, K, C, H, W]``, reconstructions; masks_by_label,
        masks_by_prediction, truth ``[B, K, H, W]``, bool; iou_by_label, iou_by_prediction, baseline ``[B, K]``,
        intersection over union with the true foreground, the baseline with the image's foreground as every object's
        mask; absent ``[B]``, a class that is neither label nor prediction, absent_decoded ``[B, C, H, W]`` its
        reconstruction, and absent_foreground ``[B]`` the number of foreground pixels of that over the image's. Then the
        means, and the threshold of the foreground.

    >>> import torch, torchcaps
    >>> model = torchcaps.create_model("sabour2017_multimnist", width=4, types=2, hidden=(8,))
    >>> images, labels, targets = torch.rand(2, 1, 36, 36), torch.tensor([[0, 1], [2, 3]]), torch.rand(2, 2, 1, 36, 36)
    >>> from torchcaps.analysis import segment
    >>> result = segment(model, images, labels, targets)
    >>> result.masks_by_label.shape, result.threshold
    (torch.Size([2, 2, 36, 36]), 0.5)
    """

    images: Tensor
    labels: Tensor
    predictions: Tensor
    correct: Tensor
    by_label: Tensor
    by_prediction: Tensor
    masks_by_label: Tensor
    masks_by_prediction: Tensor
    truth: Tensor
    iou_by_label: Tensor
    iou_by_prediction: Tensor
    baseline: Tensor
    absent: Tensor
    absent_decoded: Tensor
    absent_foreground: Tensor
    mean_by_label: float
    mean_by_prediction: float
    mean_baseline: float
    mean_absent_foreground: float
    threshold: float


def segment(
    model: Network,
    images: Tensor,
    labels: Tensor,
    targets: Tensor,
    threshold: float = 0.5,
    batch_size: int = 128,
    seed: int = 0,
    progress: Progress | None = None,
) -> Segmentation:
    """Assign each pixel to every object whose reconstruction covers it: Sabour 2017, section 6 and Figure 5.

    Each object is reconstructed from the capsule of its class alone and compared with its true foreground by
    intersection over union. The baseline uses the image's foreground as the mask of every object: a reconstruction has
    to beat it to segment at all. The image is the sum of its objects, clipped at 1, as in MultiMNIST.

    Args:
        model: a capsule network with a decoder, for several objects per image.
        images: ``[B, C, H, W]``, as the model takes them.
        labels: class indices ``[B, K]``, or zeros and ones ``[B, classes]``.
        targets: each object alone, ``[B, K, C, H, W]`` in 0..1, in the order of the labels.
        threshold: pixels above it are foreground.
        batch_size: images per forward pass.
        seed: seed of the absent classes, which are drawn at random.
        progress: called after each batch.

    Deviation: the paper assigns a pixel to all digits with "non-zero intensity" and gives no score, but a sigmoid is
    never zero. Here foreground is above ``threshold``, for reconstructions and targets alike. At 0.5 a reconstruction
    that minimises the squared error marks pixels that are more likely foreground than background; blurred
    reconstructions hardly reach it and score better with a lower threshold.

    >>> import torch, torchcaps
    >>> model = torchcaps.create_model("sabour2017_multimnist", width=4, types=2, hidden=(8,))
    >>> images, labels, targets = torch.rand(2, 1, 36, 36), torch.tensor([[0, 1], [2, 3]]), torch.rand(2, 2, 1, 36, 36)
    >>> segment(model, images, labels, targets).iou_by_label.shape
    torch.Size([2, 2])
    """
    network = require_decoder(model, "segmentation")
    if network.n_objects is None or network.n_objects < 2:
        raise ValueError(
            f"segmentation needs several objects per image, but {network.name} takes one: "
            "use a model such as sabour2017_multimnist"
        )
    if not 0 < threshold < 1:
        raise ValueError(f"threshold must lie between 0 and 1, got {threshold}")
    if network.spec.classes <= 2 * network.n_objects:
        raise ValueError(
            f"segmentation needs a class that is neither label nor prediction: more than {2 * network.n_objects} "
            f"classes, got {network.spec.classes}"
        )
    decoded = reconstruct(network, images, labels, targets, batch_size, progress)
    masks_by_label = _foreground(decoded.by_label, threshold)
    masks_by_prediction = _foreground(decoded.by_prediction, threshold)
    truth = _foreground(decoded.targets, threshold)
    image_mask = _foreground(decoded.targets.sum(1).clamp(max=1), threshold)  # [B, H, W]
    by_label = intersection_over_union(masks_by_label, truth)
    by_prediction = intersection_over_union(masks_by_prediction, truth)
    baseline = intersection_over_union(image_mask.unsqueeze(1).expand_as(truth), truth)
    absent = _draw_absent_classes(decoded.labels, decoded.predictions, network.spec.classes, seed)
    parts = []
    for batch_index, output in enumerate(batched_outputs(network, images, None, batch_size)):
        classes = absent[batch_index * batch_size : (batch_index + 1) * batch_size]
        parts.append(network.decode(output, classes.to(output.scores.device)).cpu())
    absent_decoded = torch.cat(parts)
    n_absent = _foreground(absent_decoded, threshold).flatten(1).sum(1)
    absent_foreground = n_absent / image_mask.flatten(1).sum(1).clamp_min(1)
    return Segmentation(
        images=decoded.images,
        labels=decoded.labels,
        predictions=decoded.predictions,
        correct=decoded.correct,
        by_label=decoded.by_label,
        by_prediction=decoded.by_prediction,
        masks_by_label=masks_by_label,
        masks_by_prediction=masks_by_prediction,
        truth=truth,
        iou_by_label=by_label,
        iou_by_prediction=by_prediction,
        baseline=baseline,
        absent=absent,
        absent_decoded=absent_decoded,
        absent_foreground=absent_foreground,
        mean_by_label=float(by_label.double().mean()),
        mean_by_prediction=float(by_prediction.double().mean()),
        mean_baseline=float(baseline.double().mean()),
        mean_absent_foreground=float(absent_foreground.double().mean()),
        threshold=threshold,
    )


def _foreground(images: Tensor, threshold: float) -> Tensor:
    """Return whether any channel is above the threshold: ``[..., C, H, W] -> [..., H, W]``."""
    return images.amax(-3) > threshold


def intersection_over_union(masks: Tensor, truth: Tensor) -> Tensor:
    """Return the intersection over union of two masks; 1 if both are empty.

    Shapes:
        bool ``[..., H, W] -> [...]``

    >>> masks, truth = torch.tensor([[[True, True], [False, False]]]), torch.tensor([[[True, False], [False, False]]])
    >>> intersection_over_union(masks, truth)
    tensor([0.5000])
    """
    intersection, union = ((m.flatten(-2).sum(-1)).double() for m in (masks & truth, masks | truth))
    return torch.where(union > 0, intersection / union.clamp_min(1), 1.0).float()


def _draw_absent_classes(labels: Tensor, predictions: Tensor, n_classes: int, seed: int) -> Tensor:
    """Draw for each image a class that is neither a label nor predicted: ``[B]``."""
    present = torch.zeros(len(labels), n_classes).scatter_(1, labels, 1.0).scatter_(1, predictions, 1.0)
    return torch.multinomial(1 - present, 1, generator=torch.Generator().manual_seed(seed))[:, 0]


# Figure -------------------------------------------------------------------------------------------------------------


def draw_segmentation(
    result: Segmentation, out: Path | str, title: str = "", n: int = 8, counts: tuple[int, int] | None = None
) -> None:
    """Draw images above the reconstructions of their two digits, in orange and blue: Sabour 2017, Figure 5.

    Above each image are R, the reconstructed classes, and L, the labels. First ``n`` correctly classified images, then
    up to ``n / 2`` incorrect ones, reconstructed by label (R:l) and by prediction (R:p), then ``n`` pairs of a label
    and a class that is neither label nor prediction (*), which should be invisible.

    Args:
        result: the return value of `segment`.
        out: the file, .png, .svg or .pdf.
        title: above the figure.
        n: columns, 2 or more.
        counts: number of correct images and of all images, if ``result`` has a selection of them only.

    >>> import torch, torchcaps
    >>> model = torchcaps.create_model("sabour2017_multimnist", width=4, types=2, hidden=(8,))
    >>> labels, targets = torch.tensor([[0, 1], [2, 3]]), torch.rand(2, 2, 1, 36, 36)
    >>> result = segment(model, torch.rand(2, 1, 36, 36), labels, targets)
    >>> draw_segmentation(result, "fig.png")
    """
    if n < 2:
        raise ValueError(f"n must be 2 columns or more, got {n}")
    correct = round_robin_indices(result.labels, result.correct)
    incorrect = round_robin_indices(result.labels, ~result.correct)
    failures = []
    for index in incorrect[: n // 2]:
        label, predicted = result.labels[index].tolist(), result.predictions[index].tolist()
        failures.append((index, f"R:l{_join_classes(label)}", result.by_label[index]))
        failures.append((index, f"R:p{_join_classes(predicted)}", result.by_prediction[index]))
    absent = []
    for index in (correct[n:] + correct[:n] or incorrect)[:n]:
        label, other = int(result.labels[index, 0]), int(result.absent[index])
        pair = torch.stack([result.by_label[index, 0], result.absent_decoded[index]])
        absent.append((index, f"R:({label}, {other}*)", pair))
    examples = [
        (index, f"R:{_join_classes(result.labels[index].tolist())}", result.by_label[index]) for index in correct[:n]
    ]
    iou = f"IoU {result.mean_by_label:.3f} by label, {result.mean_by_prediction:.3f} by prediction"
    n_correct, n_images = counts or (len(correct), len(result.correct))
    absent_percent = 100 * result.mean_absent_foreground
    groups = [
        (f"correct: {n_correct:,} of {n_images:,} images", examples),
        (f"incorrect: {n_images - n_correct:,}" if incorrect else "incorrect: none", failures),
        (f"*: class neither present nor predicted; {absent_percent:.1f} % of the image's foreground pixels", absent),
    ]
    subtitle = f"baseline {result.mean_baseline:.3f}: image foreground as both masks; threshold {result.threshold:g}"
    _draw_groups(groups, f"{title}: {iou}" if title else iou, subtitle, result, n, out)


def _draw_groups(
    groups: list[tuple[str, list[Any]]], title: str, subtitle: str, result: Segmentation, n: int, out: Path | str
) -> None:
    """Draw each group as a heading and columns of input and coloured reconstructions."""
    side, left = 0.95, 0.62
    width = left + side * max(n, 6) + 0.1
    heights = [0.75 + 2 * side if columns else 0.4 for _, columns in groups]
    height = 0.5 + sum(heights) + 0.05
    figure = new_figure(width, height, layout=None)

    def write(x: float, y: float, text: str, **options: Any) -> None:
        figure.text(x / width, 1 - y / height, text, **{"fontsize": 8, **options})

    write(width / 2, 0.06, f"{title}\n{subtitle}", ha="center", va="top")
    top = 0.5
    for (heading, columns), group_height in zip(groups, heights, strict=True):
        write(0.08, top + 0.04, heading, va="top", fontweight="bold")
        for row, name in enumerate(("input", "output") if columns else ()):
            write(0.08, top + 0.68 + side * (row + 0.5), name, va="center")
        for column, (index, text, pair) in enumerate(columns):
            x = left + side * column
            text = f"{text}\nL:{_join_classes(result.labels[index].tolist())}"
            write(x + 0.47 * side, top + 0.62, text, ha="center", va="bottom", fontsize=7.5)
            for row, picture in enumerate((result.images[index], pair)):
                y = top + 0.66 + side * (row + 1)
                box = (x / width, 1 - y / height, 0.94 * side / width, 0.94 * side / height)
                show_objects(figure.add_axes(box), picture)
        top += group_height
    save_figure(figure, out)


def _join_classes(classes: list[int]) -> str:
    return "(" + ", ".join(str(index) for index in classes) + ")"


# Declaration --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SegmentationOptions:
    """Options of the analysis ``segmentation``.

    Args:
        threshold: pixels above it are foreground, between 0 and 1.
        seed: seed of the absent classes.
    """

    threshold: float = 0.5
    seed: int = 0


def _run(subject: Subject, options: SegmentationOptions) -> Segmentation:
    """Segment the overlapping digits of the subject's images by their reconstructions."""
    batch = subject.batch()
    return segment(
        subject.model,
        batch.images,
        batch.labels,
        batch.targets,
        options.threshold,
        subject.batch_size,
        options.seed,
        subject.track(subject.n_batches()),
    )


def _summarize(result: Segmentation, classes: Sequence[str]) -> Summary:
    """Return the summary table: mean IoU of masks by label, by prediction, and of the baseline."""
    means = {
        "reconstruction by label": result.mean_by_label,
        "reconstruction by prediction": result.mean_by_prediction,
        "image foreground (baseline)": result.mean_baseline,
    }
    n_images, n_correct = len(result.correct), int(result.correct.sum())
    low, high = wilson_interval(n_correct, n_images)
    notes = (
        f"A class that is neither present nor predicted covers {100 * result.mean_absent_foreground:.2f} % of the "
        "image's foreground.",
        f"Accuracy {100 * n_correct / n_images:.2f} % (95 % interval {100 * low:.2f} to {100 * high:.2f} %).",
    )
    details = {"absent_foreground": result.mean_absent_foreground, "accuracy": n_correct / n_images}
    rows = {name: {"iou": mean} for name, mean in means.items()}
    title = f"segmentation of overlapping objects, foreground above {result.threshold:g}"
    return Summary(title, n_images, "mask", {"iou": Column("mean IoU", ".3f")}, rows, notes, details)


SEGMENTATION = register_analysis(
    Analysis(
        "segmentation",
        "segmentation of overlapping objects by their reconstructions",
        _run,
        _summarize,
        lambda result, out, title, classes: draw_segmentation(result, out, title),
        SegmentationOptions,
    )
)
