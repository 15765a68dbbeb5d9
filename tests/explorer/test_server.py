"""The command ``torchcaps explore``: ports, Ctrl-C, invalid usage; and the files of the page."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest

import torchcaps
from tests.cli.commands import usage_error
from tests.explorer.helpers import small_run
from tests.explorer.live import SERVER_THREAD, running
from tests.test_structure import MAX_LINES
from torchcaps.explorer import ExploredRun, load_pretrained_run, server
from torchcaps.explorer.app import PAGE
from torchcaps.explorer.export import _explore_command
from torchcaps.explorer.server import bind_socket
from torchcaps.models import pretrained
from torchcaps.training import RunSpec
from torchcaps.training.run import train

SMALL = {"width": 4, "types": 2, "primary_dim": 4, "dim": 4, "hidden": (8,)}


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = RunSpec.of("capsnet_small", **SMALL, steps=1, max_train_images=40, max_test_images=10, num_threads=1)
    return train(spec, tmp_path_factory.mktemp("explore") / "run", figures=False).path


def test_a_port_in_use_is_replaced() -> None:
    first, is_requested = bind_socket("127.0.0.1", 0)
    assert is_requested
    port = first.getsockname()[1]
    second, is_requested = bind_socket("127.0.0.1", port)
    assert not is_requested
    assert second.getsockname()[1] != port
    first.close()
    second.close()
    with pytest.raises(ValueError, match="can't be bound"):
        bind_socket("203.0.113.1", 0)


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n", b"{info}GET /api"])
def test_connections_without_a_complete_head_are_closed(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    """Clients that connect and send nothing, or part of a request, also after a complete one: the others are served."""
    monkeypatch.setattr(server, "HEAD_TIMEOUT_S", 0.05)
    info = b"GET /api/info HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with running([small_run()], statistics=False) as address:
        port = int(address.rpartition(":")[2])
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(server.MAX_CONNECTIONS + 6)]
        for client in clients:
            client.settimeout(120)
            client.sendall(sent.replace(b"{info}", info))
        for client in clients:
            with contextlib.suppress(ConnectionResetError):
                while client.recv(65536):
                    pass
            client.close()
        with urllib.request.urlopen(f"{address}/api/info", timeout=60) as reply:
            assert reply.status == 200


LIST = b"GET /api/samples?limit=100 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
N_LISTS = 200  # more than the buffers of the connection can hold


def unread_client(port: int) -> socket.socket:
    """Return a client that sends many requests and does not read their responses."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(0.2)
    client.connect(("127.0.0.1", port))
    with contextlib.suppress(TimeoutError):
        client.sendall(N_LISTS * LIST)
    return client


def test_a_client_that_reads_no_response_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would hold a place of a request for ever."""
    monkeypatch.setattr(server, "READ_TIMEOUT_S", 0.2)
    with running([small_run(max_images=100)], statistics=False) as address:
        client = unread_client(int(address.rpartition(":")[2]))
        time.sleep(3)
        client.settimeout(60)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while part := client.recv(1 << 20):
                received += part
        client.close()
    assert received.count(b"HTTP/1.1 200 OK") < N_LISTS


def test_the_server_stops_while_a_client_reads_no_response(capfd: pytest.CaptureFixture[str]) -> None:
    with running([small_run(max_images=100)], statistics=False) as address:
        client = unread_client(int(address.rpartition(":")[2]))
        time.sleep(0.5)
    names = [thread.name for thread in threading.enumerate()]
    client.close()
    assert SERVER_THREAD not in names
    assert "Traceback" not in capfd.readouterr().err


def test_ctrl_c_ends_the_server_cleanly(run_directory: Path) -> None:
    busy = socket.socket()
    busy.bind(("127.0.0.1", 0))
    busy.listen()
    command = [sys.executable, "-m", "torchcaps", "explore", str(run_directory), "--browser", "false"]
    command += ["--port", str(busy.getsockname()[1])]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        url = re.search(r"http://127\.0\.0\.1:\d+/", line)
        assert url is not None, line + process.communicate()[1]
        with urllib.request.urlopen(url[0], timeout=60) as page:
            assert b"torchcaps explorer" in page.read()
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
        busy.close()
    assert process.returncode == 0
    assert "Traceback" not in stderr
    assert "is in use" in stderr


def test_invalid_usage_is_one_sentence(run_directory: Path, tmp_path: Path) -> None:
    assert "at most 2" in usage_error("explore", "a", "b", "c")
    assert "--port" in usage_error("explore", str(run_directory), "--port", "70000")
    assert "not a run directory" in usage_error("explore", str(tmp_path))
    unwritable = usage_error("explore", str(run_directory), "--export", "/dev/null/page.html")
    assert "/dev/null/page.html" in unwritable


def test_without_a_run_the_pretrained_network_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained, "DIRECTORY", tmp_path)
    assert load_pretrained_run() is None
    assert "torchcaps train" in usage_error("explore")
    model = torchcaps.create_model("capsnet_small")
    pretrained.save_pretrained(model, "card", tmp_path)
    run = load_pretrained_run()
    assert run is not None
    assert (run.model.name, run.classes) == ("capsnet_small", tuple("0123456789"))
    explored = ExploredRun(run, "pretrained")
    assert explored.n_samples == 1000
    assert "decoder" not in explored.missing_parts()
    assert _explore_command([explored.describe()]) == "torchcaps explore"
    assert _explore_command([{"name": "a", "weights": "last"}, {"name": "b", "weights": "best"}]).endswith(" a b")


def test_files_of_the_page_are_short_and_load_nothing_from_elsewhere() -> None:
    for entry in PAGE.iterdir():
        text = entry.read_text(encoding="utf-8")
        assert text.count("\n") <= MAX_LINES, entry.name
        foreign = [url for url in re.findall(r"https?://[^\s\"'`)]+", text) if "www.w3.org" not in url]
        assert foreign == [], entry.name
        for name in re.findall(r'from "\./([^"]+)"', text):
            assert (PAGE / name).is_file(), f"{entry.name} imports {name}"


def luminance(color: str) -> float:
    channels = [int(color[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_have_contrast(theme: str) -> None:
    """WCAG: 4.5 for text, 3 for lines and controls."""
    style = (PAGE / "style.css").read_text(encoding="utf-8")
    block = re.search(rf':root\[data-theme="{theme}"\] {{(.*?)}}', style, re.DOTALL)
    assert block is not None
    colors = dict(re.findall(r"--([\w-]+): (#\w{6});", block[1]))

    def contrast(first: str, second: str) -> float:
        values = sorted((luminance(colors[first]), luminance(colors[second])), reverse=True)
        return (values[0] + 0.05) / (values[1] + 0.05)

    for name in ("ink", "soft", "accent"):
        assert contrast(name, "panel") >= 4.5, name
        assert contrast(name, "page") >= 4.5, name
    for name in ("c0", "c1", "c2", "c3", "c4", "focus"):
        assert contrast(name, "panel") >= 3, name
