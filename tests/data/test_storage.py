"""Downloads from servers that fail, archives with malicious or missing members, and the data directory."""

import concurrent.futures
import hashlib
import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.data import writers
from tests.data.helpers import data_error, raise_disk_full
from tests.data.server import WAIT_S, Server, serve
from tests.data.writers import random_bytes
from torchcaps._core.files import STAGING_PREFIX
from torchcaps._core.progress import track
from torchcaps.cli import main
from torchcaps.cli.console import ExitCode
from torchcaps.data import MNIST, DataError, MissingDataError, create_dataset, list_datasets, storage
from torchcaps.data.registry import find_spec
from torchcaps.data.storage import DataDirectory, RemoteFile, download_file

pytestmark = pytest.mark.filterwarnings("ignore:.*images, expected")  # the files of these tests are small

ROOT = Path(__file__).resolve().parents[2]
DATA = random_bytes(300_000).tobytes()
CHECKSUM = f"sha256:{hashlib.sha256(DATA).hexdigest()}"
FAILURES = {
    "404": "404",
    "500": "500",
    "truncate": "connection lost",
    "truncate_without_length": "checksum",
    "wrong_content": "checksum",
    "reset": "connection lost",
    "stall": "timeout",
}


@pytest.fixture
def server() -> Iterator[Server]:
    with serve({"data.bin": DATA}) as running:
        yield running


def set_timeout(monkeypatch: pytest.MonkeyPatch, behavior: str) -> None:
    """Set a short timeout for the first request if the server stalls, and a long one for all other requests."""
    describe = storage._describe_failure

    def reset_timeout(url: str, error: Exception) -> str:
        monkeypatch.setattr(storage, "DOWNLOAD_TIMEOUT_S", WAIT_S)
        return describe(url, error)

    monkeypatch.setattr(storage, "_describe_failure", reset_timeout)
    monkeypatch.setattr(storage, "DOWNLOAD_TIMEOUT_S", 0.3 if behavior == "stall" else WAIT_S)


