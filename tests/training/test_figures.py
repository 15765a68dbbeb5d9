"""Figures of a run: axis titles, complete class names, colour scales and the best epoch."""

from pathlib import Path
from typing import Any

import pytest
import torch

from torchcaps._core.plotting import COLORS
from torchcaps.analysis import AttackResult, CouplingMaps, draw_attack, draw_couplings, predictions
from torchcaps.analysis.couplings import LayerCouplings
from torchcaps.analysis.couplings_figures import NEARLY_UNIFORM
from torchcaps.training import figures
from torchcaps.training.evaluation import Evaluation
from torchcaps.training.logging import COLUMNS

NAMES = ("a class with a name of many words", "cat", "dog")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Figures that are saved, in order."""
    found: list[Any] = []
    for module in (
        "training.figures",
        "analysis.adversarial",
        "analysis.couplings_figures",
        "analysis.predictions",
    ):
        monkeypatch.setattr(f"torchcaps.{module}.save_figure", lambda figure, out: found.append(figure))
    return found


def test_confusion_matrix(drawn: list[Any]) -> None:
    """Two errors in 100 are pale, counts are written, the diagonal has its own colours."""
    result = Evaluation(300, 297, 0.1, [100] * 3, [98, 99, 100], [[98, 2, 0], [1, 99, 0], [0, 0, 100]])
    figures.draw_confusion(result, NAMES, Path("confusion.png"))
    axes, *bars = drawn[0].axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("predicted class", "true class")
    assert [label.get_text() for label in axes.get_xticklabels()] == list(NAMES)
    assert sorted(text.get_text() for text in axes.texts) == ["1", "100", "2", "98", "99"]
    incorrect, correct = axes.images
    assert incorrect.get_cmap()(incorrect.norm(2.0))[1] > 0.85  # two percent are nearly white
    assert incorrect.get_clim() == (0, 20)
    assert correct.get_clim() == (0, 100)
    assert all("% of the true class" in bar.get_ylabel() for bar in bars)


def test_best_epoch_is_marked_in_curves(drawn: list[Any]) -> None:
    rows = [dict.fromkeys(COLUMNS, None) | {"epoch": float(n), "lr": 0.1, "train_loss": 1.0 / n} for n in (1, 2, 3)]
    assert figures.best_row(rows) is None
    for row, accuracy in zip(rows, (0.5, 0.8, 0.8), strict=True):
        row |= {"val_accuracy": accuracy, "val_loss": 1 - accuracy + 0.1 * row["epoch"]}
    assert figures.best_row(rows) is rows[1]
    figures.draw_learning_curves(rows, Path("curves.png"))
    for axes in drawn[0].axes:
        assert axes.get_xlabel() == "epoch"
        assert axes.get_ylabel()
    labels = [text.get_text() for text in drawn[0].axes[0].get_legend().get_texts()]
    assert "best val: epoch 2" in labels


def test_attacked_images_have_the_predictions_before_and_after(drawn: list[Any]) -> None:
    images, counts = torch.rand(2, 1, 8, 8), torch.tensor([1, 1, 0])
    before, after = torch.eye(3, dtype=torch.bool)[[0, 1]], torch.eye(3, dtype=torch.bool)[[2, 1]]
    result = AttackResult(
        "fgsm", 8 / 255, "cross_entropy", "", 2, 1.0, 0.5, counts, counts, counts, 0.03, 0.5, False, images, images,
        before, after,
    )  # fmt: skip
    draw_attack({"net": result}, "attack.png", classes=NAMES)
    titles = [axes.get_title().replace("\n", " ") for axes in drawn[0].axes if axes.images]
    assert titles == [NAMES[0], NAMES[1], NAMES[2], NAMES[1]]
    colors = [axes.title.get_color() == COLORS[1] for axes in drawn[0].axes if axes.images]
    assert colors == [False, False, True, False]
    assert "orange: changed" in drawn[0].subfigs[1].get_suptitle()


@pytest.mark.parametrize(("entropy", "is_uniform"), [(0.999, True), (0.6, False)])
def test_couplings_have_an_axis_from_0_to_1(drawn: list[Any], entropy: float, is_uniform: bool) -> None:
    entropies = torch.full((4, 3), entropy)
    layer = LayerCouplings("classes", "Dynamic(3)", "parents", entropies, "", None, "no grid", 0.1, (), torch.empty(0))
    draw_couplings(CouplingMaps(torch.rand(4, 1, 8, 8), torch.arange(4) % 3, (layer,)), "couplings.png")
    whole, magnified = drawn[0].axes
    assert whole.get_ylim() == (0, 1.05)
    assert magnified.get_ylim()[0] > 0
    assert whole.get_ylabel()
    text = drawn[0].get_suptitle().replace("\n", " ")
    assert (NEARLY_UNIFORM in text) == is_uniform


def test_class_names_of_predictions_are_complete(drawn: list[Any]) -> None:
    hot = torch.eye(3, dtype=torch.bool)
    correct = torch.tensor([True, False, True])
    result = predictions.Predictions(torch.rand(3, 1, 8, 8), hot, hot[[0, 0, 2]], correct, None)
    predictions.draw_predictions(result, "predictions.png", classes=NAMES)
    titles = {axes.get_title().replace("\n", " ") for axes in drawn[0].axes if axes.get_title()}
    assert titles == {NAMES[0], f"cat → {NAMES[0]}", "dog"}
