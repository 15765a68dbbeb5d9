"""Settings and checkpoints of a run that would exhaust time or memory: one sentence, before anything is allocated."""

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image

from tests.cli.commands import usage_error
from torchcaps.cli import main
from torchcaps.models import create_model
from torchcaps.profiling.memory import forward_memory
from torchcaps.training import CheckpointError, RunError, RunSpec, limits, load_run, resume
from torchcaps.training import run as training_run
from torchcaps.training.checkpoint import read_checkpoint, write_checkpoint

LAST = "checkpoints/last.safetensors"


@pytest.fixture
def crafted(registered_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a run, in the current directory, with an image next to it."""
    monkeypatch.chdir(tmp_path)
    Image.new("L", (28, 28)).save("image.png")
    return Path(shutil.copytree(registered_run, "run"))


def change_model(run: Path, **options: Any) -> None:
    """Change options of the model, also in the settings that the checkpoint has recorded."""
    values = yaml.safe_load((run / "config.yaml").read_text())
    values["model_options"] |= options
    (run / "config.yaml").write_text(yaml.safe_dump(values))
    tensors, state = read_checkpoint(run / LAST)
    write_checkpoint(run / LAST, tensors, {**state, "config": values})
    (run / "checkpoints/previous.safetensors").unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("routing", "fields"),
    [
        ("Dynamic", {"iterations": 10**9}),
        ("KMeans", {"iterations": 1001}),
        ("Equilibrium", {"max_steps": 10**9}),
        ("Equilibrium", {"routing": {"class_path": "torchcaps.routing.KMeans", "init_args": {"iterations": 10**9}}}),
    ],
    ids=str,
)
def test_iterations_are_limited(routing: str, fields: dict[str, Any], crafted: Path) -> None:
    change_model(crafted, routing={"class_path": f"torchcaps.routing.{routing}", "init_args": fields})
    commands = [("predict", "run", "image.png")]
    if routing == "Dynamic":
        commands += [("evaluate", "run"), ("analyze", "run", "dead"), ("train", "--resume", "run")]
        commands += [("train", "--config", "run/config.yaml", "--max-train-images", "20", "--out", "new")]
    for command in commands:
        message = usage_error(*command)
        assert "1,000" in message
        assert "run" in message


def test_the_number_of_modules_is_limited(crafted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_PARTS", 300)
    change_model(crafted, hidden=[8] * 400)
    created: list[torch.nn.Linear] = []
    monkeypatch.setattr(torch.nn.Linear, "reset_parameters", lambda layer: created.append(layer))
    for load in (load_run, resume):
        with pytest.raises(CheckpointError, match="more than 300 modules"):
            load(crafted)
    assert len(created) < 2 * 150  # although a list of layers is registered only after all are created
    with pytest.raises(CheckpointError, match="modules"):
        limits.build_on_meta(RunSpec.of("byerly2021_cifar10", depth=10**9))
    assert len(list(create_model("capsnet_small").modules())) > 1  # the limit ends with the function


def test_memory_of_a_training_that_a_file_asks_for_is_limited(crafted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ("train", "--config", "run/config.yaml", "--max-train-images", "20", "--steps", "1", "--out")
    with monkeypatch.context() as patch:
        patch.setattr(limits, "MAX_IMAGE_BYTES", 1000)
        for command in ((*config, "new"), ("train", "--resume", "run")):
            assert "per image" in usage_error(*command)
        main([*config, "trusted", "--trust-remote-code", "--quiet"])
    assert Path("trusted/results.json").exists()
    change_model(crafted, width=10**9)
    for command in ((*config, "other"), ("train", "--resume", "run")):
        assert "this process may use" in usage_error(*command)


def test_exhausted_memory_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def build(_: RunSpec) -> None:
        torch.empty(2**60, dtype=torch.uint8)  # more than any address space

    monkeypatch.setattr(training_run, "build_network", build)
    with pytest.raises(SystemExit) as stop:
        main(["train", "--out", str(tmp_path / "run")])
    assert stop.value.code == 1
    assert "not enough memory" in capsys.readouterr().err.splitlines()[-1]


def test_memory_of_activations_is_limited(crafted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = load_run(crafted)
    assert run.note == ""
    assert run.batch_size == run.spec.recipe.batch_size
    with torch.device("meta"):
        meta = create_model(run.spec.model, **run.spec.model_options).eval()
    one, two = (forward_memory(meta, n) for n in (1, 2))
    monkeypatch.setattr(limits, "MAX_BATCH_BYTES", one + 3 * (two - one))
    limited = load_run(crafted)
    assert limited.batch_size == limited.max_batch_size
    assert limited.batch_size in (3, 4, 5)  # up to rounding of small tensors
    assert f"limited to {limited.batch_size}" in limited.note
    monkeypatch.setattr(limits, "MAX_IMAGE_BYTES", one - 1)
    assert "per image" in usage_error("predict", "run", "image.png")
    replaced = dataclasses.replace(run, max_batch_size=None)
    assert replaced.batch_size == run.spec.recipe.batch_size


def test_a_checkpoint_larger_than_its_model_is_not_read(crafted: Path) -> None:
    """A sparse file of 64 GiB takes no space on the disk; its checksum would be that of all its zeros."""
    path = crafted / LAST
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    end = len(data) - 8 - size
    header["model.extra"] = {"dtype": "U8", "shape": [2**36], "data_offsets": [end, end + 2**36]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    os.truncate(path, 8 + len(text) + end + 2**36)
    (crafted / "checkpoints/previous.safetensors").unlink(missing_ok=True)
    for load in (load_run, resume):
        with pytest.raises(CheckpointError, match="more than a checkpoint of its model"):
            load(crafted)


def test_metrics_of_any_size_are_not_read(crafted: Path) -> None:
    os.truncate(crafted / "metrics.csv", 2**36)
    with pytest.raises(RunError, match=r"metrics\.csv"):
        resume(crafted)
