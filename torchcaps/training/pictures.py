"""The pictures of a run: how it went, what the network sees, what each dimension does, who is taken for whom."""

import itertools
import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchcaps._core.files import staging_directory
from torchcaps._core.optional import import_optional
from torchcaps._core.plotting import as_rgb, overlay_two_colors, save_figure
from torchcaps.capsules import Capsules
from torchcaps.data import Batch, DataError, Dataset, Loader
from torchcaps.models import CapsuleNetwork, Network
from torchcaps.training.evaluation import Measures
from torchcaps.training.predict import Prediction
from torchcaps.training.setup import some_of

__all__ = [
    "draw_confusion",
    "draw_curves",
    "draw_dimensions",
    "draw_prediction",
    "draw_reconstructions",
    "draw_run",
    "write_image",
]

RIGHT, WRONG = "#1a7f37", "#c62828"
COLOURS = {"train": "#9e9e9e", "validation": "#1565c0", "test": "#ef6c00"}
ACROSS = 10  # images in a row
LOOKED = 2000  # images that are looked through for wrong ones
MOVES = [round(-0.25 + 0.05 * n, 2) for n in range(11)]  # Sabour 2017, figure 4


def _figure(width: float, height: float, layout: str | None = "constrained") -> Any:
    return import_optional("matplotlib.figure", "drawing").Figure(figsize=(width, height), dpi=100, layout=layout)


def draw_curves(rows: list[dict[str, Any]], out: Path, title: str = "") -> None:
    """Draw loss, error and learning rate over the epochs."""
    figure = _figure(9, 3.4)
    loss, error, rate = figure.subplots(1, 3)
    epochs = [row["epoch"] for row in rows]
    for name, colour in COLOURS.items():
        for axes, key, factor in ((loss, f"{name}_loss", 1.0), (error, f"{name}_accuracy", 100.0)):
            points = [(row["epoch"], row[key]) for row in rows if row.get(key) is not None]
            if points:
                values = [value if axes is loss else factor * (1 - value) for _, value in points]
                axes.plot([epoch for epoch, _ in points], values, color=colour, marker=".", label=name)
    rate.plot(epochs, [row["rate"] for row in rows], color="#555555", marker=".")
    for axes, words in ((loss, "loss"), (error, "images that are wrong, %"), (rate, "learning rate")):
        axes.set_xlim(left=0)
        axes.set_title(words, fontsize=10)
        axes.set_xlabel("epochs")
        axes.grid(color="#eeeeee")
        axes.spines[["top", "right"]].set_visible(False)
    for axes in (loss, error):
        low, high = axes.get_ylim()
        if low > 0 and high / low > 20:
            axes.set_yscale("log")
        elif axes is error:
            axes.set_ylim(bottom=0)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=9)
    if title:
        figure.suptitle(title, fontsize=11)
    save_figure(figure, out)


def draw_confusion(found: Measures, classes: tuple[str, ...], out: Path, title: str = "") -> None:
    """Draw which class was taken for which; what is right lies on the diagonal, and the colour is that of the wrong."""
    table = torch.tensor(found.confusion)
    n = len(classes)
    side = min(14.0, 2.2 + 0.42 * n)
    figure = _figure(side + 0.6, side)
    axes = figure.subplots()
    wrong = table.clone().fill_diagonal_(0)
    shown = axes.imshow(wrong.numpy(), cmap="Reds", vmin=0, vmax=max(1, int(wrong.max())))
    names = [name if len(name) <= 14 else name[:13] + "…" for name in classes]
    size = 9 if n <= 20 else 5
    axes.set_xticks(range(n), names, rotation=90 if max(map(len, names)) > 2 else 0, fontsize=size)
    axes.set_yticks(range(n), names, fontsize=size)
    if n <= 30:
        for row in range(n):
            for column in range(n):
                count = int(table[row, column])
                if count:
                    dark = row != column and count > 0.6 * int(wrong.max())
                    colour = RIGHT if row == column else "white" if dark else "#333333"
                    axes.text(
                        column, row, str(count), ha="center", va="center", fontsize=8 if n <= 15 else 5, color=colour
                    )
    axes.set_xlabel("taken for")
    axes.set_ylabel("is")
    bar = figure.colorbar(shown, ax=axes, label="wrong images", shrink=0.7)
    bar.locator = import_optional("matplotlib.ticker", "drawing").MaxNLocator(integer=True)
    bar.update_ticks()
    axes.set_title(title or f"{found.n_right:,} of {found.n:,} right", fontsize=10)
    save_figure(figure, out)


