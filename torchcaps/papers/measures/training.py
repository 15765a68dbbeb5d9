"""Measurements of training: ensembles, the first steps of training, learning curves."""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torchcaps._core.plotting import COLORS, MARKERS, new_figure, save_figure, style_axes
from torchcaps.data import Loader
from torchcaps.models import create_model
from torchcaps.papers.measures.cost import smoke_options
from torchcaps.reproduce.runner import MeasurementContext
from torchcaps.reproduce.schema import Measurement
from torchcaps.reproduce.statistics import Results
from torchcaps.reproduce.store import MeasurementCheckpoint
from torchcaps.routing import Dynamic, Quadratic, Routing
from torchcaps.training import TrainedRun
from torchcaps.training.inference import evaluate_runs as evaluate_ensemble

__all__ = [
    "curves",
    "draw_curves",
    "draw_early_training",
    "measure_early_training",
    "measure_ensemble",
    "measure_spread",
]

ROUTING_NAMES = {"dynamic": "dynamic", "l2": "quadratic, L2", "l1": "quadratic, L1"}


def measure_ensemble(
    context: MeasurementContext, nets: list[TrainedRun], data: str, n_images: int | None = None
) -> dict[str, Any]:
    """Measure the test accuracy of an ensemble, whose scores are the sums of its members' scores."""
    dataset = context.dataset(data, n=n_images, **nets[0].spec.data_options)
    result = evaluate_ensemble(nets, dataset, context.progress)
    return {
        "accuracy": 100 * result.accuracy,
        "error": 100 * (1 - result.accuracy),
        "accuracy_images": result.n,
        "error_images": result.n,
        "members": len(nets),
    }


def measure_spread(context: MeasurementContext, records: list[dict[str, Any]]) -> dict[str, Any]:
    """Measure how much the test accuracy of equal runs with different seeds varies, in points."""
    accuracies = [100 * record["results"]["accuracy"] for record in records]
    return {
        "std": statistics.stdev(accuracies),
        "range": max(accuracies) - min(accuracies),
        "mean": statistics.fmean(accuracies),
        "members": len(accuracies),
    }


