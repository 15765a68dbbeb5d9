"""Run directories with valid checksums and invalid content: one sentence each, bounded resources, plain output."""

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image

from tests.cli.commands import usage_error
from torchcaps.cli import main
from torchcaps.data import create_dataset
from torchcaps.training import CheckpointError, inference, load_run, resume
from torchcaps.training.checkpoint import read_checkpoint, write_checkpoint


@pytest.fixture
def crafted(registered_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a run, in the current directory."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(registered_run, "run"))


def change_checkpoint(run: Path, state: dict[str, Any], tensors: dict[str, Any] | None = None) -> None:
    """Replace parts of the state and tensors of a checkpoint; ``None`` removes them."""
    path = run / "checkpoints/last.safetensors"
    old_tensors, old_state = read_checkpoint(path)
    new_state = {k: v for k, v in {**old_state, **state}.items() if v is not None}
    new_tensors = {k: v for k, v in {**old_tensors, **(tensors or {})}.items() if v is not None}
    write_checkpoint(path, new_tensors, new_state)
    (run / "checkpoints/previous.safetensors").unlink(missing_ok=True)


def change_config(run: Path, text: str = "", **changes: Any) -> None:
    values = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(text or yaml.safe_dump({**values, **changes}))


NAMES = [str(digit) for digit in range(10)]
STATES: dict[str, tuple[dict[str, Any], tuple[Callable[[Path], object], ...]]] = {
    "no run": ({"run": None}, (load_run, resume)),
    "run is a number": ({"run": 5}, (load_run, resume)),
    "no steps": ({"run": {}}, (load_run, resume)),
    "no classes": ({"classes": None}, (load_run,)),
    "classes are a number": ({"classes": 5}, (load_run,)),
    "class names are numbers": ({"classes": list(range(10))}, (load_run,)),
    "class names with a lone surrogate": ({"classes": [*NAMES[:9], "\ud800"]}, (load_run,)),
    "too few classes": ({"classes": NAMES[:9]}, (load_run,)),
    "too many classes": ({"classes": [*NAMES, "10"]}, (load_run,)),
    "config is a list": ({"config": []}, (load_run, resume)),
    "n_images is a string": ({"n_images": "many"}, (resume,)),
}


@pytest.mark.parametrize("name", STATES)
def test_invalid_state_is_one_sentence(name: str, crafted: Path) -> None:
    state, loaders = STATES[name]
    change_checkpoint(crafted, state)
    for load in loaders:
        with pytest.raises(CheckpointError, match="run"):
            load(crafted)


@pytest.mark.parametrize(
    "change",
    [
        {"step": "two"},
        {"step": -1},
        {"seconds": None},
        {"best": 5},
        {"best": {"accuracy": "high"}},
        {"counts": [1]},
        {"counts": {"counts": [1, 2], "loss": 0.0}},
        {"counts": {"counts": "many", "loss": 0.0}},
        {"counts": {"loss": 0.0}},
    ],
    ids=str,
)
def test_invalid_training_state_is_one_sentence(change: dict[str, Any], crafted: Path) -> None:
    state = read_checkpoint(crafted / "checkpoints/last.safetensors").state
    change_checkpoint(crafted, {"run": {**state["run"], **change}})
    with pytest.raises(CheckpointError, match="run"):
        resume(crafted)


def test_state_that_is_not_a_mapping_is_rejected(tmp_path: Path) -> None:
    for state in ([1], "text"):
        write_checkpoint(tmp_path / "file", {}, state)  # type: ignore[arg-type]
        with pytest.raises(CheckpointError, match="mapping"):
            read_checkpoint(tmp_path / "file")


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64])
def test_weights_of_another_kind_of_dtype_are_rejected(dtype: torch.dtype, crafted: Path) -> None:
    tensors = read_checkpoint(crafted / "checkpoints/last.safetensors").tensors
    name = next(name for name in tensors if name.startswith("model."))
    change_checkpoint(crafted, {}, {name: tensors[name].to(dtype)})
    for load in (load_run, resume):
        with pytest.raises(CheckpointError, match=str(dtype)):
            load(crafted)
    change_checkpoint(crafted, {}, {name: tensors[name].double()})  # another precision is accepted
    assert load_run(crafted).step == 2


@pytest.mark.parametrize(
    "tensors",
    [
        {"optimizer.0.exp_avg": torch.zeros(3)},
        {"optimizer.0.exp_avg": None},
        {"optimizer.99.exp_avg": torch.zeros(3)},
        {"optimizer.x": torch.zeros(3)},
        {"optimizer.0.step": torch.tensor(-1e38)},
    ],
    ids=["shape", "missing", "index", "name", "step"],
)
def test_invalid_optimizer_state_is_rejected(tensors: dict[str, Any], crafted: Path) -> None:
    change_checkpoint(crafted, {}, tensors)
    with pytest.raises(CheckpointError, match="optimizer"):
        resume(crafted)