def draw_reconstructions(model: Network, loader: Loader, out: Path, title: str = "") -> None:
    """Draw test images beside what the decoder makes of them: first right ones, then wrong ones."""
    batch, output = _looked_at(model, loader)
    right = model.is_correct(output, batch.labels)
    rows = []
    for places in (_mixed(batch.labels, right), _mixed(batch.labels, ~right)):
        rows += [places[start : start + ACROSS] for start in range(0, min(len(places), 2 * ACROSS), ACROSS)]
    decoded = output.reconstruction
    lines = 2 if decoded is not None else 1
    figure = _figure(ACROSS * 0.95 + 0.2, len(rows) * (lines * 0.95 + 0.3) + 0.7, layout=None)
    tall = figure.get_size_inches()[1]
    figure.subplots_adjust(left=0.01, right=0.99, bottom=0.02, top=1 - 0.8 / tall, hspace=0.35)
    outer = figure.add_gridspec(len(rows), 1, hspace=0.3)
    for number, row in enumerate(rows):
        grid = outer[number].subgridspec(lines, ACROSS, hspace=0.04, wspace=0.06).subplots(squeeze=False)
        for axes in grid.flat:
            axes.set_axis_off()
        for column, place in enumerate(row):
            one = decoded is not None and model.n_objects == 1
            _show(grid[0][column], batch.targets[place] if one else batch.images[place])
            words = _told(model, loader.dataset, output.scores[place], batch.labels[place])
            grid[0][column].set_title(words, fontsize=8, color=RIGHT if right[place] else WRONG, pad=3)
            if decoded is not None:
                _show(grid[1][column], decoded[place])
    words = "Above: images. Below: what the decoder makes of their capsules." if lines == 2 else ""
    words = f"{title}{int(right.sum()):,} of {len(right):,} right. {words}"
    marks = "Green: right. Red: wrong, what it is → what it was taken for."
    figure.suptitle(f"{words}\n{marks}", fontsize=10, y=1 - 0.08 / tall, va="top")
    save_figure(figure, out)


def _mixed(labels: Tensor, which: Tensor) -> list[int]:
    """Return the places of some images, one of each class in turn."""
    of_class: dict[str, list[int]] = {}
    for place in which.nonzero()[:, 0].tolist():
        of_class.setdefault(str(labels[place].tolist()), []).append(place)
    turns = itertools.zip_longest(*(of_class[key] for key in sorted(of_class)))
    return [place for turn in turns for place in turn if place is not None]


