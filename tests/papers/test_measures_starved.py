"""Classes without coefficients: sizes that are known, and classes counted one by one."""

from pathlib import Path

import pytest
import torch

from tests.models.narrow import narrow
from tests.papers.nets import as_trained, given
from tests.tolerances import SAME
from torchcaps.papers.measures.starved import class_coefficients, draw_class_coefficients
from torchcaps.papers.measures.training import coefficients_of
from torchcaps.reproduce.schema import Item, Measure
from torchcaps.reproduce.statistics import Results
from torchcaps.reproduce.store import Job, Store
from torchcaps.routing import Dynamic


def test_the_class_with_the_smallest_coefficients_is_found_and_counted() -> None:
    """Class 3 has none and is never predicted; the others have 1 to 9, of either sign."""
    net = as_trained(narrow("yang2021_mnist"), "yang2021_mnist")
    dynamic = as_trained(narrow("yang2021_mnist", routing=Dynamic(3)), "yang2021_mnist")
    sizes = torch.tensor([1.0, 2, 3, 0, 4, 5, 6, 7, 8, 9])
    values = coefficients_of(net)
    values.copy_(sizes * torch.where(torch.arange(len(values)) % 2 == 0, 1.0, -1.0)[:, None])
    images = torch.rand(40, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        told = net.model(images).scores.argmax(1)
    labels = torch.where(torch.arange(40) % 2 == 0, told, torch.arange(40) // 2 % 10)  # half of them right, or more
    found = class_coefficients(given(images, labels), net, dynamic, images=40)
    assert (found["least_class"], found["least"], found["recall"]) == (3, 0, 0)
    assert torch.allclose(found["sizes"], sizes / 4.5, rtol=SAME[torch.float32])
    with torch.no_grad():
        other = dynamic.model(images).scores.argmax(1)
    recalls, control = (
        [sum(a == b == n for a, b in zip(by.tolist(), labels.tolist(), strict=True)) / labels.tolist().count(n)
         for n in range(10)]
        for by in (told, other)
    )  # fmt: skip
    assert found["recalls"].tolist() == pytest.approx(recalls)
    assert found["control"].tolist() == pytest.approx(control)
    assert found["recall_dynamic"] == pytest.approx(100 * control[3])
    assert found["recall_images"] == labels.tolist().count(3)
    assert found["others"] == pytest.approx(100 * sum(r for n, r in enumerate(recalls) if n != 3) / 9)


def test_a_point_is_drawn_for_each_class_and_the_lost_one_is_named(tmp_path: Path) -> None:
    measure = Measure("starved", class_coefficients)
    store = Store("smoke", tmp_path / "results", tmp_path / "work")
    results = Results(Item("lost", "Lost", "A class.", measures=(measure,)), store)
    draw_class_coefficients({"L2": measure}, results, tmp_path / "none.svg")
    assert not (tmp_path / "none.svg").exists(), "nothing ran"
    sizes, recalls = torch.tensor([1.6, 1.3, 0.1]), torch.tensor([0.9, 0.8, 0.0])
    numbers = {"sizes": sizes, "recalls": recalls, "control": torch.full((3,), 0.8), "least_class": 2}
    store.write_measure(Job(measure, 0), {"classes": ["Coat", "Bag", "Shirt"], **numbers}, 1.0)
    draw_class_coefficients({"L2": measure}, results, tmp_path / "lost.svg")
    text = (tmp_path / "lost.svg").read_text()
    assert "<!-- Shirt -->" in text
    assert "<!-- Coat -->" not in text
