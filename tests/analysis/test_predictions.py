"""Predictions of any network, with their figure."""

import dataclasses
from pathlib import Path

import pytest
import torch

from tests.models.narrow import batch, narrow
from tests.tolerances import SAME, relative_rms
from torchcaps.analysis import Predictions, Subject, draw_predictions, predict_images, run_analysis
from torchcaps.data import Loader, create_dataset


@pytest.mark.parametrize(
    "name", ["capsnet_small", "sabour2017_multimnist", "tsai2020_diverse_matrix", "sabour2017_cnn_mnist"]
)
def test_predictions_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    model = narrow(name).train()
    images, labels, targets = batch(model, 5)
    calls: list[int] = []
    result = predict_images(model, images, labels, targets, batch_size=2, progress=lambda: calls.append(1))
    assert len(calls) == 3
    assert model.training is True
    with torch.no_grad():
        output = model.eval()(images, labels)
    assert result.correct.tolist() == model.is_correct(output, labels).tolist()
    assert result.predicted.tolist() == model.predict_multi_hot(output).tolist()
    assert result.correct.tolist() == (result.predicted == result.true).all(1).tolist()
    if output.reconstruction is None:
        assert result.reconstructions is None
    else:
        assert result.reconstructions is not None
        assert relative_rms(result.reconstructions, output.reconstruction) < SAME[torch.float32]
    draw_predictions(result, tmp_path / "predictions.png", name)
    assert (tmp_path / "predictions.png").stat().st_size > 5_000


def test_figure_names_true_and_predicted_classes(tmp_path: Path) -> None:
    true, predicted = (torch.eye(3, dtype=torch.bool)[[0, index]] for index in (1, 2))
    images = torch.rand(2, 1, 8, 8)
    result = Predictions(images, true, predicted, torch.tensor([True, False]), None)
    draw_predictions(result, tmp_path / "named.svg", classes=("cat", "dog", "owl"))
    text = (tmp_path / "named.svg").read_text()
    assert [label in text for label in ("<!-- cat -->", "dog→owl")] == [True, True]
    draw_predictions(dataclasses.replace(result, reconstructions=images), tmp_path / "decoded.png")
    assert (tmp_path / "decoded.png").stat().st_size > 5_000


def test_summary_has_recall_and_precision_by_class() -> None:
    model = narrow("capsnet_small")
    dataset = create_dataset("digits", "test").subset(torch.arange(12))
    report = run_analysis("predictions", Subject("small", model, Loader(dataset, 5, train=False)))
    rows, result = report.summary.rows, report.result
    assert list(rows) == list(dataset.classes)
    assert [row["images"] for row in rows.values()] == result.true.sum(0).tolist()
    n_both = (result.true & result.predicted).sum(0).tolist()
    assert [round((row["recall"] or 0) * row["images"]) for row in rows.values()] == n_both
    assert report.summary.details["accuracy"] == float(result.correct.double().mean())


def test_labels_must_match_the_images() -> None:
    model = narrow("capsnet_small")
    images, labels, _ = batch(model, 3)
    with pytest.raises(ValueError, match="labels"):
        predict_images(model, images, labels[:2])
    with pytest.raises(ValueError, match="images"):
        predict_images(model, images[:0], labels[:0])
