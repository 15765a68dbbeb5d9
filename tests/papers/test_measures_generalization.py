"""Errors on training and test images, with networks whose predictions are known."""

import math
from pathlib import Path

import pytest
import torch

from tests.papers.networks import network_with_outputs
from tests.tolerances import SAME
from torchcaps.data import ImageSet, create_pipeline
from torchcaps.papers.measures import generalization
from torchcaps.papers.measures.generalization import measure_generalization_gap, measure_training_loss
from torchcaps.reproduce.runner import MeasurementContext
from torchcaps.training.setup import RunData

CLOSE = SAME[torch.float32]


def test_the_gap_between_test_and_training_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of five training images and one of four test images are classified correctly."""
    pixels = (100 * torch.rand(9, 1, 28, 28, generator=torch.Generator().manual_seed(0))).byte()
    labels, predicted = torch.arange(9), torch.tensor([0, 1, 2, 3, 9, 5, 9, 9, 9])
    net = network_with_outputs("sabour2017_cnn_mnist", pixels.float() / 255, torch.eye(10)[predicted])
    train, test = (
        ImageSet("mnist", split, pixels[part], labels[part], tuple("0123456789"))
        for split, part in (("train", slice(0, 5)), ("test", slice(5, 9)))
    )
    monkeypatch.setattr(generalization, "open_data", lambda spec: RunData(train, None, test, create_pipeline("")))
    results = measure_generalization_gap(MeasurementContext("smoke", 0, Path("none")), net)
    assert (results["training_error_images"], results["test_error_images"]) == (5, 4)
    assert results["training_error"] == pytest.approx(20, rel=CLOSE)
    assert results["test_error"] == pytest.approx(75, rel=CLOSE)
    assert results["gap"] == pytest.approx(55, rel=CLOSE)
    half_width = 196 * math.sqrt(0.2 * 0.8 / 5 + 0.25 * 0.75 / 4)
    assert results["gap_ci95"] == pytest.approx(half_width, rel=1e-3)
    assert measure_generalization_gap(MeasurementContext("smoke", 0, Path("none")), net, 3)["test_error_images"] == 3


def test_the_training_loss_of_the_first_and_the_last_epoch() -> None:
    """Rows of a curve that have no training loss are evaluations within an epoch."""
    curve = [{"epoch": 0.5}, {"epoch": 1.0, "train_loss": 0.8}, {"epoch": 2.0, "train_loss": 0.3}, {"epoch": 2.0}]
    results = measure_training_loss(MeasurementContext("smoke", 0, Path("none")), {"curve": curve})
    assert results == {"first_loss": 0.8, "last_loss": 0.3}
