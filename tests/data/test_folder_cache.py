"""The cache of decoded images of directories: renewed, damaged, read-only and unwritable."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data.folders import load, use_cache_in, write_folder
from tests.data.helpers import assert_bit_equal, write_image


@pytest.fixture(autouse=True)
def cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return use_cache_in(tmp_path, monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "images")


def test_cache_is_read_and_renewed(folder: Path, cache_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load(folder, size=16, val_fraction=0, test_fraction=0)
    (cached,) = cache_directory.iterdir()
    with monkeypatch.context() as patch:
        patch.setattr("torchcaps.data.images.read_image", None)  # decoding would fail
        assert_bit_equal(load(folder, size=16, val_fraction=0, test_fraction=0).images, first.images)
    content = cached.read_bytes()
    position = content.index(first.images.numpy().tobytes())
    flipped = content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]
    for damaged in (content[:1000], b"", b"no archive", flipped):
        cached.write_bytes(damaged)
        assert_bit_equal(load(folder, size=16, val_fraction=0, test_fraction=0).images, first.images)
    changed = next(iter(sorted(folder.rglob("*.png"))))
    write_image(changed, seed=999)
    os.utime(changed, ns=(1, 1))
    load(folder, size=16, val_fraction=0, test_fraction=0)
    assert len(list(cache_directory.iterdir())) == 2
    load(folder, size=16, val_fraction=0, test_fraction=0, cache=False)
    assert len(list(cache_directory.iterdir())) == 2
    for path in cache_directory.iterdir():
        os.utime(path, (0, 0))  # not used for a long time
    load(folder, size=17, val_fraction=0, test_fraction=0)
    assert len(list(cache_directory.iterdir())) == 1


def test_io_errors_are_not_cached(folder: Path, cache_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchcaps.data import images

    read = images.read_image

    def failing(path: Path, form: Any) -> torch.Tensor:
        if path.name == "1.png":
            raise OSError(5, "Input/output error")
        return read(path, form)

    monkeypatch.setattr(images, "read_image", failing)
    with pytest.warns(UserWarning, match="3 of 33 images"):
        load(folder, val_fraction=0, test_fraction=0, on_error="skip")
    monkeypatch.setattr(images, "read_image", read)
    assert not list(cache_directory.glob("*.pt"))
    assert len(load(folder, val_fraction=0, test_fraction=0, on_error="skip")) == 33


def test_read_only_cache_is_used(folder: Path, cache_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load(folder, size=16)

    def raise_permission_error(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("torchcaps.data.images.os.utime", raise_permission_error)
    monkeypatch.setattr("torchcaps.data.images.read_image", None)  # decoding would fail
    assert_bit_equal(load(folder, size=16).images, first.images)


def test_unwritable_cache_is_a_warning(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="file/torchcaps/folders"):
        assert len(load(folder)) == 27
