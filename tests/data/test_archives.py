"""Archives: paths and links that are not extracted, and damage that is found before anything is written."""

import hashlib
import os
import stat
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tests.data import writers
from tests.data.helpers import data_error, publish, raise_disk_full
from tests.data.writers import random_bytes
from torchcaps.data import CIFAR10, DataError, archives, create_dataset
from torchcaps.data.archives import extract_member

pytestmark = pytest.mark.filterwarnings("ignore:.*images, expected")  # the files of these tests are small

CIFAR_RECORD = writers.cifar_binary(random_bytes(1, 3, 32, 32), np.array([1]))
CIFAR_MEMBER = "cifar-10-batches-bin/test_batch.bin"


@pytest.mark.parametrize(
    "name",
    ["../out.bin", "/tmp/torchcaps-out.bin", "cifar-10-batches-bin/../../out.bin", "..\\out.bin", "C:\\out.bin"],
)
@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_archive_member_outside_of_the_directory(tmp_path: Path, name: str, kind: str) -> None:
    root = tmp_path / "a/b/root"
    if kind == "tar":
        writers.write_tar_gz(root / "cifar10/cifar-10-binary.tar.gz", {CIFAR_MEMBER: CIFAR_RECORD, name: b"evil"})
        message = data_error("cifar10", root)
    else:
        writers.write_zip(root / "affnist/test_batches.zip", {"test_batches/1.mat": b"x", name: b"evil"})
        message = data_error("affnist", root)
    assert repr(name) in message
    assert list(tmp_path.rglob("out.bin")) == []
    assert not Path("/tmp/torchcaps-out.bin").exists()


def test_zip_with_a_link(tmp_path: Path) -> None:
    with zipfile.ZipFile(writers.put(tmp_path / "affnist/test_batches.zip", b""), "w") as file:
        entry = zipfile.ZipInfo("test_batches/1.mat")
        entry.external_attr = (stat.S_IFLNK | 0o777) << 16
        file.writestr(entry, "/etc/passwd")
    assert "link 'test_batches/1.mat'" in data_error("affnist", tmp_path)


def test_only_the_needed_directory_is_extracted_and_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(monkeypatch, CIFAR10, CIFAR_MEMBER, CIFAR_RECORD)
    writers.write_tar_gz(
        tmp_path / "cifar10/cifar-10-binary.tar.gz", {CIFAR_MEMBER: CIFAR_RECORD, "other/file.bin": b"x"}
    )
    writers.put(tmp_path / "cifar10/cifar-10-batches-bin/mine.txt", b"keep me")
    assert len(create_dataset("cifar10", "test", tmp_path, download=False)) == 1
    assert sorted(os.listdir(tmp_path / "cifar10")) == ["cifar-10-batches-bin", "cifar-10-binary.tar.gz"]
    assert (tmp_path / "cifar10/cifar-10-batches-bin/mine.txt").read_bytes() == b"keep me"


