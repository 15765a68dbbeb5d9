"""Classes whose coefficients an ascent has taken away: Yang 2021's quadratic program."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchcaps._core.plotting import COLORS, MARKERS, new_figure, save_figure, style_axes
from torchcaps.analysis.common import evaluate_predictions
from torchcaps.papers.measures.training import coefficients_of
from torchcaps.reproduce.context import Context
from torchcaps.reproduce.schema import Measure
from torchcaps.reproduce.statistics import Results
from torchcaps.training import Trained

__all__ = ["class_coefficients", "draw_class_coefficients"]


def class_coefficients(context: Context, net: Trained, dynamic: Trained, images: int = 10_000) -> dict[str, Any]:
    """Measure how large the routing coefficients of each class are, and how many of its test images are recognised, by
    this net and by one with dynamic routing, which is the control: some classes are hard for both.

    Sizes are means of ``|b|`` over the children, as shares of the mean over the classes.
    """
    sizes = coefficients_of(net).abs().mean(0)  # [parents]
    sizes = sizes / sizes.mean()
    recalls, totals = _recalls(context, net, images)
    control, _ = _recalls(context, dynamic, images)
    least = int(sizes.argmin())
    others = torch.arange(len(sizes)) != least
    return {
        "classes": list(net.classes),
        "sizes": sizes,
        "recalls": recalls,
        "control": control,
        "least": 100 * float(sizes[least]),
        "least_class": least,
        "recall": 100 * float(recalls[least]),
        "recall_images": int(totals[least]),
        "recall_dynamic": 100 * float(control[least]),
        "recall_dynamic_images": int(totals[least]),
        "others": 100 * float(recalls[others].mean()),
        "others_dynamic": 100 * float(control[others].mean()),
    }


def _recalls(context: Context, net: Trained, images: int) -> tuple[Tensor, Tensor]:
    """Return which share of each class a net recognises, and how many images it has: both ``[classes]``."""
    batch = context.test_batch(net, images)
    right, _ = evaluate_predictions(net.model, batch.images, batch.labels, progress=context.tick)
    n = len(net.classes)
    totals = batch.labels.bincount(minlength=n)
    return batch.labels[right].bincount(minlength=n) / totals.clamp(min=1), totals


def draw_class_coefficients(measures: Mapping[str, Measure], results: Results, out: Path) -> None:
    """Draw a point for each class of each net: the size of its coefficients, and its loss against dynamic routing."""
    figure = new_figure(7.8, 4.0)
    axes = figure.subplots()
    lowest: dict[str, tuple[float, float]] = {}  # of the class with the smallest coefficients, by its name
    drawn = False
    for number, (label, measure) in enumerate(measures.items()):
        style: dict[str, Any] = {"marker": MARKERS[number % len(MARKERS)], "s": 34, "alpha": 0.8}
        colour = COLORS[number % len(COLORS)]
        style |= {"facecolors": "none", "edgecolors": colour} if number % 2 else {"color": colour}
        for seed, (_, record) in enumerate(results.records(measure)):
            drawn, found = True, record["found"]
            sizes, recalls, control = (torch.as_tensor(found[key]).float() for key in ("sizes", "recalls", "control"))
            apart = 100 * (recalls - control)
            axes.scatter(sizes, apart, label=label if seed == 0 else None, **style)
            least = int(found["least_class"])
            name, point = found["classes"][least], (float(sizes[least]), float(apart[least]))
            lowest[name] = min(lowest.get(name, point), point, key=lambda place: place[1])
    if not drawn:
        return
    for name, point in lowest.items():
        axes.annotate(name, point, (10, 4), textcoords="offset points", fontsize=9)
    axes.axhline(0, color="0.4", linewidth=0.8)
    words = f"{results.item.title}, scale {results.store.scale}, all seeds"
    style_axes(axes, words, "size of a class's coefficients, mean of the classes = 1", "points over dynamic routing")
    axes.set_xlim(left=0)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    save_figure(figure, out)
