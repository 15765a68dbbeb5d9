"""HTTP server on loopback that fails in the way that the requested path names."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WAIT_S = 240  # upper bound for waiting on another thread or process; no result depends on it


@dataclass
class Server:
    """A running server.

    Attributes:
        url: address; ``{url}/BEHAVIOR/name`` serves the file ``name`` with that behavior.
        requests: behaviors that were requested, in order.
        half_sent: set after the behavior ``stall`` has sent half of a file.
        closing: set when the server shuts down; ``stall`` waits for it.
        barrier: ``together`` answers only after two requests have arrived.
    """

    files: dict[str, bytes]
    url: str = ""
    requests: list[str] = field(default_factory=list)
    half_sent: threading.Event = field(default_factory=threading.Event)
    closing: threading.Event = field(default_factory=threading.Event)
    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(2))


class Handler(BaseHTTPRequestHandler):
    owner: Server

    def do_GET(self) -> None:
        _, behavior, name = self.path.split("/", 2)
        self.owner.requests.append(behavior)
        data = self.owner.files.get(name)
        if behavior == "404" or data is None:
            self.send_error(404)
        elif behavior == "500":
            self.send_error(500)
        else:
            getattr(self, behavior)(data)

    def start(self, length: int | None) -> None:
        self.send_response(200)
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def send_half(self, data: bytes) -> None:
        self.start(len(data))
        self.wfile.write(data[: len(data) // 2])
        self.wfile.flush()

    def good(self, data: bytes) -> None:
        self.start(len(data))
        self.wfile.write(data)

    def chunks(self, data: bytes) -> None:
        self.start(len(data))
        size = max(1, len(data) // 20)
        for start in range(0, len(data), size):
            self.wfile.write(data[start : start + size])
            self.wfile.flush()

    def together(self, data: bytes) -> None:
        self.owner.barrier.wait(WAIT_S)
        self.good(data)

    def stall(self, data: bytes) -> None:
        self.send_half(data)
        self.owner.half_sent.set()
        self.owner.closing.wait(WAIT_S)

    def truncate(self, data: bytes) -> None:
        self.send_half(data)

    def truncate_without_length(self, data: bytes) -> None:
        """No Content-Length, so that nothing in HTTP shows that half is missing."""
        self.start(None)
        self.wfile.write(data[: len(data) // 2])

    def endless(self, data: bytes) -> None:
        """Send until the client closes the connection."""
        self.start(None)
        while True:
            self.wfile.write(data)

    def wrong_content(self, data: bytes) -> None:
        self.good(bytes(len(data)))

    def reset(self, data: bytes) -> None:
        """Reset the connection after half of the file."""
        self.send_half(data)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        self.connection.close()

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


@contextmanager
def serve(files: dict[str, bytes]) -> Iterator[Server]:
    """Serve files until the context is left."""
    owner = Server(files)
    handler = type("BoundHandler", (Handler,), {"owner": owner})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.block_on_close = False
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    owner.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield owner
    finally:
        owner.closing.set()
        server.shutdown()
        server.server_close()