def test_tar_with_a_link_without_the_member_or_corrupt(tmp_path: Path) -> None:
    content = {"cifar-10-batches-bin/readme.html": b"x"}
    path = writers.write_tar_gz(tmp_path / "cifar10/cifar-10-binary.tar.gz", content, link=CIFAR_MEMBER)
    assert repr(CIFAR_MEMBER) in data_error("cifar10", tmp_path)
    writers.write_tar_gz(path, content)
    message = data_error("cifar10", tmp_path)
    assert CIFAR_MEMBER in message
    assert str(path) in message
    archive = path.read_bytes()
    for corrupt in (b"", b"no archive", archive[: len(archive) // 2]):
        path.write_bytes(corrupt)
        assert str(path) in data_error("cifar10", tmp_path)


def test_full_disk_during_extraction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(monkeypatch, CIFAR10, CIFAR_MEMBER, CIFAR_RECORD)
    writers.write_tar_gz(tmp_path / "cifar10/cifar-10-binary.tar.gz", {CIFAR_MEMBER: CIFAR_RECORD})
    with monkeypatch.context() as patch:
        patch.setattr("torchcaps.data.archives.shutil.copyfileobj", raise_disk_full)
        assert "No space left on device" in data_error("cifar10", tmp_path)
    assert len(create_dataset("cifar10", "test", tmp_path, download=False)) == 1


def test_zip_with_a_wrong_crc(tmp_path: Path) -> None:
    content = {"test_batches/1.mat": bytes(random_bytes(5000))}
    path = writers.write_zip(tmp_path / "affnist/test_batches.zip", content)
    data = bytearray(path.read_bytes())
    data[200] ^= 255
    path.write_bytes(data)
    assert str(path) in data_error("affnist", tmp_path)


def test_flipped_bit_in_a_tar_gz_is_found(tmp_path: Path) -> None:
    """Random bytes are not compressed, so that only the CRC at the end of the file shows that a bit is wrong."""
    content = random_bytes(40_000).tobytes()
    path = writers.write_tar_gz(tmp_path / "made.tar.gz", {"top/data.bin": content})
    data = path.read_bytes()
    extract_member(path, tmp_path / "intact", "top/data.bin")
    assert (tmp_path / "intact/top/data.bin").read_bytes() == content
    for position in range(2000, len(data), 4001):
        path.write_bytes(data[:position] + bytes([data[position] ^ 16]) + data[position + 1 :])
        with pytest.raises(DataError, match=r"made\.tar\.gz"):
            extract_member(path, tmp_path / "damaged", "top/data.bin")
        assert list((tmp_path / "damaged").rglob("*")) == []


def test_members_must_have_the_published_checksum(tmp_path: Path) -> None:
    """Also those that are not requested, but extracted with the requested one."""
    members = {"top/a.bin": b"a", "top/b.bin": b"b", "top/c.bin": b"c"}
    checksums = {name: f"sha256:{hashlib.sha256(data).hexdigest()}" for name, data in members.items()}
    path = writers.write_tar_gz(tmp_path / "made.tar.gz", members)
    extract_member(path, tmp_path / "intact", "top/a.bin", checksums)
    assert sorted(os.listdir(tmp_path / "intact/top")) == ["a.bin", "b.bin", "c.bin"]
    writers.write_tar_gz(path, {**members, "top/b.bin": b"x"})
    with pytest.raises(DataError, match=rf"made\.tar\.gz .*top/b\.bin .*{checksums['top/b.bin']}"):
        extract_member(path, tmp_path / "damaged", "top/a.bin", checksums)
    assert os.listdir(tmp_path / "damaged") == []


def test_published_checksums_of_cifar_are_used(tmp_path: Path) -> None:
    writers.write_tar_gz(tmp_path / "cifar10/cifar-10-binary.tar.gz", {CIFAR_MEMBER: CIFAR_RECORD})
    assert CIFAR10.members["binary"]["test"][CIFAR_MEMBER] in data_error("cifar10", tmp_path)


def bomb(path: Path, size: int, count: int = 1) -> Path:
    members = {f"top/{number}.bin": bytes(size) for number in range(count)}
    return (writers.write_zip if path.suffix == ".zip" else writers.write_tar_gz)(path, members)


@pytest.mark.parametrize("name", ["made.zip", "made.tar.gz"])
def test_size_when_extracted_is_limited(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MIN_LIMIT_BYTES", 1 << 20)
    monkeypatch.setattr(archives, "MAX_MEMBER_BYTES", 1 << 20)
    for size, count, limit in ((2 << 20, 1, 1 << 20), (1 << 19, 3, 1 << 20)):
        path = bomb(tmp_path / name, size, count)
        with pytest.raises(DataError, match=rf"{path} .*'top/{count - 1}\.bin'.*{limit:,}"):
            extract_member(path, tmp_path / "new", "top/0.bin")
        assert os.listdir(tmp_path / "new") == []
        assert not archives.is_intact_zip(path)
    path = bomb(tmp_path / name, 1 << 19)
    extract_member(path, tmp_path / "new", "top/0.bin")
    assert (tmp_path / "new/top/0.bin").stat().st_size == 1 << 19


def test_long_headers_and_data_after_the_end_of_a_tar_are_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "MIN_LIMIT_BYTES", 1 << 20)
    entry = tarfile.TarInfo("top/a.bin")
    entry.pax_headers = {"comment": "x" * (17 << 20)}
    path = tmp_path / "made.tar.gz"
    with tarfile.open(path, "w:gz", format=tarfile.PAX_FORMAT, compresslevel=1) as file:
        file.addfile(entry)
    with pytest.raises(DataError, match=rf"{path} .*17,"):
        extract_member(path, tmp_path / "new", "top/a.bin")
    valid = writers.gzip.decompress(writers.write_tar_gz(path, {"top/a.bin": b"a"}).read_bytes())
    path.write_bytes(writers.gzip.compress(valid + bytes(3 << 20)))
    with pytest.raises(DataError, match=str(path)):
        extract_member(path, tmp_path / "new", "top/a.bin")


def test_unusual_compression_of_a_zip(tmp_path: Path) -> None:
    path = tmp_path / "made.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as file:
        file.writestr("top/a.bin", b"a")
    with pytest.raises(DataError, match=rf"{path} .*14 .*'top/a\.bin'"):
        extract_member(path, tmp_path / "new", "top/a.bin")


@pytest.mark.parametrize("damage", ["empty name", "negative offset"])
def test_zip_with_an_empty_name_or_a_negative_offset(tmp_path: Path, damage: str) -> None:
    path = writers.write_zip(tmp_path / "archive.zip", {"top/1.mat": b"x", "Qx": b"y"})
    content = path.read_bytes()
    if damage == "empty name":
        content = content.replace(b"Qx", b"\0x")  # names end at a null byte
    else:
        position = content.rindex(b"PK\5\6") + 16  # offset of the central directory
        offset = int.from_bytes(content[position : position + 4], "little") + 7
        content = content[:position] + offset.to_bytes(4, "little") + content[position + 4 :]
    path.write_bytes(content)
    with pytest.raises(DataError, match=str(path)):
        extract_member(path, tmp_path / "out", "top/1.mat")
    assert archives.is_intact_zip(path) is False
