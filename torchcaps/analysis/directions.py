"""Two capsules on their way: what it means that both sides of a transformation move them apart, or the same way."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchcaps._core.plotting import COLORS, MARKERS, new_figure, save_figure, style_axes
from torchcaps.analysis.alignment import DEGREES, PIXELS, alignment_ratio, capsule_moves, side_cosines
from torchcaps.analysis.common import Progress
from torchcaps.models import Network

__all__ = ["Directions", "directions", "draw_directions"]


@dataclass(frozen=True)
class Directions:
    """Two capsules on their way, one with the lowest and one with the highest cosine: Choi 2019, figure 5.

    Args:
        amounts: from the most negative to the most positive, 0 in the middle, ``[2, 2 n + 1]``.
        points: where the capsule is, from where it started, in the plane that holds the most of its way,
            ``[2, 2 n + 1, 2]``.
        arrows: its directions of + and of -, in that plane, ``[2, 2, 2]``.
        cosines: between them, in all dimensions.
        shown: the share of the way's squares that lies in the plane.
        names: what was done: ``"rotation"``, ``"x"`` or ``"y"``.
        labels: the class of the image. images: its place among the images.
    """

    amounts: Tensor
    points: Tensor
    arrows: Tensor
    cosines: tuple[float, ...]
    shown: tuple[float, ...]
    names: tuple[str, ...]
    labels: tuple[int, ...]
    images: tuple[int, ...]


def directions(
    model: Network,
    images: Tensor,
    labels: Tensor,
    degrees: Sequence[float] = DEGREES,
    pixels: Sequence[float] = PIXELS,
    before_tanh: bool = False,
    batch_size: int = 128,
    progress: Progress | None = None,
) -> Directions:
    """Find real cases of what figure 5 of Choi 2019 sketches: a capsule that + and - move apart, and one they don't.

    At a cosine of -1 the two sides of a transformation move the capsule along one line in opposite directions, as if
    the amount was a coordinate. At +1 both move it the same way: it can't tell them apart. Of all images and the three
    transformations, those with the lowest and the highest cosine are taken, out of the half that moves its capsule the
    farthest: a capsule that hardly moves shows nothing. Arguments as in `align`.
    """
    moves, numbers = capsule_moves(model, images, labels, degrees, pixels, before_tanh, batch_size, progress)
    direction = alignment_ratio(moves)[1]
    cosines, moved = side_cosines(direction)
    if not bool(moved.any()):
        raise ValueError("directions need a capsule that moves, and none of these images moves any")
    # The farthest that the capsule gets on the shorter of the two sides.
    reach = torch.linalg.vector_norm(moves, dim=-1).amax(-1).unflatten(1, (2, 3)).amin(1)  # [N, 3]
    moved &= reach >= reach[moved].median()
    lowest = int(torch.where(moved, cosines, torch.inf).argmin())
    highest = int(torch.where(moved, cosines, -torch.inf).argmax())
    found = [divmod(lowest, 3), divmod(highest, 3)]  # image, transformation
    amounts, points, arrows, shown = [], [], [], []
    for image, kind in found:
        ahead, back = moves[image, kind], moves[image, kind + 3]  # [n, D]
        way = torch.cat([back.flip(0), torch.zeros_like(ahead[:1]), ahead])
        plane, squares = _plane(way, ahead)
        sizes = torch.tensor(degrees if kind == 0 else pixels, dtype=torch.float64)
        amounts.append(torch.cat([-sizes.flip(0), torch.zeros(1), sizes]))
        points.append(way @ plane.T)
        arrows.append(direction[image, [kind, kind + 3]] @ plane.T)
        shown.append(squares)
    return Directions(
        amounts=torch.stack(amounts).float(),
        points=torch.stack(points).float(),
        arrows=torch.stack(arrows).float(),
        cosines=tuple(float(cosines[place]) for place in found),
        shown=tuple(shown),
        names=tuple(("rotation", "x", "y")[kind] for _, kind in found),
        labels=tuple(int(numbers[image]) for image, _ in found),
        images=tuple(image for image, _ in found),
    )


def _plane(way: Tensor, ahead: Tensor) -> tuple[Tensor, float]:
    """Return the two directions ``[2, D]`` that hold the most of a way, + to the right, and the share they hold."""
    _, values, rows = torch.linalg.svd(way, full_matrices=False)
    plane = torch.zeros(2, way.shape[1], dtype=way.dtype)
    plane[: len(rows[:2])] = rows[:2]  # a pose of one number has no second
    plane *= torch.where((ahead @ plane.T).sum(0) < 0, -1.0, 1.0)[:, None]
    return plane, float(values[:2].square().sum() / values.square().sum())


def draw_directions(result: Directions, out: Path | str, title: str = "", classes: Sequence[str] | None = None) -> None:
    """Draw the two ways of `directions`, seen in the plane that holds the most of each: Choi 2019, figure 5.

    Classes have their numbers, or the names in ``classes``.

    Deviation: the paper's figure is a sketch; these are capsules of the model.
    """
    figure = new_figure(7.4, 3.6)
    panels: Any = figure.subplots(1, 2)
    for axes, number in zip(panels, range(2), strict=True):
        points, amounts = result.points[number], result.amounts[number].tolist()
        middle = len(amounts) // 2
        axes.plot(*points.T.tolist(), color="#999999", linewidth=1)
        sides = (("+", slice(middle + 1, None), -1), ("−", slice(None, middle), 0))
        for style, (sign, part, end) in enumerate(sides):
            colour = COLORS[style]
            axes.plot(*points[part].T.tolist(), linestyle="", color=colour, marker=MARKERS[style], label=f"{sign} side")
            unit = "°" if result.names[number] == "rotation" else " px"
            side = points[part] if end else points[part].flip(0)  # outwards
            onwards = side[-1] - (side[-2] if len(side) > 1 else 0)
            offset = (F.normalize(onwards, dim=0) * torch.tensor([24, 12])).tolist()  # beyond the end; words are wide
            axes.annotate(
                f"{sign}{abs(amounts[end]):g}{unit}", side[-1].tolist(), xytext=offset, textcoords="offset points",
                ha="center", va="center", fontsize=8, color=colour,
            )  # fmt: skip
            reach = float(points[part].norm(dim=-1).max()) * 0.6
            x, y = (reach * result.arrows[number, style]).tolist()
            axes.annotate("", (x, y), xytext=(0, 0), arrowprops={"arrowstyle": "-|>", "color": colour, "linewidth": 2})
        axes.plot(0, 0, linestyle="", marker="*", markersize=12, color="black", label="the image as it is")
        kind = {"rotation": "rotation", "x": "x shift", "y": "y shift"}[result.names[number]]
        cosine = f"{result.cosines[number]:.2f}".replace("-", "−")
        label = result.labels[number]
        name = label if classes is None else classes[label]
        share = f"class {name}, {kind}; {100 * result.shown[number]:.0f} % lies in the plane"
        style_axes(axes, f"cos = {cosine}\n{share}")
        axes.set_aspect("equal", adjustable="datalim")
        axes.margins(0.15)
        axes.tick_params(labelbottom=False, labelleft=False, length=0)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    if title:
        figure.suptitle(title, fontsize=11)
    save_figure(figure, out)
