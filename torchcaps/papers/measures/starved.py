"""Classes whose coefficients an ascent has taken away: Yang 2021's quadratic program."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torchcaps.analysis.attacks import judge
from torchcaps.analysis.style import COLOURS, MARKERS, new_figure, save, tidy
from torchcaps.papers.context import Context
from torchcaps.papers.measures.training import coefficients_of
from torchcaps.papers.parts import Measure
from torchcaps.papers.summary import Results
from torchcaps.training import Trained

__all__ = ["class_coefficients", "draw_class_coefficients"]


def class_coefficients(context: Context, net: Trained, images: int = 10_000) -> dict[str, Any]:
    """Measure how large the routing coefficients of each class are, and how many of its test images are recognised.

    Sizes are means of ``|b|`` over the children, as shares of the mean over the classes.
    """
    sizes = coefficients_of(net).abs().mean(0)  # [parents]
    sizes = sizes / sizes.mean()
    batch = context.test_batch(net, images)
    right, _ = judge(net.model, batch.images, batch.labels, progress=context.tick)
    totals = batch.labels.bincount(minlength=len(sizes))
    recalls = torch.bincount(batch.labels[right], minlength=len(sizes)) / totals.clamp(min=1)
    least = int(sizes.argmin())
    return {
        "classes": list(net.classes),
        "sizes": sizes,
        "recalls": recalls,
        "least": 100 * float(sizes[least]),
        "least_class": least,
        "recall": 100 * float(recalls[least]),
        "recall_images": int(totals[least]),
        "others": 100 * float(recalls[torch.arange(len(sizes)) != least].mean()),
    }


def draw_class_coefficients(measures: Mapping[str, Measure], results: Results, out: Path) -> None:
    """Draw a point for each class of each net: the size of its coefficients, and the share that is recognised."""
    figure = new_figure(7.6, 4.0)
    axes = figure.subplots()
    names: list[str] = []
    told: dict[int, tuple[float, float]] = {}  # a label for each class that is lost, at its lowest point
    for number, (label, measure) in enumerate(measures.items()):
        record = results.first(measure)
        if record is None:
            continue
        names = record["found"]["classes"]
        sizes, recalls = (torch.as_tensor(record["found"][key]).float() for key in ("sizes", "recalls"))
        style = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}
        hollow = {"facecolors": "none", "edgecolors": style.pop("color")} if number % 2 else {}
        axes.scatter(sizes, 100 * recalls, s=34, alpha=0.8, label=label, **style, **hollow)
        least = int(sizes.argmin())
        if least not in told or float(recalls[least]) < told[least][1]:
            told[least] = float(sizes[least]), float(recalls[least])
    if not names:
        return
    for number, (size, recall) in told.items():
        axes.annotate(names[number], (size, 100 * recall), (10, 4), textcoords="offset points", fontsize=9)
    tidy(axes, results.title, "size of a class's coefficients, mean of the classes = 1", "recognised of the class, %")
    axes.set_xlim(left=0)
    axes.set_ylim(-4, 103)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    save(figure, out)
