"""A record, and a folder that a run is trained in, are those of a run by all of its settings, not by name alone."""

import dataclasses
import json
from pathlib import Path

import pytest

from tests.papers.conftest import reproduced
from torchcaps.models.registry import REGISTRY
from torchcaps.papers.parts import Cell, Item, Row, Run
from torchcaps.papers.records import Job, Store
from torchcaps.training.errors import RunError

RUN = Run("chen2019_lenet")
ITEM = Item("one", "One", "One run.", {"error": "test error, %"}, (Row("LeNet", {"error": Cell(None, RUN)}),))


@pytest.fixture
def own(tmp_path: Path) -> Store:
    store = Store("smoke", tmp_path / "results", tmp_path / "work")
    reproduced(ITEM, store)
    return store


def again(store: Store) -> Store:
    """The same folders, read anew."""
    return Store("smoke", store.results.parent, store.work.parent)


def test_a_record_of_other_settings_is_none(own: Store) -> None:
    path = own.path(Job(RUN, 0))
    record = json.loads(path.read_text())
    assert again(own).record(Job(RUN, 0)) is not None
    path.write_text(json.dumps({**record, "config": {**record["config"], "decay": 0.5}}))
    assert again(own).record(Job(RUN, 0)) is None
    path.write_text(json.dumps({**record, "net": {**record["net"], "width": 99}}))
    assert again(own).record(Job(RUN, 0)) is None
    path.write_text(json.dumps({k: v for k, v in record.items() if k != "net"}))
    assert again(own).record(Job(RUN, 0)) is not None  # written before there was such a thing


def test_a_default_of_a_model_that_changes_is_noticed(own: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = REGISTRY["chen2019_lenet"]
    now = dataclasses.replace(entry, spec=dataclasses.replace(entry.spec, channels=51))
    monkeypatch.setitem(REGISTRY, "chen2019_lenet", now)
    store = again(own)
    assert store.record(Job(RUN, 0)) is None
    with pytest.raises(RunError, match="was begun with other settings than it would have now: remove it"):
        reproduced(ITEM, store)
