"""What each dimension of a class capsule does to the image."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from torchcaps._core.labels import check_class_indices, split_labels
from torchcaps._core.plotting import new_figure, save_figure, show_image
from torchcaps.analysis.common import Progress, evaluating, outputs, require_decoder
from torchcaps.models import CapsuleNetwork

__all__ = ["AMOUNTS", "Perturbation", "draw_perturbation", "first_labels", "perturb"]

AMOUNTS = tuple(round(-0.25 + 0.05 * n, 2) for n in range(11))  # Sabour 2017, figure 4


@dataclass(frozen=True)
class Perturbation:
    """Decodes of class capsules, one of their dimensions moved at a time.

    Shapes:
        images ``[B, C, H, W]``, labels ``[B]`` (the class whose capsule was moved), dims ``[D]`` (which dimensions),
        amounts ``[A]`` (what was added), decoded ``[B, D, A, C, H, W]``, unperturbed ``[B, C, H, W]``
    """

    images: Tensor
    labels: Tensor
    dims: Tensor
    amounts: Tensor
    decoded: Tensor
    unperturbed: Tensor


def perturb(
    model: CapsuleNetwork,
    images: Tensor,
    labels: Tensor | None = None,
    amounts: Tensor | tuple[float, ...] | None = None,
    dims: Tensor | tuple[int, ...] | None = None,
    batch_size: int = 128,
    progress: Progress | None = None,
) -> Perturbation:
    """Move each dimension of a class capsule and decode it, all other capsules masked: Sabour 2017, figure 4.

    Where poses are scored by their length over ``sqrt(D)`` (Choi 2019, figure 3) the default amounts are ``sqrt(D)``
    times as large: there each number of a pose, not the pose as a whole, reaches up to 1.

    Args:
        model: one with a decoder.
        images: as the model takes them.
        labels: whose capsule is moved, the first where an image has several; by default that of the predicted class.
        amounts: what is added; by default -0.25 to 0.25 in steps of 0.05, times ``sqrt(D)`` where said above.
        dims: which dimensions; by default all.
        batch_size: images, and later decodes, at a time.
        progress: called after each batch of images.
    """
    network = require_decoder(model, "perturbation")
    if len(images) == 0:
        raise ValueError("images must be one or more, got none")
    numbers = None if labels is None else first_labels(network, labels, len(images))
    poses, chosen = [], []
    for output in outputs(network, images, None, batch_size, progress=progress):
        assert output.capsules is not None
        poses.append(output.capsules.pose)
        chosen.append(network.top_class(output))
    pose = torch.cat(poses)  # [B, classes, D]
    number = torch.cat(chosen) if numbers is None else numbers.to(pose.device)
    dim = pose.shape[-1]
    which = _dims(dims, dim).to(pose.device)
    added = _amounts(amounts, math.sqrt(dim) if getattr(network.head, "normalized", False) else 1.0).to(pose)
    decoded = []
    with evaluating(network):
        unperturbed = torch.cat([network.decode(*part) for part in _pieces(pose, number, batch_size)])
        for n in range(len(pose)):
            # [dims, amounts, classes, D]: the labelled capsule of one image, each of its dimensions at each amount
            moved = pose[n].repeat(len(which), len(added), 1, 1)
            for row, d in enumerate(which.tolist()):
                moved[row, :, number[n], d] += added
            parts = _pieces(moved.flatten(0, 1), number[n].expand(len(which) * len(added)), batch_size)
            whole = torch.cat([network.decode(*part) for part in parts])
            decoded.append(whole.unflatten(0, (len(which), len(added))).cpu())
    return Perturbation(images.cpu(), number.cpu(), which.cpu(), added.cpu(), torch.stack(decoded), unperturbed.cpu())


def first_labels(model: CapsuleNetwork, labels: Tensor, n_images: int) -> Tensor:
    """Return one class number for each image: its label, or the first of several.

    Shapes:
        ``[B]``, ``[B, objects]`` or zeros and ones ``[B, classes] -> [B]``
    """
    if not isinstance(labels, Tensor) or labels.dim() == 0 or len(labels) != n_images:
        found = list(labels.shape) if isinstance(labels, Tensor) else type(labels).__name__
        raise ValueError(f"labels must be one for each of {n_images} images, got {found}")
    if labels.dim() == 1:
        return check_class_indices(labels, model.spec.classes)
    if model.n_objects is None:  # any number of classes: the lowest that is there
        return labels.to(torch.uint8).argmax(1)
    numbers = split_labels(labels, model.spec.classes, model.n_objects)[0]
    return numbers if numbers.dim() == 1 else numbers[:, 0]


def _dims(dims: Tensor | tuple[int, ...] | None, n: int) -> Tensor:
    which = torch.arange(n) if dims is None else torch.as_tensor(dims)
    if which.dim() != 1 or which.is_floating_point() or not len(which) or which.min() < 0 or which.max() >= n:
        raise ValueError(f"dims must be numbers of dimensions in 0..{n - 1}, got {dims}")
    return which


def _amounts(amounts: Tensor | tuple[float, ...] | None, factor: float) -> Tensor:
    added = torch.as_tensor(AMOUNTS if amounts is None else amounts, dtype=torch.float64)
    added = factor * added if amounts is None else added
    if added.dim() != 1 or not len(added) or not bool(torch.isfinite(added).all()):
        raise ValueError(f"amounts must be one or more finite numbers, got {amounts}")
    return added


def _pieces(pose: Tensor, labels: Tensor, batch_size: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(pose.split(batch_size), labels.split(batch_size), strict=True))


def draw_perturbation(
    result: Perturbation,
    out: Path | str,
    title: str = "",
    image: int = 0,
    classes: Sequence[str] | None = None,
    most: int | None = None,
) -> None:
    """Draw the decodes of one image: a row for each dimension, a column for each amount (Sabour 2017, figure 4).

    The image itself and its decode as it stands come first. Classes have their numbers, or the names in ``classes``.
    With ``most`` only so many dimensions are drawn, those that change the decode most, the first of them above.
    """
    if not 0 <= image < len(result.images):
        raise ValueError(f"image must lie in 0..{len(result.images) - 1}, got {image}")
    if most is not None and most < 1:
        raise ValueError(f"most must be 1 or more, got {most}")
    decoded = result.decoded[image]
    rows = torch.arange(len(decoded))
    if most is not None and most < len(decoded):
        rows = (decoded - result.unperturbed[image]).square().flatten(1).sum(1).topk(most).indices
    dims, decoded = result.dims[rows], decoded[rows]
    n_rows, n_columns = decoded.shape[:2]
    side, left, top = 0.55, 0.55, 1.75
    width, height = left + side * n_columns + 0.1, top + side * n_rows + 0.1
    figure = new_figure(width, height, layout=None)

    def place(x: float, y: float, size: float = side):  # inches from the upper left corner
        return figure.add_axes((x / width, 1 - (y + size) / height, 0.94 * size / width, 0.94 * size / height))

    words = f"{title}: " if title else ""
    middle = left + side * n_columns / 2
    label = int(result.labels[image])
    words += f"class {label if classes is None else classes[label]}, "
    words += "each dimension moved" if n_rows == len(result.dims) else f"the {n_rows} dimensions that change most"
    figure.text(0.5, 1 - 0.08 / height, words, ha="center", va="top", fontsize=9)
    for x, picture, name in (
        (middle - 1.0, result.images[image], "image"),
        (middle + 0.1, result.unperturbed[image], "decoded"),
    ):
        axes = place(x, 0.5, 0.8)
        show_image(axes, picture)
        axes.set_title(name, fontsize=8, pad=2)
    figure.text(0.06 / width, 1 - (top - 0.06) / height, "dim", fontsize=8, va="bottom")
    for row in range(n_rows):
        y = top + side * row
        number = str(int(dims[row]))
        figure.text((left - 0.12) / width, 1 - (y + side / 2) / height, number, ha="right", va="center", fontsize=8)
        for column in range(n_columns):
            axes = place(left + side * column, y)
            show_image(axes, decoded[row, column])
            if row == 0:
                amount = float(result.amounts[column])
                axes.set_title(f"{amount:+.2f}" if abs(amount) > 1e-6 else "0", fontsize=8, pad=3)
    save_figure(figure, out)
