"""Measurements of decoded capsules: reconstruction, perturbation, segmentation, and the decoder of another network."""

import dataclasses
from pathlib import Path
from typing import Any

import torch

from torchcaps._core.plotting import new_figure, save_figure, show_image
from torchcaps._core.serialize import result_from_dict, result_to_dict
from torchcaps.analysis.perturbation import Perturbation, draw_perturbation, perturb
from torchcaps.analysis.reconstruction import Reconstructions, draw_reconstructions, reconstruct
from torchcaps.analysis.segmentation import Segmentation, draw_segmentation, intersection_over_union, segment
from torchcaps.reproduce.runner import MeasurementContext, first_of_each_class
from torchcaps.reproduce.schema import Measurement
from torchcaps.reproduce.statistics import Results, mean_with_interval
from torchcaps.training import TrainedRun

__all__ = [
    "draw_foreign_decoder",
    "draw_measured_perturbation",
    "draw_measured_reconstruction",
    "draw_measured_segmentation",
    "measure_foreign_decoder",
    "measure_perturbation",
    "measure_reconstruction",
    "measure_segmentation",
]


def measure_reconstruction(
    context: MeasurementContext, net: TrainedRun, n_images: int = 10_000, n_shown: int = 10
) -> dict[str, Any]:
    """Measure the reconstruction error of test images, decoded by label and by prediction.

    Args:
        context: context of the measurement.
        net: the network.
        n_images: number of test images.
        n_shown: number of correctly classified images, and of misclassified ones with the highest confidence, that the
            record keeps for the figure.
    """
    result: Reconstructions = context.analyze(net, "reconstruction", n_images)
    correct, incorrect = result.correct.nonzero()[:, 0], (~result.correct).nonzero()[:, 0]
    by_confidence = result.confidence[incorrect].argsort(descending=True)
    first = correct[first_of_each_class(result.labels[correct], 1)]
    shown = torch.cat([first[:n_shown], incorrect[by_confidence][:n_shown]])
    shown_result = reconstruct(net.model, result.images[shown], result.labels[shown], result.targets[shown])
    return {
        "n": len(result.labels),
        "n_incorrect": len(incorrect),
        "squared_error_per_pixel": float(result.error_by_label.mean()) / result.targets[0].numel(),
        **mean_with_interval("squared_error", result.error_by_label),
        **mean_with_interval("squared_error_of_incorrect_by_prediction", result.error_by_prediction[incorrect]),
        **mean_with_interval("squared_error_of_incorrect_by_label", result.error_by_label[incorrect]),
        **result_to_dict(shown_result, "shown_"),
    }


def draw_measured_reconstruction(measurement: Measurement, results: Results, out: Path) -> None:
    """Draw the images that the record keeps."""
    numbers = results.first(measurement)
    if numbers is None:
        return
    counts = (numbers["n"] - numbers["n_incorrect"], numbers["n"])
    draw_reconstructions(result_from_dict(Reconstructions, numbers, "shown_"), out, results.title, counts=counts)


def measure_perturbation(
    context: MeasurementContext, net: TrainedRun, n_classes: int = 10, shown: int = 4
) -> dict[str, Any]:
    """Measure the effect of perturbing each dimension of the labelled capsule on the reconstruction.

    Args:
        context: context of the measurement.
        net: the network.
        n_classes: number of classes; the first test image of each is perturbed.
        shown: index of the class whose reconstructions the record keeps for the figure.
    """
    batch = context.test_batch(net, 1_000)
    chosen = first_of_each_class(batch.labels, 1)[:n_classes]
    result = perturb(net.model, batch.images[chosen], batch.labels[chosen], progress=context.progress)
    change = (result.decoded - result.unperturbed[:, None, None]).square().sum(dim=(-3, -2, -1))  # [B, D, A]
    at_ends = change[:, :, [0, -1]].mean(dim=(0, 2))
    index = min(shown, len(chosen) - 1)
    shown_result = {
        name: value if name in ("dims", "amounts") else value[index : index + 1]
        for name, value in result_to_dict(result).items()
    }
    return {
        **shown_result,
        "squared_change_by_dimension": at_ends,
        "largest_change": float(at_ends.max()),
        "smallest_change": float(at_ends.min()),
        "n": len(chosen),
    }


def draw_measured_perturbation(
    measurement: Measurement, results: Results, out: Path, n_dimensions: int | None = None
) -> None:
    """Draw the image that the record keeps: all dimensions, or the ``n_dimensions`` with the largest change."""
    numbers = results.first(measurement)
    if numbers is None:
        return
    draw_perturbation(result_from_dict(Perturbation, numbers), out, results.title, n_dims=n_dimensions)