@pytest.mark.parametrize(
    "changes",
    [
        {"lr_schedule": {"class_path": 5}},
        {"lr_schedule": {"class_path": "torchcaps.models.schedules.OneCycle", "init_args": 5}},
        {"lr_schedule": {"class_path": "torchcaps.models.schedules.OneCycle", "init_args": {"warmup": "x"}}},
        {"model": 5},
        {"data": 5},
        {"augmentation": [1]},
        {"model_options": 5},
        {"model_options": []},
        {"data_options": 5},
        {"test_options": "x"},
        {"model_options": {"classes": 10**9}},
        {"model_options": {"width": 10**12}},
        {"model_options": {"width": 10**40}},
        {"model_options": {"hidden": "x"}},
        {"model_options": {"image": [1, 10**6, 10**6]}},
    ],
    ids=str,
)
def test_invalid_settings_are_one_sentence(changes: dict[str, Any], crafted: Path) -> None:
    values = yaml.safe_load((crafted / "config.yaml").read_text())
    if isinstance(changes.get("model_options"), dict):
        changes = {"model_options": {**values["model_options"], **changes["model_options"]}}
    change_config(crafted, **changes)
    change_checkpoint(crafted, {"config": {}})
    Image.new("L", (28, 28)).save("image.png")
    assert "run" in usage_error("predict", "run", "image.png")
    assert "run" in usage_error("train", "--resume", "run")


# Twelve lists of four aliases each: 17 million values in 400 bytes.
ALIASES = "a: &a [0, 0, 0, 0]\n" + "".join(
    f"{b}: &{b} [*{a}, *{a}, *{a}, *{a}]\n" for a, b in itertools.pairwise("abcdefghijklm")
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: " + "[" * 5000, "nested too deeply"),
        ("a: " + "{b: " * 3000, "nested too deeply"),
        (ALIASES, "values"),
        ("a: &a [*a]", "contains itself"),
        ("a: 2020-99-99", "month"),
        ("x" * 2**21, "too large"),
    ],
    ids=["lists", "mappings", "aliases", "recursive", "date", "size"],
)
def test_yaml_that_would_exhaust_the_parser_is_one_sentence(text: str, reason: str, crafted: Path) -> None:
    change_config(crafted, text)
    for command in ("evaluate run", "train --resume run", "train --config run/config.yaml"):
        message = usage_error(*command.split())
        assert "config.yaml" in message
        assert reason in message


def test_resources_of_a_loaded_run_are_limited(crafted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "available_cores", lambda: 2)
    run = load_run(crafted)
    assert (run.num_workers, run.batch_size, run.note) == (0, 64, "")
    change_config(crafted, num_workers=500, batch_size=10**9)
    change_checkpoint(crafted, {"config": {}})
    run = load_run(crafted)
    limit = inference.MAX_BATCH_PIXELS // (28 * 28)
    assert (run.num_workers, run.batch_size) == (2, limit)
    assert "num_workers 500" in run.note
    assert "batch_size 1,000,000,000" in run.note
    loader = run.loader(create_dataset("digits", "test"))
    assert (loader.num_workers, loader.batch_size) == (2, limit)


def test_control_characters_of_class_names_are_escaped(crafted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"\x1b[2J{digit}\r\u202e" for digit in range(10)]
    change_checkpoint(crafted, {"classes": names})
    torch.manual_seed(0)
    Image.fromarray((torch.rand(28, 28) * 255).byte().numpy()).save("image.png")
    main(["predict", "run", "image.png", "--out", "figures"])
    output = capsys.readouterr().out
    message = usage_error("evaluate", "run")  # the classes of the data are others
    for text in (output, message):
        assert not {"\x1b", "\r", "\u202e"} & set(text)
        assert "\\x1b[2J0\\r\\u202e" in text


def merge_keys(levels: int) -> str:
    """Return a YAML mapping in which every value merges the previous one nine times."""
    entries = ["a0: &a0 {k: 1}"]
    entries += [f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}" for i in range(1, levels)]
    return "{" + ", ".join(entries) + "}"


MERGED = merge_keys(8)  # 5 million keys; each further mapping has nine times as many


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (MERGED, "more than 100,000"),
        (yaml.safe_dump({"augmentation": MERGED}), "more than 100,000"),  # a value of a flag is parsed as YAML
        ("seed: " + "1:" * 20_000 + "1", "number"),  # base 60: the time grows with the square of the length
        ("a: [" + "[]," * 101_000 + "]", "more than 100,000"),
        ("a: &a {<<: *a}", "itself"),
        ("note: 2020-01-01", "date"),
        ("seed: !!set {a}", "set"),
        ("lr_schedule: {class_path: 5}", "import path"),
    ],
    ids=["merge", "merge in a string", "base 60", "many", "recursive merge", "date", "set", "class_path"],
)
def test_settings_that_multiply_or_are_not_plain_are_one_sentence(text: str, reason: str, crafted: Path) -> None:
    change_config(crafted, text)
    for command in (("predict", "run", "image.png"), ("train", "--config", "run/config.yaml")):
        message = usage_error(*command)
        assert "run/config.yaml" in message
        assert reason in message


def test_aliases_of_a_few_values_are_accepted(crafted: Path) -> None:
    text = (crafted / "config.yaml").read_text()
    text = text.replace("data_options: {}", "data_options: &none {}")
    change_config(crafted, text.replace("note: ''", "note: 'a & *b'"))
    assert load_run(crafted).spec.recipe.note == "a & *b"
