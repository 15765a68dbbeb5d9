from collections.abc import Iterator

import pytest

from torchcaps.data.registry import REGISTRY as DATA
from torchcaps.models.registry import REGISTRY as MODELS
from torchcaps.routing.base import REGISTRY as ROUTINGS
from torchcaps.training import run


@pytest.fixture(autouse=True)
def no_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in tests draw nothing, which takes longer than they do, but where the test asks for it."""
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr(run, "draw_run", lambda *_: [])


@pytest.fixture(autouse=True)
def names_of_ones_own() -> Iterator[None]:
    """What tests name by import path is forgotten after them."""
    registries = (MODELS, DATA, ROUTINGS)
    before = [dict(registry) for registry in registries]
    yield
    for registry, known in zip(registries, before, strict=True):
        registry.clear()
        registry.update(known)


@pytest.fixture
def pictures() -> None:
    """Let runs draw."""
