"""Recorded benchmarks: they reach their bounds, and the documents quote them."""

import json
from pathlib import Path
from typing import Any

import pytest

from torchcaps.bench.cases import CASES
from torchcaps.bench.growth import BATCH_SIZES, ITERATIONS
from torchcaps.bench.images import BASELINE as PHOTO_BASELINE
from torchcaps.bench.images import IMAGE_CASES
from torchcaps.bench.images import MODEL as PHOTO_MODEL
from torchcaps.bench.memory import ESTIMATE_CASES, MEMORY_CASES
from torchcaps.bench.thresholds import SWEEPS
from torchcaps.explorer.benchmark import BENCH_MODELS
from torchcaps.votes.dispatch import THRESHOLDS

ROOT = Path(__file__).resolve().parent.parent.parent


def read_document(name: str) -> str:
    """Return the text of a document with all white space as single spaces."""
    return " ".join((ROOT / name).read_text().split())


SPEED = read_document("docs/speed.md")


def rows(name: str, kind: str) -> list[dict[str, Any]]:
    record = json.loads((ROOT / "results/bench" / f"{name}.json").read_text())
    return [row for row in record["rows"] if row["kind"] == kind]


def test_speed() -> None:
    speed = {row["case"]: row for row in rows("speed", "speed")}
    assert set(speed) == set(CASES)
    for name, row in speed.items():
        case = CASES[name]
        assert (row["title"], row["min_speedup"]) == (case.title, case.min_speedup)
        assert row["speedup"] >= case.min_speedup, name
        cpu = row["cpu_seconds"]
        cells = f"{1e3 * cpu['naive']:,.1f} ms | {1e3 * cpu['torchcaps']:,.1f} ms | {row['speedup']:.1f}x"
        assert cells in SPEED, name
    assert speed["dynamic-last"]["matmul_ratio"] < 8
    assert speed["dynamic-full"]["matmul_ratio"] < 8


@pytest.mark.parametrize("name", ["em_kernel", "kernel_blocks"])
def test_changes_of_the_kernel(name: str) -> None:
    for row in rows(name, "change"):
        before, after = (f"{1e3 * row[f'{key}_seconds']:.1f} ms" for key in ("before", "after"))
        assert f"| {before} | {after} | {row['speedup']:.2f}x |" in SPEED, row["case"]


def test_models_on_a_second_processor() -> None:
    for row in rows("kernel_blocks", "cpu"):
        ours, naive = (f"{1e3 * row['cpu_seconds'][key]:.1f} ms" for key in ("torchcaps", "naive"))
        assert row["speedup"] >= 1.6
        assert ours in SPEED
        assert f"{naive}, {row['speedup']:.2f}x" in SPEED.replace("naive baseline ", ""), row["case"]


def test_steps_and_bfloat16() -> None:
    """The document quotes the steps; bfloat16 is as accurate as float32."""
    for row in rows("steps", "step") + rows("bf16", "step"):
        single, *others = row["cpu_seconds"].values()
        assert f"| `{row['model']}`, {row['batch_size']} | {1e3 * single:.1f} ms |" in SPEED, row["model"]
        for seconds in others:
            assert f"| {1e3 * seconds:.1f} ms ({single / seconds:.2f}x) |" in SPEED, row["model"]
    (row,) = rows("bf16", "accuracy")
    single, mixed = row["test_accuracy"]["32-true"], row["test_accuracy"]["bf16-mixed"]
    assert mixed > single - 0.01
    assert f"{100 * single:.2f} % in float32 and {100 * mixed:.2f} % with bf16-mixed" in SPEED


def test_memory() -> None:
    memory = {row["model"]: row for row in rows("speed", "memory")}
    assert set(memory) == {case.model for case in MEMORY_CASES}
    for case in MEMORY_CASES:
        row = memory[case.model]
        if case.max_fraction is not None:
            assert row["torchcaps"]["step_bytes"] <= case.max_fraction * row["naive"]["step_bytes"]
        if case.max_process_bytes is not None:
            assert row["torchcaps"]["process_bytes"] < case.max_process_bytes
        assert f"{row['torchcaps']['step_bytes'] / 2**20:,.0f} MiB" in SPEED


@pytest.mark.parametrize("layer", [0, 1])
def test_time_grows_in_proportion(layer: int) -> None:
    """From 32 images on, which fill two registers, at most a third more than in proportion; also for iterations."""
    growth = rows("speed", "growth")
    name = list(dict.fromkeys(row["layer"] for row in growth))[layer]
    points = {axis: {} for axis in ("batch_size", "iterations")}
    for row in growth:
        if row["layer"] == name:
            points[row["axis"]][row["value"]] = row["seconds"]
    by_batch, by_iterations = points["batch_size"], points["iterations"]
    assert (tuple(by_batch), tuple(by_iterations)) == (BATCH_SIZES, ITERATIONS)
    assert by_batch[512] / by_batch[32] < 16 * 4 / 3
    assert (by_iterations[8] - by_iterations[1]) / (by_iterations[4] - by_iterations[1]) < 7 / 3 * 4 / 3


