import pytest

from torchcaps.training import run


@pytest.fixture(autouse=True)
def no_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in tests draw nothing, which takes longer than they do, but where the test asks for it."""
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr(run, "draw_run", lambda *_: [])


@pytest.fixture
def pictures() -> None:
    """Let runs draw."""
