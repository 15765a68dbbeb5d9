"""A record, and a folder that a run is trained in, are those of a run by all of its settings, not by name alone."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tests.papers.conftest import reproduced
from torchcaps.models.registry import MODELS
from torchcaps.reproduce.planner import make_plan
from torchcaps.reproduce.schema import Cell, Item, Measure, Row, Run
from torchcaps.reproduce.store import Job, Store
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
    path.write_text(json.dumps({**record, "config": {**record["config"], "ema_decay": 0.5}}))
    assert again(own).record(Job(RUN, 0)) is None
    path.write_text(json.dumps({**record, "model_spec": {**record["model_spec"], "width": 99}}))
    assert again(own).record(Job(RUN, 0)) is None
    path.write_text(json.dumps({k: v for k, v in record.items() if k != "model_spec"}))
    assert again(own).record(Job(RUN, 0)) is not None  # written before there was such a thing


def test_a_default_of_a_model_that_changes_is_noticed(own: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = MODELS.get("chen2019_lenet")
    now = dataclasses.replace(entry, spec=dataclasses.replace(entry.spec, channels=51))
    monkeypatch.setitem(MODELS._entries, "chen2019_lenet", now)
    store = again(own)
    assert store.record(Job(RUN, 0)) is None
    with pytest.raises(RunError, match="was begun with other settings than it would have now: remove it"):
        reproduced(ITEM, store)


def of_net(context: Any, net: Any) -> dict[str, Any]:
    return {"steps": net.step}


def left(context: Any) -> dict[str, Any]:
    context.folder.mkdir(parents=True, exist_ok=True)
    (context.folder / "made.pt").write_bytes(b"made")
    return {"n": 1}


def after(context: Any) -> dict[str, Any]:
    return {"size": len((context.folder.parent / "left-seed0" / "made.pt").read_bytes())}


def item_of(measure: Measure, read: str) -> Item:
    return Item("one", "One", "One measurement.", {"x": "steps"}, (Row("a", {"x": Cell(None, measure, read)}),))


def states(item: Item, store: Store) -> dict[str, str]:
    return {task.name: task.state for task in make_plan(item, store, 1, timed=False).tasks}


def test_a_measurement_is_of_a_net_with_all_of_its_settings(own: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    item = item_of(Measure("of-net", of_net, {"net": RUN}), "steps")
    reproduced(item, own)
    assert set(states(item, again(own)).values()) == {"done"}
    entry = MODELS.get("chen2019_lenet")
    now = dataclasses.replace(entry, spec=dataclasses.replace(entry.spec, channels=51))
    monkeypatch.setitem(MODELS._entries, "chen2019_lenet", now)
    assert states(item, again(own))["of-net, seed 0"] == "new"


def test_a_file_that_another_measurement_needs_is_made_again(own: Store) -> None:
    first = Measure("left", left, leaves="made.pt")
    item = item_of(Measure("after", after, after={"left": first}), "size")
    reproduced(item, own)
    assert states(item, again(own)) == {"left, seed 0": "done", "after, seed 0": "done"}
    (own.work / "left-seed0" / "made.pt").unlink()
    assert states(item, again(own))["left, seed 0"] == "done", "nobody needs it"
    own.path(Job(item.rows[0].cells["x"].source, 0)).unlink()  # type: ignore[arg-type]
    assert states(item, again(own)) == {"left, seed 0": "new", "after, seed 0": "new"}
    reproduced(item, again(own))
    assert again(own).record(Job(first, 0)) is not None
