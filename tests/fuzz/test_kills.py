"""Comparison of a killed run with an uninterrupted one; ``make fuzz`` kills runs at random moments."""

import shutil
from pathlib import Path

import pytest

from tests.fuzz.kills import find_difference
from torchcaps.training import RunSpec, train
from torchcaps.training.checkpoint import read_checkpoint, write_checkpoint

SIZES = {"width": 4, "types": 2, "primary_dim": 4, "dim": 4, "hidden": (8,)}


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = RunSpec.of("capsnet_small", **SIZES, steps=2, max_train_images=40, max_test_images=10, num_threads=1)
    return train(spec, tmp_path_factory.mktemp("kills") / "run", figures=False).path


def test_differences_of_runs_are_found(complete: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(complete, tmp_path / "run"))
    assert find_difference(complete, other) == ""
    path = other / "checkpoints/last.safetensors"
    tensors, state = read_checkpoint(path)
    name = next(iter(tensors))
    write_checkpoint(path, {**tensors, name: tensors[name] + 1e-7}, state)
    assert name in find_difference(complete, other)
    write_checkpoint(path, tensors, {**state, "run": {**state["run"], "step": 1}})
    assert "state" in find_difference(complete, other)
    write_checkpoint(path, tensors, {**state, "run": {**state["run"], "seconds": 1e9}})
    assert find_difference(complete, other) == ""
    (other / "metrics.csv").write_text("step,seconds\n1,2\n")
    assert find_difference(complete, other) == "metrics.csv"
    (other / "checkpoints/best.safetensors").unlink()
    assert "best" in find_difference(complete, other)