def measure_early_training(
    context: MeasurementContext,
    model: str,
    model_options: Mapping[str, Any],
    steps: int = 400,
    interval: int = 10,
    batch_size: int = 128,
) -> dict[str, Any]:
    """Measure training error and fraction of negative coefficients over the first training steps, for three routings.

    The learning rate is the recipe's first; all routings see the same batches and start from the same seed. The state
    is kept in a checkpoint.

    Args:
        context: context of the measurement.
        model: name of the model.
        model_options: its options.
        steps: number of training steps.
        interval: steps per point of the curves.
        batch_size: images per step.
    """
    options = {"model": model, "model_options": dict(model_options), "steps": steps}
    options |= {"interval": interval, "batch_size": batch_size}
    checkpoint = MeasurementCheckpoint(context.directory / "early.pt", options)
    state = checkpoint.load() or {"numbers": {}, "label": ""}
    routings: dict[str, Routing] = {
        "dynamic": Dynamic(3),
        "l2": Quadratic("l2", initial=0.1),
        "l1": Quadratic("l1", initial=0.1),
    }
    numbers: dict[str, Any] = {"steps": torch.arange(interval, steps + 1, interval), **state["numbers"]}
    for label, routing in routings.items():
        if f"{label} error" in numbers:
            continue  # measured before the interruption
        torch.manual_seed(context.seed)
        net = create_model(model, **smoke_options(context, model, model_options), routing=routing)
        dataset = context.dataset(net.recipe.data, "train")
        loader = Loader(dataset, batch_size, pipeline=net.recipe.augmentation, seed=context.seed)
        loss, optimizer = net.loss(), net.recipe.optimizer.make(net.parameters())
        errors, negative, window, first_step = [], [], [], 0
        if state["label"] == label:
            net.load_state_dict(state["net"])
            optimizer.load_state_dict(state["optimizer"])
            errors, negative, window, first_step = (state[name] for name in ("errors", "negative", "window", "step"))
        for step in range(first_step, steps):
            images, labels, targets, _ = loader.batch(step // len(loader), step % len(loader))
            optimizer.zero_grad()
            output = net(images, labels)
            loss(output, labels, targets).backward()
            optimizer.step()
            if isinstance(routing, Quadratic):
                Quadratic.ascend(net, images, labels)
            window.append(float((~net.is_correct(output, labels)).float().mean()))
            if (step + 1) % interval == 0:
                errors.append(100 * sum(window) / len(window))
                window = []
                coefficients = dict(net.named_buffers()).get("capsules.layers.classes.coefficients.coefficient")
                negative.append(0.0 if coefficients is None else 100 * float((coefficients < 0).float().mean()))
                context.progress()
            if checkpoint.due:
                lists = {"errors": errors, "negative": negative, "window": window, "step": step + 1}
                weights = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
                checkpoint.save({"numbers": numbers, "label": label, **lists, **weights})
        quarter = max(1, len(errors) // 4)
        numbers[f"{label} error"], numbers[f"{label} negative"] = torch.tensor(errors), torch.tensor(negative)
        numbers[f"{label} first_quarter_error"] = sum(errors[:quarter]) / quarter
        numbers[f"{label} mean_error"], numbers[f"{label} last_error"] = sum(errors) / len(errors), errors[-1]
        numbers[f"{label} last_negative"] = negative[-1]
    checkpoint.remove()
    return numbers


def draw_early_training(measurement: Measurement, results: Results, out: Path) -> None:
    """Draw training error and fraction of negative coefficients over the first steps."""
    numbers = results.first(measurement)
    if numbers is None:
        return
    figure = new_figure(8, 3.4)
    panels = figure.subplots(1, 2)
    steps = torch.as_tensor(numbers["steps"]).float()
    titles = {"error": "training error", "negative": "negative coupling coefficients"}
    for axes, (quantity, title) in zip(panels, titles.items(), strict=True):
        for index, (label, name) in enumerate(ROUTING_NAMES.items()):
            if quantity == "negative" and label == "dynamic":
                continue  # a softmax has none
            values = torch.as_tensor(numbers[f"{label} {quantity}"]).float()
            axes.plot(steps, values, color=COLORS[index], marker=MARKERS[index], markersize=3, label=name)
        style_axes(axes, title, "optimiser steps", f"{title}, %")
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, fontsize=8)
    figure.suptitle(results.title, fontsize=11)
    save_figure(figure, out)


def curves(results: Results, column: str, key: str) -> dict[str, list[tuple[list[float], list[float]]]]:
    """Return the learning curves of each row of an item: one (epochs, values) per seed, by row label."""
    by_label: dict[str, list[tuple[list[float], list[float]]]] = {}
    for row in results.item.rows:
        cell = row.cells.get(column)
        for _, record in results.records(cell.source) if cell is not None and cell.source is not None else ():
            points = [(r["epoch"], r[key]) for r in record.get("curve", ()) if key in r]
            if points:
                epochs, values = map(list, zip(*points, strict=True))
                by_label.setdefault(row.label, []).append((epochs, values))
    return by_label


def draw_curves(
    results: Results,
    out: Path,
    columns: tuple[str, ...],
    key: str = "test_accuracy",
    groups: tuple[str, ...] = ("",),
    shared_axis: bool = True,
) -> None:
    """Draw the learning curves of an item's rows.

    There is one panel per column and group; the first seed is drawn with markers, the others as thin lines. A label has
    the same colour in all panels. An accuracy is drawn as an error.

    Args:
        results: the results.
        out: path of the figure.
        columns: column names.
        key: metric column of the curve.
        groups: prefixes of row labels.
        shared_axis: share the vertical axis, so that panels are comparable.
    """
    by_column = {name: found for name in columns if (found := curves(results, name, key))}
    panels = [(name, group) for name in by_column for group in groups]
    if not panels:
        return
    # place the legend of many curves below them, one for all panels
    below = len(groups) == 1 and max(len(rows) for rows in by_column.values()) > 4
    figure = new_figure(max(6.0 if below else 4.6, 3.4 * len(panels)), 4.2 if below else 3.6)
    grid = figure.subplots(1, len(panels), sharey=shared_axis, squeeze=False)[0]
    is_accuracy = key.endswith("accuracy")
    legends = {
        (group, row.label): row.label.removeprefix(group).strip(", ") or row.label
        for group in groups
        for row in results.item.rows
        if row.label.startswith(group) and any(row.label in rows for rows in by_column.values())
    }
    styles = list(dict.fromkeys(legends.values()))
    for axes, (name, group) in zip(grid, panels, strict=True):
        rows = {label: seeds for label, seeds in by_column[name].items() if label.startswith(group)}
        for label, seeds in rows.items():
            legend = legends[group, label]
            index = styles.index(legend)
            color, dashes = COLORS[index % 7], ("-", "--")[index // 7 % 2]
            for seed, (epochs, values) in enumerate(seeds):
                values = [100 * (1 - value) if is_accuracy else value for value in values]
                marked = {"marker": MARKERS[index % 7], "markersize": 4, "label": legend}
                thin = {"linewidth": 0.8, "alpha": 0.7}
                axes.plot(epochs, values, color=color, linestyle=dashes, **(thin if seed else marked))
        quantity = "error, %" if is_accuracy else "loss"
        title = group or (name if len(columns) > 1 else "")
        style_axes(axes, title, "epochs", f"{'test' if key.startswith('test') else 'training'} {quantity}")
        axes.xaxis.get_major_locator().set_params(integer=True)
        if rows and not below:
            axes.legend(frameon=False, fontsize=7)
    if below:
        handles = {h.get_label(): h for axes in grid for h in axes.get_legend_handles_labels()[0]}
        shown = [handles[legend] for legend in styles]
        figure.legend(handles=shown, loc="outside lower center", ncols=2, frameon=False, fontsize=7)
    for axes in grid[1:]:
        axes.set_ylabel("")
    n_seeds = max(len(seeds) for rows in by_column.values() for seeds in rows.values())
    title = f"{results.item.title}, scale {results.store.scale}"
    figure.suptitle(f"{title}, seed 0" if n_seeds == 1 else f"{title}; thin lines: further seeds", fontsize=11)
    save_figure(figure, out)
