"""Measurements of pose and routing, with capsules and networks whose values are known."""

import copy
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.analysis.test_alignment import dot, position_model
from tests.models.narrow import batch, narrow
from tests.papers.networks import as_trained, fixed_context, network_with_outputs
from tests.tolerances import SAME, largest_difference
from torchcaps import create_model
from torchcaps.data import ImageSet
from torchcaps.papers.measures.geometry import (
    draw_alignment_ratios,
    draw_logit_changes,
    measure_affine_robustness,
    measure_alignment_ratios,
    measure_logit_changes,
)
from torchcaps.reproduce.schema import Item, Measurement, Run
from torchcaps.reproduce.statistics import Results
from torchcaps.reproduce.store import RecordKey, RecordStore

CLOSE = SAME[torch.float32]
NAMES = {"Rot+": "rotation +", "x+": "x +", "y+": "y +", "Rot-": "rotation -", "x-": "x -", "y-": "y -"}


def bent_ratios() -> list[float]:
    """Return the ratios of ``v_i = (i, i²)``, from the first axis of a symmetric 2x2 matrix."""
    second, third, fourth = (sum(i**power for i in range(1, 6)) for power in (2, 3, 4))
    angle = math.atan2(2 * third, second - fourth) / 2
    return [abs(i * math.cos(angle) + i * i * math.sin(angle)) / math.hypot(i, i * i) for i in range(1, 6)]


def test_the_average_weights_classes_equally() -> None:
    """Three images of class 0, whose capsule moves along a line, and one of class 2, whose path is bent by x shifts."""
    images, labels = dot().repeat(4, 1, 1, 1), torch.tensor([0, 0, 0, 2])
    images[3] = images[3].roll(-3, 1)  # above the centre, so that a rotation moves it sideways: a cosine of about 0
    results = measure_alignment_ratios(
        fixed_context(images, labels), as_trained(position_model(), "sabour2017_mnist"), n_images=4
    )
    ratios = bent_ratios()
    mean = sum(ratios) / 5
    variance = sum((ratio - mean) ** 2 for ratio in ratios) / 5
    for way in ("x+", "x-"):
        assert results[f"0 {way}"] == pytest.approx(1, abs=CLOSE)
        assert results[f"2 {way}"] == pytest.approx(mean, abs=CLOSE)
        assert results[f"average {way}"] == pytest.approx((1 + mean) / 2, abs=CLOSE)
        half = 1.959964 * math.sqrt(0 / 3 + variance / 1) / 2
        assert results[f"average {way}_ci95"] == pytest.approx(half, abs=CLOSE)
    for way in ("y+", "y-"):
        assert results[f"average {way}"] == pytest.approx(1, abs=CLOSE)
    assert "1 x+" not in results  # no image of this class
    sides = [float(results["cosines"][k, way]) for k in range(4) for way in range(3) if results["moved"][k, way]]
    assert results["cosine_mean"] == pytest.approx(sum(sides) / len(sides), abs=CLOSE)
    for name, count in (("below_minus", sum(c < -0.5 for c in sides)), ("above", sum(c > 0.5 for c in sides))):
        assert results[f"cosine_{name}_half"] == pytest.approx(100 * count / len(sides), abs=CLOSE)
        assert 0 < count < len(sides)
    assert min(map(abs, sides)) < 0.4


def test_columns_of_the_table_are_the_transforms_of_the_analysis() -> None:
    model = narrow("sabour2017_mnist")
    images, labels, _ = batch(model, 3)
    results = measure_alignment_ratios(fixed_context(images, labels), as_trained(model, "sabour2017_mnist"), n_images=3)
    averages = dict(zip(results["names"], results["averages"].tolist(), strict=True))
    assert len(set(averages.values())) == 6
    for way, name in NAMES.items():
        assert results[f"average {way}"] == averages[name]
        assert results[f"2 {way}"] == float(results["ratios"][2, results["names"].index(name)])
        assert results[f"random {way}"] == results["reference"][0] > results[f"random as printed {way}"]


def expected_changes(model: Any, images: Tensor, iterations: int) -> tuple[list[float], list[float]]:
    """Return the mean change of a logit and of a coupling in each iteration, by Procedure 1 of Sabour 2017."""
    (layer,) = model.capsules.layers.children()
    with torch.no_grad():
        votes = torch.einsum("bix,ixjd->bijd", model.front(images).pose.flatten(1, -2), layer.weight)
    of_logits, of_couplings, b = [], [], torch.zeros_like(votes[..., 0])
    for _ in range(iterations):
        total = torch.einsum("bij,bijd->bjd", b.softmax(2), votes)
        square = total.square().sum(2, keepdim=True)
        agreement = torch.einsum("bjd,bijd->bij", total * square.sqrt() / (1 + square), votes)
        of_logits.append(float(agreement.abs().mean()))
        of_couplings.append(float(((b + agreement).softmax(2) - b.softmax(2)).abs().mean()))
        b = b + agreement
    return of_logits, of_couplings


def test_alignment_of_the_initial_weights() -> None:
    """The control: the network with which the training began, whatever the trained weights are."""
    fields: dict[str, Any] = {"image": (1, 20, 20), "width": 4, "types": 2, "classes": 3, "dim": 4, "hidden": (8,)}
    trained: Any = create_model("sabour2017_mnist", **fields)
    images, labels, _ = batch(trained, 3)
    net = as_trained(trained, "sabour2017_mnist", seed=4, **fields)
    context = fixed_context(images, labels)
    torch.manual_seed(4)
    initial = as_trained(create_model("sabour2017_mnist", **fields), "sabour2017_mnist", **fields)
    expected = measure_alignment_ratios(context, initial, n_images=3)
    results = measure_alignment_ratios(context, net, n_images=3, untrained=True)
    for name in NAMES:
        assert results[f"average {name}"] == expected[f"average {name}"]
    after = measure_alignment_ratios(context, net, n_images=3)
    assert after["average Rot+"] != results["average Rot+"]


