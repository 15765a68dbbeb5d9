"""Records: round trip, identity by all settings, unreadable files, checkpoints of measurements."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.reproduce.items import reproduce_item, smoke_store
from torchcaps._core.serialize import result_from_dict, result_to_dict
from torchcaps.analysis.alignment import Alignment
from torchcaps.models.registry import MODELS
from torchcaps.papers import list_papers
from torchcaps.reproduce.planner import TaskState, make_plan
from torchcaps.reproduce.scales import Scale, run_spec
from torchcaps.reproduce.schema import Cell, Item, Measurement, Run, TableRow
from torchcaps.reproduce.store import MeasurementCheckpoint, RecordKey, RecordStore
from torchcaps.routing import Dynamic
from torchcaps.training.errors import RunError

RUN = Run("chen2019_lenet")
KEY = RecordKey(RUN, 0)
ITEM = Item("one", "One", "One run.", {"error": "test error, %"}, (TableRow("LeNet", {"error": Cell(None, RUN)}),))


def measure_nothing(context: Any) -> dict[str, Any]:
    return {}


def measure_steps(context: Any, net: Any) -> dict[str, Any]:
    return {"steps": net.step}


@pytest.fixture
def trained(tmp_path: Path) -> RecordStore:
    """A store with the record of `RUN`."""
    store = smoke_store(tmp_path)
    reproduce_item(ITEM, store)
    return store


def reopen(store: RecordStore) -> RecordStore:
    """Return a store of the same directories without cached records."""
    return RecordStore(store.scale, store.results.parent, store.work.parent)


def widen_model(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Change a default of a registered model."""
    entry = MODELS.get(name)
    changed = dataclasses.replace(entry, spec=dataclasses.replace(entry.spec, channels=51))
    monkeypatch.setitem(MODELS._entries, name, changed)


def rewrite(path: Path, *keys: str, value: Any) -> None:
    """Set a nested value of a JSON file."""
    record = json.loads(path.read_text())
    inner = record
    for name in keys[:-1]:
        inner = inner[name]
    inner[keys[-1]] = value
    path.write_text(json.dumps(record))


def test_a_record_has_settings_results_curve_machine_and_command(trained: RecordStore) -> None:
    record = json.loads(trained.path(KEY).read_text())
    assert (record["name"], record["scale"], record["seed"]) == (KEY.name("smoke"), "smoke", 0)
    assert record["config"]["model"] == "chen2019_lenet"
    assert record["config"]["model_options"]["width"] == run_spec(RUN, "smoke").model_options["width"]
    assert record["settings"]["identity"] == run_spec(RUN, "smoke").identity()
    assert record["curve"][-1]["step"] == 2
    assert (record["results"]["n"], len(record["results"]["correct"])) == (32, 8)
    assert set(record["machine"]) >= {"torch", "cpu"}
    assert set(record) >= {"command", "finished"}


@pytest.mark.parametrize(
    "keys", [("ema_decay",), ("batch_size",), ("model_spec", "width")], ids=["run", "recipe", "model"]
)
def test_a_record_with_other_settings_is_ignored(trained: RecordStore, keys: tuple[str, ...]) -> None:
    assert reopen(trained).read(KEY) is not None
    rewrite(trained.path(KEY), "settings", "identity", *keys, value=99)
    assert reopen(trained).read(KEY) is None


def test_a_setting_added_after_the_record_has_its_default(trained: RecordStore) -> None:
    path = trained.path(KEY)
    record = json.loads(path.read_text())
    del record["settings"]["identity"]["ema_decay"], record["settings"]["identity"]["model_spec"]["width"]
    path.write_text(json.dumps(record))
    assert reopen(trained).read(KEY) is not None


def test_a_removed_setting_invalidates_a_record(trained: RecordStore) -> None:
    rewrite(trained.path(KEY), "settings", "identity", "removed", value=1)
    assert reopen(trained).read(KEY) is None