def test_memory_estimates() -> None:
    """Most estimates are within a quarter of the measured peak."""
    estimates = rows("training_memory", "estimate")
    assert [row["case"] for row in estimates] == list(ESTIMATE_CASES)
    for row in estimates:
        estimated, measured = (f"{row[key] / 2**20:,.0f} MiB" for key in ("estimated_bytes", "measured_bytes"))
        assert f"| {estimated} | {measured} | {row['ratio']:.2f} |" in SPEED
    outside = [row["case"] for row in estimates if not 0.76 < row["ratio"] < 1.25]
    assert len(outside) <= 2, outside


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("images-32", ["images_32"]),
        ("images-64", [f"images_64_seed{n}" for n in range(3)]),
        ("images-held-out", [f"images_held_out_seed{n}" for n in range(3)]),
    ],
)
def test_photographs(name: str, files: list[str]) -> None:
    """The default model is at least as accurate as the CNN after the same CPU time; the document has both means."""
    images = [row for file in files for row in rows(file, "images")]
    case = IMAGE_CASES[name]
    for row in images:
        assert (row["side"], row["seconds"], row["n_test"]) == (case.side, case.seconds, 5 * case.n_test)
        assert row["training_seconds"] == pytest.approx(case.seconds, rel=0.02)
    models = (PHOTO_MODEL, PHOTO_BASELINE)
    accuracies = {model: [row["accuracy"] for row in images if row["model"] == model] for model in models}
    means = [sum(values) / len(values) for values in accuracies.values()]
    assert [len(values) for values in accuracies.values()] == [3, 3]
    assert means[0] >= means[1]
    assert f"{case.seconds:.0f} s | {100 * means[0]:.2f} % | {100 * means[1]:.2f} % |" in read_document(
        "docs/howto/own-images.md"
    )


def test_data_loading() -> None:
    for row in rows("data", "data"):
        cells = f"{1e3 * row['batch_seconds']:.1f} ms | {row['step_seconds']:.2f} s | {100 * row['fraction']:.2f} % |"
        assert cells in read_document("docs/reference/datasets.md")
        assert row["fraction"] < 0.05
    (total,) = rows("data", "data-total")
    assert f"{total['mnist_read_seconds']:.2f} s and {total['mnist_bytes'] / 1e6:.0f} MB" in read_document(
        "docs/reference/datasets.md"
    )
    assert f"{total['multimnist_images_per_second']:,.0f}" in read_document("docs/reference/datasets.md")
    assert total["mnist_read_seconds"] < 2
    assert total["mnist_bytes"] < 120e6
    assert total["multimnist_images_per_second"] > 20_000


def test_training_overhead() -> None:
    scaling = (ROOT / "docs/scaling.md").read_text()
    fractions = {row["model"]: row["overhead_fraction"] for row in rows("training", "loop")}
    assert fractions["sabour2017_mnist"] < 0.03
    assert fractions["capsnet_small"] < 0.10
    for name, fraction in fractions.items():
        assert f"{100 * fraction:.1f} % for `{name}`" in read_document("docs/howto/train.md")
    seconds = {row["command"]: row["seconds"] for row in rows("training", "startup")}
    assert seconds["torchcaps --help"] < 0.5
    assert seconds["torchcaps train --help"] < 2
    for command, shortest in seconds.items():
        assert f"`{command}` answers in {shortest:.2f} s" in read_document("docs/howto/train.md")
    processes = rows("training", "processes")
    assert {(row["processes"], row["threads"]) for row in processes} == {(1, 1), (1, 2), (2, 1)}
    for row in processes:
        cells = f"{row['step_seconds']:.3f} s | {row['images_per_second']:,.0f} | {100 * row['efficiency']:.0f} %"
        assert f"| {row['processes']} | {row['threads']} | {cells} |" in scaling


def test_thresholds_cite_their_measurement() -> None:
    """Each threshold has a row in the record and quotes its crossover or fastest size within a factor of two."""
    recorded = {row["threshold"]: row for row in rows("thresholds", "threshold")}
    assert list(recorded) == list(SWEEPS)
    assert {name for name, threshold in THRESHOLDS.items() if threshold.recorded} == set(recorded)
    for name, row in recorded.items():
        threshold, sweep = THRESHOLDS[name], SWEEPS[name]
        assert (row["value"], row["unit"], row["title"]) == (threshold.value, threshold.unit, sweep.title), name
        assert row["points"][0]["at"] < threshold.value < row["points"][-1]["at"], name
        found = row.get("crossover", row.get("optimum"))
        if threshold.measured is not None:
            assert found is not None, name
            assert 0.5 <= found / threshold.measured <= 2, f"{name}: recorded {found}, quoted {threshold.measured}"


def test_explorer() -> None:
    """Forward pass and trace of the small network in under 30 ms on one core."""
    measured = {row["model"]: row for row in rows("explorer", "explorer")}
    assert set(measured) == set(BENCH_MODELS)
    assert measured["capsnet_small"]["reply_seconds"] < 0.03
    for row in measured.values():
        assert f"{1e3 * row['trace_seconds']:.1f} ms" in read_document("docs/explorer.md")
