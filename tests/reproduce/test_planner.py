"""Plans: which records an item needs, their state, and shards."""

import gc
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest

from tests.reproduce.items import reproduce_item, smoke_store
from torchcaps.models.schedules import OneCycle
from torchcaps.papers import find_item
from torchcaps.reproduce import planner
from torchcaps.reproduce.planner import TaskState, ensemble_keys, make_plan, record_keys
from torchcaps.reproduce.schema import Cell, Claim, Item, Measurement, Run, TableRow
from torchcaps.reproduce.store import RecordKey, RecordStore
from torchcaps.training.config import RunSpec
from torchcaps.training.setup import RunData, open_data


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


def test_a_plan_opens_equal_data_once_and_keeps_none_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[weakref.ref[RunData]] = []

    def open_and_count(spec: RunSpec) -> RunData:
        data = open_data(spec)
        opened.append(weakref.ref(data))
        return data

    monkeypatch.setattr(planner, "open_data", open_and_count)
    rows = tuple(TableRow(f"{n}", {"x": Cell(None, Run("chen2019_lenet", {"batch_size": n}))}) for n in (1, 2))
    plan = make_plan(Item("i", "Item", "An item.", {"x": "%"}, rows), smoke_store(tmp_path), 1, timed=False)
    gc.collect()
    assert [task.state for task in plan.tasks] == [TaskState.NEW] * 2
    assert [data() for data in opened] == [None]


def test_runs_that_a_claim_compares_are_planned_with_half_length_companions(tmp_path: Path) -> None:
    a, b, c = (Run("chen2019_lenet", {"batch_size": size}) for size in (1, 2, 3))
    measurement, timing = Measurement("m", measure_nothing, {"net": c}), Measurement("t", measure_nothing)
    sources = {"a": a, "b": b, "c": c, "m": measurement, "t": timing}
    rows = tuple(TableRow(name, {"x": Cell(None, source)}) for name, source in sources.items())
    untrained: Any = {"convergence": "not applicable", "convergence_reason": "nothing is trained"}
    claims = (
        Claim("a is better", ("a", "x"), ("b", "x")),
        Claim("m is better", ("m", "x"), ("t", "x")),
        Claim("c is faster", ("c", "x"), ("t", "x"), **untrained),
    )
    item = Item("i", "Item", "An item.", {"x": "%"}, rows, claims)
    assert item.half_length_sources() == [a.halved(), b.halved(), measurement.halved()]
    assert item.half_length_sources(rows=("b", "c")) == [b.halved()]

    def names(**options: Any) -> list[str]:
        return [task.name for task in make_plan(item, smoke_store(tmp_path), 2, timed=False, **options).tasks]

    full = [f"{name}, seed {seed}" for seed in (0, 1) for name in "abc"]
    full += [f"{name}, seed {seed}" for seed in (0, 1) for name in "mt"]
    assert names() == names(half_length=False) == full  # the scale smoke judges no claim
    half = [f"{name}, half length, seed {seed}" for seed in (0, 1) for name in "abc"]  # c for the measurement
    assert names(half_length=True) == [*full, *half, "m-half, seed 0", "m-half, seed 1"]
    plan = make_plan(item, smoke_store(tmp_path), 1, rows=("a",), timed=False, half_length=True)
    assert [(task.name, task.half_length, task.steps) for task in plan.tasks] == [
        ("a, seed 0", False, 2),
        ("a, half length, seed 0", True, 1),
    ]


def test_companions_are_planned_by_default_except_at_the_scale_smoke(tmp_path: Path) -> None:
    _, item = find_item("chen2019", "table2")
    store = RecordStore("cpu", tmp_path / "results", tmp_path / "work")
    plan = make_plan(item, store, 1, timed=False, data_dir=str(tmp_path))
    assert sum(task.half_length for task in plan.tasks) == len(item.half_length_sources()) > 0


def test_a_companion_that_equals_a_run_of_the_item_is_planned_once(tmp_path: Path) -> None:
    long, short = (Run("chen2019_lenet", {"steps": steps, "lr_schedule": OneCycle()}) for steps in (8, 4))
    rows = tuple(TableRow(name, {"x": Cell(None, run)}) for name, run in (("long", long), ("short", short)))
    claims = (Claim("longer is better", ("long", "x"), ("short", "x")),)
    item = Item("i", "Item", "An item.", {"x": "%"}, rows, claims)
    store = RecordStore("full", tmp_path / "results", tmp_path / "work")
    plan = make_plan(item, store, 1, timed=False, data_dir=str(tmp_path))
    assert [task.name for task in plan.tasks] == ["long, seed 0", "short, seed 0", "short, half length, seed 0"]


def test_companions_are_trained_and_measured_like_the_item(tmp_path: Path) -> None:
    run = Run("chen2019_lenet")
    measurement = Measurement("steps", measure_steps, {"net": run})
    rows = (TableRow("run", {"x": Cell(None, run)}), TableRow("steps", {"x": Cell(None, measurement, "steps")}))
    claims = (Claim("it is better", ("run", "x"), ("steps", "x")),)
    item = Item("i", "Item", "An item.", {"x": "%"}, rows, claims)
    store = smoke_store(tmp_path)
    reproduce_item(item, store, half_length=True)
    records = [store.read(RecordKey(source, 0)) for source in (run, run.halved(), measurement, measurement.halved())]
    assert [record and record["results"]["steps"] for record in records] == [2, 1, 2, 1]
    assert make_plan(item, store, 1, timed=False, half_length=True).pending == []


def measure_steps(context: Any, net: Any) -> dict[str, Any]:
    return {"steps": net.step}


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


def count_records(context: Any, records: list[dict[str, Any]]) -> dict[str, Any]:
    return {"seeds": [record["seed"] for record in records], "n": len(records)}


def test_a_measurement_of_records_needs_no_weights(tmp_path: Path) -> None:
    run = Run("capsnet_small")
    measurement = Measurement("m", count_records, {"records": run}, ensemble_size=2, from_records=True)
    rows = (TableRow("a", {"x": Cell(None, measurement, "n")}),)
    item = Item("one", "One", "One measurement.", {"x": "records"}, rows)
    runs = {"capsnet_small for m, seed 0": TaskState.DONE, "capsnet_small for m, seed 1": TaskState.DONE}
    store = smoke_store(tmp_path)
    reproduce_item(item, store)
    record = store.read(RecordKey(measurement, 0))
    assert record is not None
    assert record["results"] == {"seeds": [0, 1], "n": 2}
    store.path(RecordKey(measurement, 0)).unlink()
    shutil.rmtree(store.work)
    assert task_states(item, smoke_store(tmp_path)) == {**runs, "m, seed 0": TaskState.NEW}
    reproduce_item(item, smoke_store(tmp_path))
    assert task_states(item, smoke_store(tmp_path)) == {**runs, "m, seed 0": TaskState.DONE}