def test_logit_changes_at_points_of_the_training() -> None:
    fields: dict[str, Any] = {"image": (1, 20, 20), "width": 4, "types": 2, "classes": 3, "dim": 4, "hidden": (8,)}
    models: dict[str, Any] = {"early": create_model("sabour2017_mnist", **fields)}
    models["late"] = copy.deepcopy(models["early"])
    next(models["late"].capsules.layers.children()).weight.data.mul_(20)  # as after training
    images, labels, _ = batch(models["early"], 3)
    nets = {
        stage: dataclasses.replace(as_trained(model, "sabour2017_mnist", seed=5, **fields), step=step)
        for (stage, model), step in zip(models.items(), (10, 200), strict=True)
    }
    results = measure_logit_changes(fixed_context(images, labels), n_images=3, iterations=4, **nets)
    torch.manual_seed(5)
    for stage, net in {"untrained": create_model("sabour2017_mnist", **fields), **models}.items():
        of_logits, of_couplings = expected_changes(net, images, 4)
        for number in range(4):
            assert results[f"{stage} {number + 1}"] == pytest.approx(of_logits[number], rel=CLOSE)
            assert results[f"{stage} coupling {number + 1}"] == pytest.approx(of_couplings[number], abs=CLOSE)
        assert largest_difference(results[f"{stage}_change"][0], of_logits) < CLOSE
    assert (results["early_steps"], results["late_steps"]) == (10, 200)
    assert results["late 1"] > 10 * results["early 1"] != 10 * results["untrained 1"]
    assert results["late coupling 1"] > 100 * CLOSE


def test_the_figure_of_logit_changes_names_the_steps(tmp_path: Path) -> None:
    measurement = Measurement("logits", measure_logit_changes, {"late": Run("sabour2017_mnist")})
    store = RecordStore("smoke", tmp_path / "results", tmp_path / "work")
    results = Results(Item("figa1", "Figure A.1", "Logits.", measurements=(measurement,)), store)
    draw_logit_changes(measurement, results, tmp_path / "none.svg")
    assert not (tmp_path / "none.svg").exists()  # no record
    model = narrow("sabour2017_mnist")
    images, labels, _ = batch(model, 2)
    net = dataclasses.replace(as_trained(model, "sabour2017_mnist", **model.spec.smoke_changes()), step=1_234)
    numbers = measure_logit_changes(fixed_context(images, labels), n_images=2, iterations=2, late=net)
    store.write_measurement(RecordKey(measurement, 0), numbers, 1.0)
    draw_logit_changes(measurement, results, tmp_path / "figure.svg")
    text = (tmp_path / "figure.svg").read_text()
    for label in ("untrained", "1,234 steps"):
        assert f"<!-- {label} -->" in text


def test_the_figure_of_alignment_ratios_has_all_networks_that_were_measured(tmp_path: Path) -> None:
    measurements = {name: Measurement(name, measure_alignment_ratios) for name in ("trained", "untrained", "missing")}
    store = RecordStore("smoke", tmp_path / "results", tmp_path / "work")
    results = Results(Item("table3", "Table 3", "Ratios.", measurements=tuple(measurements.values())), store)
    draw_alignment_ratios(measurements, results, tmp_path / "none.svg")
    assert not (tmp_path / "none.svg").exists()  # no record
    model = narrow("sabour2017_mnist")
    images, labels, _ = batch(model, 3)
    numbers = measure_alignment_ratios(fixed_context(images, labels), as_trained(model, "sabour2017_mnist"), n_images=3)
    for name in ("trained", "untrained"):
        store.write_measurement(RecordKey(measurements[name], 0), numbers, 1.0)
    draw_alignment_ratios(measurements, results, tmp_path / "figure.svg")
    text = (tmp_path / "figure.svg").read_text()
    labels_drawn = [name for name in (*measurements, "random vectors") if f"<!-- {name} -->" in text]
    assert labels_drawn == ["trained", "untrained", "random vectors"]


def test_accuracy_on_both_data_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of five digits at random positions are classified correctly, one of four transformed ones."""
    pixels = (100 * torch.rand(9, 1, 40, 40)).byte()
    parts = {"expanded-mnist": slice(0, 5), "affnist": slice(5, 9)}
    labels = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8])
    predicted = torch.tensor([0, 1, 2, 9, 9, 5, 9, 9, 9])
    images = pixels.float() / 255
    net = network_with_outputs("sabour2017_cnn_mnist", images, torch.eye(10)[predicted])
    context = fixed_context(images[:5], labels[:5])

    def dataset(self: object, name: str, split: str = "test", n: int | None = None) -> ImageSet:
        return ImageSet(name, split, pixels[parts[name]][:n], labels[parts[name]][:n], tuple("0123456789"))

    monkeypatch.setattr(type(context), "dataset", dataset)
    results = measure_affine_robustness(context, net, n_images=5, n_affine=4, n_sweep=2)
    assert (results["expanded"], results["affine"]) == (60, 25)
    assert (results["expanded_images"], results["affine_images"]) == (5, 4)
