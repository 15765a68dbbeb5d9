"""What is read off curves and weights: networks together, the first steps of training, signs of coefficients."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchcaps._core.plotting import COLORS, MARKERS, new_figure, save_figure, style_axes
from torchcaps.data import Loader
from torchcaps.models import create_model
from torchcaps.models.registry import MODELS
from torchcaps.reproduce.context import Context
from torchcaps.reproduce.kept import Kept
from torchcaps.reproduce.schema import Measure
from torchcaps.reproduce.statistics import Results
from torchcaps.routing import Dynamic, Quadratic, Routing
from torchcaps.training import Trained
from torchcaps.training.inference import measure as test_together

__all__ = ["coefficient_signs", "coefficients_of", "curves", "draw_curves", "draw_early", "early_training", "ensemble"]


def ensemble(context: Context, nets: list[Trained], data: str, images: int | None = None) -> dict[str, Any]:
    """Test several networks together: the sum of their scores."""
    dataset = context.dataset(data, n=images, **nets[0].spec.data_options)
    found = test_together(nets, dataset, context.tick)
    n = {"accuracy_images": found.n, "error_images": found.n}
    return {"accuracy": 100 * found.accuracy, "error": 100 * (1 - found.accuracy), **n, "members": len(nets)}


def coefficient_signs(context: Context, net: Trained) -> dict[str, Any]:
    """Measure how many of the routing coefficients of a trained network are negative, and near zero."""
    values = coefficients_of(net)
    size = values.abs().mean()
    return {
        "negative": 100 * float((values < 0).float().mean()),
        "near_zero": 100 * float((values.abs() < 0.01 * size).float().mean()),
        "mean": float(values.mean()),
        "largest": float(values.abs().max()),
    }


def coefficients_of(net: Trained) -> Tensor:
    """Return the coefficients of the layer that is routed by a quadratic program.

    Shapes:
        ``[children, parents]``
    """
    (values,) = (
        layer.coefficients["coefficient"].detach()  # type: ignore[index, operator]
        for layer in net.model.modules()
        if isinstance(getattr(layer, "routing", None), Quadratic)
    )
    return values.reshape(-1, values.shape[-1])


def early_training(
    context: Context,
    model: str,
    fields: dict[str, Any],
    steps: int = 400,
    every: int = 10,
    batch: int = 128,
) -> dict[str, Any]:
    """Follow the first steps of training with three routings: the share of wrong training images, and that of negative
    coefficients. Rates are the recipe's first; every routing sees the same batches from the same weights' seed. It is
    kept every minute, and goes on from there where it was killed.
    """
    options = {"model": model, "fields": fields, "steps": steps, "every": every, "batch": batch}
    kept = Kept(context.folder / "early.pt", options)
    left = kept.read() or {"found": {}, "label": ""}
    routings: dict[str, Routing] = {
        "dynamic": Dynamic(3),
        "l2": Quadratic("l2", initial=0.1),
        "l1": Quadratic("l1", initial=0.1),
    }
    found: dict[str, Any] = {"steps": torch.arange(every, steps + 1, every), **left["found"]}
    fields = {**fields, **(MODELS.get(model).spec.smoke_changes() if context.scale == "smoke" else {})}
    for label, routing in routings.items():
        if f"{label} wrong" in found:
            continue  # before it was killed
        torch.manual_seed(context.seed)
        net = create_model(model, **fields, routing=routing)
        dataset = context.dataset(net.recipe.data, "train")
        loader = Loader(dataset, batch, pipeline=net.recipe.augmentation, seed=context.seed)
        loss, optimizer = net.loss(), net.recipe.optimizer.make(net.parameters())
        wrong, negative, window, done = [], [], [], 0
        if left["label"] == label:
            net.load_state_dict(left["net"])
            optimizer.load_state_dict(left["optimizer"])
            wrong, negative, window, done = (left[name] for name in ("wrong", "negative", "window", "done"))
        for number in range(done, steps):
            images, labels, targets, _ = loader.batch(number // len(loader), number % len(loader))
            optimizer.zero_grad()
            output = net(images, labels)
            loss(output, labels, targets).backward()
            optimizer.step()
            if isinstance(routing, Quadratic):
                Quadratic.ascend(net, images, labels)
            window.append(float((~net.is_correct(output, labels)).float().mean()))
            if (number + 1) % every == 0:
                wrong.append(100 * sum(window) / len(window))
                window = []
                coefficients = dict(net.named_buffers()).get("capsules.layers.classes.coefficients.coefficient")
                share = 0.0 if coefficients is None else 100 * float((coefficients < 0).float().mean())
                negative.append(share)
                context.tick()
            if kept.due:
                lists = {"wrong": wrong, "negative": negative, "window": window, "done": number + 1}
                weights = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
                kept.write({"found": found, "label": label, **lists, **weights})
        found[f"{label} wrong"], found[f"{label} negative"] = torch.tensor(wrong), torch.tensor(negative)
        found[f"{label} first"] = sum(wrong[: max(1, len(wrong) // 4)]) / max(1, len(wrong) // 4)
        found[f"{label} negative_last"] = negative[-1]
    kept.clear()
    return found


def draw_early(measure: Measure, results: Results, out: Path) -> None:
    """Draw wrong training images and negative coefficients over the first steps."""
    record = results.first(measure)
    if record is None:
        return
    found = record["found"]
    figure = new_figure(8, 3.4)
    panels = figure.subplots(1, 2)
    names = {"dynamic": "dynamic", "l2": "quadratic, L2", "l1": "quadratic, L1"}
    steps = torch.as_tensor(found["steps"]).float()
    for axes, what, words in zip(
        panels, ("wrong", "negative"), ("training images that are wrong", "coefficients below zero"), strict=True
    ):
        for number, (label, name) in enumerate(names.items()):
            if what == "negative" and label == "dynamic":
                continue  # a softmax has none
            values = torch.as_tensor(found[f"{label} {what}"]).float()
            axes.plot(steps, values, color=COLORS[number], marker=MARKERS[number], markersize=3, label=name)
        style_axes(axes, words, "steps", "%")
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, fontsize=8)
    figure.suptitle(results.title, fontsize=11)
    save_figure(figure, out)


def curves(results: Results, column: str, key: str) -> dict[str, list[tuple[list[float], list[float]]]]:
    """Return the curves of each row of an item, one a seed: epochs and values."""
    found: dict[str, list[tuple[list[float], list[float]]]] = {}
    for row in results.item.rows:
        cell = row.cells.get(column)
        for _, record in results.records(cell.source) if cell is not None and cell.source is not None else ():
            points = [(r["epoch"], r[key]) for r in record.get("curve", ()) if key in r]
            if points:
                epochs, values = map(list, zip(*points, strict=True))
                found.setdefault(row.label, []).append((epochs, values))
    return found


def draw_curves(
    results: Results,
    out: Path,
    columns: tuple[str, ...],
    key: str = "test_accuracy",
    groups: tuple[str, ...] = ("",),
    same: bool = True,
) -> None:
    """Draw the curves of an item's rows over the epochs: a panel for each column that anything ran of and each group
    of rows whose labels begin alike. The first seed has marks, the others are thin. ``same``: errors compare
    across panels.
    """
    there = {name: found for name in columns if (found := curves(results, name, key))}
    panels = [(name, group) for name in there for group in groups]
    if not panels:
        return
    below = len(panels) == 1 and len(there[panels[0][0]]) > 4  # many curves leave no room for a legend among them
    figure = new_figure(max(6.0 if below else 4.6, 3.4 * len(panels)), 4.2 if below else 3.6)
    grid = figure.subplots(1, len(panels), sharey=same, squeeze=False)[0]
    share = key.endswith("accuracy")
    for axes, (name, group) in zip(grid, panels, strict=True):
        rows = {label: seeds for label, seeds in there[name].items() if label.startswith(group)}
        for number, (label, seeds) in enumerate(rows.items()):
            colour, dashes = COLORS[number % 7], ("-", "--")[number // 7 % 2]
            words = label.removeprefix(group).strip(", ") or label
            for seed, (epochs, values) in enumerate(seeds):
                values = [100 * (1 - value) if share else value for value in values]
                marked = {"marker": MARKERS[number % 7], "markersize": 4, "label": words}
                thin = {"linewidth": 0.8, "alpha": 0.7}
                axes.plot(epochs, values, color=colour, linestyle=dashes, **(thin if seed else marked))
        what = "error, %" if share else "loss"
        heading = group or (name if len(columns) > 1 else "")
        style_axes(axes, heading, "epochs", f"{'test' if key.startswith('test') else 'training'} {what}")
        axes.xaxis.get_major_locator().set_params(integer=True)
        if rows and not below:
            axes.legend(frameon=False, fontsize=7)
    if below:
        figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=7)
    for axes in grid[1:]:
        axes.set_ylabel("")
    seeds = max(len(seeds) for found in there.values() for seeds in found.values())
    words = f"{results.item.title}, scale {results.store.scale}"
    figure.suptitle(f"{words}, seed 0" if seeds == 1 else f"{words}; thin: further seeds", fontsize=11)
    save_figure(figure, out)