def draw_dimensions(model: CapsuleNetwork, loader: Loader, out: Path, title: str = "") -> None:
    """Draw what each dimension of a capsule does: a row for each, moved and decoded (Sabour 2017, figure 4).

    Poses whose length is taken over ``sqrt(D)`` (Choi 2019) are moved by ``sqrt(D)`` times as much, as in its figure 3.
    """
    batch, output = _looked_at(model, loader)
    right = model.is_correct(output, batch.labels).nonzero()[:, 0]
    place = int(right[len(right) // 3]) if len(right) else 0
    assert output.capsules is not None
    pose = output.capsules.pose[place].float()  # [classes, D]
    number = int(model.predict(output)[place])
    dim = pose.shape[-1]
    factor = math.sqrt(dim) if getattr(model.head, "normalized", False) else 1.0
    moved = pose.repeat(dim, len(MOVES), 1, 1)  # [D, moves, classes, D]
    for d in range(dim):
        moved[d, :, number, d] += factor * torch.tensor(MOVES)
    labels = torch.full((dim * len(MOVES),), number)
    with torch.no_grad():
        weight = next(model.parameters())
        decoded = model.decode(Capsules(moved.flatten(0, 1).to(weight)), labels.to(weight.device)).cpu().float()
    figure = _figure(len(MOVES) * 0.62 + 1.2, dim * 0.62 + 0.9)
    grid = figure.subplots(dim, len(MOVES), squeeze=False)
    for row in range(dim):
        for column, move in enumerate(MOVES):
            axes = grid[row][column]
            _show(axes, decoded[row * len(MOVES) + column])
            axes.set_xticks([])
            axes.set_yticks([])
            axes.spines[:].set_visible(False)
            axes.set_axis_on()
            if row == 0:
                axes.set_title(f"{move * factor:+.2g}" if move else "0", fontsize=8)
            if column == 0:
                axes.set_ylabel(str(row), rotation=0, fontsize=8, labelpad=8, va="center")
    figure.suptitle(f"{title}each dimension of the capsule for {loader.dataset.classes[number]!r}, moved", fontsize=10)
    save_figure(figure, out)


def _looked_at(model: Network, loader: Loader) -> tuple[Batch, Any]:
    """Return images with what the model makes of them: enough that some are wrong, if any are."""
    model.eval()
    device = next(model.parameters()).device
    some = Loader(some_of(loader.dataset, LOOKED), loader.batch_size, pipeline=loader.pipeline, train=False)
    batches, outputs = [], []
    for batch in some.epoch(0):
        with torch.no_grad():
            output = model(batch.images.to(device), batch.labels.to(device))
        batches.append(batch.to("cpu"))
        outputs.append(output)
    whole = Batch(*(torch.cat([getattr(b, name) for b in batches]) for name in Batch._fields))
    first = outputs[0]
    scores = torch.cat([o.scores for o in outputs]).cpu().float()
    decoded = None
    if first.reconstruction is not None:
        decoded = torch.cat([o.reconstruction for o in outputs]).cpu().float()
    capsules = None
    if first.capsules is not None:
        capsules = Capsules(torch.cat([o.capsules.pose for o in outputs]).cpu())
    return whole, first._replace(scores=scores, reconstruction=decoded, capsules=capsules)


def _show(axes: Any, image: Tensor) -> None:
    """Show an image, or the two objects of one in two colours."""
    image = image.float()
    if image.ndim == 4:
        image = overlay_two_colors(*image[:2]) if len(image) > 1 else image[0]
    axes.imshow(as_rgb(image).permute(1, 2, 0).clamp(0, 1).numpy(), interpolation="nearest")


def _told(model: Network, dataset: Dataset, scores: Tensor, labels: Tensor) -> str:
    """Return what an image is, and what it was taken for where that is something else."""

    def named(numbers: list[int]) -> str:
        return "+".join(dataset.classes[n][:8] for n in sorted(numbers)) or "none"

    told = model.predict_multi_hot(scores.unsqueeze(0))[0].nonzero()[:, 0].tolist()
    if model.n_objects is None:
        true = labels.nonzero()[:, 0].tolist()
    else:
        true = [int(labels)] if model.n_objects == 1 else labels.tolist()
    return named(true) if set(true) == set(told) else f"{named(true)}→{named(told)}"


def draw_run(
    rows: list[dict[str, Any]], model: Network, loader: Loader | None, found: Measures | None, folder: Path, name: str
) -> list[Path]:
    """Draw all pictures that there are of a run; return where they are.

    Args:
        rows: its metrics.
        model: with the weights that count.
        loader: of the test images.
        found: what it does on them.
        folder: where the pictures go.
        name: what stands above them.
    """
    drawn = [folder / "curves.png"]
    draw_curves(rows, drawn[0], name)
    if loader is None:
        return drawn
    drawn.append(folder / "reconstructions.png")
    draw_reconstructions(model, loader, drawn[-1], f"{name}: ")
    if isinstance(model, CapsuleNetwork) and model.decoder is not None and model.n_objects == 1:
        drawn.append(folder / "dimensions.png")
        draw_dimensions(model, loader, drawn[-1], f"{name}: ")
    if found is not None and found.confusion:
        drawn.append(folder / "confusion.png")
        right = f"{name}: {found.n_right:,} of {found.n:,} right"
        draw_confusion(found, loader.dataset.classes, drawn[-1], right)
    return drawn


def draw_prediction(prediction: Prediction, classes: tuple[str, ...], out: Path) -> None:
    """Draw what a network was shown, what its decoder made of it, and how sure it is of each class."""
    images = [("what it saw", prediction.image)]
    if prediction.reconstruction is not None:
        images.append(("what it makes of it", prediction.reconstruction))
    figure = _figure(2.2 * len(images) + 3.2, 2.6)
    axes = figure.subplots(1, len(images) + 1, width_ratios=[1] * len(images) + [1.4])
    for place, (words, image) in zip(axes, images, strict=False):
        _show(place, image)
        place.set_axis_off()
        place.set_title(words, fontsize=9)
    order = sorted(range(len(classes)), key=lambda n: -prediction.scores[n])[:12]
    order = sorted(order) if len(classes) <= 12 else order
    names = [classes[n][:16] for n in order]
    colours = [RIGHT if classes[n] in prediction.classes else "#9e9e9e" for n in order]
    axes[-1].barh(range(len(order)), [prediction.scores[n] for n in order], color=colours)
    axes[-1].set_yticks(range(len(order)), names, fontsize=8)
    axes[-1].invert_yaxis()
    axes[-1].set_xlim(0, 1)
    axes[-1].spines[["top", "right"]].set_visible(False)
    axes[-1].set_title(" and ".join(prediction.classes) or "none of the classes", fontsize=10)
    save_figure(figure, out)


def write_image(image: Tensor, out: Path) -> None:
    """Write an image, pixel by pixel, as PNG; several objects in two colours."""
    if image.ndim == 4:
        image = overlay_two_colors(*image[:2]) if len(image) > 1 else image[0]
    pixels = (as_rgb(image).clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous()
    picture = import_optional("PIL.Image", "writing images").fromarray(pixels.numpy())
    try:
        with staging_directory(out.parent, sweep=False) as own:
            picture.save(own / out.name)
            os.replace(own / out.name, out)
    except OSError as error:
        raise DataError(f"{out} can't be written: {error.strerror or error}") from error
