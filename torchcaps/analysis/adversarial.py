"""Accuracy under adversarial attacks, white-box or black-box: Chen 2019, section 4.3."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from torchcaps._core.plotting import COLORS, new_figure, save_figure, show_image, style_axes
from torchcaps._core.stats import wilson_interval
from torchcaps._core.validation import FieldError
from torchcaps.analysis.attacks import AttackLoss, Bound, bim, fgsm, pgd
from torchcaps.analysis.common import Progress, evaluate_predictions, multi_hot_labels
from torchcaps.analysis.registry import Analysis, Column, Subject, Summary, register_analysis
from torchcaps.models import Network

__all__ = ["AttackOptions", "AttackResult", "attack", "draw_attack"]

DEGENERATE_FRACTION = 0.9  # of the images predicted as one class: from here on a result is called degenerate
LABEL_CHARACTERS = 14  # of a line of a class name
HATCHES = ("", "//", "..", "xx", "--", "++", "oo")


@dataclass(frozen=True)
class AttackResult:
    """Accuracy and predictions of a model before and after an attack.

    Attributes:
        method, eps, loss: of the attack.
        source: name of the model whose gradients were used; empty for a white-box attack, by the model's own.
        n_images: number of images attacked.
        clean_accuracy, accuracy: before and after the attack.
        true: number of images of each class, ``[classes]``.
        clean_predicted, predicted: number of predictions of each class before and after, ``[classes]``.
        largest_change: of any pixel.
        top_fraction: fraction of the images predicted, after the attack, as the most frequent class.
        degenerate: whether nearly all images are predicted as one class. The accuracy is then the frequency of that
            class, whatever the attack. (The 11.35 % and 8.92 % of Chen 2019 are the frequencies of the
            digits 1 and 5 in the MNIST test set.)
        before, after: example images, those with a changed prediction first, ``[K, C, H, W]``.
        predicted_before, predicted_after: predicted classes of the examples, multi-hot ``[K, classes]``, if recorded.

    >>> import torch, torchcaps
    >>> model = torchcaps.create_model("capsnet_small", width=4, types=2, hidden=(8,))
    >>> images, labels = torch.rand(4, 1, 28, 28), torch.arange(4)
    >>> from torchcaps.analysis import attack
    >>> result = attack(model, images, labels, method="fgsm", eps=8 / 255)
    >>> result.method, result.n_images, result.predicted.shape
    ('fgsm', 4, torch.Size([10]))
    """

    method: str
    eps: float
    loss: str
    source: str
    n_images: int
    clean_accuracy: float
    accuracy: float
    true: Tensor
    clean_predicted: Tensor
    predicted: Tensor
    largest_change: float
    top_fraction: float
    degenerate: bool
    before: Tensor
    after: Tensor
    predicted_before: Tensor | None = None
    predicted_after: Tensor | None = None


def attack(
    model: Network,
    images: Tensor,
    labels: Tensor,
    method: Literal["fgsm", "bim", "pgd"] = "fgsm",
    eps: float = 8 / 255,
    source: Network | None = None,
    low: Bound = 0.0,
    high: Bound = 1.0,
    loss: AttackLoss = "cross_entropy",
    steps: int = 10,
    step_size: float | None = None,
    restarts: int = 1,
    seed: int = 0,
    n_examples: int = 8,
    batch_size: int = 128,
    progress: Progress | None = None,
) -> AttackResult:
    """Measure the accuracy on adversarial images; the defaults are the FGSM attack of Chen 2019, section 4.3.

    Args:
        model: the attacked network.
        images: ``[B, C, H, W]``, as the model takes them.
        labels: as the model takes them.
        method: ``"fgsm"``, ``"bim"`` or ``"pgd"``; `torchcaps.analysis.attacks` defines them and the arguments below.
        eps: the largest change of a pixel, in the scale of the images.
        source: a model that takes the same images and whose gradients are used (black-box attack); by default the
            attacked model itself (white-box).
        low: the smallest value of a pixel.
        high: the largest value of a pixel.
        loss: ``"cross_entropy"`` or ``"training"``.
        steps: iterations of ``bim`` and ``pgd``.
        step_size: of ``bim`` and ``pgd``, by default ``2.5 eps / steps``.
        restarts: of ``pgd``.
        seed: of the random starts of ``pgd``.
        n_examples: number of images kept before and after the attack.
        batch_size: images per forward pass.
        progress: called after each batch: before, during and after the attack.

    >>> import torchcaps
    >>> model = torchcaps.create_model("capsnet_small", width=4, types=2, hidden=(8,))
    >>> attack(model, torch.rand(4, 1, 28, 28), torch.arange(4)).n_images
    4
    """
    if method not in ("fgsm", "bim", "pgd"):
        raise ValueError(f"method must be 'fgsm', 'bim' or 'pgd', got {method!r}")
    if len(images) == 0:
        raise ValueError("images must contain at least one image, got none")
    attacker = model if source is None else source
    if (attacker.spec.image, attacker.spec.classes) != (model.spec.image, model.spec.classes):
        raise ValueError(
            f"source must take the images and classes of {model.name}, {model.spec.image} and {model.spec.classes}, "
            f"but {attacker.name} takes {attacker.spec.image} and {attacker.spec.classes}"
        )
    clean_correct, clean = evaluate_predictions(model, images, labels, batch_size, progress)
    if method == "fgsm":
        changed = fgsm(attacker, images, labels, eps, low, high, loss, batch_size, progress)
    elif method == "bim":
        changed = bim(attacker, images, labels, eps, steps, step_size, low, high, loss, batch_size, progress)
    else:
        changed = pgd(
            attacker, images, labels, eps, steps, step_size, restarts, seed, low, high, loss, batch_size, progress
        )
    correct, predicted = evaluate_predictions(model, changed, labels, batch_size, progress)
    true = multi_hot_labels(model, labels).sum(0).cpu()
    top_fraction = float(predicted.sum(0).max()) / len(images)
    examples = (clean_correct & ~correct).to(torch.uint8).argsort(descending=True, stable=True)[:n_examples]
    return AttackResult(
        method=method,
        eps=float(eps),
        loss=loss,
        source="" if source is None else source.name,
        n_images=len(images),
        clean_accuracy=float(clean_correct.double().mean()),
        accuracy=float(correct.double().mean()),
        true=true,
        clean_predicted=clean.sum(0),
        predicted=predicted.sum(0),
        largest_change=float((changed - images).abs().max()),
        top_fraction=top_fraction,
        degenerate=top_fraction >= DEGENERATE_FRACTION > float(true.max()) / len(images),
        before=images[examples].cpu(),
        after=changed[examples].cpu(),
        predicted_before=clean[examples].cpu() > 0,
        predicted_after=predicted[examples].cpu() > 0,
    )


# Figure -------------------------------------------------------------------------------------------------------------


def draw_attack(
    results: Mapping[str, AttackResult], out: Path | str, title: str = "", classes: Sequence[str] | None = None
) -> None:
    """Draw accuracies before and after, the predicted classes, and example images of the first result.

    Args:
        results: the return values of `attack`, by the name of the model.
        out: the file, .png, .svg or .pdf.
        title: above the figure.
        classes: class names, by default their indices.

    >>> import torch, torchcaps
    >>> model = torchcaps.create_model("capsnet_small", width=4, types=2, hidden=(8,))
    >>> images, labels = torch.rand(4, 1, 28, 28), torch.arange(4)
    >>> result = attack(model, images, labels, method="fgsm", eps=8 / 255)
    >>> draw_attack({"capsnet_small": result}, "attack.png")
    """
    if not results:
        raise ValueError("results must contain at least one attack, got none")
    first = next(iter(results.values()))
    n_examples = len(first.before)
    height = max(3.6, 1.6 + 0.45 * len(results))
    figure = new_figure(10, height + (2.2 if n_examples else 0))
    figure.suptitle(title)
    upper, *lower = figure.subfigures(2, 1, height_ratios=(height, 2.2)) if n_examples else [figure]
    accuracy, predicted = upper.subplots(1, 2, width_ratios=(2, 3))
    rows = torch.arange(len(results)).numpy()
    for offset, name, color, fractions in (
        (-0.2, "clean", "#bbbbbb", [result.clean_accuracy for result in results.values()]),
        (0.2, "attacked", COLORS[1], [result.accuracy for result in results.values()]),
    ):
        bars = accuracy.barh(rows + offset, [100 * fraction for fraction in fractions], 0.38, label=name, color=color)
        accuracy.bar_label(bars, fmt="%.1f", fontsize=7, padding=2)
    style_axes(accuracy, x="accuracy, %")
    accuracy.set_yticks(rows, [_row_label(name, result) for name, result in results.items()], fontsize=8)
    accuracy.set_ylim(len(results) - 0.45, -0.55)  # the first result on top
    accuracy.set_xlim(0, 112)
    accuracy.set_xticks(range(0, 101, 20))
    accuracy.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, fontsize=8, frameon=False)
    _draw_predicted(predicted, results, classes)
    if lower:
        grid = lower[0].subplots(2, n_examples, squeeze=False)
        change = f"pixels changed by at most {255 * first.eps:.3g} of 255 grey levels"
        shown, colors = ("images", "") if first.predicted_before is None else ("predictions", " (orange: changed)")
        text = f"{next(iter(results))}: {shown} before (above) and after the attack{colors}, {change}"
        lower[0].suptitle(text, fontsize=9)
        for row, (images, predictions) in enumerate(
            ((first.before, first.predicted_before), (first.after, first.predicted_after))
        ):
            for column, image in enumerate(images):
                show_image(grid[row, column], image)
                if predictions is not None:
                    is_changed = row == 1 and not bool((predictions[column] == first.predicted_before[column]).all())  # type: ignore[index]
                    label = _class_label(predictions[column], classes)
                    grid[row, column].set_title(label, fontsize=8, pad=4, color=COLORS[1] if is_changed else "black")
    save_figure(figure, out)


def _row_label(name: str, result: AttackResult) -> str:
    """Return the label of a bar; a degenerate result names the class that is nearly always predicted."""
    return f"{name}\n(nearly always {int(result.predicted.argmax())})" if result.degenerate else name


def _class_label(predicted: Tensor, classes: Sequence[str] | None) -> str:
    """Return the names of predicted classes, wrapped."""
    names = [str(n) if classes is None else classes[int(n)] for n in predicted.nonzero()[:, 0].tolist()]
    return textwrap.fill(" + ".join(names) or "none", LABEL_CHARACTERS)


def _draw_predicted(axes: Any, results: Mapping[str, AttackResult], classes: Sequence[str] | None) -> None:
    """Draw how often each class is predicted after the attack, in percent of the images."""
    width = 0.8 / len(results)
    for index, (name, result) in enumerate(results.items()):
        n_classes = len(result.predicted)
        centers = torch.arange(n_classes) + (index - (len(results) - 1) / 2) * width
        percent = 100 * result.predicted / result.n_images
        style = {"color": COLORS[index % len(COLORS)], "hatch": HATCHES[index % len(HATCHES)]}
        axes.bar(centers.numpy(), percent.numpy(), width, label=name, edgecolor="white", linewidth=0.4, **style)
        if index == 0:
            true = (100 * result.true / result.n_images).numpy()
            ticks = torch.arange(n_classes).numpy()
            axes.hlines(true, ticks - 0.45, ticks + 0.45, color="black", linewidth=1.2, label="true")
            if n_classes <= 20:
                names = list(map(str, ticks)) if classes is None else list(classes)
                is_rotated = max(map(len, names)) > 2
                labels = [textwrap.fill(name, LABEL_CHARACTERS) for name in names] if is_rotated else names
                axes.set_xticks(ticks, labels, rotation=90 if is_rotated else 0, fontsize=8)
    style_axes(axes, x="predicted class after the attack", y="images, %")
    columns = 2 if max(map(len, results)) > 16 else 4
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=columns, fontsize=8, frameon=False)


# Declaration --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttackOptions:
    """Options of the analysis ``attack``.

    Args:
        method: attack: one step (fgsm), several (bim), or several from a random start (pgd).
        eps: largest change of a pixel, in grey levels out of 255.
        iterations: steps of bim and pgd (default: 10).
        source: run whose gradients are used against all others, a black-box attack (default: each run's own).
        seed: seed of the random starts of pgd.
    """

    method: Literal["fgsm", "bim", "pgd"] = "fgsm"
    eps: float = 8.0
    iterations: int | None = None
    source: Subject | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.eps <= 255:
            raise FieldError(self, "eps", f"must be in 0..255, the grey levels of an image, got {self.eps:g}")
        if self.iterations is not None and self.method == "fgsm":
            raise FieldError(self, "iterations", "applies to the methods 'bim' and 'pgd' only: 'fgsm' makes one step")


def _run(subjects: Sequence[Subject], options: AttackOptions) -> dict[str, AttackResult]:
    """Attack each model, by its own gradients or by those of ``options.source``."""
    source = None if options.source is None else options.source.pixel_network()
    results = {}
    for subject in subjects:
        network = subject.pixel_network()
        batch = subject.pixels(network)
        results[subject.name] = attack(
            network,
            batch.images,
            batch.labels,
            options.method,
            options.eps / 255,
            source,
            steps=10 if options.iterations is None else options.iterations,
            seed=options.seed,
            batch_size=subject.batch_size,
            progress=subject.track(3 * subject.n_batches()),  # before, the attack, after
        )
    return results


def _summarize(results: Mapping[str, AttackResult], classes: Sequence[str]) -> Summary:
    """Return the summary table: accuracy without and under attack, and the most predicted class, by run."""
    first = next(iter(results.values()))
    rows = {
        name: {
            "clean_accuracy": result.clean_accuracy,
            "accuracy": result.accuracy,
            "interval": wilson_interval(round(result.accuracy * result.n_images), result.n_images),
            "top_class": classes[int(result.predicted.argmax())],
            "top_fraction": result.top_fraction,
        }
        for name, result in results.items()
    }
    columns = {
        "clean_accuracy": Column("clean accuracy", "percent"),
        "accuracy": Column("accuracy under attack", "percent"),
        "interval": Column("95 % interval", "interval"),
        "top_class": Column("most predicted"),
        "top_fraction": Column("fraction of images", "percent"),
    }
    notes = tuple(
        f"{name} predicts nearly all images as one class: its accuracy is the frequency of that class."
        for name, result in results.items()
        if result.degenerate
    )
    return Summary(_title(first), first.n_images, "run", columns, rows, notes)


def _title(result: AttackResult) -> str:
    gradients = f"gradients of {result.source}" if result.source else "its own gradients"
    return f"{result.method.upper()} attack of {255 * result.eps:g} grey levels out of 255 by {gradients}"


def _draw(results: Mapping[str, AttackResult], out: Path, title: str, classes: Sequence[str]) -> None:
    subtitle = _title(next(iter(results.values())))
    draw_attack(results, out, f"{title}: {subtitle}" if title else subtitle, classes)


ATTACK = register_analysis(
    Analysis(
        "attack",
        "accuracy on images perturbed by FGSM, BIM or PGD",
        _run,
        _summarize,
        _draw,
        AttackOptions,
        n_images=1_000,
        compares_models=True,
    )
)
