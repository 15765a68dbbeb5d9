"""Interrupted measurements resume from their checkpoint and return bit-equal results."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.reproduce.items import reproduce_item
from torchcaps.papers import find_paper
from torchcaps.papers.measures import cost
from torchcaps.papers.measures.geometry import measure_affine_robustness
from torchcaps.papers.measures.robustness import measure_gan_images, measure_white_box
from torchcaps.papers.measures.training import measure_early_training
from torchcaps.reproduce.runner import MeasurementContext
from torchcaps.reproduce.schema import Item
from torchcaps.reproduce.store import MeasurementCheckpoint, RecordKey, RecordStore
from torchcaps.training import TrainedRun, load_run

GAN_OPTIONS: dict[str, Any] = {"n_images": 300, "epochs": 2, "images_per_class": 1, "width": 0.05, "n_shown": 1}


class Interrupted(Exception):
    """Raised in the middle of a measurement."""


def interrupt_after(calls: int) -> Callable[[], None]:
    """Return a progress callback that raises when it is called for the ``calls + 1``-th time."""
    remaining = [calls]

    def progress() -> None:
        remaining[0] -= 1
        if remaining[0] < 0:
            raise Interrupted

    return progress


@pytest.fixture(autouse=True)
def _always_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MeasurementCheckpoint, "due", True)


def check_resume(
    measure: Callable[[MeasurementContext], dict[str, Any]], tmp_path: Path, interruptions: tuple[int, ...]
) -> None:
    """Interrupt a measurement after these numbers of progress calls; compare it with an uninterrupted one."""
    expected = measure(MeasurementContext("smoke", 3, tmp_path / "uninterrupted"))
    for calls in interruptions:
        with pytest.raises(Interrupted):
            measure(MeasurementContext("smoke", 3, tmp_path / "interrupted", progress=interrupt_after(calls)))
    results = measure(MeasurementContext("smoke", 3, tmp_path / "interrupted"))
    assert results.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(results[name], value, rtol=0, atol=0, msg=name)
        else:
            assert results[name] == value, name


def remaining_files(directory: Path) -> list[str]:
    return [path.name for path in directory.glob("*")]


def test_gan_training_resumes_within_an_epoch(tmp_path: Path) -> None:
    def measure(context: MeasurementContext) -> dict[str, Any]:
        return measure_gan_images(context, **GAN_OPTIONS)

    check_resume(measure, tmp_path, (2, 2))  # three steps per epoch: in the first, in the second


def test_gan_training_repeats_no_saved_step(tmp_path: Path) -> None:
    steps = [0]

    def count() -> None:
        steps[0] += 1

    with pytest.raises(Interrupted):
        measure_gan_images(MeasurementContext("smoke", 0, tmp_path, progress=interrupt_after(4)), **GAN_OPTIONS)
    measure_gan_images(MeasurementContext("smoke", 0, tmp_path, progress=count), **GAN_OPTIONS)
    assert steps[0] == 6 - 4  # the fifth step was taken but not saved


def trained_network(store: RecordStore, item: Item, label: str, column: str) -> TrainedRun:
    """Reproduce one row of an item; return the network that its measurement uses."""
    rows = tuple(row for row in item.rows if row.label == label)
    reproduce_item(Item(item.name, item.title, item.description, item.columns, rows), store)
    source = rows[0].cells[column].source
    return load_run(store.run_directory(RecordKey(source.runs["net"], 0)).path)  # type: ignore[union-attr]


def test_universal_perturbation_resumes(tmp_path: Path, store: RecordStore) -> None:
    net = trained_network(store, find_paper("chen2019").item("blackbox"), "CNN", "attacked")

    def measure(context: MeasurementContext) -> dict[str, Any]:
        return measure_white_box(context, net, eps=32, iterations=5, interval=2, n_train_images=64, n_images=20)

    check_resume(measure, tmp_path, (3, 3))
    assert remaining_files(tmp_path / "interrupted") == []


def test_early_training_resumes_in_each_routing(tmp_path: Path) -> None:
    def measure(context: MeasurementContext) -> dict[str, Any]:
        return measure_early_training(context, "yang2021_mnist", {}, steps=6, interval=2, batch_size=8)

    check_resume(measure, tmp_path, (1, 3))  # in the first routing, and in a later one
    assert remaining_files(tmp_path / "interrupted") == []


def test_affine_robustness_resumes_in_each_data_set(tmp_path: Path, store: RecordStore) -> None:
    net = trained_network(store, find_paper("sabour2017").item("sec52"), "CNN", "affNIST")

    def measure(context: MeasurementContext) -> dict[str, Any]:
        return measure_affine_robustness(context, net, n_images=60, n_affine=300, n_sweep=4)

    check_resume(measure, tmp_path, (0, 1))
    assert remaining_files(tmp_path / "interrupted") == []


def test_iteration_cost_repeats_no_finished_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def fake_cost(context: MeasurementContext, cases: dict[str, Any], *_: Any) -> tuple[dict[str, float], ...]:
        context.progress()
        measured.extend(name for name, _ in cases.values())
        return dict.fromkeys(cases, 1.0), dict.fromkeys(cases, 2.0)

    monkeypatch.setattr(cost, "_inference_and_memory", fake_cost)
    models = {"dynamic": "tsai2020_dynamic_cifar10", "em": "tsai2020_em_cifar10"}
    interrupted = MeasurementContext("smoke", 0, tmp_path, progress=interrupt_after(1))
    with pytest.raises(Interrupted):
        cost.iteration_cost(interrupted, models, iterations=1)
    results = cost.iteration_cost(MeasurementContext("smoke", 0, tmp_path), models, iterations=1)
    assert measured == list(models.values())
    assert [results[f"{label} milliseconds 1"] for label in models] == [1, 1]
    assert remaining_files(tmp_path) == []
