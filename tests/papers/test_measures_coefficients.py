"""Measurements of routing coefficients with known values."""

from pathlib import Path

import pytest
import torch

from tests.models.narrow import narrow
from tests.papers.networks import as_trained, fixed_context
from tests.tolerances import SAME
from torchcaps.papers.measures.coefficients import (
    draw_class_coefficients,
    measure_class_coefficients,
    routing_coefficients,
)
from torchcaps.reproduce.schema import Item, Measurement
from torchcaps.reproduce.statistics import Results
from torchcaps.reproduce.store import RecordKey, RecordStore
from torchcaps.routing import Dynamic


def test_the_class_with_the_smallest_coefficients_and_its_recall() -> None:
    """Class 3 has coefficients of 0 and is never predicted; the others have 1 to 9, with both signs."""
    net = as_trained(narrow("yang2021_mnist"), "yang2021_mnist")
    dynamic = as_trained(narrow("yang2021_mnist", routing=Dynamic(3)), "yang2021_mnist")
    magnitudes = torch.tensor([1.0, 2, 3, 0, 4, 5, 6, 7, 8, 9])
    values = routing_coefficients(net)
    values.copy_(magnitudes * torch.where(torch.arange(len(values)) % 2 == 0, 1.0, -1.0)[:, None])
    images = torch.rand(40, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        predicted = net.model(images).scores.argmax(1)
    labels = torch.where(torch.arange(40) % 2 == 0, predicted, torch.arange(40) // 2 % 10)  # at least half are correct
    results = measure_class_coefficients(fixed_context(images, labels), net, dynamic, n_images=40)
    assert (results["smallest_class"], results["smallest_magnitude"], results["recall"]) == (3, 0, 0)
    torch.testing.assert_close(results["magnitudes"], magnitudes / 4.5, rtol=SAME[torch.float32], atol=0)
    with torch.no_grad():
        other = dynamic.model(images).scores.argmax(1)
    recalls, control = (
        [sum(a == b == n for a, b in zip(by.tolist(), labels.tolist(), strict=True)) / labels.tolist().count(n)
         for n in range(10)]
        for by in (predicted, other)
    )  # fmt: skip
    assert results["recalls"].tolist() == pytest.approx(recalls)
    assert results["recalls_dynamic"].tolist() == pytest.approx(control)
    assert results["recall_dynamic"] == pytest.approx(100 * control[3])
    assert results["recall_images"] == labels.tolist().count(3)
    assert results["recall_of_others"] == pytest.approx(100 * sum(r for n, r in enumerate(recalls) if n != 3) / 9)


def test_one_point_per_class_is_drawn_and_the_class_with_the_smallest_coefficients_is_named(tmp_path: Path) -> None:
    measurement = Measurement("coefficients", measure_class_coefficients)
    store = RecordStore("smoke", tmp_path / "results", tmp_path / "work")
    results = Results(Item("lost", "Lost", "A class.", measurements=(measurement,)), store)
    draw_class_coefficients({"L2": measurement}, results, tmp_path / "none.svg")
    assert not (tmp_path / "none.svg").exists()  # no record
    numbers = {
        "classes": ["Coat", "Bag", "Shirt"],
        "magnitudes": torch.tensor([1.6, 1.3, 0.1]),
        "recalls": torch.tensor([0.9, 0.8, 0.0]),
        "recalls_dynamic": torch.full((3,), 0.8),
        "smallest_class": 2,
    }
    store.write_measurement(RecordKey(measurement, 0), numbers, 1.0)
    draw_class_coefficients({"L2": measurement}, results, tmp_path / "lost.svg")
    text = (tmp_path / "lost.svg").read_text()
    assert "<!-- Shirt -->" in text
    assert "<!-- Coat -->" not in text
