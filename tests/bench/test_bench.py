"""Benchmark: the naive baseline computes the same, disagreeing cases are not timed, and the command reports both."""

import copy
import itertools
import json
from pathlib import Path

import pytest
import torch

from tests.cli.commands import run_command, usage_error
from tests.tolerances import SAME, relative_rms
from torchcaps.bench import CASES, Case, compare, matmul_rate, measure_case, training, use_naive_votes
from torchcaps.bench.cases import Work
from torchcaps.bench.data import measure_batch
from torchcaps.bench.growth import BATCH_SIZES, CONV, DENSE, ITERATIONS, draw_growth
from torchcaps.bench.iterations import REFERENCE, measure_iterations
from torchcaps.bench.naive import EinsumVotes, broadcast_votes
from torchcaps.bench.steps import measure_steps
from torchcaps.bench.timing import training_step
from torchcaps.bench.training import measure_loop
from torchcaps.models import create_model
from torchcaps.nn import ConvCapsules, DenseCapsules
from torchcaps.routing import EM, Attention, Dynamic, InvertedAttention, Trainable
from torchcaps.votes import DenseVotes

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
def test_naive_baseline_equals_torchcaps(name: str) -> None:
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    ours = make().double()
    naive = use_naive_votes(copy.deepcopy(ours))
    pose = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    votes = naive.votes(pose)
    assert type(votes) is (EinsumVotes if "inverted" in name else DenseVotes)
    assert relative_rms(votes.dense(), ours.votes(pose).dense()) < SAME[torch.float64]
    found = []
    for layer in (ours, naive):
        parents = layer(pose)
        direction = torch.randn(parents.pose.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        gradients = torch.autograd.grad((parents.pose * direction).sum(), [pose, layer.weight])
        found.append([parents.pose, *gradients])
    for a, b in zip(*found, strict=True):
        assert relative_rms(a, b) < SAME[torch.float64]


def test_votes_factory_is_copied_with_the_layer_and_not_saved() -> None:
    layer = use_naive_votes(DenseCapsules(6, 4, 3, 4, routing=InvertedAttention(2), pose="matrix"))
    pose = torch.randn(2, 6, 4)
    assert type(copy.deepcopy(layer).votes(pose)) is EinsumVotes
    plain = DenseCapsules(6, 4, 3, 4, routing=InvertedAttention(2), pose="matrix")
    assert list(plain.state_dict()) == list(layer.state_dict())
    plain.load_state_dict(layer.state_dict())
    assert type(plain.votes(pose)) is DenseVotes
    assert relative_rms(plain(pose).pose, layer(pose).pose) < SAME[torch.float32]


def test_naive_baseline_rejects_unsupported_layers() -> None:
    layer = ConvCapsules(2, 4, 3, 4, 3, routing=Trainable(), grid=(5, 5), weights="position")
    with pytest.raises(ValueError, match="weight"):
        broadcast_votes(*layer.vote_inputs(layer.check_children(torch.randn(1, 5, 5, 2, 4))))
    with pytest.raises(ValueError, match="slot_kind='type'"):
        EinsumVotes(torch.randn(1, 6, 4), torch.randn(6, 4, 3, 4), None, 1, Attention().wire(6))
    votes = EinsumVotes(torch.randn(1, 6, 4), torch.randn(6, 4, 3, 4), None, 1, Dynamic(1).wire(6))
    for call in (lambda: votes.mix(torch.zeros(1)), lambda: votes.sqsum(votes.dense(), votes.dense()), votes.detach):
        with pytest.raises(NotImplementedError):
            call()


def test_disagreeing_implementations_are_not_timed() -> None:
    different = Case("two numbers", lambda naive: Work(lambda: [torch.ones(3) + naive], 3))
    with pytest.raises(ValueError, match=r"two numbers: .* 5\.0e-01"):
        measure_case(different, 1, 1e9)
    # A gradient that is zero up to rounding is compared with the largest one.
    tiny = Case("rounding", lambda naive: Work(lambda: [torch.ones(3), torch.full((3,), 1e-9 * (1 + naive))], 3))
    assert compare(tiny)[1] < 1e-8


def test_row_of_a_case() -> None:
    row = measure_case(CASES["small"], 1, matmul_rate(1))
    assert row["difference"] == 0  # small votes are stored by both
    assert row["speedup"] == row["cpu_seconds"]["naive"] / row["cpu_seconds"]["torchcaps"]
    assert row["wall_speedup"] == row["wall_seconds"]["naive"] / row["wall_seconds"]["torchcaps"]
    assert row["matmul_ratio"] == row["cpu_seconds"]["torchcaps"] / row["matmul_seconds"]


def test_steps_of_models(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda function: compiled.append(function) or function)
    (row,) = measure_steps(1, {"capsnet_small": 2})
    assert set(row["cpu_seconds"]) == {"eager", "compiled", "bf16-mixed"}
    assert len(compiled) == 2  # forward pass with loss, optimiser


def test_command_prints_and_records(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = run_command(capsys, "bench", "small", "--repeat", "1", "--out", str(tmp_path / "speed.json"))
    assert CASES["small"].title in text
    record = json.loads((tmp_path / "speed.json").read_text())
    assert set(record) == {"command", "finished", "seed", "machine", "rows"}
    assert [row["case"] for row in record["rows"]] == ["small"]


def test_command_rejects_invalid_arguments(tmp_path: Path) -> None:
    assert "'dynamic-last'" in usage_error("bench", "dynamic-lst")  # the nearest name
    assert "--repeat" in usage_error("bench", "--repeat", "0")
    assert str(tmp_path / "none") in usage_error("bench", "small", "--out", str(tmp_path / "none/x.json"))
    assert "capsnet_smal:3" in usage_error("bench", "capsnet_smal:3")


def test_growth_is_drawn(tmp_path: Path) -> None:
    axes = {"batch_size": BATCH_SIZES, "iterations": ITERATIONS}
    rows = [
        {"kind": "growth", "layer": layer, "axis": axis, "value": value, "seconds": 1e-3 * value}
        for axis, values in axes.items()
        for value in values
        for layer in (DENSE, CONV)
    ]
    draw_growth(rows, tmp_path / "growth.png")
    assert (tmp_path / "growth.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("name", ["capsnet_small", "sabour2017_multimnist", "yang2021_mnist"])
def test_training_step_updates_the_weights(name: str) -> None:
    """One object, several objects, and an ascent after each step."""
    torch.manual_seed(0)
    changes = {} if name == "capsnet_small" else {"width": 8, "types": 2}
    model = create_model(name, **changes)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    training_step(model, 2)()
    unchanged = [name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])]
    assert unchanged == []


def test_overhead_of_the_loop_counts_all_steps_but_the_first() -> None:
    row = measure_loop("capsnet_small", 3)
    assert row["kind"] == "loop"
    assert row["step_seconds"] > 0
    assert row["overhead_fraction"] == row["overhead_seconds"] / row["step_seconds"]


def test_phases_are_timed_by_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that advances by 1 at each call, a step takes 4: forward, loss, backward and optimizer step."""
    network, loss = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2)), torch.nn.MSELoss()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    monkeypatch.setattr(training.time, "process_time", itertools.count().__next__)
    timer = training.PhaseTimer(network, loss, optimizer)
    seconds = []
    for closed in (False, False, True):
        if closed:
            timer.close()
        optimizer.zero_grad()
        value = loss(network(torch.ones(4, 3)), torch.zeros(4, 2))
        seconds.append(timer.seconds)
        (0.5 * value).backward()
        seconds.append(timer.seconds)
        optimizer.step()
        seconds.append(timer.seconds)
    assert seconds == [2, 3, 4, 6, 7, 8, 8, 8, 8]


def test_loading_is_compared_with_a_step() -> None:
    row = measure_batch("digits", "sabour2017.mnist", "train", "capsnet_small", repeat=1)
    assert row["fraction"] == row["batch_seconds"] / row["step_seconds"]
    assert (row["case"], row["model"]) == ("digits, sabour2017.mnist", "capsnet_small")


def test_time_per_iteration_is_relative_to_inverted_attention() -> None:
    rows = {row["routing"]: row for row in measure_iterations(1, batch_size=2, sizes=(4, 3, 2, 4))}
    assert rows[REFERENCE]["stored_ratio"] == rows[REFERENCE]["streamed_ratio"] == 1
    for row in rows.values():
        for storage in ("stored", "streamed"):
            assert row[f"{storage}_seconds"] > 0
            expected = row[f"{storage}_seconds"] / rows[REFERENCE][f"{storage}_seconds"]
            assert row[f"{storage}_ratio"] == pytest.approx(expected)
