"""The benchmark: the usual way is the same computation, what differs is not timed, and the record is the README's."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.cli.commands import run_command, usage_error
from tests.tolerances import SAME, relative_rms
from torchcaps.bench import CASES, Case, compare, make_explicit, matmul_rate, measure_case
from torchcaps.bench.cases import Work
from torchcaps.bench.growth import draw_growth
from torchcaps.bench.naive import ContractedVotes, explicit_votes
from torchcaps.nn import ConvCapsules, DenseCapsules
from torchcaps.nn.conv import FEW_IMAGES, Convolution
from torchcaps.routing import EM, Attention, Dynamic, InvertedAttention, Trainable
from torchcaps.votes import DenseVotes

ROOT = Path(__file__).resolve().parent.parent
LAYERS = {
    "dense vector": (lambda: DenseCapsules(6, 4, 3, 8, routing=Dynamic(3)), (2, 6, 4)),
    "dense matrix": (lambda: DenseCapsules(6, 4, 3, 4, routing=EM(2), pose="matrix"), (2, 6, 4)),
    "dense inverted": (lambda: DenseCapsules(6, 4, 3, 4, routing=InvertedAttention(2), pose="matrix"), (2, 6, 4)),
    "conv inverted": (
        lambda: ConvCapsules(2, 4, 3, 4, 3, 2, padding=1, routing=InvertedAttention(2), pose="matrix"),
        (2, 5, 5, 2, 4),
    ),
    "conv em": (lambda: ConvCapsules(2, 4, 3, 4, 3, routing=EM(2), pose="matrix"), (2, 5, 5, 2, 4)),
    "choi": (
        lambda: ConvCapsules(3, 4, 2, 5, 3, 2, padding="same", routing=Attention(dropout=0.0)),
        (2, 5, 5, 3, 4),
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_usual_way_is_the_same_computation(name: str) -> None:
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    ours = make().double()
    usual = make_explicit(copy.deepcopy(ours))
    pose = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    votes = usual.make_votes(usual.check_children(pose))
    assert isinstance(votes, ContractedVotes if "inverted" in name else DenseVotes)
    assert relative_rms(votes.dense(), ours.votes(pose).dense()) < SAME[torch.float64]
    found = []
    for layer in (ours, usual):
        parents = layer(pose)
        direction = torch.randn(parents.pose.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        gradients = torch.autograd.grad((parents.pose * direction).sum(), [pose, layer.weight])
        found.append([parents.pose, *gradients])
    for a, b in zip(*found, strict=True):
        assert relative_rms(a, b) < SAME[torch.float64]


def test_the_usual_way_refuses_what_it_is_not_written_for() -> None:
    layer = ConvCapsules(2, 4, 3, 4, 3, routing=Trainable(), grid=(5, 5), weights="position")
    with pytest.raises(ValueError, match="matrices that all places share"):
        explicit_votes(*layer.vote_inputs(layer.check_children(torch.randn(1, 5, 5, 2, 4))))
    votes = ContractedVotes(torch.randn(1, 6, 4), torch.randn(6, 4, 3, 4), None, 1, Dynamic(1).wire(6))
    for ask in (lambda: votes.mix(torch.zeros(1)), lambda: votes.sqsum(votes.dense(), votes.dense()), votes.detach):
        with pytest.raises(TypeError, match="sums and agreements alone"):
            ask()


def test_what_does_not_agree_is_not_timed() -> None:
    wrong = Case("two numbers", lambda explicit: Work(lambda: [torch.ones(3) + explicit], 3))
    with pytest.raises(ValueError, match=r"two numbers: the two ways differ by 5\.0e-01, so they are not timed"):
        measure_case(wrong, 1, 1e9)
    # A gradient that is zero but for rounding has no size of its own.
    tiny = Case("rounding", lambda explicit: Work(lambda: [torch.ones(3), torch.full((3,), 1e-9 * (1 + explicit))], 3))
    assert compare(tiny)[1] < 1e-8


def test_a_case_is_measured() -> None:
    row = measure_case(CASES["small"], 1, matmul_rate(1))
    assert row["difference"] == 0  # so small that votes are stored either way
    assert row["ratio"] == row["cpu_seconds"]["usual"] / row["cpu_seconds"]["ours"] > 0
    assert row["above_floor"] > 1


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = run_command(capsys, "bench", "small", "--repeat", "1", "--out", str(tmp_path / "speed.json"))
    assert "16x8 to 10x16, batch 1, against the plain path" in text
    record = json.loads((tmp_path / "speed.json").read_text())
    assert record["rows"][0]["case"] == "small"
    assert "did you mean 'dynamic-last'" in usage_error("bench", "dynamic-lst")
    assert "--repeat must be 1 or more, got 0" in usage_error("bench", "--repeat", "0")
    assert "there is no folder" in usage_error("bench", "small", "--out", str(tmp_path / "none/x.json"))


def test_the_growth_is_drawn(tmp_path: Path) -> None:
    rows = [
        row for row in json.loads((ROOT / "results/bench/speed.json").read_text())["rows"] if row["kind"] == "growth"
    ]
    draw_growth(rows, tmp_path / "growth.png")
    assert (tmp_path / "growth.png").read_bytes()[:4] == b"\x89PNG"


def test_few_images_are_convolved_by_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Convolution(64, 256, 9, 2)  # enough weights
    images = torch.randn(FEW_IMAGES, 64, 20, 20)
    with torch.no_grad():
        found = layer(images)
        monkeypatch.setattr(layer, "_few_images", lambda _: False)
        assert relative_rms(found, layer(images)) < SAME[torch.float32]
    monkeypatch.undo()
    assert not layer._few_images(images)  # with gradients
    with torch.no_grad():
        assert layer._few_images(images)
        assert not layer._few_images(torch.randn(FEW_IMAGES + 1, 64, 20, 20))
        assert not Convolution(64, 256, 9, padding=2)._few_images(images)
        assert not Convolution(4, 4, 3)._few_images(torch.randn(1, 4, 9, 9))


def test_the_record_is_the_readmes_and_reaches_its_bars() -> None:
    rows = json.loads((ROOT / "results/bench/speed.json").read_text())["rows"]
    readme = (ROOT / "README.md").read_text()
    speed = {row["case"]: row for row in rows if row["kind"] == "speed"}
    assert set(speed) == set(CASES)
    for name, row in speed.items():
        assert row["ratio"] >= row["least"], name
        cpu = row["cpu_seconds"]
        cells = f"{1e3 * cpu['usual']:,.1f} ms | {1e3 * cpu['ours']:,.1f} ms | {row['ratio']:.1f}x"
        assert cells in readme, name
    assert speed["dynamic-last"]["above_floor"] < 8
    assert speed["dynamic-full"]["above_floor"] < 8
    memory = {row["model"]: row for row in rows if row["kind"] == "memory"}
    small, large = memory["tsai2020_cifar10"], memory["tsai2020_cifar100"]
    assert small["ours"]["above_bytes"] <= small["usual"]["above_bytes"] / 8
    assert large["ours"]["process_bytes"] < 6 * 2**30
    for row in memory.values():
        assert f"{row['ours']['above_bytes'] / 2**20:,.0f} MiB" in readme


@pytest.mark.parametrize("layer", [0, 1])
def test_recorded_time_grows_in_proportion(layer: int) -> None:
    """From 32 images, which fill two registers, at most a third more than in proportion; so for iterations."""
    rows = [
        row for row in json.loads((ROOT / "results/bench/speed.json").read_text())["rows"] if row["kind"] == "growth"
    ]
    name = list(dict.fromkeys(row["layer"] for row in rows))[layer]
    by_batch = {row["value"]: row["seconds"] for row in rows if row["layer"] == name and row["axis"] == "batch"}
    assert list(by_batch) == [2**n for n in range(10)]
    assert by_batch[512] / by_batch[32] < 16 * 4 / 3
    steps = {row["value"]: row["seconds"] for row in rows if row["layer"] == name and row["axis"] == "iterations"}
    assert list(steps) == list(range(1, 9))
    assert (steps[8] - steps[1]) / (steps[4] - steps[1]) < 7 / 3 * 4 / 3


def test_memory_benchmark_rejects_unknown_cases() -> None:
    command = [sys.executable, "-m", "benchmarks.training_memory", "capsnet_smal:3"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 2
    assert "capsnet_smal:3" in run.stderr