def test_a_changed_default_invalidates_records_and_run_directories(
    trained: RecordStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    widen_model(monkeypatch, "chen2019_lenet")
    store = reopen(trained)
    assert store.read(KEY) is None
    with pytest.raises(RunError) as raised:
        reproduce_item(ITEM, store)
    assert str(store.run_directory(KEY).path) in str(raised.value)


def test_a_changed_default_of_a_network_invalidates_measurements(
    trained: RecordStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    measurement = Measurement("steps", measure_steps, {"net": RUN})
    rows = (TableRow("a", {"x": Cell(None, measurement, "steps")}),)
    item = Item("one", "One", "One measurement.", {"x": "steps"}, rows)
    reproduce_item(item, trained)
    key = RecordKey(measurement, 0)

    def state() -> TaskState:
        (task,) = (t for t in make_plan(item, reopen(trained), 1, timed=False).tasks if t.key == key)
        return task.state

    assert state() is TaskState.DONE
    widen_model(monkeypatch, "chen2019_lenet")
    assert state() is TaskState.NEW


def test_measurement_records_are_identified_by_options_version_runs_and_dependencies(tmp_path: Path) -> None:
    store = smoke_store(tmp_path)
    base = Measurement("m", measure_nothing, {"net": RUN}, options={"n_images": 10})
    store.write_measurement(RecordKey(base, 0), {"a": 1.0}, 0.0)
    assert store.read(RecordKey(base, 0)) is not None
    dependency = Measurement("b", measure_nothing)
    for changes in (
        {"options": {"n_images": 20}},
        {"options": {"n_images": 10, "eps": 1}},
        {"version": 2},
        {"runs": {"net": Run("chen2019_lenet", {"batch_size": 1, "ema_decay": 0.5})}},
        {"runs": {}},
        {"depends_on": {"b": dependency}},
    ):
        other = dataclasses.replace(base, **changes)  # type: ignore[arg-type]
        assert smoke_store(tmp_path).read(RecordKey(other, 0)) is None, changes
    first, second = (dataclasses.replace(dependency, options={"n": n}) for n in (1, 2))
    c, changed = (Measurement("c", measure_nothing, depends_on={"b": b}) for b in (first, second))
    store.write_measurement(RecordKey(c, 0), {"a": 1.0}, 0.0)
    assert store.read(RecordKey(c, 0)) is not None
    assert smoke_store(tmp_path).read(RecordKey(changed, 0)) is None


@pytest.mark.parametrize(
    ("scale", "expected"), [("smoke", (1, 9)), ("cpu", (2, 8)), ("long", (3, 8)), ("full", (4, 9))]
)
def test_options_of_a_measurement_by_scale(tmp_path: Path, scale: Scale, expected: tuple[int, int]) -> None:
    measurement = Measurement(
        "m", measure_nothing, options={"a": 4, "b": 9}, smoke={"a": 1}, cpu={"a": 2, "b": 8}, long={"a": 3}
    )
    options = RecordStore(scale, tmp_path).options(measurement)
    assert (options["a"], options["b"]) == expected


def test_networks_that_are_equal_at_a_scale_give_the_same_settings(tmp_path: Path) -> None:
    store = smoke_store(tmp_path)
    runs = (Run("capsnet_small", {"width": n}) for n in (16, 8))
    one, other = (Measurement("m", measure_nothing, {"net": run}) for run in runs)
    assert store.settings(RecordKey(one, 0)) == store.settings(RecordKey(other, 0))


def test_record_names_depend_on_the_settings_but_not_on_seed_or_place() -> None:
    base = Run("sabour2017_mnist", {"routing": Dynamic(1)})
    name = run_spec(base, "cpu").record_name()
    assert run_spec(Run("sabour2017_mnist", {"routing": Dynamic(1)}), "cpu", 5).record_name() == name
    assert run_spec(base, "cpu", num_threads=1, data_dir="/somewhere").record_name() == name
    for other in (Run("sabour2017_mnist"), base.replace(cpu={"epochs": 5}), base.replace(val_fraction=0.1)):
        assert run_spec(other, "cpu").record_name() != name


def test_declared_runs_that_differ_have_names_that_differ() -> None:
    identities: dict[str, dict[str, Any]] = {}
    for paper in list_papers():
        for item in paper.items:
            for source in item.sources():
                if isinstance(source, Run):
                    spec = run_spec(source, "cpu")
                    assert identities.setdefault(spec.record_name(), spec.identity()) == spec.identity()


def test_an_analysis_result_is_restored_from_its_record(tmp_path: Path) -> None:
    result = Alignment(
        names=("a", "b"),
        ratios=torch.rand(10, 6),
        std=torch.rand(10, 6),
        averages=torch.rand(6),
        n=tuple(range(10)),
        cosines=torch.rand(90, 3),
        moved=torch.rand(90, 3) > 0.5,
        labels=torch.arange(90) % 10,
        n_unmoved=3,
        reference=(0.462, 0.269),
        printed_reference=(0.308, 0.262),
        before_tanh=False,
    )
    store, key = RecordStore("cpu", tmp_path / "results", tmp_path / "work"), RecordKey(NOTHING, 0)
    store.write_measurement(key, result_to_dict(result), 0.0)
    record = reopen(store).read(key)
    assert record is not None
    restored = result_from_dict(Alignment, record["results"])
    assert (restored.names, restored.reference) == (result.names, result.reference)
    torch.testing.assert_close(restored.moved, result.moved)
    torch.testing.assert_close(restored.averages, result.averages, rtol=0, atol=0)
    torch.testing.assert_close(restored.cosines, result.cosines, rtol=0, atol=1e-3)  # stored as float16


NOTHING = Measurement("m", measure_nothing)


@pytest.mark.parametrize(
    ("suffix", "content"),
    [(".json", b"{"), (".json", b"[]"), (".json", b'{"results": {}}'), (".npz", b"PK"), (".npz", b""), (".npz", None)],
    ids=["truncated", "list", "incomplete", "damaged arrays", "empty arrays", "missing arrays"],
)
def test_unreadable_measurement_records_are_reported_or_skipped(
    tmp_path: Path, suffix: str, content: bytes | None
) -> None:
    store, key = RecordStore("cpu", tmp_path / "results", tmp_path / "work"), RecordKey(NOTHING, 0)
    store.write_measurement(key, {"many": torch.rand(100)}, 0.0)
    path = store.path(key).with_suffix(suffix)
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(RunError) as raised:
        reopen(store).read(key)
    assert str(store.path(key)) in str(raised.value)
    store.skip_unreadable = True
    assert store.read(key) is None
    assert list(store.problems) == [str(store.path(key))]


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("results", "n"), "gone"),
        (("results", "accuracy"), "x"),
        (("results", "accuracy"), 7),
        (("results", "steps"), True),
        (("results", "correct"), "zz"),
        (("results", "correct"), "00"),
        (("config",), [1]),
        (("machine",), None),
    ],
)
def test_a_run_record_with_an_invalid_field_is_reported(
    trained: RecordStore, keys: tuple[str, ...], value: Any
) -> None:
    path = trained.path(KEY)
    rewrite(path, *keys, value=value)
    with pytest.raises(RunError) as raised:
        reopen(trained).read(KEY)
    assert str(path) in str(raised.value)
    if value != "zz":
        assert repr(keys[-1]) in str(raised.value)