def measure_segmentation(
    context: MeasurementContext, net: TrainedRun, n_images: int = 10_000, n_shown: int = 8
) -> dict[str, Any]:
    """Measure how well the reconstructions of two overlapping digits separate them (intersection over union, %)."""
    batch = context.test_batch(net, n_images)
    result: Segmentation = context.analyze(net, "segmentation", n_images, seed=context.seed)
    correct, incorrect = result.correct.nonzero()[:n_shown, 0], (~result.correct).nonzero()[:n_shown, 0]
    shown = torch.cat([correct, incorrect])
    shown_result = segment(net.model, batch.images[shown], batch.labels[shown], batch.targets[shown], seed=context.seed)
    intensity = result.by_label.mean(2)  # [B, 2, H, W]
    assigned = (batch.images.mean(1, keepdim=True) > result.threshold) & (intensity > intensity.flip(1))
    overlaps = {
        "by_label": result.iou_by_label,
        "by_prediction": result.iou_by_prediction,
        "baseline": result.baseline,
        "by_intensity": intersection_over_union(assigned, result.truth),
        "by_label_if_correct": result.iou_by_label[result.correct],
        "by_label_if_incorrect": result.iou_by_label[~result.correct],
    }
    numbers: dict[str, Any] = {}
    for name, values in overlaps.items():
        numbers |= mean_with_interval(name, 100 * values)
    return {
        **numbers,
        "absent_foreground": 100 * result.mean_absent_foreground,
        "n": len(result.correct),
        "accuracy": 100 * float(result.correct.float().mean()),
        **result_to_dict(shown_result, "shown_"),
    }


def draw_measured_segmentation(measurement: Measurement, results: Results, out: Path) -> None:
    """Draw the images that the record keeps, the two digits in two colours."""
    numbers = results.first(measurement)
    if numbers is None:
        return
    shown_result = result_from_dict(Segmentation, numbers, "shown_")
    means = {"mean_by_label": "by_label", "mean_by_prediction": "by_prediction", "mean_baseline": "baseline"}
    means |= {"mean_absent_foreground": "absent_foreground"}
    shown_result = dataclasses.replace(shown_result, **{field: numbers[name] / 100 for field, name in means.items()})
    counts = (round(numbers["n"] * numbers["accuracy"] / 100), numbers["n"])
    draw_segmentation(shown_result, out, results.title, counts=counts)


def measure_foreign_decoder(
    context: MeasurementContext, own: TrainedRun, net: TrainedRun, n_images: int = 2_000, n_shown: int = 8
) -> dict[str, Any]:
    """Decode the class capsules of one network with the decoder of another (Yang 2021, figure 2).

    Images that both networks classify correctly are decoded; all images if there is none.

    Args:
        context: context of the measurement.
        own: the network whose decoder is used, trained with dynamic routing.
        net: the network whose capsules are decoded, trained without reconstruction.
        n_images: number of test images.
        n_shown: number of images that the record keeps for the figure.
    """
    batch = context.test_batch(net, n_images)
    with torch.no_grad():
        outputs = {"own": own.model(batch.images), "foreign": net.model(batch.images)}
    correct = own.model.is_correct(outputs["own"], batch.labels) & net.model.is_correct(
        outputs["foreign"], batch.labels
    )
    chosen = correct.nonzero()[:, 0] if bool(correct.any()) else torch.arange(len(batch.labels))
    labels, targets = batch.labels[chosen], batch.targets[chosen]
    with torch.no_grad():
        decoded = {
            name: own.model.decode(output.capsules.pose[chosen], labels)  # type: ignore[operator, union-attr]
            for name, output in outputs.items()
        }
    means = torch.stack(
        [targets[labels == c].mean(0) if bool((labels == c).any()) else targets.mean(0) for c in range(10)]
    )
    numbers: dict[str, Any] = {}
    for name, images in {**decoded, "class_mean": means[labels]}.items():
        numbers |= mean_with_interval(name, (images - targets).square().flatten(1).sum(1))
    shown = first_of_each_class(labels, 1)[:n_shown]
    return {
        **numbers,
        "n": len(chosen),
        "shown_images": targets[shown],
        "shown_own": decoded["own"][shown],
        "shown_foreign": decoded["foreign"][shown],
        "shown_labels": labels[shown],
    }


def draw_foreign_decoder(measurement: Measurement, results: Results, out: Path) -> None:
    """Draw images, their reconstructions, and reconstructions of the other network's capsules."""
    numbers = results.first(measurement)
    if numbers is None:
        return
    rows = {"input": "shown_images", "own capsules": "shown_own", "the other\nnetwork's capsules": "shown_foreign"}
    n = len(torch.as_tensor(numbers["shown_labels"]))
    figure = new_figure(1.6 + 0.9 * n, 3.4, layout=None)
    figure.subplots_adjust(left=1.5 / (1.6 + 0.9 * n), right=0.99, top=0.86, bottom=0.02, hspace=0.05, wspace=0.05)
    grid = figure.subplots(3, n, squeeze=False)
    for line, (label, name) in zip(grid, rows.items(), strict=True):
        for axes, image in zip(line, torch.as_tensor(numbers[name]).float(), strict=True):
            show_image(axes, image)
        line[0].text(-0.1, 0.5, label, transform=line[0].transAxes, ha="right", va="center", fontsize=9)
    figure.suptitle(f"{results.title}: one decoder, capsules of two networks", fontsize=11)
    save_figure(figure, out)
