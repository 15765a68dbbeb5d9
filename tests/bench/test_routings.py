"""Comparison of routings: cells, selection of the learning rate, resumption, table and page."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.commands import run_command, usage_error
from torchcaps.bench import routings
from torchcaps.bench.memory import TrainingPeak
from torchcaps.bench.routings import (
    CNN,
    MODEL,
    SCALES,
    Comparison,
    RoutingCell,
    affine_pipeline,
    baseline_channels,
    list_rows,
    pending_cells,
    read_record,
    run_cells,
    selected_lr,
)
from torchcaps.bench.routings_report import Mean, draw_routings, read_rows, render_page
from torchcaps.data import create_pipeline
from torchcaps.data.base import Batch
from torchcaps.models import create_model

(SMOKE,) = SCALES["smoke"]
ROW = "uniform"


def write_training(
    directory: Path, comparison: Comparison, lr: float, seed: int, val: float, row: str = ROW, **fields: Any
) -> None:
    """Write the record of a training that was not run."""
    cell = RoutingCell(comparison, row, lr, seed)
    values = {"status": "finished", "val_accuracy": val, "test_accuracy": 1 - val, "affine_accuracy": val / 2}
    record = {"lr": lr, "settings": cell.spec().record_name(), **values, **fields}
    path = directory / cell.file
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record))


def test_every_routing_has_a_row() -> None:
    assert {"uniform", CNN, "dynamic", "em", "self_attention", "dynamic-maxmin"} <= set(list_rows())
    assert len(list_rows()) == len(set(list_rows()))


@pytest.mark.parametrize("comparison", [c for scale in SCALES.values() for c in scale], ids=lambda c: c.data)
def test_plain_cnn_has_equal_parameters(comparison: Comparison) -> None:
    with torch.device("meta"):
        capsules = create_model(MODEL, image=comparison.image, **RoutingCell(comparison, ROW).model_options())
        cnn = create_model("cnn_images", image=comparison.image, channels=baseline_channels(comparison))
    assert abs(cnn.n_parameters / capsules.n_parameters - 1) < 0.04


def test_learning_rate_is_selected_by_validation(tmp_path: Path) -> None:
    low, high = SMOKE.lrs
    write_training(tmp_path, SMOKE, low, 0, val=0.5)
    assert selected_lr(tmp_path, SMOKE, ROW) is None  # the grid is incomplete
    write_training(tmp_path, SMOKE, high, 0, val=0.6)  # with the lower test accuracy
    assert selected_lr(tmp_path, SMOKE, ROW) == high
    write_training(tmp_path, SMOKE, high, 0, val=0.5)
    assert selected_lr(tmp_path, SMOKE, ROW) == low
    write_training(tmp_path, SMOKE, low, 0, val=0.9, status="diverged")
    assert selected_lr(tmp_path, SMOKE, ROW) == high
    assert [cell.file for cell in pending_cells(tmp_path, [SMOKE], [ROW])] == [
        RoutingCell(SMOKE, ROW).file,
        RoutingCell(SMOKE, ROW, high, 1).file,
    ]
    write_training(tmp_path, SMOKE, high, 1, val=0.8)
    (row,) = (row for row in read_rows(tmp_path, SMOKE) if row.name == ROW)
    assert row.accuracy == Mean((0.5, 1 - 0.8))
    assert row.affine == Mean((0.25, 0.4))
    assert (row.lr, row.step_seconds, row.diverged) == (high, None, False)


def test_a_row_that_diverges_is_complete(tmp_path: Path) -> None:
    for lr in SMOKE.lrs:
        write_training(tmp_path, SMOKE, lr, 0, val=0.0, status="diverged")
    assert [cell.is_cost for cell in pending_cells(tmp_path, [SMOKE], [ROW])] == [True]
    (row,) = (row for row in read_rows(tmp_path, SMOKE) if row.name == ROW)
    assert row.diverged
    assert row.cells()[1:4] == ["diverged"] * 3


def test_records_of_other_settings_are_not_used(tmp_path: Path) -> None:
    cell = RoutingCell(SMOKE, ROW, SMOKE.lrs[0], 0)
    write_training(tmp_path, SMOKE, SMOKE.lrs[0], 0, val=0.5)
    assert read_record(tmp_path, cell) is not None
    write_training(tmp_path, SMOKE, SMOKE.lrs[0], 0, val=0.5, settings="capsnet_images-00000000")
    assert read_record(tmp_path, cell) is None


def test_interval_of_the_mean() -> None:
    mean = Mean((0.97, 0.98, 0.99))
    assert mean.mean == pytest.approx(0.98)
    assert mean.half_width == pytest.approx(4.303 * 0.01 / 3**0.5)
    assert mean.text(3) == "98.00 ± 2.48"
    assert Mean((0.5,)).text(3) == "50.00 (1 of 3 seeds)"


def test_means_differ_if_the_interval_of_the_difference_excludes_zero() -> None:
    """Of three values each, with a standard deviation of 0.01, 4 degrees of freedom: 2.776 * 0.01 * sqrt(2 / 3)."""
    mean, half = Mean((0.50, 0.51, 0.52)), 2.776 * 0.01 * (2 / 3) ** 0.5
    for distance, verdict in ((0.99 * half, None), (1.01 * half, True)):
        higher = Mean(tuple(value + distance for value in mean.values))
        assert higher.exceeds(mean) is verdict
        assert mean.exceeds(higher) is (None if verdict is None else not verdict)
    assert Mean((0.5,)).exceeds(mean) is None


def test_page_names_the_rows_that_differ_from_uniform_couplings(tmp_path: Path) -> None:
    for name, accuracies in {"uniform": (0.80, 0.82), "em": (0.30, 0.32), "dynamic": (0.81, 0.83)}.items():
        comparison_lr = SMOKE.lrs[-1]
        for lr in SMOKE.lrs[:-1]:
            write_training(tmp_path, SMOKE, lr, 0, val=0.0, row=name)
        for seed, accuracy in zip(SMOKE.seeds, accuracies, strict=True):
            write_training(tmp_path, SMOKE, comparison_lr, seed, val=1 - accuracy, row=name)
    text = render_page(tmp_path, (SMOKE,))
    assert "- accuracy: higher with none; lower with `em`." in text
    assert "Margin: `uniform`, `dynamic`; spread: `em`." in text
    assert "may be better: `uniform`, `dynamic`, `em`." in text


def test_affine_test_images_are_transformed_before_standardisation() -> None:
    (comparison,) = (c for c in SCALES["cpu"] if c.data == "cifar10")
    plain = create_pipeline("tsai2020.cifar10")
    pipeline = affine_pipeline(plain, comparison.affine())
    pixels = torch.randint(256, (4, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    batch = Batch(pixels, torch.zeros(4, dtype=torch.long), pixels, torch.arange(4))
    first, again = (pipeline(batch, train=False).images for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.allclose(first, plain(batch, train=False).images, atol=0.5)
    assert pipeline.train == plain.train


def test_command_resumes_and_writes_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(routings, "measure_training_peaks", lambda cases: {"step": TrainingPeak(3, 2**20, 4)})
    words = ["bench", "routings", "--scale", "smoke", "--rows", "uniform", "--out", str(tmp_path)]
    n_cells = len(SMOKE.lrs) + 1 + len(SMOKE.seeds) - 1
    plan = run_command(capsys, *words, "--plan")
    assert len(plan.splitlines()) == n_cells + 1
    page, figure = tmp_path / "page.md", tmp_path / "figure.png"
    output = run_command(capsys, *words, "--page", str(page), "--figure", str(figure))
    assert output.count(" left") == n_cells
    text = page.read_text()
    assert "](figure.png)" in text
    (line,) = (line for line in text.splitlines() if line.startswith("| `uniform`"))
    assert "1 MiB" in line
    assert "not run" not in line
    assert "| `em` | not run |" in text
    record = json.loads((tmp_path / "smoke" / RoutingCell(SMOKE, ROW, SMOKE.lrs[1], 0).file).read_text())
    assert (record["status"], record["steps"], record["n_test"]) == ("finished", SMOKE.steps, SMOKE.max_images)
    (tmp_path / "smoke" / RoutingCell(SMOKE, ROW, SMOKE.lrs[1], 0).file).unlink()
    measured: list[str] = []
    left = run_cells(tmp_path / "smoke", [SMOKE], [ROW], lambda cell, record, n_left: measured.append(cell.file))
    assert measured[0] == RoutingCell(SMOKE, ROW, SMOKE.lrs[1], 0).file
    assert len(measured) <= 2  # the selection may change
    assert left == 0


def test_command_rejects_unknown_names() -> None:
    assert "'emm'" in usage_error("bench", "routings", "--rows", "emm")
    assert "'minst'" in usage_error("bench", "routings", "--data", "minst")
    assert "--max-minutes" in usage_error("bench", "routings", "--max-minutes", "0")


def test_page_without_records(tmp_path: Path) -> None:
    assert not draw_routings(tmp_path, SCALES["smoke"], tmp_path / "figure.png")
    assert not (tmp_path / "figure.png").exists()
    text = render_page(tmp_path, SCALES["smoke"])
    assert text.count("| not run |") >= len(list_rows())
