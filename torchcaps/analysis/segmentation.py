"""Which pixel belongs to which of two digits that lie over each other."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchcaps._core.plotting import new_figure, save_figure
from torchcaps.analysis.common import Progress, outputs, require_decoder
from torchcaps.analysis.reconstruction import mixed, reconstruct, show_objects
from torchcaps.models import CapsuleNetwork

__all__ = ["Segmentation", "draw_segmentation", "intersection_over_union", "segment"]


@dataclass(frozen=True)
class Segmentation:
    """Two objects of an image told apart by their decodes, with how well that went.

    Shapes:
        images ``[B, C, H, W]``; labels, predictions ``[B, K]``, right predictions in the places of their labels;
        right ``[B]``; by_label, by_prediction ``[B, K, C, H, W]``, decodes; masks_by_label, masks_by_prediction, truth
        ``[B, K, H, W]``, truth values; iou_by_label, iou_by_prediction, baseline ``[B, K]``, intersection over union
        with the true ink, the baseline with all ink of the image given to every object; absent ``[B]``, a class that is
        neither label nor prediction, absent_decoded ``[B, C, H, W]`` its decode and absent_ink ``[B]`` the inked pixels
        of that over those of the image: 0 where nothing is drawn. Last the means, and the threshold of ink.
    """

    images: Tensor
    labels: Tensor
    predictions: Tensor
    right: Tensor
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
    absent_ink: Tensor
    mean_by_label: float
    mean_by_prediction: float
    mean_baseline: float
    mean_absent_ink: float
    threshold: float


def segment(
    model: CapsuleNetwork,
    images: Tensor,
    labels: Tensor,
    targets: Tensor,
    threshold: float = 0.5,
    batch_size: int = 128,
    seed: int = 0,
    progress: Progress | None = None,
) -> Segmentation:
    """Give each pixel to every object whose decode inks it: Sabour 2017, section 6 and figure 5.

    Each object is decoded by itself, from the capsule of its class, and compared with its true ink: intersection
    over union. The baseline gives all ink of the image to every object: what a decode must beat to have told
    objects apart. The image's ink is that of its objects added up, at most 1, as MultiMNIST makes images.

    Deviation: the paper gives a pixel to all digits with "non-zero intensity", but a sigmoid is never zero, and
    gives no score. Here ink is what lies over ``threshold``, the same for decodes and targets. Half is where a decode
    that is best in squared error says that ink is likelier than paper; decodes that are still blurred hardly get there,
    and score better at a lower one.

    Args:
        model: one with a decoder, for images of several objects.
        images: as the model takes them.
        labels: ``[B, K]`` class numbers, or zeros and ones ``[B, classes]``.
        targets: each object alone, ``[B, K, C, H, W]`` in 0..1, in the order of the labels.
        threshold: of ink.
        batch_size: images at a time.
        seed: of the absent classes, which are drawn at random.
        progress: called after each batch.
    """
    network = require_decoder(model, "segmentation")
    if network.n_objects is None or network.n_objects < 2:
        raise ValueError(
            f"segmentation needs images of several objects, and {network.name} takes them with one: "
            "take a model such as sabour2017_multimnist"
        )
    if not 0 < threshold < 1:
        raise ValueError(f"threshold must lie between 0 and 1, got {threshold}")
    if network.spec.classes <= 2 * network.n_objects:
        raise ValueError(
            f"segmentation needs a class that is neither label nor prediction: more than {2 * network.n_objects} "
            f"classes, got {network.spec.classes}"
        )
    found = reconstruct(network, images, labels, targets, batch_size, progress)
    masks_by_label, masks_by_prediction = _ink(found.by_label, threshold), _ink(found.by_prediction, threshold)
    truth = _ink(found.targets, threshold)
    whole = _ink(found.targets.sum(1).clamp(max=1), threshold)  # [B, H, W]
    by_label = intersection_over_union(masks_by_label, truth)
    by_prediction = intersection_over_union(masks_by_prediction, truth)
    baseline = intersection_over_union(whole.unsqueeze(1).expand_as(truth), truth)
    absent = _absent(found.labels, found.predictions, network.spec.classes, seed)
    drawn = []
    for number, output in enumerate(outputs(network, images, None, batch_size)):
        part = absent[number * batch_size : (number + 1) * batch_size]
        drawn.append(network.decode(output, part.to(output.scores.device)).cpu())
    absent_decoded = torch.cat(drawn)
    absent_ink = _ink(absent_decoded, threshold).flatten(1).sum(1) / whole.flatten(1).sum(1).clamp_min(1)
    return Segmentation(
        images=found.images,
        labels=found.labels,
        predictions=found.predictions,
        right=found.right,
        by_label=found.by_label,
        by_prediction=found.by_prediction,
        masks_by_label=masks_by_label,
        masks_by_prediction=masks_by_prediction,
        truth=truth,
        iou_by_label=by_label,
        iou_by_prediction=by_prediction,
        baseline=baseline,
        absent=absent,
        absent_decoded=absent_decoded,
        absent_ink=absent_ink,
        mean_by_label=float(by_label.double().mean()),
        mean_by_prediction=float(by_prediction.double().mean()),
        mean_baseline=float(baseline.double().mean()),
        mean_absent_ink=float(absent_ink.double().mean()),
        threshold=threshold,
    )


def _ink(images: Tensor, threshold: float) -> Tensor:
    """Return where any channel is over the threshold: ``[..., C, H, W] -> [..., H, W]``."""
    return images.amax(-3) > threshold


def intersection_over_union(masks: Tensor, truth: Tensor) -> Tensor:
    """Return what two masks share over what they cover together; 1 where both are empty.

    Shapes:
        truth values ``[..., H, W] -> [...]``
    """
    both, either = ((m.flatten(-2).sum(-1)).double() for m in (masks & truth, masks | truth))
    return torch.where(either > 0, both / either.clamp_min(1), 1.0).float()


def _absent(labels: Tensor, predictions: Tensor, n_classes: int, seed: int) -> Tensor:
    """Draw for each image a class that is neither among its labels nor predicted."""
    present = torch.zeros(len(labels), n_classes).scatter_(1, labels, 1.0).scatter_(1, predictions, 1.0)
    return torch.multinomial(1 - present, 1, generator=torch.Generator().manual_seed(seed))[:, 0]


# Drawing ---------------------------------------------------------------------------------------------------------


def draw_segmentation(
    result: Segmentation, out: Path | str, title: str = "", n: int = 8, counts: tuple[int, int] | None = None
) -> None:
    """Draw images over the decodes of their two digits, one in orange and one in blue: Sabour 2017, figure 5.

    Above each stand R, the classes that are decoded, and L, the labels. First ``n`` that are right, then up to
    ``n / 2`` that are wrong, decoded by their labels (R:l) and by what was predicted (R:p), then ``n`` pairs of a
    label and a class that is neither label nor prediction (*), of which nothing should be seen. ``counts``: how many
    are right of how many, where the result holds a selection of them only.
    """
    if n < 2:
        raise ValueError(f"n must be 2 columns or more, got {n}")
    right = mixed(result.labels, result.right)
    wrong = mixed(result.labels, ~result.right)
    failures = []
    for place in wrong[: n // 2]:
        label, told = result.labels[place].tolist(), result.predictions[place].tolist()
        failures.append((place, f"R:l{_pair(label)}", result.by_label[place]))
        failures.append((place, f"R:p{_pair(told)}", result.by_prediction[place]))
    absent = []
    for place in (right[n:] + right[:n] or wrong)[:n]:
        label, other = int(result.labels[place, 0]), int(result.absent[place])
        pair = torch.stack([result.by_label[place, 0], result.absent_decoded[place]])
        absent.append((place, f"R:({label}, {other}*)", pair))
    whole = [(place, f"R:{_pair(result.labels[place].tolist())}", result.by_label[place]) for place in right[:n]]
    iou = f"IoU {result.mean_by_label:.3f} by label, {result.mean_by_prediction:.3f} by prediction"
    n_right, n_all = counts or (len(right), len(result.right))
    groups = [
        (f"right: {n_right:,} of {n_all:,} images", whole),
        (f"wrong: {n_all - n_right:,}" if wrong else "no image of these is wrong", failures),
        (f"*: absent from image and prediction; inks {100 * result.mean_absent_ink:.1f} % of the image's ink", absent),
    ]
    _draw_groups(
        groups,
        f"{title}: {iou}" if title else iou,
        f"all ink given to both: {result.mean_baseline:.3f}; ink is over {result.threshold:g}",
        result,
        n,
        out,
    )


def _draw_groups(
    groups: list[tuple[str, list[Any]]], title: str, below: str, result: Segmentation, n: int, out: Path | str
) -> None:
    side, left = 0.95, 0.62
    width = left + side * max(n, 6) + 0.1
    tall = [0.75 + 2 * side if columns else 0.4 for _, columns in groups]
    height = 0.5 + sum(tall) + 0.05
    figure = new_figure(width, height, layout=None)

    def write(x: float, y: float, words: str, **options: Any) -> None:
        figure.text(x / width, 1 - y / height, words, **{"fontsize": 8, **options})

    write(width / 2, 0.06, f"{title}\n{below}", ha="center", va="top")
    top = 0.5
    for (words, columns), size in zip(groups, tall, strict=True):
        write(0.08, top + 0.04, words, va="top", fontweight="bold")
        for line, name in enumerate(("input", "decodes") if columns else ()):
            write(0.08, top + 0.68 + side * (line + 0.5), name, va="center")
        for column, (place, told, pair) in enumerate(columns):
            x = left + side * column
            told = f"{told}\nL:{_pair(result.labels[place].tolist())}"
            write(x + 0.47 * side, top + 0.62, told, ha="center", va="bottom", fontsize=7.5)
            for line, picture in enumerate((result.images[place], pair)):
                y = top + 0.66 + side * (line + 1)
                box = (x / width, 1 - y / height, 0.94 * side / width, 0.94 * side / height)
                show_objects(figure.add_axes(box), picture)
        top += size
    save_figure(figure, out)


def _pair(numbers: list[int]) -> str:
    return "(" + ", ".join(str(number) for number in numbers) + ")"
