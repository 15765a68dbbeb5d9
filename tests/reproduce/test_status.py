"""Status of records: done, running, waiting, failed; progress and time left from the checkpoints."""

import json
import os
from pathlib import Path

import pytest

from tests.reproduce.items import reproduce_item, smoke_store
from torchcaps.cli.main import main
from torchcaps.reproduce.schema import Cell, Item, Measurement, Run, TableRow
from torchcaps.reproduce.status import (
    MAX_CHECKPOINT_AGE_S,
    FailureNote,
    RecordState,
    RunProgress,
    record_status,
    run_progress,
)
from torchcaps.reproduce.store import RecordKey, RecordStore
from torchcaps.training.run_dir import RunDirectory

RUN = Run("chen2019_lenet")
KEY = RecordKey(RUN, 0)
ITEM = Item("t", "T", "T.", {"error": "%"}, (TableRow("a", {"error": Cell(None, RUN)}),))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the record and the run directory of `RUN`."""
    directory = tmp_path_factory.mktemp("status")
    reproduce_item(ITEM, smoke_store(directory))
    return directory


@pytest.fixture
def interrupted(trained: Path) -> RecordStore:
    """A store in which `RUN` has a checkpoint and no record."""
    store = smoke_store(trained)
    path = store.path(KEY)
    content = path.read_bytes()
    path.unlink()
    yield store  # type: ignore[misc]
    path.write_bytes(content)


def test_a_record_without_a_process_is_done(trained: Path) -> None:
    assert record_status(KEY, smoke_store(trained)).state is RecordState.DONE


def test_a_stopped_run_is_waiting_with_its_progress(interrupted: RecordStore) -> None:
    """Its lock file still names a process, which has ended."""
    lock = interrupted.run_directory(KEY).path / "lock"
    assert lock.read_text().strip() == str(os.getpid())
    status = record_status(KEY, interrupted)
    assert (status.state, status.seconds_left) == (RecordState.WAITING, None)
    assert status.progress is not None
    assert (status.progress.step, status.progress.total) == (2, 2)


def test_a_run_is_running_while_its_directory_is_locked(interrupted: RecordStore) -> None:
    with interrupted.run_directory(KEY) as directory:
        directory.lock()
        status = record_status(KEY, interrupted, now=0.0)
    assert (status.state, status.seconds_left) == (RecordState.RUNNING, 0.0)
    assert record_status(KEY, interrupted).state is RecordState.WAITING


def test_a_failed_job_is_reported_until_it_runs_again(interrupted: RecordStore) -> None:
    note = FailureNote.of(KEY, interrupted)
    note.write("no space left")
    status = record_status(KEY, interrupted)
    assert (status.state, status.detail) == (RecordState.FAILED, "no space left")
    with interrupted.run_directory(KEY) as directory:
        directory.lock()
        assert record_status(KEY, interrupted).state is RecordState.RUNNING
    note.clear()
    assert record_status(KEY, interrupted).state is RecordState.WAITING


def test_a_damaged_record_has_failed(interrupted: RecordStore) -> None:
    """It is not waiting: 'torchcaps reproduce' rejects it until it is removed."""
    interrupted.skip_unreadable = True
    path = interrupted.path(KEY)
    path.write_text("{")
    status = record_status(KEY, interrupted)
    assert status.state is RecordState.FAILED
    assert str(path) in status.detail


def test_nothing_is_waiting_without_progress_or_reason(tmp_path: Path) -> None:
    for source in (RUN, Measurement("m", lambda context: {})):
        status = record_status(RecordKey(source, 0), smoke_store(tmp_path))
        assert (status.state, status.progress, status.detail) == (RecordState.WAITING, None, "")


def test_missing_data_is_named(tmp_path: Path) -> None:
    store = RecordStore("long", tmp_path / "results", tmp_path / "work")
    status = record_status(KEY, store, data_dir=str(tmp_path))
    assert (status.state, "mnist" in status.detail) == (RecordState.WAITING, True)


def test_time_left_counts_from_the_checkpoint() -> None:
    progress = RunProgress(step=100, total=400, seconds=50.0, saved_at=1_000.0)
    times = [1_000.0, 1_100.0, 2_000.0]
    assert [progress.seconds_left(now) for now in times] == [150.0, 50.0, 0.0]
    suspended = RunProgress(step=100, total=2_100, seconds=50.0, saved_at=0.0)
    assert suspended.seconds_left(now=10_000.0) == 1_000.0 - MAX_CHECKPOINT_AGE_S
    assert RunProgress(0, 400, 0.0, 0.0).seconds_left(1.0) is None


def test_progress_is_that_of_the_previous_checkpoint_while_the_next_is_written(
    interrupted: RecordStore, tmp_path: Path
) -> None:
    """``last`` has been renamed to ``previous``, and an incomplete file is in its place."""
    complete = interrupted.run_directory(KEY).last.read_bytes()
    directory = RunDirectory(tmp_path)
    assert run_progress(directory) is None
    directory.last.parent.mkdir()
    directory.last.write_bytes(complete[:100])
    assert run_progress(directory) is None
    directory.previous.write_bytes(complete)
    progress = run_progress(directory)
    assert progress is not None
    assert progress.step == 2


def directories(path: Path) -> tuple[str, ...]:
    return "--scale", "smoke", "--results", str(path / "results"), "--work", str(path / "work")


def test_status_of_an_item_as_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    store = smoke_store(tmp_path)
    main(["reproduce", "status", "chen2019", "multi", "--json", *directories(tmp_path)])
    (item,) = json.loads(capsys.readouterr().out)
    (record,) = item["records"]
    assert (item["paper"], item["item"], item["scale"], item["seeds"]) == ("chen2019", "multi", "smoke", 1)
    assert (record["record"], record["state"], record["step"]) == ("chen2019-multi-seed0", "waiting", None)
    assert not store.work.exists()


def test_status_of_the_queue_fits_80_columns(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    main(["reproduce", "status", *directories(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > 80] == []
    assert lines[0].startswith("scale smoke: 0 done, 0 running, ")
