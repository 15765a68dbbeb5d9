"""Effect of each dimension of a class capsule on its reconstruction: Sabour 2017, Figure 4; Choi 2019, Figure 3."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from torchcaps._core.plotting import new_figure, save_figure, show_image
from torchcaps._core.registry import check_name
from torchcaps.analysis.common import (
    Progress,
    batched_outputs,
    eval_mode,
    evaluate_predictions,
    first_labels,
    multi_hot_labels,
    require_decoder,
)
from torchcaps.analysis.registry import Analysis, Column, Subject, Summary, register_analysis
from torchcaps.models import Network

__all__ = [
    "AMOUNTS",
    "Perturbation",
    "PerturbationOptions",
    "PerturbedImage",
    "draw_perturbation",
    "perturb",
]

AMOUNTS = tuple(round(-0.25 + 0.05 * n, 2) for n in range(11))  # Sabour 2017, Figure 4


@dataclass(frozen=True)
class Perturbation:
    """Reconstructions from class capsules with one dimension perturbed at a time.

    Shapes:
        images ``[B, C, H, W]``, labels ``[B]`` (class of the perturbed capsule), dims ``[D]`` (perturbed dimensions),
        amounts ``[A]`` (added values), decoded ``[B, D, A, C, H, W]``, unperturbed ``[B, C, H, W]``

    >>> import torch, torchcaps
    >>> model = torchcaps.create_model("capsnet_small", width=4, types=2, hidden=(8,))
    >>> images, labels = torch.rand(4, 1, 28, 28), torch.arange(4)
    >>> from torchcaps.analysis import perturb
    >>> result = perturb(model, images[:1], amounts=(-0.2, 0.2), dims=(0, 1))
    >>> result.dims, result.amounts
    (tensor([0, 1]), tensor([-0.2000,  0.2000]))
    """

    images: Tensor
    labels: Tensor
    dims: Tensor
    amounts: Tensor
    decoded: Tensor
    unperturbed: Tensor


def perturb(
    model: Network,
    images: Tensor,
    labels: Tensor | None = None,
    amounts: Tensor | tuple[float, ...] | None = None,
    dims: Tensor | tuple[int, ...] | None = None,
    batch_size: int = 128,
    progress: Progress | None = None,
) -> Perturbation:
    """Add an amount to each dimension of a class capsule and decode it, all others masked: Sabour 2017, Figure 4.

    If the head scores ``|pose| / sqrt(D)`` (Choi 2019, section 3.5 and Figure 3), the default amounts are multiplied by
    ``sqrt(D)``: there each entry of a pose, not its length, is bounded by 1.

    Args:
        model: a capsule network with a decoder.
        images: ``[B, C, H, W]``, as the model takes them.
        labels: class of the capsule to perturb, the first one if an image has several; by default the predicted class.
        amounts: values to add; by default -0.25 to 0.25 in steps of 0.05, multiplied by ``sqrt(D)`` as described above.
        dims: dimensions to perturb, by default all.
        batch_size: images per forward pass, and reconstructions per decoder pass.
        progress: called after each batch of images.

    >>> import torchcaps
    >>> model = torchcaps.create_model("capsnet_small", width=4, types=2, hidden=(8,))
    >>> list(perturb(model, torch.rand(1, 1, 28, 28), amounts=(-0.2, 0.2), dims=(0, 1)).decoded.shape)
    [1, 2, 2, 1, 28, 28]
    """
    network = require_decoder(model, "perturbation")
    if len(images) == 0:
        raise ValueError("images must contain at least one image, got none")
    given = None if labels is None else first_labels(network, labels, len(images))
    poses, predicted = [], []
    for output in batched_outputs(network, images, None, batch_size, progress=progress):
        assert output.capsules is not None
        poses.append(output.capsules.pose)
        predicted.append(network.top_class(output))
    pose = torch.cat(poses)  # [B, classes, D]
    classes = torch.cat(predicted) if given is None else given.to(pose.device)
    dim = pose.shape[-1]
    selected = _check_dims(dims, dim).to(pose.device)
    added = _check_amounts(amounts, math.sqrt(dim) if getattr(network.head, "normalized", False) else 1.0).to(pose)
    decoded = []
    with eval_mode(network):
        unperturbed = torch.cat([network.decode(*part) for part in _split(pose, classes, batch_size)])
        for n in range(len(pose)):
            # [dims, amounts, classes, D]: the capsules of one image, each dimension of one of them by each amount
            moved = pose[n].repeat(len(selected), len(added), 1, 1)
            for row, d in enumerate(selected.tolist()):
                moved[row, :, classes[n], d] += added
            parts = _split(moved.flatten(0, 1), classes[n].expand(len(selected) * len(added)), batch_size)
            all_decoded = torch.cat([network.decode(*part) for part in parts])
            decoded.append(all_decoded.unflatten(0, (len(selected), len(added))).cpu())
    return Perturbation(
        images.cpu(), classes.cpu(), selected.cpu(), added.cpu(), torch.stack(decoded), unperturbed.cpu()
    )


def _check_dims(dims: Tensor | tuple[int, ...] | None, n: int) -> Tensor:
    """Return the indices of the dimensions, by default all; raise a ValueError for invalid ones."""
    selected = torch.arange(n) if dims is None else torch.as_tensor(dims)
    invalid = selected.dim() != 1 or selected.is_floating_point() or not len(selected)
    if invalid or selected.min() < 0 or selected.max() >= n:
        raise ValueError(f"dims must be one or more indices of dimensions in 0..{n - 1}, got {dims}")
    return selected


def _check_amounts(amounts: Tensor | tuple[float, ...] | None, factor: float) -> Tensor:
    """Return the amounts as float64, by default ``AMOUNTS`` times a factor; raise a ValueError for invalid ones."""
    added = torch.as_tensor(AMOUNTS if amounts is None else amounts, dtype=torch.float64)
    added = factor * added if amounts is None else added
    if added.dim() != 1 or not len(added) or not bool(torch.isfinite(added).all()):
        raise ValueError(f"amounts must be one or more finite numbers, got {amounts}")
    return added


def _split(pose: Tensor, labels: Tensor, batch_size: int) -> list[tuple[Tensor, Tensor]]:
    """Split poses and labels into batches."""
    return list(zip(pose.split(batch_size), labels.split(batch_size), strict=True))


# Figure -------------------------------------------------------------------------------------------------------------


def draw_perturbation(
    result: Perturbation,
    out: Path | str,
    title: str = "",
    image: int = 0,
    classes: Sequence[str] | None = None,
    n_dims: int | None = None,
) -> None:
    """Draw the reconstructions of one image, one row per dimension and one column per amount: Sabour 2017, Figure 4.

    Args:
        result: the return value of `perturb`.
        out: the file, .png, .svg or .pdf.
        title: above the figure.
        image: index of the image.
        classes: class names, by default their indices.
        n_dims: number of dimensions to draw, those with the largest change first; by default all, in order.

    >>> import torch, torchcaps
    >>> model = torchcaps.create_model("capsnet_small", width=4, types=2, hidden=(8,))
    >>> result = perturb(model, torch.rand(1, 1, 28, 28), amounts=(-0.2, 0.2), dims=(0, 1))
    >>> draw_perturbation(result, "fig.png")
    """
    if not 0 <= image < len(result.images):
        raise ValueError(f"image must be an index in 0..{len(result.images) - 1}, got {image}")
    if n_dims is not None and n_dims < 1:
        raise ValueError(f"n_dims must be 1 or more, got {n_dims}")
    decoded = result.decoded[image]
    rows = torch.arange(len(decoded))
    if n_dims is not None and n_dims < len(decoded):
        rows = (decoded - result.unperturbed[image]).square().flatten(1).sum(1).topk(n_dims).indices
    dims, decoded = result.dims[rows], decoded[rows]
    n_rows, n_columns = decoded.shape[:2]
    side, left, top = 0.55, 0.75, 1.85
    width, height = left + side * n_columns + 0.1, top + side * n_rows + 0.1
    figure = new_figure(width, height, layout=None)

    def add_axes(x: float, y: float, size: float = side):  # inches from the upper left corner
        return figure.add_axes((x / width, 1 - (y + size) / height, 0.94 * size / width, 0.94 * size / height))

    label = int(result.labels[image])
    heading = f"{title}: " if title else ""
    heading += f"class {label if classes is None else classes[label]}, "
    heading += "each dimension perturbed" if n_rows == len(result.dims) else f"{n_rows} dimensions of largest effect"
    figure.text(0.5, 1 - 0.08 / height, heading, ha="center", va="top", fontsize=9)
    middle = left + side * n_columns / 2
    for x, panel, name in (
        (middle - 1.0, result.images[image], "image"),
        (middle + 0.1, result.unperturbed[image], "reconstruction"),
    ):
        axes = add_axes(x, 0.5, 0.8)
        show_image(axes, panel)
        axes.set_title(name, fontsize=8, pad=2)
    figure.text(0.06 / width, 1 - (top - 0.06) / height, "dimension", fontsize=8, va="bottom")
    columns_title = "amount added to the dimension of the class capsule"
    figure.text(middle / width, 1 - (top - 0.24) / height, columns_title, ha="center", va="bottom", fontsize=8)
    for row in range(n_rows):
        y = top + side * row
        name = str(int(dims[row]))
        figure.text((left - 0.12) / width, 1 - (y + side / 2) / height, name, ha="right", va="center", fontsize=8)
        for column in range(n_columns):
            axes = add_axes(left + side * column, y)
            show_image(axes, decoded[row, column])
            if row == 0:
                amount = float(result.amounts[column])
                axes.set_title(f"{amount:+.2f}" if abs(amount) > 1e-6 else "0", fontsize=8, pad=3)
    save_figure(figure, out)


# Declaration --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PerturbationOptions:
    """Options of the analysis ``perturbation``.

    Args:
        class_name: class whose capsule is perturbed (default: that of the first correctly classified image).
    """

    class_name: str | None = None


@dataclass(frozen=True)
class PerturbedImage:
    """The perturbation of one image, and the index of the image in its data set."""

    index: int
    perturbation: Perturbation


def _run(subject: Subject, options: PerturbationOptions) -> PerturbedImage:
    """Perturb one image, of ``options.class_name`` if given: the first correctly classified one, if there is any."""
    batch = subject.batch()
    progress = subject.track(subject.n_batches() + 1)
    hot = multi_hot_labels(subject.model, batch.labels).cpu()
    label = None
    candidates = torch.ones(len(hot), dtype=torch.bool)
    if options.class_name is not None:
        label = subject.classes.index(check_name(options.class_name, subject.classes, "class_name"))
        candidates = hot[:, label] == 1
        if not bool(candidates.any()):
            raise ValueError(
                f"class_name: none of the {len(hot):,} images is of the class {options.class_name!r}; use more images"
            )
    require_decoder(subject.model, "perturbation")
    correct = evaluate_predictions(subject.model, batch.images, batch.labels, subject.batch_size, progress)[0]
    preferred = candidates & correct
    position = int((preferred if bool(preferred.any()) else candidates).to(torch.uint8).argmax())
    label = int(hot[position].argmax()) if label is None else label
    image = batch.images[position : position + 1]
    result = perturb(subject.model, image, torch.tensor([label]), progress=progress)
    return PerturbedImage(int(batch.indices[position]), result)


def _summarize(result: PerturbedImage, classes: Sequence[str]) -> Summary:
    """Return the summary table: mean absolute change of a pixel at both ends of the range, by dimension."""
    perturbation = result.perturbation
    ends = perturbation.decoded[0][:, [0, -1]] - perturbation.unperturbed[0]  # [D, 2, C, H, W]
    changes = ends.abs().flatten(1).mean(1).tolist()
    rows = {str(dim): {"change": change} for dim, change in zip(perturbation.dims.tolist(), changes, strict=True)}
    columns = {"change": Column("mean change of a pixel at both ends", ".4f")}
    name = classes[int(perturbation.labels[0])]
    low, high = float(perturbation.amounts[0]), float(perturbation.amounts[-1])
    note = f"Image {result.index:,}, class {name}; each dimension perturbed by {low:g} to {high:g}."
    details = {"image": result.index, "class": name, "amounts": perturbation.amounts.tolist()}
    return Summary("effect of each dimension of a capsule", 1, "dimension", columns, rows, (note,), details)


PERTURBATION = register_analysis(
    Analysis(
        "perturbation",
        "effect of each dimension of a class capsule on its reconstruction",
        _run,
        _summarize,
        lambda result, out, title, classes: draw_perturbation(result.perturbation, out, title, classes=classes),
        PerturbationOptions,
        n_images=100,
    )
)