def test_checkpoints_with_other_options_or_damaged_files_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "directory" / "state.pt"
    MeasurementCheckpoint(path, {"eps": 8}).save({"step": 5})
    assert MeasurementCheckpoint(path, {"eps": 8}).load() == {"step": 5}
    assert MeasurementCheckpoint(path, None).load() == {"step": 5}
    assert MeasurementCheckpoint(path, {"eps": 16}).load() is None
    content = path.read_bytes()
    for damaged in (b"", content[: len(content) // 2], b"not a file of torch"):
        path.write_bytes(damaged)
        assert MeasurementCheckpoint(path, {"eps": 8}).load() is None
    path.unlink()
    assert MeasurementCheckpoint(path, {"eps": 8}).load() is None


def test_a_checkpoint_is_due_after_its_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("torchcaps.reproduce.store.time.monotonic", lambda: now[0])
    checkpoint = MeasurementCheckpoint(tmp_path / "state.pt", {})
    due = [checkpoint.due]
    now[0] += 60
    due.append(checkpoint.due)
    checkpoint.save({})
    due.append(checkpoint.due)
    assert due == [False, True, False]


def test_a_full_disk_raises_a_run_error_with_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos\nsecond line")

    monkeypatch.setattr(torch, "save", fail)
    path = tmp_path / "state.pt"
    with pytest.raises(RunError) as raised:
        MeasurementCheckpoint(path, None).save({})
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not path.exists()
