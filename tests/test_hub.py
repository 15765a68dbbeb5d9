"""Model directories in the layout of the Hugging Face Hub, offline."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

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
        {"fields": {"width": 10**9}},
        {"fields": {"nonexistent": 1}},
        {"fields": {"routing": {"class_path": "os.system", "init_args": {}}}},
        {"fields": {"routing": {"class_path": "evil_module.Routing"}}},
    ],
    ids=str,
)
def test_invalid_configs_are_rejected(change: dict[str, Any], saved: tuple[Network, Path]) -> None:
    path = saved[1] / "config.json"
    config = json.loads(path.read_text())
    for key, value in change.items():
        config[key] = {**config[key], **value} if isinstance(value, dict) else value
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        HubModel.from_pretrained(str(saved[1]))
    assert "\n" not in str(raised.value)


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


def test_invalid_arguments() -> None:
    with pytest.raises(ValueError, match="list_models"):
        HubModel(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="classes"):
        HubModel(narrow("capsnet_small"), ("a",))
