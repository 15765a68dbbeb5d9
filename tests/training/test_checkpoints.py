"""Checkpoints: whole or not there, and refused by name where they are broken or another run's."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.training.test_loop import last, same, small
from torchcaps.models.recipe import OptimizerConfig
from torchcaps.training import CheckpointError, resume, train
from torchcaps.training.checkpoint import read_checkpoint, write_checkpoint
from torchcaps.training.inference import load_run
from torchcaps.training.run_dir import RunFolder


def broken_files(good: Path) -> dict[str, bytes]:
    content = good.read_bytes()
    changed = bytearray(content)
    changed[-100] ^= 1
    return {
        "truncated": content[: len(content) // 2],
        "empty": b"",
        "a bit changed": bytes(changed),
        "a header cut off": content[:20],
        "words": b"not a checkpoint at all",
        "a step changed": content.replace(b'\\"step\\": 10', b'\\"step\\": 11'),
        "huge header": (2**60).to_bytes(8, "little") + b"{}",
    }


def test_data_that_have_changed_are_said_so(tmp_path: Path) -> None:
    result = train(small(data_options={"train": 40}), tmp_path / "run")
    path = result.folder / "checkpoints/last.safetensors"
    tensors, state = read_checkpoint(path)
    write_checkpoint(path, tensors, {**state, "n_images": 44})
    with pytest.raises(CheckpointError, match="its data has changed: there were 44, and there are 40 images"):
        resume(result.folder)


def test_a_broken_checkpoint_is_said_and_the_one_before_it_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = small(epochs=3, checkpoint_interval_steps=2)
    whole = train(spec, tmp_path / "whole")
    train(spec.replace_recipe(epochs=2), tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    for name, content in broken_files(folder.last).items():
        assert content != folder.last.read_bytes(), name
        kept = folder.last.read_bytes(), folder.previous.read_bytes()
        folder.last.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"no checkpoint|broken"):
            read_checkpoint(folder.last)
        assert load_run(folder.path).note.endswith("the one before it is taken"), name
        capsys.readouterr()
        result = resume(folder.path, lambda spec: spec.replace_recipe(epochs=3))
        assert "going on from the one before it" in capsys.readouterr().out
        assert same(last(result).tensors, last(whole).tensors), name
        folder.last.write_bytes(kept[0])
        folder.previous.write_bytes(kept[1])
    folder.last.write_bytes(b"")
    folder.previous.write_bytes(b"")
    with pytest.raises(CheckpointError, match="there is no other checkpoint to go on from"):
        resume(folder.path)
    assert folder.last.read_bytes() == b""  # nothing was touched


def test_a_foreign_checkpoint_is_named_for_what_it_is(tmp_path: Path) -> None:
    run = train(small(), tmp_path / "run")
    other = train(small(width=6), tmp_path / "other")
    path = run.folder / "checkpoints/last.safetensors"
    path.write_bytes((other.folder / "checkpoints/last.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"does not belong to this run: .* run with fields \{'width': 6\}"):
        resume(run.folder)
    tensors, state = read_checkpoint(path)
    write_checkpoint(path, tensors, {**state, "config": {}})
    with pytest.raises(CheckpointError, match=r"does not belong to this run: .* front\.conv1\.\w+ is \[6"):
        resume(run.folder)
    with pytest.raises(CheckpointError, match="those of another model"):
        load_run(run.folder)
    save_file({"weight": torch.zeros(3)}, tmp_path / "theirs.safetensors")
    with pytest.raises(CheckpointError, match="is no checkpoint of torchcaps"):
        read_checkpoint(tmp_path / "theirs.safetensors")
    torch.save({"weight": torch.zeros(3)}, tmp_path / "pickle.pt")
    with pytest.raises(CheckpointError, match="no checkpoint, or a broken one"):
        read_checkpoint(tmp_path / "pickle.pt")
    with pytest.raises(CheckpointError, match="is not there"):
        read_checkpoint(tmp_path / "nothing")
    write_checkpoint(tmp_path / "odd.safetensors", {"model.x": torch.zeros(1)}, {"run": {"step": 1}, "classes": []})
    path.write_bytes((tmp_path / "odd.safetensors").read_bytes())
    with pytest.raises(CheckpointError):
        resume(run.folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seed": 5}, "it is of a run with seed 5, and this one has 0"),
        ({"optimizer": OptimizerConfig("sgd", 0.1)}, "it is of a run with optimizer .*'sgd'"),
        ({"data_options": {"train": 60}}, "it is of a run with data_options"),
    ],
    ids=["seed", "optimizer", "data"],
)
def test_a_checkpoint_of_another_run_of_the_same_model_is_refused(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    run, other = train(small(), tmp_path / "run"), train(small(**change), tmp_path / "other")
    (run.folder / "checkpoints/last.safetensors").write_bytes(
        (other.folder / "checkpoints/last.safetensors").read_bytes()
    )
    with pytest.raises(CheckpointError, match=said):
        resume(run.folder)
    with pytest.raises(CheckpointError, match=said):
        load_run(run.folder)


def test_a_broken_best_checkpoint_is_said_at_once_and_costs_no_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(small(epochs=2, val_fraction=0.3), tmp_path / "run")
    best = run.folder / "checkpoints/best.safetensors"
    best.write_bytes(best.read_bytes()[:1000])
    again = resume(run.folder, lambda spec: spec.replace_recipe(epochs=3))
    said = capsys.readouterr().out
    assert said.index("set aside, a new best one is looked for") < said.index("going on with")
    assert read_checkpoint(best).state["run"]["step"] > 0  # the next look is better than none
    assert set(again.tests) == {"last", "best"}
    best.write_bytes(b"nothing")
    over = resume(run.folder)  # no look is left to take
    assert set(over.tests) == {"last"}
    assert json.loads((run.folder / "results.json").read_text())["steps"] == over.steps


def test_a_checkpoint_is_on_the_disk_before_it_takes_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    sync, replace = os.fsync, os.replace

    def noted_sync(handle: int) -> None:
        done.append(f"sync {Path(os.readlink(f'/proc/self/fd/{handle}')).name}")
        sync(handle)

    def noted_replace(source: Path, target: Path) -> None:
        done.append(f"rename to {Path(target).name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(os, "replace", noted_replace)
    for _ in range(2):
        done.clear()
        write_checkpoint(tmp_path / "last", {"x": torch.zeros(3)}, {}, tmp_path / "previous")
    assert done[0] == "sync last"
    assert done.index("rename to previous") < done.index("rename to last")
    assert done[-1] == f"sync {tmp_path.name}"
