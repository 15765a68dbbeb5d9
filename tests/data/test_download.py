"""Downloads from a server that is slow, truncates, answers 404 and 500, sends wrong bytes, or dies half way."""

import hashlib
import io
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.data import writers
from tests.data.server import serving
from torchcaps._core.files import staging_directory
from torchcaps._core.progress import track
from torchcaps.cli import main
from torchcaps.data import MNIST, DataError, MissingDataError, create_dataset
from torchcaps.data.storage import download_file

pytestmark = pytest.mark.filterwarnings("ignore:.*it should have")  # the files of these tests are small

ROOT = Path(__file__).resolve().parents[2]
DATA = writers.random_bytes(300_000).tobytes()
CHECKSUM = f"sha256:{hashlib.sha256(DATA).hexdigest()}"
BAD = ["404", "500", "truncates", "truncates_silently", "wrong", "dies", "stalls"]


@pytest.fixture
def server() -> Iterator[tuple[str, list[str]]]:
    with serving({"data.bin": DATA}) as running:
        yield running


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchcaps.data.storage.DOWNLOAD_TIMEOUT_S", 1)


@pytest.mark.parametrize("manner", BAD)
def test_the_next_mirror_is_tried(tmp_path: Path, server: tuple[str, list[str]], manner: str) -> None:
    address, asked = server
    urls = [f"{address}/{manner}/data.bin", f"{address}/good/data.bin"]
    path = download_file("data.bin", urls, CHECKSUM, tmp_path / "here")
    assert path.read_bytes() == DATA
    assert asked[0] == manner
    assert asked[-1] == "good"
    assert os.listdir(tmp_path / "here") == ["data.bin"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_and_a_pipe_a_line(
    tmp_path: Path, server: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, wanted in ((Terminal, "300.0/300.0 kB"), (io.StringIO, "downloading data.bin\n")):
        said = kind()
        monkeypatch.setattr(sys, "stderr", said)
        monkeypatch.setenv("COLUMNS", "100")
        download_file("data.bin", [f"{server[0]}/404/data.bin", f"{server[0]}/good/data.bin"], CHECKSUM, tmp_path)
        assert wanted in said.getvalue()
        assert ("\x1b" in said.getvalue()) == (kind is Terminal)


def test_many_things_get_a_bar_on_a_terminal_and_nothing_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (Terminal, io.StringIO):
        said = kind()
        monkeypatch.setattr(sys, "stderr", said)
        assert list(track(range(1000), "counting")) == list(range(1000))
        assert ("counting" in said.getvalue()) == (kind is Terminal)


def test_a_slow_server_is_waited_for(tmp_path: Path, server: tuple[str, list[str]]) -> None:
    assert download_file("data.bin", [f"{server[0]}/slow/data.bin"], CHECKSUM, tmp_path).read_bytes() == DATA


@pytest.mark.parametrize(
    ("manner", "said"),
    [
        ("404", "127.0.0.1:{port} answered 404"),
        ("500", "answered 500"),
        ("truncates", "broke off"),
        ("truncates_silently", "sent a file with another checksum"),
        ("wrong", "sent a file with another checksum"),
        ("dies", "broke off"),
        ("stalls", "did not answer in time"),
    ],
)
def test_no_partial_file_is_ever_left(tmp_path: Path, server: tuple[str, list[str]], manner: str, said: str) -> None:
    folder = tmp_path / "new"
    with pytest.raises(MissingDataError) as error:
        download_file("data.bin", [f"{server[0]}/{manner}/data.bin"], CHECKSUM, folder)
    assert said.format(port=server[0].rpartition(":")[2]) in str(error.value)
    assert "\n" not in str(error.value)
    assert not folder.exists()  # not even an empty one


def test_a_whole_file_is_not_spoilt_by_a_bad_mirror(tmp_path: Path, server: tuple[str, list[str]]) -> None:
    (tmp_path / "data.bin").write_bytes(DATA)
    with pytest.raises(MissingDataError):
        download_file("data.bin", [f"{server[0]}/wrong/data.bin"], CHECKSUM, tmp_path)
    assert (tmp_path / "data.bin").read_bytes() == DATA


SCRIPT = """
import sys
from pathlib import Path
from torchcaps.data.storage import download_file
from torchcaps._core.progress import track
from torchcaps._core.files import staging_directory
download_file("data.bin", [sys.argv[1] + "/slow/data.bin"], sys.argv[2], Path(sys.argv[3]))
"""


def start(address: str, folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", SCRIPT, address, CHECKSUM, str(folder)], cwd=ROOT)


def test_two_processes_at_once_do_each_other_no_harm(tmp_path: Path, server: tuple[str, list[str]]) -> None:
    both = [start(server[0], tmp_path) for _ in range(2)]
    assert [process.wait(timeout=60) for process in both] == [0, 0]
    assert server[1] == ["slow", "slow"]
    assert (tmp_path / "data.bin").read_bytes() == DATA
    assert os.listdir(tmp_path) == ["data.bin"]


def test_a_killed_download_leaves_nothing_that_passes_for_a_file(tmp_path: Path, server: tuple[str, list[str]]) -> None:
    process = start(server[0], tmp_path)
    deadline = time.time() + 60
    while not any(path.stat().st_size for path in tmp_path.glob(".torchcaps-scratch-*/*")) and time.time() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=60)
    (left,) = os.listdir(tmp_path)
    assert left.startswith(".torchcaps-scratch-")
    os.utime(tmp_path / left, (0, 0))  # long ago
    assert download_file("data.bin", [f"{server[0]}/good/data.bin"], CHECKSUM, tmp_path).read_bytes() == DATA
    assert os.listdir(tmp_path) == ["data.bin"]  # what was left is swept away


def test_a_full_disk_and_a_folder_that_cannot_be_written(
    tmp_path: Path, server: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(MissingDataError, match="can't be written: not a directory"):
        download_file("data.bin", [f"{server[0]}/good/data.bin"], CHECKSUM, tmp_path / "file/below")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pooch.HTTPDownloader.__call__", full)
    with pytest.raises(MissingDataError, match="can't be written: no space left on device"):
        download_file("data.bin", [f"{server[0]}/good/data.bin"], CHECKSUM, tmp_path)
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("manner", ["truncates_silently", "wrong"])
def test_an_archive_without_a_published_checksum_must_be_whole(tmp_path: Path, manner: str) -> None:
    """As affNIST's are: a page of HTML or half an archive is never kept, and the next mirror is tried."""
    whole = writers.zipped(tmp_path / "made.zip", {"a.mat": DATA}).read_bytes()
    with serving({"data.zip": whole}) as (address, _):
        bad, good = f"{address}/{manner}/data.zip", f"{address}/good/data.zip"
        with pytest.raises(MissingDataError, match="sent something that is not the whole archive"):
            download_file("data.zip", [bad], "", tmp_path / "here")
        assert download_file("data.zip", [bad, good], "", tmp_path / "here").read_bytes() == whole


def test_others_may_read_what_was_fetched(tmp_path: Path, server: tuple[str, list[str]]) -> None:
    path = download_file("data.bin", [f"{server[0]}/good/data.bin"], CHECKSUM, tmp_path)
    plain = tmp_path / "plain"
    plain.write_bytes(b"")
    assert path.stat().st_mode == plain.stat().st_mode


def test_a_folder_that_others_remove_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, failures = tempfile.mkdtemp, [2]

    def unlucky(*arguments: str, **options: str) -> str:
        if failures[0]:
            failures[0] -= 1
            raise FileNotFoundError(2, "gone")
        return make(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("torchcaps._core.files.tempfile.mkdtemp", unlucky)
    with staging_directory(tmp_path / "new") as own:
        assert own.is_dir()
    assert not own.exists()


# A whole data set -------------------------------------------------------------------------------------------


@pytest.fixture
def tiny_mnist(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[str]]]:
    """MNIST's four files, small, on a first mirror that fails and a second that works."""
    files, known = {}, {}
    for name in MNIST.files:
        count = 6 if name.startswith("train") else 4
        array = writers.random_bytes(count, 28, 28) if "images" in name else writers.random_bytes(count, high=10)
        files[name] = writers.gzip.compress(writers.idx(array), mtime=0)
        known[name] = (hashlib.md5(files[name], usedforsecurity=False).hexdigest(), len(files[name]))
    with serving(files) as (address, asked):
        monkeypatch.setattr(MNIST, "files", known)
        monkeypatch.setattr(MNIST, "mirrors", (f"{address}/500/", f"{address}/good/"))
        yield address, asked


def test_get_fetches_all_files_once_and_check_finds_them_right(
    tmp_path: Path, tiny_mnist: tuple[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    main(["data", "get", "mnist", "--data-dir", str(tmp_path)])
    assert tiny_mnist[1].count("good") == 4
    assert f"all files are in {tmp_path / 'mnist'}" in capsys.readouterr().out
    main(["data", "get", "multimnist", "--data-dir", str(tmp_path)])
    assert tiny_mnist[1].count("good") == 4  # nothing again
    assert len(create_dataset("mnist", "test", tmp_path, download=False)) == 4
    with pytest.raises(SystemExit) as stop:
        main(["data", "check", "mnist", "--data-dir", str(tmp_path)])
    assert stop.value.code == 2
    printed = capsys.readouterr()
    assert "the split 'train' has 6 images, it should have 60,000 (and 1 more such problem)" in printed.err
    assert printed.out.count(" right ") == 4


def test_a_mirror_of_ones_own_comes_first(
    tmp_path: Path, tiny_mnist: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (name,) = [name for name in MNIST.files if name.startswith("t10k-labels")]
    with serving({f"mnist/{name}": b"another file"}) as (address, asked):
        monkeypatch.setenv("TORCHCAPS_MIRROR", f"{address}/good/")
        create_dataset("mnist", "test", tmp_path)
    assert asked == ["good", "good"]  # asked for both, it has the wrong bytes for one and nothing for the other
    assert tiny_mnist[1].count("good") == 2


def test_what_is_there_in_another_form_is_not_fetched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writers.put(tmp_path / "cifar-10-batches-bin/test_batch.bin", bytes(3073))
    main(["data", "get", "cifar10", "--split", "test", "--data-dir", str(tmp_path)])
    assert f"all files are in {tmp_path / 'cifar-10-batches-bin'}" in capsys.readouterr().out


def test_a_mirror_must_be_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHCAPS_MIRROR", "example.org")
    with pytest.raises(DataError, match="TORCHCAPS_MIRROR must be an address"):
        create_dataset("mnist", "test", tmp_path)


def test_a_data_set_is_fetched_when_it_is_needed(tmp_path: Path, tiny_mnist: tuple[str, list[str]]) -> None:
    with pytest.raises(MissingDataError, match="is missing: 'torchcaps data get mnist' fetches it"):
        create_dataset("mnist", "train", tmp_path, download=False)
    assert tiny_mnist[1] == []
    assert len(create_dataset("mnist", "train", tmp_path)) == 6
    assert sorted(os.listdir(tmp_path / "mnist")) == ["train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"]


def test_offline_says_which_file_is_missing_where_it_goes_and_what_needs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(MNIST, "mirrors", ("http://127.0.0.1:9/", "http://nowhere.invalid/"))
    with pytest.raises(SystemExit):
        main(["data", "sample", "mnist", "--data-dir", str(tmp_path), "--out", str(tmp_path / "x.png")])
    sentence = capsys.readouterr().err.splitlines()[-1]
    assert "train-images-idx3-ubyte.gz is missing and could not be fetched" in sentence
    assert "127.0.0.1:9 can't be reached; nowhere.invalid can't be reached" in sentence
    assert f"put it into {tmp_path / 'mnist'}" in sentence
    assert "the data set 'digits' needs no file" in sentence
    assert os.listdir(tmp_path) == []
    with pytest.raises(MissingDataError):
        create_dataset("mnist", "test", tmp_path / "some/where/new")
    assert os.listdir(tmp_path) == []
