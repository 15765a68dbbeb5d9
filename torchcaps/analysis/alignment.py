"""Whether a capsule moves along one direction when its object is turned or shifted."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from torchcaps._core.labels import split_labels
from torchcaps._core.plotting import COLORS, new_figure, save_figure, style_axes
from torchcaps.analysis.affine import transformed
from torchcaps.analysis.common import Progress, outputs, require_capsules
from torchcaps.models import Network
from torchcaps.nn import CapsuleLayer
from torchcaps.routing import Attention

__all__ = [
    "DEGREES",
    "PIXELS",
    "Alignment",
    "align",
    "alignment_ratio",
    "capsule_moves",
    "draw_alignment",
    "draw_cosines",
    "random_reference",
    "side_cosines",
]

# Table 3 of Choi 2019 has them in this order: all to one side, then all to the other.
KINDS = ("rotation", "shift_x", "shift_y")
NAMES = ("rotation +", "x +", "y +", "rotation -", "x -", "y -")
DEGREES, PIXELS = (5.0, 10.0, 15.0, 20.0, 25.0), (1.0, 2.0, 3.0, 4.0, 5.0)


def alignment_ratio(differences: Tensor) -> tuple[Tensor, Tensor]:
    """Return how well differences lie on their main direction, and that direction: Choi 2019, eq. 12 and footnote 5.

    ``r_i = |<v_i, v>| / |v_i|`` with ``v`` the first right-singular vector of the matrix whose rows are the ``v_i``,
    from which no mean is taken; ``v`` points to where ``Σ_i <v_i, v> > 0``. A single difference has ratio 1.

    A difference of length zero has no direction, and its ratio is 0. Where all are zero, so is the direction.

    Shapes:
        differences ``[..., n, D] ->`` ratio ``[..., n]``, direction ``[..., D]`` of length 1
    """
    if not isinstance(differences, Tensor) or not differences.is_floating_point() or differences.dim() < 2:
        raise ValueError("differences must be a floating-point tensor [..., n, D]")
    if not bool(torch.isfinite(differences).all()):
        raise ValueError("differences must be finite numbers, got NaN or infinite ones")
    lengths = torch.linalg.vector_norm(differences, dim=-1)  # [..., n]
    # Rows of Vh are the right-singular vectors: the first row, not the first column.
    first = torch.linalg.svd(differences, full_matrices=False).Vh[..., 0, :]  # [..., D]
    along = torch.einsum("...nd,...d->...n", differences, first)
    sign = torch.where(along.sum(-1, keepdim=True) < 0, -1.0, 1.0).to(first)
    moves = lengths > 0
    ratio = torch.where(moves, along.abs() / torch.where(moves, lengths, 1), 0).clamp_max(1)
    return ratio, torch.where(moves.any(-1, keepdim=True), sign * first, 0)


@functools.cache
def random_reference(
    n: int = 5, dim: int = 32, samples: int = 10_000, seed: int = 0, axis: Literal["right", "printed"] = "right"
) -> tuple[float, float]:
    """Return mean and standard deviation of the alignment ratio of random vectors: what chance gives.

    Five Gaussian vectors of 32 numbers have 0.462 +- 0.269. Choi 2019 prints 0.311 +- 0.262, which the stated procedure
    can't give: the first singular direction carries at least a fifth of the squares of five vectors, so that the root
    mean square of the ratio, weighted by length, is 0.447 or more, and the printed one has 0.407. It comes out (0.309
    +- 0.261) when the first *column* of numpy's ``VT`` is taken for the direction instead of the first row.

    Args:
        n: vectors at a time.
        dim: their size.
        samples: how many times.
        seed: of the draws.
        axis: ``"right"`` for the stated procedure, ``"printed"`` for the column.
    """
    if axis not in ("right", "printed"):
        raise ValueError(f"axis must be 'right' or 'printed', got {axis!r}")
    if min(n, dim, samples) < 1:
        raise ValueError(f"n, dim and samples must be 1 or more, got {n}, {dim} and {samples}")
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(samples, n, dim, generator=generator, dtype=torch.float64)
    if axis == "right":
        ratio, _ = alignment_ratio(vectors)
    else:
        column = torch.linalg.svd(vectors, full_matrices=True).Vh[..., :, 0]
        ratio = torch.einsum("snd,sd->sn", vectors, column).abs() / torch.linalg.vector_norm(vectors, dim=-1)
    return float(ratio.mean()), float(ratio.std(correction=0))


@dataclass(frozen=True)
class Alignment:
    """How well class capsules keep to a direction under transformations: Choi 2019, table 3 and figure 4.

    Args:
        names: the six transformations, in the paper's order: rotation counter-clockwise, shift right, shift down, and
            the three the other way.
        ratios: the mean alignment ratio by class and transformation, ``[classes, 6]``; 0 for a class without images.
        std: the standard deviation of the single ratios, ``[classes, 6]``.
        averages: the mean over the classes that there are, each counting the same, ``[6]``.
        n: images of each class.
        cosines: for each image the cosine between the directions of + and -, for rotation, x and y: ``[N, 3]``.
        moved: whether it has one: 0 where the capsule does not move at all, ``[N, 3]``.
        labels: the class of each image, ``[N]``.
        n_still: single differences of length zero, which have no ratio and are left out of the means.
        reference: mean and standard deviation for random vectors, as `random_reference` has them.
        printed_reference: the same by the axis that the paper's number comes from.
        before_tanh: whether capsules were taken before their tanh.
    """

    names: tuple[str, ...]
    ratios: Tensor
    std: Tensor
    averages: Tensor
    n: tuple[int, ...]
    cosines: Tensor
    moved: Tensor
    labels: Tensor
    n_still: int
    reference: tuple[float, float]
    printed_reference: tuple[float, float]
    before_tanh: bool


def align(
    model: Network,
    images: Tensor,
    labels: Tensor,
    degrees: Sequence[float] = DEGREES,
    pixels: Sequence[float] = PIXELS,
    before_tanh: bool = False,
    batch_size: int = 128,
    progress: Progress | None = None,
) -> Alignment:
    """Measure whether the capsule of the true class moves along one direction: Choi 2019, section 4.3, table 3.

    With ``T_i`` the five amounts of one transformation to one side, ``v_i = u(T_i x) - u(x)``; `alignment_ratio` of
    these is averaged over amounts and images of a class, then over classes. Images that the model gets wrong count as
    well. The cosines (figure 4) are those between the directions of the two sides.

    Args:
        model: a model with class capsules, for one object in each image.
        images: ``[N, C, H, W]`` as the model takes them; what comes in from outside is zero.
        labels: ``[N]`` class numbers, or zeros and ones ``[N, classes]``.
        degrees: of the rotations, to either side.
        pixels: of the shifts, to either side. Whole ones are exact.
        before_tanh: take ``K_n s_n + k_n`` instead of its tanh, for attention routing only. The paper's equation has
            capsules after the tanh; the authors' notebook reads them before it. It is found as ``artanh`` of the pose:
            in float32 numbers over 8 are blurred, and 8.7 is the largest.
        batch_size: images at a time.
        progress: called after each of the transformations (30, and one for the images as they are) of each batch.

    Deviation: the authors' notebook leaves the sign of a direction to chance, against footnote 5, and with it that of
    each cosine. Here the footnote is followed.
    """
    moves, numbers = capsule_moves(model, images, labels, degrees, pixels, before_tanh, batch_size, progress)
    ratio, direction = alignment_ratio(moves)  # [N, 6, n], [N, 6, D]
    counts = (moves.abs().sum(-1) > 0).double()
    n_classes = model.spec.classes
    means, deviations = torch.zeros(n_classes, 6), torch.zeros(n_classes, 6)
    for number in numbers.unique().tolist():
        of_class, weight = ratio[numbers == number], counts[numbers == number]
        total = weight.sum((0, 2)).clamp_min(1)
        mean = (of_class * weight).sum((0, 2)) / total
        means[number] = mean
        deviations[number] = (((of_class - mean[:, None]).square() * weight).sum((0, 2)) / total).sqrt()
    n = torch.bincount(numbers, minlength=n_classes)
    cosines, moved = side_cosines(direction)
    return Alignment(
        names=NAMES,
        ratios=means,
        std=deviations,
        averages=means[n > 0].mean(0),
        n=tuple(n.tolist()),
        cosines=cosines.float(),
        moved=moved,
        labels=numbers,
        n_still=int((counts == 0).sum()),
        reference=random_reference(len(degrees), moves.shape[-1]),
        printed_reference=random_reference(len(degrees), moves.shape[-1], axis="printed"),
        before_tanh=before_tanh,
    )


def capsule_moves(
    model: Network,
    images: Tensor,
    labels: Tensor,
    degrees: Sequence[float] = DEGREES,
    pixels: Sequence[float] = PIXELS,
    before_tanh: bool = False,
    batch_size: int = 128,
    progress: Progress | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ``u(T_i x) - u(x)`` of the true class's capsule, and class numbers. Arguments as in `align`.

    Shapes:
        ``[N, 6, n, D]`` in float64, the six as `Alignment` names them; class numbers ``[N]``
    """
    network = require_capsules(model, "the alignment of capsules")
    if model.n_objects != 1:
        raise ValueError(f"the alignment of capsules needs images with one object each, and {model.name} has several")
    last = list(network.capsules.layers.children())[-1]
    if before_tanh and not (isinstance(last, CapsuleLayer) and isinstance(last.routing, Attention)):
        raise ValueError(f"before_tanh needs class capsules by Attention routing, and {model.name} has no tanh there")
    if images.dim() != 4 or len(images) == 0:
        raise ValueError(f"images must be [N, C, H, W], one or more, got {list(images.shape)}")
    if len(labels) != len(images):
        raise ValueError(f"labels must be one for each of {len(images)} images, got {len(labels)}")
    if not len(degrees) == len(pixels) > 0 or min(*degrees, *pixels) <= 0:
        raise ValueError(f"degrees and pixels must be as many positive numbers each, got {degrees} and {pixels}")
    numbers = split_labels(labels, model.spec.classes)[0].cpu()
    steps = [
        (kind, sign * float(amount))
        for sign in (1, -1)
        for kind, amounts in zip(KINDS, (degrees, pixels, pixels), strict=True)
        for amount in amounts
    ]

    def pose(part: Tensor, numbers: Tensor) -> Tensor:
        (output,) = outputs(network, part, batch_size=batch_size, progress=progress)
        assert output.capsules is not None
        poses = output.capsules.pose.cpu()[torch.arange(len(numbers)), numbers]  # [B, D]
        most = 1 - torch.finfo(poses.dtype).eps / 2
        return poses.double().clamp(-most, most).atanh() if before_tanh else poses.double()

    moves = []
    for start in range(0, len(images), batch_size):
        part, of_part = images[start : start + batch_size], numbers[start : start + batch_size]
        still = pose(part, of_part)
        moved = [pose(transformed(part, kind, amount), of_part) - still for kind, amount in steps]
        moves.append(torch.stack(moved, dim=1).unflatten(1, (6, len(degrees))))
    return torch.cat(moves), numbers


