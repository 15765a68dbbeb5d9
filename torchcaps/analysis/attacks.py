"""What attacks do to a model, with its own gradients or another's, as in the black-box attack of Chen 2019."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from torchcaps._core.plotting import COLORS, new_figure, save_figure, show_image, style_axes
from torchcaps.analysis.adversarial import Limit, LossName, bim, fgsm, label_sets, pgd
from torchcaps.analysis.common import Progress, outputs
from torchcaps.models import Network

__all__ = ["AttackResult", "attack", "bim", "draw_attack", "fgsm", "judge", "pgd"]

CONSTANT = 0.9  # the share of images from which on one predicted class is taken for a failure
HATCHES = ("", "//", "..", "xx", "--", "++", "oo")


@dataclass(frozen=True)
class AttackResult:
    """What an attack does to a model.

    Attributes:
        method, eps, loss: of the attack.
        source: the name of the model whose gradients were used; empty: the attacked model's own, a white-box attack.
        n_images: how many were attacked.
        clean_accuracy, accuracy: the shares recognised before and after.
        true: images of each class, ``[classes]``.
        clean_predicted, predicted: how often each class was predicted before and after, ``[classes]``.
        largest_change: of any pixel.
        top_share: the share of images for which the class predicted most often after the attack was predicted.
        degenerate: whether that is nearly all of them: then the accuracy is just that class's share of the images and
            says nothing of the attack. (The 11.35 % and 8.92 % of Chen 2019 are the shares of the digits 1 and 5 among
            MNIST's test images.)
        before, after: a few images, first those that were recognised before and not after, ``[K, C, H, W]``.
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
    top_share: float
    degenerate: bool
    before: Tensor
    after: Tensor


def attack(
    model: Network,
    images: Tensor,
    labels: Tensor,
    method: Literal["fgsm", "bim", "pgd"] = "fgsm",
    eps: float = 8 / 255,
    source: Network | None = None,
    low: Limit = 0.0,
    high: Limit = 1.0,
    loss: LossName = "cross_entropy",
    steps: int = 10,
    step_size: float | None = None,
    restarts: int = 1,
    seed: int = 0,
    n_examples: int = 8,
    batch_size: int = 128,
    progress: Progress | None = None,
) -> AttackResult:
    """Measure a model on images that were changed to mislead it; by default as Chen 2019 attacks, by FGSM.

    With its own gradients this is a white-box attack; with those of a ``source``, another model that takes the same
    images, a black-box one. ``n_examples`` images are kept as they were before and after. The other arguments are those
    of `torchcaps.analysis.adversarial.fgsm`, `bim` and `pgd`; eps, low and high are in the images' own scale.
    """
    if method not in ("fgsm", "bim", "pgd"):
        raise ValueError(f"method must be 'fgsm', 'bim' or 'pgd', got {method!r}")
    if len(images) == 0:
        raise ValueError("images must be one or more, got none")
    attacker = model if source is None else source
    if (attacker.spec.image, attacker.spec.classes) != (model.spec.image, model.spec.classes):
        raise ValueError(
            f"source must take the images and classes of {model.name}, {model.spec.image} and {model.spec.classes}, "
            f"and {attacker.name} takes {attacker.spec.image} and {attacker.spec.classes}"
        )
    clean_right, clean = judge(model, images, labels, batch_size, progress)
    if method == "fgsm":
        changed = fgsm(attacker, images, labels, eps, low, high, loss, batch_size, progress)
    elif method == "bim":
        changed = bim(attacker, images, labels, eps, steps, step_size, low, high, loss, batch_size, progress)
    else:
        changed = pgd(
            attacker, images, labels, eps, steps, step_size, restarts, seed, low, high, loss, batch_size, progress
        )
    right, found = judge(model, changed, labels, batch_size, progress)
    true = label_sets(model, labels).sum(0).cpu()
    top_share = float(found.sum(0).max()) / len(images)
    turned = (clean_right & ~right).to(torch.uint8).argsort(descending=True, stable=True)[:n_examples]
    return AttackResult(
        method=method,
        eps=float(eps),
        loss=loss,
        source="" if source is None else source.name,
        n_images=len(images),
        clean_accuracy=float(clean_right.double().mean()),
        accuracy=float(right.double().mean()),
        true=true,
        clean_predicted=clean.sum(0),
        predicted=found.sum(0),
        largest_change=float((changed - images).abs().max()),
        top_share=top_share,
        degenerate=top_share >= CONSTANT > float(true.max()) / len(images),
        before=images[turned].cpu(),
        after=changed[turned].cpu(),
    )


def judge(
    model: Network, images: Tensor, labels: Tensor, batch_size: int = 128, progress: Progress | None = None
) -> tuple[Tensor, Tensor]:
    """Return which images a model recognises, as its paper counts, and which classes it predicts.

    Shapes:
        truth values ``[B]``, zeros and ones ``[B, classes]``
    """
    scores = torch.cat([out.scores for out in outputs(model, images, batch_size=batch_size, progress=progress)])
    return model.is_correct(scores, labels).cpu(), model.predict_multi_hot(scores).long().cpu()


def draw_attack(results: Mapping[str, AttackResult], out: Path | str, title: str = "") -> None:
    """Draw what attacks did: accuracies, what was predicted beside what was there, and images of the first of them."""
    if not results:
        raise ValueError("results must be one or more, got none")
    first = next(iter(results.values()))
    n_examples = len(first.before)
    height = max(3.6, 1.6 + 0.45 * len(results))
    figure = new_figure(10, height + (2.2 if n_examples else 0))
    figure.suptitle(title)
    upper, *lower = figure.subfigures(2, 1, height_ratios=(height, 2.2)) if n_examples else [figure]
    accuracy, predicted = upper.subplots(1, 2, width_ratios=(2, 3))
    places = torch.arange(len(results)).numpy()
    for offset, name, colour, shares in (
        (-0.2, "clean", "#bbbbbb", [result.clean_accuracy for result in results.values()]),
        (0.2, "attacked", COLORS[1], [result.accuracy for result in results.values()]),
    ):
        bars = accuracy.barh(places + offset, [100 * share for share in shares], 0.38, label=name, color=colour)
        accuracy.bar_label(bars, fmt="%.1f", fontsize=7, padding=2)
    style_axes(accuracy, x="accuracy, %")
    accuracy.set_yticks(places, [_flagged(name, result) for name, result in results.items()], fontsize=8)
    accuracy.set_ylim(len(results) - 0.45, -0.55)  # the first on top
    accuracy.set_xlim(0, 112)
    accuracy.set_xticks(range(0, 101, 20))
    accuracy.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, fontsize=8, frameon=False)
    _draw_predicted(predicted, results)
    if lower:
        grid = lower[0].subplots(2, n_examples, squeeze=False)
        lower[0].suptitle(f"{next(iter(results))}: before and after, changed by at most {first.eps:.3g}", fontsize=9)
        for column, (before, after) in enumerate(zip(first.before, first.after, strict=True)):
            show_image(grid[0, column], before)
            show_image(grid[1, column], after)
    save_figure(figure, out)


