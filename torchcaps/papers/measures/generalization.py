"""Measurements of optimisation and overfitting: training loss, and errors on training and on test images."""

import math
from typing import Any

from torchcaps._core.stats import NORMAL_QUANTILE
from torchcaps.reproduce.runner import MeasurementContext
from torchcaps.training import TrainedRun
from torchcaps.training.inference import evaluate_runs
from torchcaps.training.setup import limit_images, open_data

__all__ = ["measure_generalization_gap", "measure_training_loss"]


def measure_generalization_gap(context: MeasurementContext, net: TrainedRun, n_images: int = 10_000) -> dict[str, Any]:
    """Measure the error on the images that a network was trained on, without augmentation, and on test images.

    Args:
        context: context of the measurement.
        net: the network.
        n_images: largest number of images of each kind.

    Returns:
        ``training_error``, ``test_error`` and their difference ``gap``, in per cent.
    """
    data = open_data(net.spec)
    assert data.test is not None
    errors, variance = {}, 0.0
    for name, dataset in (("training", data.train), ("test", data.test)):
        result = evaluate_runs([net], limit_images(dataset, n_images), context.progress)
        errors[f"{name}_error"] = 100 * (1 - result.accuracy)
        errors[f"{name}_error_images"] = result.n
        variance += result.accuracy * (1 - result.accuracy) / result.n
    gap = errors["test_error"] - errors["training_error"]
    return {**errors, "gap": gap, "gap_ci95": 100 * NORMAL_QUANTILE * math.sqrt(variance)}


def measure_training_loss(context: MeasurementContext, record: dict[str, Any]) -> dict[str, Any]:
    """Measure the mean training loss of the first and of the last epoch, from the learning curve of a run's record."""
    losses = [row["train_loss"] for row in record["curve"] if "train_loss" in row]
    return {"first_loss": losses[0], "last_loss": losses[-1]}
