"""Measurements of training: ensembles and the first steps of training."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from tests.models.narrow import narrow
from tests.papers.networks import as_trained, network_with_outputs
from tests.tolerances import SAME
from torchcaps.data import ImageSet
from torchcaps.models import Network
from torchcaps.papers.measures import training
from torchcaps.papers.measures.coefficients import measure_coefficient_signs
from torchcaps.papers.measures.training import draw_curves, measure_early_training, measure_ensemble, measure_spread
from torchcaps.reproduce.runner import MeasurementContext
from torchcaps.reproduce.schema import Cell, Item, Run, TableRow
from torchcaps.reproduce.statistics import Results
from torchcaps.reproduce.store import RecordStore
from torchcaps.routing import Quadratic

CLOSE = SAME[torch.float32]


def quadratic_layer(model: nn.Module) -> Any:
    (layer,) = (layer for layer in model.modules() if isinstance(getattr(layer, "routing", None), Quadratic))
    return layer


def test_coefficients_are_counted_by_sign_and_magnitude() -> None:
    """Of every ten three are negative, two are zero, and one is below a hundredth of the mean magnitude, 1."""
    model = narrow("yang2021_mnist")
    values = quadratic_layer(model).coefficients["coefficient"]
    ten = torch.tensor([-4.0, -0.005, -0.5, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0, 1.995])
    values.copy_(ten.repeat(values.numel() // 10).view_as(values))
    results = measure_coefficient_signs(
        MeasurementContext("smoke", 0, Path("none")), as_trained(model, "yang2021_mnist")
    )
    assert results["negative"] == pytest.approx(30, rel=CLOSE)
    assert results["near_zero"] == pytest.approx(30, rel=CLOSE)
    assert results["mean"] == pytest.approx(0.099, rel=CLOSE)
    squares, root = 16 + 0.005**2 + 2 * 0.25 + 3 + 1.995**2, values.numel() ** 0.5
    ratio = 10 / (10 * squares) ** 0.5 * root  # |x|_1 / |x|_2
    assert results["sparsity"] == pytest.approx((root - ratio) / (root - 1), rel=CLOSE)
    assert results["largest"] == 4


def test_early_training_error_and_negative_coefficients(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Against the predictions seen by a hook; each ascent makes another hundredth of the coefficients negative."""
    errors: dict[str, list[float]] = {}
    ascents: list[str] = []

    def record_errors(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if isinstance(module, Network) and len(inputs) == 2:
            routing = getattr(module.spec, "effective_routing", None)
            name = routing.penalty if isinstance(routing, Quadratic) else "dynamic"
            predicted = output.scores.argmax(1).tolist()
            errors.setdefault(name, []).append(
                sum(a != b for a, b in zip(predicted, inputs[1].tolist(), strict=True)) / 8
            )

    def ascend(module: Any, images: Tensor, labels: Tensor) -> None:
        ascents.append(module.spec.effective_routing.penalty)
        values = quadratic_layer(module).coefficients["coefficient"]
        turned = values.numel() * ascents.count(ascents[-1]) // 100
        values.view(-1)[:turned] = -values.view(-1)[:turned].abs()

    monkeypatch.setattr(Quadratic, "ascend", staticmethod(ascend))
    handle = register_module_forward_hook(record_errors)
    results = measure_early_training(
        MeasurementContext("smoke", 0, tmp_path), "yang2021_mnist", {}, steps=16, interval=2, batch_size=8
    )
    handle.remove()
    assert results["steps"].tolist() == [2, 4, 6, 8, 10, 12, 14, 16]
    assert {name: len(fractions) for name, fractions in errors.items()} == {"dynamic": 16, "l2": 16, "l1": 16}
    for name, fractions in errors.items():
        windows = [50 * (fractions[k] + fractions[k + 1]) for k in range(0, 16, 2)]
        assert results[f"{name} error"].tolist() == pytest.approx(windows, rel=CLOSE)
        assert results[f"{name} first_quarter_error"] == pytest.approx((windows[0] + windows[1]) / 2, rel=CLOSE)
        assert results[f"{name} mean_error"] == pytest.approx(sum(windows) / 8, rel=CLOSE)
        assert results[f"{name} last_error"] == pytest.approx(windows[-1], rel=CLOSE)
        assert len(set(windows)) > 2
    size = 10 * 144  # coefficients: ten classes, 4 types at 6x6 positions
    turned = [100 * (size * steps // 100) / size for steps in (2, 4, 6, 8, 10, 12, 14, 16)]
    for name in ("l2", "l1"):
        assert results[f"{name} negative"].tolist() == pytest.approx(turned, rel=CLOSE)
        assert results[f"{name} last_negative"] == pytest.approx(turned[-1], rel=CLOSE)
    assert results["dynamic negative"].tolist() == [0] * 8


class FiveImages(MeasurementContext):
    """A context with five images."""

    def dataset(self, name: str, split: str = "test", n: int | None = None, **options: Any) -> ImageSet:
        assert (name, split) == ("mnist", "test")
        images = (100 * torch.rand(5, 1, 28, 28, generator=torch.Generator().manual_seed(0))).byte()
        return ImageSet(name, split, images[:n], torch.arange(5)[:n], tuple("0123456789"))


def test_an_ensemble_sums_the_scores_of_its_members() -> None:
    """Two members slightly prefer the next class, one strongly prefers the correct one: the sum is correct.

    On image 3 the third member prefers the next class too, on image 4 it is too weak.
    """
    context = FiveImages("smoke", 0, Path("none"))
    data = context.dataset("mnist")
    images, correct = data.images.float() / 255, F.one_hot(torch.arange(5), 10)
    hesitant = 0.1 * F.one_hot(torch.arange(1, 6), 10).float()
    sure = torch.tensor([0.9, 0.9, 0.9, 0.0, 0.1])[:, None] * correct
    sure[3, 4] = 0.9
    nets = [network_with_outputs("sabour2017_cnn_mnist", images, scores) for scores in (hesitant, hesitant, sure)]
    results = measure_ensemble(context, nets, "mnist")
    assert results["accuracy"] == pytest.approx(60, rel=CLOSE)
    assert results["error"] == pytest.approx(40, rel=CLOSE)
    assert (results["members"], results["accuracy_images"], results["error_images"]) == (3, 5, 5)
    assert measure_ensemble(context, nets[:2], "mnist", n_images=4)["accuracy"] == 0


def test_spread_over_seeds() -> None:
    records = [{"results": {"accuracy": accuracy}} for accuracy in (0.40, 0.43, 0.46)]
    results = measure_spread(MeasurementContext("smoke", 0, Path("none")), records)
    expected = {"std": 3, "range": 6, "mean": 43, "members": 3}
    assert results == pytest.approx(expected, rel=CLOSE)


class CurveResults:
    """Results of an item whose runs have one learning curve each."""

    def __init__(self, labels: list[str]) -> None:
        rows = tuple(TableRow(label, {"x": Cell(None, Run(label), "accuracy")}) for label in labels)
        self.item = Item("one", "One", "One figure.", {"x": "%"}, rows)
        self.store = RecordStore("cpu")

    def records(self, source: Any) -> Iterator[tuple[int, dict[str, Any]]]:
        yield 0, {"curve": [{"epoch": 1, "test_accuracy": 0.4}, {"epoch": 2, "test_accuracy": 0.5}]}


def drawn_figure(monkeypatch: pytest.MonkeyPatch, labels: list[str], groups: tuple[str, ...]) -> Any:
    figures: list[Any] = []
    monkeypatch.setattr(training, "save_figure", lambda figure, out: figures.append(figure))
    draw_curves(cast("Results", CurveResults(labels)), Path("none"), ("x",), groups=groups)
    return figures[0]


def test_a_label_has_the_same_colour_in_all_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    figure = drawn_figure(monkeypatch, ["A, 1", "A, 2", "A, 3", "B, 2", "B, 3"], ("A", "B"))
    colors = [{line.get_label(): line.get_color() for line in axes.lines} for axes in figure.axes]
    assert [sorted(panel) for panel in colors] == [["1", "2", "3"], ["2", "3"]]
    assert len(set(colors[0].values())) == 3
    assert colors[1] == {label: colors[0][label] for label in ("2", "3")}


def test_many_curves_share_one_legend(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = ["a", "b", "c", "d", "e"]
    figure = drawn_figure(monkeypatch, labels, ("",))
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == labels
    assert [axes.get_legend() for axes in figure.axes] == [None]
