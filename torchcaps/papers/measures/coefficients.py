"""Measurements of the trained coefficients of quadratic-program routing (Yang 2021): signs, sparsity, and magnitude
per class.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchcaps._core.plotting import COLORS, MARKERS, new_figure, save_figure, style_axes
from torchcaps.analysis.common import evaluate_predictions
from torchcaps.reproduce.runner import MeasurementContext
from torchcaps.reproduce.schema import Measurement
from torchcaps.reproduce.statistics import Results
from torchcaps.routing import Quadratic
from torchcaps.training import TrainedRun

__all__ = [
    "draw_class_coefficients",
    "draw_recalls",
    "hoyer_sparsity",
    "measure_class_coefficients",
    "measure_coefficient_signs",
    "routing_coefficients",
]

NEAR_ZERO = 0.01  # relative to the mean magnitude


def routing_coefficients(net: TrainedRun) -> Tensor:
    """Return the coefficients of the layer with quadratic-program routing.

    Shapes:
        ``[children, parents]``
    """
    (values,) = (
        layer.coefficients["coefficient"].detach()  # type: ignore[index, operator]
        for layer in net.model.modules()
        if isinstance(getattr(layer, "routing", None), Quadratic)
    )
    return values.reshape(-1, values.shape[-1])


def measure_coefficient_signs(context: MeasurementContext, net: TrainedRun) -> dict[str, Any]:
    """Measure the percentage of routing coefficients that are negative, and near zero, and their sparsity."""
    values = routing_coefficients(net)
    magnitude = values.abs().mean()
    return {
        "negative": 100 * float((values < 0).float().mean()),
        "near_zero": 100 * float((values.abs() < NEAR_ZERO * magnitude).float().mean()),
        "sparsity": hoyer_sparsity(values),
        "mean": float(values.mean()),
        "largest": float(values.abs().max()),
    }


def hoyer_sparsity(values: Tensor) -> float:
    """Return Hoyer's sparsity ``(sqrt(n) - |x|_1 / |x|_2) / (sqrt(n) - 1)`` of ``n`` numbers.

    It is 0 if all have the same magnitude and 1 if a single one is not zero.

    >>> hoyer_sparsity(torch.tensor([0.0, -3.0, 0.0])), hoyer_sparsity(torch.tensor([2.0, -2.0]))
    (1.0, 0.0)
    """
    flat = values.double().flatten()
    root = len(flat) ** 0.5
    return round(float((root - flat.abs().sum() / flat.norm()) / (root - 1)), 12)


def measure_class_coefficients(
    context: MeasurementContext, net: TrainedRun, dynamic: TrainedRun, n_images: int = 10_000
) -> dict[str, Any]:
    """Measure the magnitude of each class's routing coefficients and the recall of the class.

    Magnitudes are means of ``|b|`` over the children, relative to the mean over the classes.

    Args:
        context: context of the measurement.
        net: a network with quadratic-program routing.
        dynamic: the control, a network with dynamic routing: some classes are hard for both.
        n_images: number of test images.
    """
    magnitudes = routing_coefficients(net).abs().mean(0)  # [parents]
    magnitudes = magnitudes / magnitudes.mean()
    recalls, totals = _recalls(context, net, n_images)
    recalls_dynamic, _ = _recalls(context, dynamic, n_images)
    smallest = int(magnitudes.argmin())
    others = torch.arange(len(magnitudes)) != smallest
    return {
        "classes": list(net.classes),
        "magnitudes": magnitudes,
        "recalls": recalls,
        "recalls_dynamic": recalls_dynamic,
        "smallest_magnitude": 100 * float(magnitudes[smallest]),
        "smallest_class": smallest,
        "recall": 100 * float(recalls[smallest]),
        "recall_images": int(totals[smallest]),
        "recall_dynamic": 100 * float(recalls_dynamic[smallest]),
        "recall_dynamic_images": int(totals[smallest]),
        "recall_of_others": 100 * float(recalls[others].mean()),
        "recall_of_others_dynamic": 100 * float(recalls_dynamic[others].mean()),
    }


def _recalls(context: MeasurementContext, net: TrainedRun, n_images: int) -> tuple[Tensor, Tensor]:
    """Return the recall and the number of test images of each class, both ``[classes]``."""
    batch = context.test_batch(net, n_images)
    correct, _ = evaluate_predictions(net.model, batch.images, batch.labels, progress=context.progress)
    n = len(net.classes)
    totals = batch.labels.bincount(minlength=n)
    return batch.labels[correct].bincount(minlength=n) / totals.clamp(min=1), totals


def draw_class_coefficients(measurements: Mapping[str, Measurement], results: Results, out: Path) -> None:
    """Draw one point per class and network: the magnitude of its coefficients, and its recall minus that of dynamic
    routing. The class with the smallest coefficients is named.
    """
    figure = new_figure(7.8, 4.0)
    axes = figure.subplots()
    smallest: dict[str, tuple[float, float]] = {}  # point of the class with the smallest coefficients, by class name
    drawn = False
    for index, (label, measurement) in enumerate(measurements.items()):
        color = COLORS[index % len(COLORS)]
        style: dict[str, Any] = {"marker": MARKERS[index % len(MARKERS)], "s": 34, "alpha": 0.8}
        style |= {"facecolors": "none", "edgecolors": color} if index % 2 else {"color": color}
        for seed, (_, record) in enumerate(results.records(measurement)):
            drawn, numbers = True, record["results"]
            keys = ("magnitudes", "recalls", "recalls_dynamic")
            magnitudes, recalls, dynamic = (torch.as_tensor(numbers[key]).float() for key in keys)
            difference = 100 * (recalls - dynamic)
            axes.scatter(magnitudes, difference, label=label if seed == 0 else None, **style)
            i = int(numbers["smallest_class"])
            name, point = numbers["classes"][i], (float(magnitudes[i]), float(difference[i]))
            smallest[name] = min(smallest.get(name, point), point, key=lambda p: p[1])
    if not drawn:
        return
    for name, point in smallest.items():
        axes.annotate(name, point, (10, 4), textcoords="offset points", fontsize=9)
    axes.axhline(0, color="0.4", linewidth=0.8)
    title = f"{results.item.title}, scale {results.store.scale}, all seeds"
    x = "magnitude of a class's coefficients (mean over the classes = 1)"
    style_axes(axes, title, x, "recall minus that of dynamic routing, points")
    axes.set_xlim(left=0)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    save_figure(figure, out)


def draw_recalls(results: Results, out: Path) -> None:
    """Draw the recall of each class, a column of the item, for each row: means with 95 % intervals."""
    estimates = {row.label: [results.estimate(cell) for cell in row.cells.values()] for row in results.item.rows}
    estimates = {label: found for label, found in estimates.items() if any(found)}
    if not estimates:
        return
    classes = list(results.item.columns)
    figure = new_figure(max(7.8, 0.9 * len(classes)), 4.2)
    axes = figure.subplots()
    for index, (label, found) in enumerate(estimates.items()):
        offset = 0.12 * (index - (len(estimates) - 1) / 2)  # variants of a class next to each other
        points = [(x + offset, one) for x, one in enumerate(found) if one is not None]
        means = [one.mean for _, one in points]
        below, above = [one.mean - one.low for _, one in points], [one.high - one.mean for _, one in points]
        style: dict[str, Any] = {"color": COLORS[index % len(COLORS)], "marker": MARKERS[index % len(MARKERS)]}
        style |= {"linestyle": "", "markersize": 4, "elinewidth": 1, "label": label}
        axes.errorbar([x for x, _ in points], means, yerr=[below, above], **style)
    title = f"{results.item.title}, scale {results.store.scale}: means and 95 % intervals"
    style_axes(axes, title, "class", "recall, %")
    axes.set_xticks(range(len(classes)), classes, fontsize=8, rotation=20)
    axes.set_ylim(0, 103)
    axes.legend(frameon=False, fontsize=8, loc="lower left", ncols=2)
    save_figure(figure, out)
