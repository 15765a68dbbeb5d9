"""What capsules decode to: reconstructions, perturbations, segmentations, and a decoder that is not their own."""

import dataclasses
from pathlib import Path
from typing import Any

import torch

from torchcaps._core.plotting import new_figure, save_figure, show_image
from torchcaps._core.serialize import result_from_dict, result_to_dict
from torchcaps.analysis.perturbation import Perturbation, draw_perturbation, perturb
from torchcaps.analysis.reconstruction import Reconstructions, draw_reconstructions, reconstruct
from torchcaps.analysis.segmentation import Segmentation, draw_segmentation, intersection_over_union, segment
from torchcaps.reproduce.context import Context, first_of_each, mean_of
from torchcaps.reproduce.schema import Measure
from torchcaps.reproduce.statistics import Results
from torchcaps.training import Trained

__all__ = [
    "draw_foreign",
    "draw_measured_perturbation",
    "draw_measured_reconstructions",
    "draw_measured_segmentation",
    "foreign_decoder",
    "perturbations",
    "reconstructions",
    "segmentations",
]


def reconstructions(context: Context, net: Trained, images: int = 10_000, shown: int = 10) -> dict[str, Any]:
    """Decode test images by label and by prediction: all for the errors, a few right and wrong ones to look at."""
    batch = context.test_batch(net, images)
    found = reconstruct(net.model, batch.images, batch.labels, batch.targets, progress=context.tick)
    right, wrong = found.correct.nonzero()[:, 0], (~found.correct).nonzero()[:, 0]
    surest = found.confidence[wrong].argsort(descending=True)
    chosen = torch.cat([right[first_of_each(batch.labels[right], 1)][:shown], wrong[surest][:shown]])
    few = reconstruct(net.model, batch.images[chosen], batch.labels[chosen], batch.targets[chosen])
    return {
        "n": len(batch.labels),
        "wrong": len(wrong),
        "squared_error_per_pixel": float(found.error_by_label.mean()) / batch.targets[0].numel(),
        **mean_of("squared_error", found.error_by_label),
        **mean_of("squared_error_of_wrong_by_prediction", found.error_by_prediction[wrong]),
        **mean_of("squared_error_of_wrong_by_label", found.error_by_label[wrong]),
        **result_to_dict(few, "shown_"),
    }


def draw_measured_reconstructions(measure: Measure, results: Results, out: Path) -> None:
    """Draw the few."""
    record = results.first(measure)
    if record is None:
        return
    found = record["found"]
    counts = (found["n"] - found["wrong"], found["n"])
    draw_reconstructions(result_from_dict(Reconstructions, found, "shown_"), out, results.title, counts=counts)


def perturbations(context: Context, net: Trained, classes: int = 10, shown: int = 4) -> dict[str, Any]:
    """Move every dimension of the label's capsule, for the first test image of some classes; one is kept to look at."""
    batch = context.test_batch(net, 1_000)
    chosen = first_of_each(batch.labels, 1)[:classes]
    found = perturb(net.model, batch.images[chosen], batch.labels[chosen], progress=context.tick)
    change = (found.decoded - found.unperturbed[:, None, None]).square().sum(dim=(-3, -2, -1))  # [B, D, A]
    ends = change[:, :, [0, -1]].mean(dim=(0, 2))
    place = min(shown, len(chosen) - 1)
    few = {
        name: value if name in ("dims", "amounts") else value[place : place + 1]
        for name, value in result_to_dict(found).items()
    }
    return {
        **few,
        "squared_change_by_dimension": ends,
        "most": float(ends.max()),
        "least": float(ends.min()),
        "n": len(chosen),
    }


def draw_measured_perturbation(measure: Measure, results: Results, out: Path, most: int | None = None) -> None:
    """Draw the image that was kept: all dimensions, or those that change most."""
    record = results.first(measure)
    if record is None:
        return
    found = result_from_dict(Perturbation, record["found"])
    draw_perturbation(found, out, results.title, n_dims=most)


