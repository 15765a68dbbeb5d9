"""Atomic writes and staging directories."""

import contextlib
import os
import stat
import time
from pathlib import Path

import pytest

from torchcaps._core import files
from torchcaps._core.files import (
    STAGING_PREFIX,
    atomic_path,
    move_tree_into_place,
    reason_of,
    staging_directory,
    write_atomic,
)


class WriteError(Exception):
    """An error type of a caller."""


@pytest.mark.parametrize("content", ["text: ä", b"\x00\xff"], ids=["text", "bytes"])
def test_write_atomic_creates_directories_and_replaces_files(tmp_path: Path, content: str | bytes) -> None:
    path = tmp_path / "new" / "file"
    write_atomic(path, "before")
    write_atomic(path, content)
    assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    mask = os.umask(0o027)
    try:
        write_atomic(tmp_path / "file", "")
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_failure_leaves_the_target_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, "before")
    with contextlib.suppress(KeyboardInterrupt), atomic_path(path) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "before"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_os_errors_are_raised_as_the_given_type(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "below"  # the parent is not a directory
    with pytest.raises(WriteError, match=str(path)) as raised:
        write_atomic(path, "", WriteError)
    assert isinstance(raised.value.__cause__, OSError)
    assert reason_of(raised.value.__cause__) in str(raised.value)
    with pytest.raises(OSError, match="file"):
        write_atomic(path, "")


@pytest.mark.parametrize("sweep", [True, False])
def test_only_old_staging_directories_are_swept(tmp_path: Path, sweep: bool) -> None:
    old, new, other = (tmp_path / name for name in (f"{STAGING_PREFIX}old", f"{STAGING_PREFIX}new", "other"))
    for directory in (old, new, other):
        directory.mkdir()
        (directory / "file").write_text("")
    past = time.time() - files.STALE_AFTER_S - 60
    os.utime(old, (past, past))
    os.utime(other, (past, past))
    with staging_directory(tmp_path, sweep) as staging:
        assert staging.parent == tmp_path
        (staging / "file").write_text("")
    assert {entry.name for entry in tmp_path.iterdir()} == {new.name, other.name} | (set() if sweep else {old.name})


def test_staging_directory_in_a_directory_that_is_removed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, mkdtemp, calls = tmp_path / "runs", files.tempfile.mkdtemp, []

    def remove_then_make(**options: str) -> str:
        calls.append(options)
        if len(calls) == 1:
            directory.rmdir()  # as another process that removes an empty directory
        return mkdtemp(**options)

    monkeypatch.setattr(files.tempfile, "mkdtemp", remove_then_make)
    with staging_directory(directory) as staging:
        assert staging.is_dir()
    assert len(calls) == 2


def test_move_tree_into_place_merges_directories(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for name in ("a/1", "a/b/2"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    (target / "a").mkdir(parents=True)
    (target / "a/own").write_text("own")
    (target / "a/1").write_text("old")
    move_tree_into_place(source, target)
    content = {str(path.relative_to(target)): path.read_text() for path in target.rglob("*") if path.is_file()}
    assert content == {"a/1": "a/1", "a/b/2": "a/b/2", "a/own": "own"}
    move_tree_into_place(target, tmp_path / "renamed")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "source") == ["renamed"]
    move_tree_into_place(tmp_path / "renamed/a/1", tmp_path / "file")
    assert (tmp_path / "file").read_text() == "a/1"