# Downloads --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("behavior", list(FAILURES))
def test_next_mirror_is_tried(tmp_path: Path, server: Server, behavior: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_timeout(monkeypatch, behavior)
    urls = [f"{server.url}/{behavior}/data.bin", f"{server.url}/good/data.bin"]
    path = download_file("data.bin", urls, CHECKSUM, tmp_path / "new")
    assert path.read_bytes() == DATA
    assert server.requests == [behavior, "good"]
    assert os.listdir(tmp_path / "new") == ["data.bin"]


@pytest.mark.parametrize(("behavior", "reason"), list(FAILURES.items()))
def test_failed_download_leaves_no_files(
    tmp_path: Path, server: Server, behavior: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_timeout(monkeypatch, behavior)
    with pytest.raises(MissingDataError) as error:
        download_file("data.bin", [f"{server.url}/{behavior}/data.bin"], CHECKSUM, tmp_path / "new")
    assert server.url.removeprefix("http://") in str(error.value)
    assert reason in str(error.value)
    assert "\n" not in str(error.value)
    assert os.listdir(tmp_path) == []  # not even an empty directory


def test_failed_download_keeps_existing_file(tmp_path: Path, server: Server) -> None:
    (tmp_path / "data.bin").write_bytes(DATA)
    with pytest.raises(MissingDataError):
        download_file("data.bin", [f"{server.url}/wrong_content/data.bin"], CHECKSUM, tmp_path)
    assert (tmp_path / "data.bin").read_bytes() == DATA


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_a_bar_on_a_terminal_and_a_line_elsewhere(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    for kind, expected in ((Terminal, "300.0/300.0 kB"), (io.StringIO, "downloading data.bin\n")):
        stream = kind()
        monkeypatch.setattr(sys, "stderr", stream)
        download_file("data.bin", [f"{server.url}/404/data.bin", f"{server.url}/good/data.bin"], CHECKSUM, tmp_path)
        assert expected in stream.getvalue()
        assert ("\x1b" in stream.getvalue()) == (kind is Terminal)


def test_track_draws_a_bar_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (Terminal, io.StringIO):
        stream = kind()
        monkeypatch.setattr(sys, "stderr", stream)
        assert list(track(range(1000), "counting")) == list(range(1000))
        assert ("counting" in stream.getvalue()) == (kind is Terminal)


def test_file_may_arrive_in_chunks(tmp_path: Path, server: Server) -> None:
    assert download_file("data.bin", [f"{server.url}/chunks/data.bin"], CHECKSUM, tmp_path).read_bytes() == DATA


def test_concurrent_downloads_do_not_interfere(tmp_path: Path, server: Server) -> None:
    """The server answers only after both requests have arrived."""
    urls = [f"{server.url}/together/data.bin"]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        both = [pool.submit(download_file, "data.bin", urls, CHECKSUM, tmp_path) for _ in range(2)]
        paths = [download.result(WAIT_S) for download in both]
    assert server.requests == ["together", "together"]
    assert paths == [tmp_path / "data.bin"] * 2
    assert (tmp_path / "data.bin").read_bytes() == DATA
    assert os.listdir(tmp_path) == ["data.bin"]


SCRIPT = """
import sys
from pathlib import Path
from torchcaps.data.storage import download_file
download_file("data.bin", [sys.argv[1] + "/stall/data.bin"], sys.argv[2], Path(sys.argv[3]))
"""


def test_killed_download_leaves_only_a_staging_directory(tmp_path: Path, server: Server) -> None:
    """The process is killed after the server has sent half of the file; the next download removes what it left."""
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, server.url, CHECKSUM, str(tmp_path)], cwd=ROOT)
    try:
        assert server.half_sent.wait(WAIT_S), "the download did not start"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(WAIT_S)
    (leftover,) = os.listdir(tmp_path)
    assert leftover.startswith(STAGING_PREFIX)
    os.utime(tmp_path / leftover, (0, 0))  # old enough to be removed
    assert download_file("data.bin", [f"{server.url}/good/data.bin"], CHECKSUM, tmp_path).read_bytes() == DATA
    assert os.listdir(tmp_path) == ["data.bin"]


def test_target_directory_cannot_be_written(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(MissingDataError, match=r"file/below.*Not a directory"):
        download_file("data.bin", [f"{server.url}/good/data.bin"], CHECKSUM, tmp_path / "file/below")
    monkeypatch.setattr("pooch.HTTPDownloader.__call__", raise_disk_full)
    with pytest.raises(MissingDataError, match="No space left on device"):
        download_file("data.bin", [f"{server.url}/good/data.bin"], CHECKSUM, tmp_path)
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("behavior", ["truncate_without_length", "wrong_content"])
def test_archive_without_published_checksum_must_be_intact(tmp_path: Path, behavior: str) -> None:
    """As affNIST's: an HTML page or half an archive is never kept, and the next mirror is tried."""
    archive = writers.write_zip(tmp_path / "made.zip", {"a.mat": DATA}).read_bytes()
    with serve({"data.zip": archive}) as server:
        bad, good = f"{server.url}/{behavior}/data.zip", f"{server.url}/good/data.zip"
        with pytest.raises(MissingDataError, match=r"127\.0\.0\.1|localhost"):
            download_file("data.zip", [bad], "", tmp_path / "new")
        with pytest.warns(UserWarning, match=r"data\.zip.* [0-9a-f]{64}"):
            assert download_file("data.zip", [bad, good], "", tmp_path / "new").read_bytes() == archive
    record = (tmp_path / "new/data.zip.sha256").read_text()
    assert record == f"{hashlib.sha256(archive).hexdigest()}  data.zip\n"


def test_archive_that_has_changed_since_its_download(tmp_path: Path) -> None:
    path = writers.write_zip(tmp_path / "affnist/test_batches.zip", {"other.txt": b"x"})
    record = path.with_name("test_batches.zip.sha256")
    record.write_text(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  test_batches.zip\n")
    assert "test_batches/1.mat" in data_error("affnist", tmp_path)
    writers.write_zip(path, {"other.txt": b"y"})
    message = data_error("affnist", tmp_path)
    for part in (str(path), record.name):
        assert part in message


@pytest.mark.parametrize("behavior", ["good", "endless"])
def test_download_ends_when_it_is_too_large(tmp_path: Path, server: Server, behavior: str) -> None:
    """Whether the server announces the size or not."""
    with pytest.raises(MissingDataError, match="200,000"):
        download_file("data.bin", [f"{server.url}/{behavior}/data.bin"], CHECKSUM, tmp_path / "new", 200_000)
    assert os.listdir(tmp_path) == []


def test_https_is_tried_first_and_http_only_with_a_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    mirrors = ("http://a.org/", "https://b.org/", "http://c.org/", "https://d.org/")
    directory = DataDirectory("mine", Path("data"), ("mine",))
    expected = ["https://b.org/x", "https://d.org/x", "http://a.org/x", "http://c.org/x"]
    assert directory._urls(RemoteFile("x", "md5:1", mirrors)) == expected
    assert directory._urls(RemoteFile("x", "", mirrors)) == expected[:2]
    monkeypatch.setenv("TORCHCAPS_MIRROR", "http://mine.org")
    assert directory._urls(RemoteFile("x", "md5:1", mirrors)) == ["http://mine.org/mine/x", *expected]


def test_every_file_has_an_https_mirror() -> None:
    for name in list_datasets():
        spec = find_spec(name)
        for split in spec.splits if spec.subdirectories else ():
            for files in spec.alternative_files(split):
                for file in files:
                    remote = file if isinstance(file, RemoteFile) else file.archive
                    assert any(mirror.startswith("https://") for mirror in remote.mirrors), f"{name}: {remote.name}"


# Data directory ---------------------------------------------------------------------------------------------


@pytest.fixture
def tiny_mnist(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """MNIST's four files with few images, on a first mirror that fails and a second one that works."""
    files, checksums = {}, {}
    for name in MNIST.checksums:
        count = 6 if name.startswith("train") else 4
        array = random_bytes(count, 28, 28) if "images" in name else random_bytes(count, high=10)
        files[name] = writers.gzip.compress(writers.idx(array), mtime=0)
        checksums[name] = (hashlib.md5(files[name], usedforsecurity=False).hexdigest(), len(files[name]))
    with serve(files) as server:
        monkeypatch.setattr(MNIST, "checksums", checksums)
        monkeypatch.setattr(MNIST, "mirrors", (f"{server.url}/500/", f"{server.url}/good/"))
        yield server


def test_get_downloads_each_file_once_and_check_verifies_them(
    tmp_path: Path, tiny_mnist: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["data", "get", "mnist", "--data-dir", str(tmp_path)])
    assert tiny_mnist.requests.count("good") == 4
    assert str(tmp_path / "mnist") in capsys.readouterr().out
    main(["data", "get", "multimnist", "--data-dir", str(tmp_path)])
    assert tiny_mnist.requests.count("good") == 4  # nothing again
    assert len(create_dataset("mnist", "test", tmp_path, download=False)) == 4
    with pytest.raises(SystemExit) as stop:
        main(["data", "check", "mnist", "--data-dir", str(tmp_path)])
    assert stop.value.code == 2
    printed = capsys.readouterr()
    assert "6 images, expected 60,000" in printed.err
    assert printed.out.count(" ok ") == 4


def test_file_with_another_checksum_is_reported(
    tmp_path: Path, tiny_mnist: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MNIST, "split_sizes", {"train": 6, "test": 4})
    create_dataset("mnist", "test", tmp_path)  # no warning
    path = tmp_path / "mnist/t10k-labels-idx1-ubyte.gz"
    writers.put(path, writers.idx(np.array([1, 2, 3, 4], np.uint8)), compressed=True)
    with pytest.warns(UserWarning, match=rf"{path} .*data check mnist"):
        create_dataset("mnist", "test", tmp_path)


def test_custom_mirror_is_tried_first(tmp_path: Path, tiny_mnist: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    (name,) = [name for name in MNIST.checksums if name.startswith("t10k-labels")]
    with serve({f"mnist/{name}": b"another file"}) as custom:
        monkeypatch.setenv("TORCHCAPS_MIRROR", f"{custom.url}/good/")
        create_dataset("mnist", "test", tmp_path)
    assert custom.requests == ["good", "good"]  # it has wrong content for one file and nothing for the other
    assert tiny_mnist.requests.count("good") == 2


def test_custom_mirror_must_be_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHCAPS_MIRROR", "example.org")
    with pytest.raises(DataError, match=r"TORCHCAPS_MIRROR .* 'example\.org'"):
        create_dataset("mnist", "test", tmp_path)


def test_get_accepts_files_in_another_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writers.put(tmp_path / "cifar-10-batches-bin/test_batch.bin", bytes(3073))
    main(["data", "get", "cifar10", "--split", "test", "--data-dir", str(tmp_path)])
    assert str(tmp_path / "cifar-10-batches-bin") in capsys.readouterr().out


def test_create_dataset_downloads_missing_files_unless_told_not_to(tmp_path: Path, tiny_mnist: Server) -> None:
    with pytest.raises(MissingDataError, match="torchcaps data get mnist"):
        create_dataset("mnist", "train", tmp_path, download=False)
    assert tiny_mnist.requests == []
    assert len(create_dataset("mnist", "train", tmp_path)) == 6
    assert sorted(os.listdir(tmp_path / "mnist")) == ["train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"]


def test_offline_error_names_file_hosts_and_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(MNIST, "mirrors", ("http://127.0.0.1:9/", "http://nowhere.invalid/"))
    with pytest.raises(SystemExit) as stop:
        main(["data", "sample", "mnist", "--data-dir", str(tmp_path), "--out", str(tmp_path / "x.png")])
    assert stop.value.code == ExitCode.FAILURE
    message = capsys.readouterr().err.splitlines()[-1]
    for part in ("train-images-idx3-ubyte.gz", "127.0.0.1:9", "nowhere.invalid", str(tmp_path / "mnist"), "'digits'"):
        assert part in message
    assert os.listdir(tmp_path) == []
    with pytest.raises(MissingDataError):
        create_dataset("mnist", "test", tmp_path / "some/where/new")
    assert os.listdir(tmp_path) == []


def test_directory_in_place_of_a_file_counts_as_missing(tmp_path: Path) -> None:
    (tmp_path / "mnist/t10k-images-idx3-ubyte.gz").mkdir(parents=True)
    assert "t10k-images-idx3-ubyte.gz" in data_error("mnist", tmp_path, kind=MissingDataError)
