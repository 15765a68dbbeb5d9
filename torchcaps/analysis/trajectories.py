"""Trajectories of capsules under a transformation: measured examples of the sketch in Choi 2019, Figure 5."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchcaps._core.plotting import COLORS, MARKERS, new_figure, save_figure, style_axes
from torchcaps.analysis.alignment import (
    DEGREES,
    PIXELS,
    AlignmentOptions,
    alignment_ratio,
    capsule_differences,
    opposite_cosines,
    run_on_subject,
)
from torchcaps.analysis.common import Progress
from torchcaps.analysis.registry import Analysis, Column, Subject, Summary, register_analysis
from torchcaps.models import Network

__all__ = ["Trajectories", "draw_trajectories", "find_trajectories"]


@dataclass(frozen=True)
class Trajectories:
    """Trajectories of two capsules, with the lowest and the highest cosine: Choi 2019, Figure 5.

    Args:
        amounts: of the transformation, from the most negative to the most positive, 0 in the middle, ``[2, 2 n + 1]``.
        points: the capsule relative to that of the untransformed image, projected onto the plane of its first two
            principal directions, ``[2, 2 n + 1, 2]``.
        arrows: directions of + and - in that plane, ``[2, 2, 2]``.
        cosines: between these directions, in all dimensions.
        plane_fractions: fraction of the trajectory's squared length within the plane.
        names: the transformation: ``"rotation"``, ``"x"`` or ``"y"``.
        labels: class of the image.
        images: index of the image.

    >>> import torch, torchcaps
    >>> model = torchcaps.create_model("capsnet_small", width=4, types=2, hidden=(8,))
    >>> images, labels = torch.rand(4, 1, 28, 28), torch.arange(4)
    >>> result = find_trajectories(model, images[:1], labels[:1])
    >>> result.points.shape[0], len(result.names)
    (2, 2)
    """

    amounts: Tensor
    points: Tensor
    arrows: Tensor
    cosines: tuple[float, ...]
    plane_fractions: tuple[float, ...]
    names: tuple[str, ...]
    labels: tuple[int, ...]
    images: tuple[int, ...]


def find_trajectories(
    model: Network,
    images: Tensor,
    labels: Tensor,
    degrees: Sequence[float] = DEGREES,
    pixels: Sequence[float] = PIXELS,
    before_tanh: bool = False,
    batch_size: int = 128,
    progress: Progress | None = None,
) -> Trajectories:
    """Find the images with the lowest and the highest cosine between opposite directions: Choi 2019, Figure 5.

    At a cosine of -1 opposite transformations move the capsule along one line in opposite directions, as if the amount
    was a coordinate. At +1 both move it in the same direction, and it does not distinguish them. Only the half of the
    images and transformations with the largest movement is considered. The arguments are those of
    `torchcaps.analysis.measure_alignment`.

    >>> import torch, torchcaps
    >>> model = torchcaps.create_model("capsnet_small", width=4, types=2, hidden=(8,))
    >>> images, labels = torch.rand(4, 1, 28, 28), torch.arange(4)
    >>> find_trajectories(model, images[:1], labels[:1]).labels
    (0, 0)
    """
    differences, indices = capsule_differences(
        model, images, labels, degrees, pixels, before_tanh, batch_size, progress
    )
    direction = alignment_ratio(differences)[1]
    cosines, moved = opposite_cosines(direction)
    if not bool(moved.any()):
        raise ValueError("trajectories need a capsule that moves, but none of these images moves its capsule")
    # The largest distance in the direction in which the capsule moves less.
    reach = torch.linalg.vector_norm(differences, dim=-1).amax(-1).unflatten(1, (2, 3)).amin(1)  # [N, 3]
    moved &= reach >= reach[moved].median()
    lowest = int(torch.where(moved, cosines, torch.inf).argmin())
    highest = int(torch.where(moved, cosines, -torch.inf).argmax())
    selected = [divmod(lowest, 3), divmod(highest, 3)]  # image, transformation
    amounts, points, arrows, fractions = [], [], [], []
    for image, kind in selected:
        positive, negative = differences[image, kind], differences[image, kind + 3]  # [n, D]
        trajectory = torch.cat([negative.flip(0), torch.zeros_like(positive[:1]), positive])
        plane, fraction = _principal_plane(trajectory, positive)
        sizes = torch.tensor(degrees if kind == 0 else pixels, dtype=torch.float64)
        amounts.append(torch.cat([-sizes.flip(0), torch.zeros(1), sizes]))
        points.append(trajectory @ plane.T)
        arrows.append(direction[image, [kind, kind + 3]] @ plane.T)
        fractions.append(fraction)
    return Trajectories(
        amounts=torch.stack(amounts).float(),
        points=torch.stack(points).float(),
        arrows=torch.stack(arrows).float(),
        cosines=tuple(float(cosines[index]) for index in selected),
        plane_fractions=tuple(fractions),
        names=tuple(("rotation", "x", "y")[kind] for _, kind in selected),
        labels=tuple(int(indices[image]) for image, _ in selected),
        images=tuple(image for image, _ in selected),
    )


def _principal_plane(trajectory: Tensor, positive: Tensor) -> tuple[Tensor, float]:
    """Return the first two principal directions ``[2, D]``, positive amounts to the right, and their fraction."""
    _, values, rows = torch.linalg.svd(trajectory, full_matrices=False)
    plane = torch.zeros(2, trajectory.shape[1], dtype=trajectory.dtype)
    plane[: len(rows[:2])] = rows[:2]  # a pose of one entry has no second direction
    plane *= torch.where((positive @ plane.T).sum(0) < 0, -1.0, 1.0)[:, None]
    return plane, float(values[:2].square().sum() / values.square().sum())


# Figure -------------------------------------------------------------------------------------------------------------


def draw_trajectories(
    result: Trajectories, out: Path | str, title: str = "", classes: Sequence[str] | None = None
) -> None:
    """Draw both trajectories in their principal planes: Choi 2019, Figure 5.

    Args:
        result: the return value of `find_trajectories`.
        out: the file, .png, .svg or .pdf.
        title: above the figure.
        classes: class names, by default their indices.

    Deviation: the paper's figure is a sketch; these are capsules of the model.

    >>> import torch, torchcaps
    >>> model = torchcaps.create_model("capsnet_small", width=4, types=2, hidden=(8,))
    >>> images, labels = torch.rand(4, 1, 28, 28), torch.arange(4)
    >>> draw_trajectories(find_trajectories(model, images[:1], labels[:1]), "trajectories.png")
    """
    figure = new_figure(7.4, 3.6)
    panels: Any = figure.subplots(1, 2)
    for axes, index in zip(panels, range(2), strict=True):
        points, amounts = result.points[index], result.amounts[index].tolist()
        middle = len(amounts) // 2
        axes.plot(*points.T.tolist(), color="#999999", linewidth=1)
        sides = (("+", slice(middle + 1, None), -1), ("−", slice(None, middle), 0))
        for style, (sign, part, end) in enumerate(sides):
            color = COLORS[style]
            axes.plot(*points[part].T.tolist(), linestyle="", color=color, marker=MARKERS[style], label=f"{sign} side")
            unit = "°" if result.names[index] == "rotation" else " px"
            side = points[part] if end else points[part].flip(0)  # outwards
            outwards = side[-1] - (side[-2] if len(side) > 1 else 0)
            offset = (F.normalize(outwards, dim=0) * torch.tensor([24, 12])).tolist()  # text is wider than high
            axes.annotate(
                f"{sign}{abs(amounts[end]):g}{unit}", side[-1].tolist(), xytext=offset, textcoords="offset points",
                ha="center", va="center", fontsize=8, color=color,
            )  # fmt: skip
            length = float(points[part].norm(dim=-1).max()) * 0.6
            x, y = (length * result.arrows[index, style]).tolist()
            axes.annotate("", (x, y), xytext=(0, 0), arrowprops={"arrowstyle": "-|>", "color": color, "linewidth": 2})
        axes.plot(0, 0, linestyle="", marker="*", markersize=12, color="black", label="untransformed image")
        kind = {"rotation": "rotation", "x": "x shift", "y": "y shift"}[result.names[index]]
        cosine = f"{result.cosines[index]:.2f}".replace("-", "−")
        label = result.labels[index]
        name = label if classes is None else classes[label]
        subtitle = f"class {name}, {kind}; {100 * result.plane_fractions[index]:.0f} % within the plane"
        style_axes(axes, f"cos = {cosine}\n{subtitle}", "first principal component", "second principal component")
        axes.set_aspect("equal", adjustable="datalim")
        axes.margins(0.2)
        axes.tick_params(labelbottom=False, labelleft=False, length=0)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    if title:
        figure.suptitle(title, fontsize=11)
    save_figure(figure, out)


# Declaration --------------------------------------------------------------------------------------------------------


def _run(subject: Subject, options: AlignmentOptions) -> Trajectories:
    return run_on_subject(subject, options, find_trajectories)


def _summarize(result: Trajectories, classes: Sequence[str]) -> Summary:
    """Return the summary table: cosine, transformation, class and image of the lowest and highest cosine."""
    rows = {
        name: {
            "cosine": result.cosines[n],
            "transformation": result.names[n],
            "class": classes[result.labels[n]],
            "image": result.images[n],
            "plane_fraction": result.plane_fractions[n],
        }
        for n, name in enumerate(("lowest", "highest"))
    }
    columns = {
        "cosine": Column("cosine", ".3f"),
        "transformation": Column("transformation"),
        "class": Column("class"),
        "image": Column("image", ",d"),
        "plane_fraction": Column("within the plane", "percent"),
    }
    return Summary("trajectories of lowest and highest cosine", None, "case", columns, rows)


TRAJECTORIES = register_analysis(
    Analysis(
        "trajectories",
        "trajectories of the two capsules whose opposite directions have the lowest and the highest cosine",
        _run,
        _summarize,
        draw_trajectories,
        AlignmentOptions,
        n_images=100,
    )
)
