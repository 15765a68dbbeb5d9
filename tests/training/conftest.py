import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchcaps.data.registry import DATASETS
from torchcaps.models.registry import MODELS
from torchcaps.routing.base import ROUTINGS
from torchcaps.training import run

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def no_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in tests draw nothing, which takes longer than they do, but where the test asks for it."""
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr(run, "draw_run", lambda *_: [])


@pytest.fixture(autouse=True)
def names_of_ones_own() -> Iterator[None]:
    """What tests name by import path is forgotten after them."""
    with ROUTINGS.restored(), DATASETS.restored(), MODELS.restored():
        yield


@pytest.fixture
def pictures() -> None:
    """Let runs draw."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder of one's own, where what the tests define can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
