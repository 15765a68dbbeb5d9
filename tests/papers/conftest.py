from pathlib import Path

import pytest

from tests.reproduce.items import smoke_store
from torchcaps.reproduce.store import RecordStore


@pytest.fixture(scope="session")
def shared_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of records and runs that the tests of one process share, so that a common run is trained once."""
    return tmp_path_factory.mktemp("papers")


@pytest.fixture
def store(shared_directory: Path) -> RecordStore:
    return smoke_store(shared_directory)
