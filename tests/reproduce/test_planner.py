"""Plans: which records an item needs, their state, and shards."""

from pathlib import Path
from typing import Any

from tests.reproduce.items import reproduce_item, smoke_store
from torchcaps.papers import find_item
from torchcaps.reproduce.planner import TaskState, ensemble_keys, make_plan, record_keys
from torchcaps.reproduce.schema import Cell, Item, Measurement, Run, TableRow
from torchcaps.reproduce.store import RecordKey, RecordStore


def measure_nothing(context: Any) -> dict[str, Any]:
    return {}


def test_ensembles_share_no_member() -> None:
    run = Run("capsnet_small")
    seven = Measurement("m", measure_nothing, {"nets": run}, ensemble_size=7)
    seeds = [[key.seed for key in ensemble_keys(seven, run, seed, "cpu")] for seed in (0, 1)]
    assert seeds == [list(range(7)), list(range(7, 14))]
    assert [key.seed for key in ensemble_keys(seven, run, 0, "smoke")] == [0, 1]


def test_seed_independent_measurements_run_once() -> None:
    once = Measurement("o", measure_nothing, seed_independent=True)
    assert record_keys([once], 3, "cpu") == [RecordKey(once, 0)]
    dependent = Measurement("a", measure_nothing, depends_on={"once": once})
    assert record_keys([dependent], 2, "cpu") == [RecordKey(once, 0), RecordKey(dependent, 0), RecordKey(dependent, 1)]


def test_shards_are_disjoint_and_complete(tmp_path: Path) -> None:
    _, item = find_item("chen2019", "table2")
    store = smoke_store(tmp_path)
    shards = [make_plan(item, store, 2, shard=(index, 3), timed=False).pending for index in (1, 2, 3)]
    names = [task.key.name("smoke") for shard in shards for task in shard]
    assert sorted(names) == sorted(key.name("smoke") for key in record_keys(item.sources(), 2, "smoke"))
    assert len(set(names)) == len(names)
    assert min(map(len, shards)) > 0


def write_output(context: Any) -> dict[str, Any]:
    context.directory.mkdir(parents=True, exist_ok=True)
    (context.directory / "output.pt").write_bytes(b"made")
    return {"n": 1}


def read_output(context: Any) -> dict[str, Any]:
    return {"size": len((context.directory.parent / "first-seed0" / "output.pt").read_bytes())}


def task_states(item: Item, store: RecordStore) -> dict[str, TaskState]:
    return {task.name: task.state for task in make_plan(item, store, 1, timed=False).tasks}


def test_a_measurement_is_repeated_if_a_dependent_one_needs_its_missing_output_file(tmp_path: Path) -> None:
    first = Measurement("first", write_output, output_file="output.pt")
    second = Measurement("second", read_output, depends_on={"first": first})
    rows = (TableRow("a", {"x": Cell(None, second, "size")}),)
    item = Item("one", "One", "One measurement.", {"x": "bytes"}, rows)
    store = smoke_store(tmp_path)
    reproduce_item(item, store)
    done = {"first, seed 0": TaskState.DONE, "second, seed 0": TaskState.DONE}
    assert task_states(item, smoke_store(tmp_path)) == done
    (store.work / "first-seed0" / "output.pt").unlink()
    assert task_states(item, smoke_store(tmp_path)) == done  # no pending measurement needs the file
    store.path(RecordKey(second, 0)).unlink()
    expected = {"first, seed 0": TaskState.NEW, "second, seed 0": TaskState.NEW}
    assert task_states(item, smoke_store(tmp_path)) == expected
    reproduce_item(item, smoke_store(tmp_path))
    assert task_states(item, smoke_store(tmp_path)) == done