def side_cosines(direction: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines between the directions of + and -, and whether there are any: ``[N, 6, D] -> [N, 3]`` each."""
    ahead, back = direction.unflatten(1, (2, 3)).unbind(1)
    moved = (ahead.abs().sum(-1) > 0) & (back.abs().sum(-1) > 0)
    return (ahead * back).sum(-1).clamp(-1, 1), moved


def draw_cosines(result: Alignment, out: Path | str, title: str = "") -> None:
    """Draw the cosines between the directions of + and - as a histogram of 20 bins: Choi 2019, figure 4."""
    figure = new_figure(5.2, 3.3)
    axes = figure.subplots()
    values = [result.cosines[:, kind][result.moved[:, kind]].tolist() for kind in range(3)]
    _, _, groups = axes.hist(
        values,
        bins=[(step - 10) / 10 for step in range(21)],
        stacked=True,
        color=COLORS[:3],
        label=["rotation", "x shift", "y shift"],
        edgecolor="white",
        linewidth=0.5,
    )
    for group, hatch in zip(groups, ("", "////", "...."), strict=True):
        for bar in group:
            bar.set_hatch(hatch)
    style_axes(axes, title, "cosine between the directions of + and −", "number of cases")
    axes.set_xlim(-1, 1)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    save_figure(figure, out)


def draw_alignment(result: Alignment, out: Path | str, title: str = "", classes: Sequence[str] | None = None) -> None:
    """Draw the alignment ratios by class and transformation as a map with numbers: Choi 2019, table 3.

    Args:
        result: what `align` found.
        out: the file, .png, .svg or .pdf.
        title: over the figure.
        classes: their names, by default their numbers.
    """
    if classes is not None and len(classes) != len(result.n):
        raise ValueError(f"classes must be {len(result.n)} names, got {len(classes)}")
    shown = [number for number, count in enumerate(result.n) if count]
    rows = [*(result.ratios[number].tolist() for number in shown), result.averages.tolist()]
    names = [*(str(number) if classes is None else classes[number] for number in shown), "average"]
    figure = new_figure(5.4, 1.7 + 0.3 * len(rows))
    axes = figure.subplots()
    lowest = min(0.9, math.floor(10 * min(map(min, rows))) / 10)
    picture = axes.imshow(rows, cmap="cividis", vmin=lowest, vmax=1, aspect="auto")
    for y, row in enumerate(rows):
        for x, value in enumerate(row):
            colour = "black" if picture.norm(value) > 0.55 else "white"
            weight = "bold" if y == len(rows) - 1 else "normal"
            axes.text(x, y, f"{value:.2f}", ha="center", va="center", color=colour, fontsize=9, fontweight=weight)
    axes.set_xticks(range(6), [name.replace("-", "−") for name in result.names])
    axes.set_yticks(range(len(rows)), names)
    axes.axhline(len(rows) - 1.5, color="white", linewidth=3)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    (mean, std), (other, spread) = result.reference, result.printed_reference
    caption = f"random vectors: {mean:.2f} ± {std:.2f}; by the axis of the paper's number: {other:.2f} ± {spread:.2f}"
    axes.set_xlabel(caption, fontsize=8, labelpad=8)
    axes.set_title(title or "alignment ratio", fontsize=10)
    figure.colorbar(picture, ax=axes, fraction=0.05, pad=0.02)
    save_figure(figure, out)
