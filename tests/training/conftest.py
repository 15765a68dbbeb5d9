import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.training.tiny import DATA, MODEL
from torchcaps.data.registry import DATASETS, find_spec, register_dataset
from torchcaps.models.registry import MODELS, find_model, register_model
from torchcaps.routing.base import ROUTINGS
from torchcaps.training import RunSpec, run

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def no_figures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the figures, which take longer than the runs, unless the test uses the fixture ``figures``."""
    if "figures" not in request.fixturenames:
        monkeypatch.setattr(run, "draw_run", lambda *_: [])


@pytest.fixture
def figures() -> None:
    """Draw the figures of runs."""


@pytest.fixture(autouse=True)
def restored_registries() -> Iterator[None]:
    """Remove the models, data sets and routings that a test has registered.

    Those of `tests.training.tiny` are registered, so that tests can load runs of them without ``trust_remote_code``.
    """
    with ROUTINGS.restored(), DATASETS.restored(), MODELS.restored():
        register_model(MODEL, find_model(MODEL).spec)
        register_dataset(DATA, find_spec(DATA))
        yield


@pytest.fixture(scope="session")
def registered_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that names registered things only. Copy it to change it."""
    sizes = {"width": 4, "types": 2, "primary_dim": 4, "dim": 4, "hidden": (8,)}
    spec = RunSpec.of("capsnet_small", **sizes, steps=2, max_train_images=40, max_test_images=10, num_threads=1)
    return run.train(spec, tmp_path_factory.mktemp("registered") / "run", figures=False).path


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a temporary directory, from which the classes of the tests can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
