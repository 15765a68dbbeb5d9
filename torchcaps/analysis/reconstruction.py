"""What the decoder makes of class capsules: of the right ones, and where the model was wrong."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchcaps._core.labels import split_labels
from torchcaps._core.plotting import new_figure, overlay_two_colors, save_figure, show_image
from torchcaps.analysis.common import Progress, evaluating, outputs, require_decoder
from torchcaps.models import CapsuleNetwork
from torchcaps.models.heads import SharedClassifier

__all__ = ["Reconstructions", "draw_reconstructions", "mixed", "reconstruct", "show_objects"]


@dataclass(frozen=True)
class Reconstructions:
    """Images and their decodes, by their labels and by what was predicted.

    Shapes:
        images ``[B, C, H, W]``; labels, predictions ``[B]``, or ``[B, K]`` where an image has ``K`` objects, right
        predictions in the places of their labels; targets, by_label, by_prediction ``[B, C, H, W]`` or
        ``[B, K, C, H, W]``; right ``[B]``, truth values; confidence ``[B]``, the (mean) score of what was predicted;
        error_by_label, error_by_prediction ``[B]``, squared differences from the targets, summed over an image.
    """

    images: Tensor
    targets: Tensor
    labels: Tensor
    predictions: Tensor
    by_label: Tensor
    by_prediction: Tensor
    right: Tensor
    confidence: Tensor
    error_by_label: Tensor
    error_by_prediction: Tensor


def reconstruct(
    model: CapsuleNetwork,
    images: Tensor,
    labels: Tensor,
    targets: Tensor | None = None,
    batch_size: int = 128,
    progress: Progress | None = None,
) -> Reconstructions:
    """Decode images by their label and by their prediction: Sabour 2017, figure 3.

    Args:
        model: one with a decoder.
        images: as the model takes them.
        labels: ``[B]``; ``[B, K]`` for ``K`` objects in each image.
        targets: what the decoder should make; by default the images. For several objects, each of them alone.
        batch_size: images at a time.
        progress: called after each batch.
    """
    network = require_decoder(model, "reconstruction")
    if len(images) == 0:
        raise ValueError("images must be one or more, got none")
    numbers = split_labels(labels, network.spec.classes, network.n_objects or 1)[0]
    if len(numbers) != len(images):
        raise ValueError(f"labels must be one for each of {len(images)} images, got {list(labels.shape)}")
    wanted = (*numbers.shape, *network.spec.image)
    if targets is None:
        if numbers.dim() == 2:
            raise ValueError(f"targets must be given for images of several objects: each alone, {list(wanted)}")
        targets = images
    if targets.shape != wanted:
        raise ValueError(f"targets must be {list(wanted)}, got {list(targets.shape)}")
    poses, scores = [], []
    for output in outputs(network, images, None, batch_size, progress=progress):
        assert output.capsules is not None
        poses.append(output.capsules.pose)
        scores.append(output.scores)
    score = torch.cat(scores)
    predictions = network.predict(score, numbers if numbers.dim() == 2 else None).cpu()
    with evaluating(network):
        by_label, by_prediction = (
            torch.cat(
                [
                    network.decode(pose, part)
                    for pose, part in zip(poses, chosen.to(score.device).split(batch_size), strict=True)
                ]
            ).cpu()
            for chosen in (numbers, predictions)
        )
    score = score.cpu()
    if isinstance(network.head, SharedClassifier):
        score = score.softmax(-1)  # logits of different images don't compare
    confidence = score.gather(1, predictions.reshape(len(score), -1)).mean(1)
    right = (predictions == numbers.cpu()).reshape(len(images), -1).all(1)
    targets = targets.cpu()
    errors = [(decoded - targets).pow(2).flatten(1).sum(1) for decoded in (by_label, by_prediction)]
    return Reconstructions(
        images.cpu(), targets, numbers.cpu(), predictions, by_label, by_prediction, right, confidence, *errors
    )


# Drawing ---------------------------------------------------------------------------------------------------------


def mixed(labels: Tensor, which: Tensor) -> list[int]:
    """Return the places of the images that ``which`` names, one of each (first) label in turn."""
    seen: dict[int, int] = {}
    order = []
    for place in which.nonzero()[:, 0].tolist():
        label = int(labels[place].flatten()[0])
        seen[label] = seen.get(label, 0) + 1
        order.append((seen[label], label, place))
    return [place for _, _, place in sorted(order)]


def show_objects(axes: Any, image: Tensor) -> None:
    """Show an image ``[C, H, W]``, or two objects ``[2, C, H, W]`` over each other in two colours."""
    if image.dim() == 4:
        image = overlay_two_colors(image[0], image[1]) if len(image) > 1 else image[0]
    show_image(axes, image)


def draw_reconstructions(
    result: Reconstructions, out: Path | str, title: str = "", n: int = 10, counts: tuple[int, int] | None = None
) -> None:
    """Draw inputs over outputs under their (label, prediction, reconstruction target): Sabour 2017, figure 3.

    First up to ``n`` images that are right, then up to ``n / 2`` that are wrong, the most confident first, each
    decoded by its label and by its prediction. ``counts``: how many are right of how many, where the result holds a
    selection of them only.
    """
    if n < 2:
        raise ValueError(f"n must be 2 columns or more, got {n}")
    right = mixed(result.labels, result.right)[:n]
    failed = (~result.right).nonzero()[:, 0]
    failed = failed[result.confidence[failed].argsort(descending=True, stable=True)].tolist()
    columns = [[(place, result.labels[place], result.by_label[place]) for place in right]]
    columns.append([])
    for place in failed[: n // 2]:
        columns[1].append((place, result.labels[place], result.by_label[place]))
        columns[1].append((place, result.predictions[place], result.by_prediction[place]))
    several = result.labels.dim() == 2
    side, gap, left = (1.0 if several else 0.75), (0.62 if several else 0.36), 0.62
    width = left + side * max(n, 6) + 0.1
    tops = [0.36 + gap, 0.36 + gap + 2 * side + gap + 0.4]
    height = tops[1] + (2 * side + 0.1 if columns[1] else 0.15 - gap)
    figure = new_figure(width, height, layout=None)

    def write(x: float, y: float, words: str, **options: Any) -> None:
        figure.text(x / width, 1 - y / height, words, fontsize=8, **options)

    n_right, n_all = counts or (int(result.right.sum()), len(result.right))
    share = f"{n_right:,} of {n_all:,} images right"
    write(width / 2, 0.06, f"{title}: {share}" if title else share, ha="center", va="top")
    write(0.08, 0.3, "right, as (l, p, r): label, prediction, what is reconstructed", va="top")
    words = f"wrong: {n_all - n_right:,}, the most confident first, decoded by label and by prediction"
    write(0.08, tops[1] - gap - 0.1, words if failed else "no image of these was taken for another class", va="top")
    if not right:
        write(left, tops[0] + side, "no image of these is right", va="center")
    for top, group in zip(tops, columns, strict=True):
        if group:
            write(0.08, top + side / 2, "input", va="center")
            write(0.08, top + 1.5 * side, "output", va="center")
        for column, (place, target, decoded) in enumerate(group):
            x = left + side * column
            numbers = [_told(value) for value in (result.labels[place], result.predictions[place], target)]
            told = "\n".join(f"{name} {words}" for name, words in zip("lpr", numbers, strict=True))
            write(x + side / 2, top - 0.04, told if several else f"({', '.join(numbers)})", ha="center", va="bottom")
            for line, picture in enumerate((result.images[place], decoded)):
                box = (x / width, 1 - (top + side * (line + 1)) / height, 0.94 * side / width, 0.94 * side / height)
                show_objects(figure.add_axes(box), picture)
    save_figure(figure, out)


def _told(numbers: Tensor) -> str:
    return str(int(numbers)) if numbers.dim() == 0 else "+".join(str(number) for number in numbers.tolist())
