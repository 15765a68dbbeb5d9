"""Checkpoints: atomic writes, detection of damage, and rejection of checkpoints of other runs."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.training.helpers import assert_bit_equal, last_checkpoint, small_spec
from torchcaps.models.recipe import OptimizerConfig
from torchcaps.training import CheckpointError, resume, train
from torchcaps.training.checkpoint import read_checkpoint, write_checkpoint
from torchcaps.training.inference import load_run
from torchcaps.training.run_dir import RunDirectory


def damaged_versions(content: bytes) -> dict[str, bytes]:
    flipped = bytearray(content)
    flipped[-100] ^= 1
    return {
        "truncated": content[: len(content) // 2],
        "empty": b"",
        "one bit flipped": bytes(flipped),
        "truncated header": content[:20],
        "text": b"not a checkpoint at all",
        "changed state": content.replace(b'\\"step\\": 10', b'\\"step\\": 11'),
        "huge header": (2**60).to_bytes(8, "little") + b"{}",
    }


def test_damaged_checkpoint_is_detected_and_previous_one_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = small_spec(epochs=3, checkpoint_interval_steps=2)
    complete = train(spec, tmp_path / "complete")
    train(spec.replace_recipe(epochs=2), tmp_path / "run")
    directory = RunDirectory(tmp_path / "run")
    intact = directory.last.read_bytes(), directory.previous.read_bytes()
    for name, content in damaged_versions(intact[0]).items():
        assert content != intact[0], name
        directory.last.write_bytes(content)
        directory.previous.write_bytes(intact[1])
        with pytest.raises(CheckpointError, match=r"last\.safetensors"):
            read_checkpoint(directory.last)
        assert str(directory.last) in load_run(directory.path).note, name
        capsys.readouterr()
        result = resume(directory.path, lambda spec: spec.replace_recipe(epochs=3))
        assert f"warning: {directory.last}" in capsys.readouterr().out, name
        assert_bit_equal(last_checkpoint(result).tensors, last_checkpoint(complete).tensors)
    directory.last.write_bytes(b"")
    directory.previous.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"last\.safetensors.* no other checkpoint"):
        resume(directory.path)
    assert directory.last.read_bytes() == b""  # unchanged


def test_files_that_are_not_checkpoints_are_rejected(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(3)}, tmp_path / "other.safetensors")
    torch.save({"weight": torch.zeros(3)}, tmp_path / "pickle.pt")
    for name in ("other.safetensors", "pickle.pt", "missing"):
        with pytest.raises(CheckpointError, match=name):
            read_checkpoint(tmp_path / name)


def test_changed_number_of_training_images_is_rejected(tmp_path: Path) -> None:
    result = train(small_spec(data_options={"train": 40}), tmp_path / "run")
    path = result.path / "checkpoints/last.safetensors"
    tensors, state = read_checkpoint(path)
    write_checkpoint(path, tensors, {**state, "n_images": 44})
    with pytest.raises(CheckpointError, match=r"\b44\b.*\b40\b"):
        resume(result.path)


def test_checkpoint_of_another_model_is_rejected(tmp_path: Path) -> None:
    run = train(small_spec(), tmp_path / "run")
    other = train(small_spec(width=6), tmp_path / "other")
    path = run.path / "checkpoints/last.safetensors"
    path.write_bytes((other.path / "checkpoints/last.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"model_options \{'width': 6\}"):
        resume(run.path)
    tensors, state = read_checkpoint(path)
    write_checkpoint(path, tensors, {**state, "config": {}})  # the weights themselves are compared, too
    for load in (resume, load_run):
        with pytest.raises(CheckpointError, match=r"front\.conv1\.\w+ is shape \[6"):
            load(run.path)
    write_checkpoint(path, {"model.x": torch.zeros(1)}, {"run": {"step": 1}, "classes": []})
    with pytest.raises(CheckpointError):
        resume(run.path)


def test_invalid_training_state_is_rejected(tmp_path: Path) -> None:
    run = train(small_spec(), tmp_path / "run")
    path = run.path / "checkpoints/last.safetensors"
    tensors, state = read_checkpoint(path)
    changes: dict[str, dict[str, Any]] = {
        "bored": {"stop_reason": "bored"},
        "color": {"best": {"color": 1}},
        "unknown": {"unknown": 1},
    }
    for name, change in changes.items():
        write_checkpoint(path, tensors, {**state, "run": {**state["run"], **change}})
        with pytest.raises(CheckpointError, match=name):
            resume(run.path)


@pytest.mark.parametrize(
    ("change", "setting"),
    [
        ({"seed": 5}, "seed 5; .* 0"),
        ({"optimizer": OptimizerConfig("sgd", 0.1)}, "optimizer .*'sgd'"),
        ({"data_options": {"train": 60}}, "data_options"),
    ],
    ids=["seed", "optimizer", "data"],
)
def test_checkpoint_with_other_settings_is_rejected(change: dict[str, Any], setting: str, tmp_path: Path) -> None:
    run, other = train(small_spec(), tmp_path / "run"), train(small_spec(**change), tmp_path / "other")
    checkpoints = [result.path / "checkpoints/last.safetensors" for result in (run, other)]
    checkpoints[0].write_bytes(checkpoints[1].read_bytes())
    for load in (resume, load_run):
        with pytest.raises(CheckpointError, match=setting):
            load(run.path)


def test_damaged_best_checkpoint_is_set_aside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(small_spec(epochs=2, val_fraction=0.3), tmp_path / "run")
    best = run.path / "checkpoints/best.safetensors"
    best.write_bytes(best.read_bytes()[:1000])
    longer = resume(run.path, lambda spec: spec.replace_recipe(epochs=3))
    output = capsys.readouterr().out
    assert output.index(f"warning: {best}") < output.index(f"resuming {run.path}")
    assert read_checkpoint(best).state["run"]["step"] > 0  # the next evaluation writes a new one
    assert set(longer.test_results) == {"last", "best"}
    best.write_bytes(b"nothing")
    finished = resume(run.path)  # no evaluation is left
    assert set(finished.test_results) == {"last"}
    assert json.loads((run.path / "results.json").read_text())["steps"] == finished.steps


def test_checkpoint_is_synced_before_it_replaces_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    sync, replace = os.fsync, os.replace

    def record_sync(handle: int) -> None:
        calls.append(f"sync {Path(os.readlink(f'/proc/self/fd/{handle}')).name}")
        sync(handle)

    def record_replace(source: Path, target: Path) -> None:
        calls.append(f"rename to {Path(target).name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "replace", record_replace)
    for _ in range(2):
        calls.clear()
        write_checkpoint(tmp_path / "last", {"x": torch.zeros(3)}, {}, tmp_path / "previous")
    assert calls[0] == "sync last"
    assert [call for call in calls if call.startswith("rename")] == ["rename to previous", "rename to last"]
    assert calls[-1] == f"sync {tmp_path.name}"
