"""Model directories in the layout of the Hugging Face Hub, offline."""

import importlib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.narrow import narrow
from torchcaps.hub import HubError, HubModel
from torchcaps.models import Network
from torchcaps.routing import EM


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Network, Path]:
    model = narrow("sabour2017_mnist", routing=EM(3), reconstruction=False, classes=3).eval()
    HubModel(model, ("a", "b", "c")).save_pretrained(tmp_path / "model")
    return model, tmp_path / "model"


def test_round_trip(saved: tuple[Network, Path]) -> None:
    model, path = saved
    assert {file.name for file in path.iterdir()} == {"config.json", "model.safetensors", "README.md"}
    loaded = HubModel.from_pretrained(str(path)).eval()
    assert loaded.model.spec == model.spec
    assert loaded.classes == ("a", "b", "c")
    images = torch.rand(2, 1, 28, 28)
    assert torch.equal(loaded(images).scores, model(images).scores)
    card = (path / "README.md").read_text()
    assert "library_name: torchcaps" in card
    assert "sabour2017_mnist" in card


@pytest.mark.parametrize(
    "change",
    [
        {"model": "os.system"},
        {"model": None},
        {"classes": ["a"]},
        {"classes": [1, 2, 3]},
        {"classes": ["a", "b", "\ud800"]},
        {"fields": {"image": [1, 3, 3]}},
        {"fields": {"width": 10**9}},
        {"fields": {"nonexistent": 1}},
        {"fields": {"routing": {"class_path": "os.system", "init_args": {}}}},
        {"fields": {"routing": {"class_path": "evil_module.Routing"}}},
        {"fields": {"routing": {"class_path": "torchcaps.routing.EM", "init_args": {"iterations": 10**9}}}},
    ],
    ids=str,
)
def test_invalid_configs_are_rejected(change: dict[str, Any], saved: tuple[Network, Path]) -> None:
    path = saved[1] / "config.json"
    config = json.loads(path.read_text())
    for key, value in change.items():
        config[key] = {**config[key], **value} if isinstance(value, dict) else value
    path.write_text(json.dumps(config))
    with pytest.raises(HubError) as raised:  # it names the file
        HubModel.from_pretrained(str(saved[1]))
    assert "\n" not in str(raised.value)
    assert not re.search(r"\brun\b", str(raised.value).replace(str(saved[1]), ""))  # a model directory is not a run


def test_damaged_files_are_rejected(saved: tuple[Network, Path]) -> None:
    weights = saved[1] / "model.safetensors"
    content = weights.read_bytes()
    for damaged in (content[:-4], b"", b"\xff" * 2 * len(content)):
        weights.write_bytes(damaged)
        with pytest.raises(HubError):
            HubModel.from_pretrained(str(saved[1]))
    (saved[1] / "config.json").write_text("{")
    with pytest.raises(ValueError):  # noqa: PT011
        HubModel.from_pretrained(str(saved[1]))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_files_that_would_exhaust_time_or_memory_are_rejected(name: str, saved: tuple[Network, Path]) -> None:
    path = saved[1] / name
    os.truncate(path, 2**36)  # sparse
    with pytest.raises(HubError, match=name):
        HubModel.from_pretrained(str(saved[1]))
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(HubError, match=name):
        HubModel.from_pretrained(str(saved[1]))
    path.unlink()
    path.write_text("[" * 100_000)
    with pytest.raises(HubError, match=name):
        HubModel.from_pretrained(str(saved[1]))


def test_missing_weights_are_not_blamed_on_the_config(saved: tuple[Network, Path]) -> None:
    (saved[1] / "model.safetensors").unlink()
    with pytest.raises(HubError, match=r"^\S*model\.safetensors is missing"):
        HubModel.from_pretrained(str(saved[1]))


def test_weights_of_another_kind_are_rejected(saved: tuple[Network, Path]) -> None:
    weights = saved[1] / "model.safetensors"
    state = load_file(weights)
    save_file({**state, "extra": torch.zeros(3)}, weights)
    with pytest.raises(HubError, match="extra"):
        HubModel.from_pretrained(str(saved[1]))
    save_file({name: tensor.to(torch.int64) for name, tensor in state.items()}, weights)
    with pytest.raises(HubError, match="int64"):
        HubModel.from_pretrained(str(saved[1]))


@pytest.mark.parametrize(
    ("name", "message"),
    [("/no/such/directory", "neither a directory nor a name"), ("user/model", "user/model can't be loaded")],
)
def test_names_that_do_not_exist(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(HubError, match=message):
        HubModel.from_pretrained(name, local_files_only=True, cache_dir=tmp_path)


def test_invalid_arguments() -> None:
    with pytest.raises(ValueError, match="list_models"):
        HubModel(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="classes"):
        HubModel(narrow("capsnet_small"), ("a",))


def test_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.delitem(sys.modules, "torchcaps.hub")
    with pytest.raises(ImportError, match=r"torchcaps\[hub\]"):
        importlib.import_module("torchcaps.hub")