def segmentations(context: Context, net: Trained, images: int = 10_000, shown: int = 8) -> dict[str, Any]:
    """Tell two overlapping digits apart by their decodes, scored by intersection over union."""
    batch = context.test_batch(net, images)
    inputs = (net.model, batch.images, batch.labels, batch.targets)
    found = segment(*inputs, seed=context.seed, progress=context.tick)
    right, wrong = found.correct.nonzero()[:shown, 0], (~found.correct).nonzero()[:shown, 0]
    chosen = torch.cat([right, wrong])
    few = segment(net.model, batch.images[chosen], batch.labels[chosen], batch.targets[chosen], seed=context.seed)
    darker = found.by_label.mean(2)  # [B, 2, H, W]
    given = (batch.images.mean(1, keepdim=True) > found.threshold) & (darker > darker.flip(1))
    overlaps = {
        "by_label": found.iou_by_label,
        "by_prediction": found.iou_by_prediction,
        "baseline": found.baseline,
        "by_darker": intersection_over_union(given, found.truth),
        "by_label_when_right": found.iou_by_label[found.correct],
        "by_label_when_wrong": found.iou_by_label[~found.correct],
    }
    return {
        **{name: value for what, values in overlaps.items() for name, value in mean_of(what, 100 * values).items()},
        "absent_ink": 100 * found.mean_absent_foreground,
        "n": len(found.correct),
        "right": 100 * float(found.correct.float().mean()),
        **result_to_dict(few, "shown_"),
    }


def draw_measured_segmentation(measure: Measure, results: Results, out: Path) -> None:
    """Draw the few, in two colours."""
    record = results.first(measure)
    if record is None:
        return
    found = record["found"]
    few = result_from_dict(Segmentation, found, "shown_")
    means = {"mean_by_label": "by_label", "mean_by_prediction": "by_prediction", "mean_baseline": "baseline"}
    means |= {"mean_absent_foreground": "absent_ink"}
    few = dataclasses.replace(few, **{field: found[name] / 100 for field, name in means.items()})
    counts = (round(found["n"] * found["right"] / 100), found["n"])
    draw_segmentation(few, out, results.title, counts=counts)


def foreign_decoder(
    context: Context, own: Trained, net: Trained, images: int = 2_000, shown: int = 8
) -> dict[str, Any]:
    """Decode the class capsules of one network by the decoder of another: Yang 2021, figure 2.

    Args:
        context: where this stands.
        own: the network whose decoder it is, trained with dynamic routing.
        net: the network whose capsules are decoded, trained without reconstruction.
        images: how many test images.
        shown: how many are kept to look at.
    """
    batch = context.test_batch(net, images)
    with torch.no_grad():
        theirs, ours = net.model(batch.images), own.model(batch.images)
    right = net.model.is_correct(theirs, batch.labels) & own.model.is_correct(ours, batch.labels)
    chosen = right.nonzero()[:, 0] if bool(right.any()) else torch.arange(len(batch.labels))
    labels, targets = batch.labels[chosen], batch.targets[chosen]
    with torch.no_grad():
        foreign = own.model.decode(_some(theirs.capsules, chosen), labels)  # type: ignore[operator, union-attr]
        proper = own.model.decode(_some(ours.capsules, chosen), labels)  # type: ignore[operator, union-attr]
    mean = torch.stack(
        [targets[labels == c].mean(0) if bool((labels == c).any()) else targets.mean(0) for c in range(10)]
    )
    few = first_of_each(labels, 1)[:shown]
    decodes = {"own": proper, "foreign": foreign, "class_mean": mean[labels]}
    errors = {name: (decoded - targets).square().flatten(1).sum(1) for name, decoded in decodes.items()}
    return {
        **{name: value for what, error in errors.items() for name, value in mean_of(what, error).items()},
        "n": len(chosen),
        "shown_images": targets[few],
        "shown_own": proper[few],
        "shown_foreign": foreign[few],
        "shown_labels": labels[few],
    }


def _some(capsules: Any, chosen: torch.Tensor) -> torch.Tensor:
    return capsules.pose[chosen]


def draw_foreign(measure: Measure, results: Results, out: Path) -> None:
    """Draw images, what their own decoder makes of them, and what it makes of the other network's capsules."""
    record = results.first(measure)
    if record is None:
        return
    found = record["found"]
    rows = {"images": "shown_images", "own capsules": "shown_own", "the other net's capsules": "shown_foreign"}
    n = len(torch.as_tensor(found["shown_labels"]))
    figure = new_figure(1.6 + 0.9 * n, 3.4, layout=None)
    figure.subplots_adjust(left=1.5 / (1.6 + 0.9 * n), right=0.99, top=0.86, bottom=0.02, hspace=0.05, wspace=0.05)
    grid = figure.subplots(3, n, squeeze=False)
    for line, (words, name) in zip(grid, rows.items(), strict=True):
        for axes, image in zip(line, torch.as_tensor(found[name]).float(), strict=True):
            show_image(axes, image)
        line[0].text(
            -0.1, 0.5, words.replace("'s ", "'s\n"), transform=line[0].transAxes, ha="right", va="center", fontsize=9
        )
    figure.suptitle(f"{results.title}: one decoder, two networks' capsules", fontsize=11)
    save_figure(figure, out)