def _flagged(name: str, result: AttackResult) -> str:
    """Name a result; say so where nearly all images are taken for one class."""
    return f"{name}\n(nearly always {int(result.predicted.argmax())})" if result.degenerate else name


def _draw_predicted(axes: Any, results: Mapping[str, AttackResult]) -> None:
    """Draw how often each class was predicted after the attack, in percent of the images."""
    width = 0.8 / len(results)
    for number, (name, result) in enumerate(results.items()):
        n_classes = len(result.predicted)
        places = torch.arange(n_classes) + (number - (len(results) - 1) / 2) * width
        shares = 100 * result.predicted / result.n_images
        style = {"color": COLORS[number % len(COLORS)], "hatch": HATCHES[number % len(HATCHES)]}
        axes.bar(places.numpy(), shares.numpy(), width, label=name, edgecolor="white", linewidth=0.4, **style)
        if number == 0:
            true = (100 * result.true / result.n_images).numpy()
            ends = torch.arange(n_classes).numpy()
            axes.hlines(true, ends - 0.45, ends + 0.45, color="black", linewidth=1.2, label="true")
            if n_classes <= 20:
                axes.set_xticks(ends)
    style_axes(axes, x="class predicted after the attack", y="of the images, %")
    columns = 2 if max(map(len, results)) > 16 else 4
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=columns, fontsize=8, frameon=False)
