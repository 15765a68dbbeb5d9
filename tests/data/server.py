"""A real HTTP server on loopback that misbehaves as it is asked to."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Misbehaving(BaseHTTPRequestHandler):
    """``/MANNER/name`` serves ``files[name]`` in that manner."""

    files: dict[str, bytes]
    requests: list[str]

    def do_GET(self) -> None:
        _, manner, name = self.path.split("/", 2)
        self.requests.append(manner)
        data = self.files.get(name)
        if manner == "404" or data is None:
            self.send_error(404)
        elif manner == "500":
            self.send_error(500)
        else:
            getattr(self, manner)(data)

    def start(self, length: int | None) -> None:
        self.send_response(200)
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def good(self, data: bytes) -> None:
        self.start(len(data))
        self.wfile.write(data)

    def slow(self, data: bytes) -> None:
        self.start(len(data))
        for place in range(0, len(data), max(1, len(data) // 20)):
            self.wfile.write(data[place : place + max(1, len(data) // 20)])
            self.wfile.flush()
            time.sleep(0.05)

    def stalls(self, data: bytes) -> None:
        self.start(len(data))
        self.wfile.write(data[: len(data) // 2])
        self.wfile.flush()
        time.sleep(3)

    def truncates(self, data: bytes) -> None:
        self.start(len(data))
        self.wfile.write(data[: len(data) // 2])

    def truncates_silently(self, data: bytes) -> None:
        """No length was promised, so nothing in HTTP tells that half is missing."""
        self.start(None)
        self.wfile.write(data[: len(data) // 2])

    def wrong(self, data: bytes) -> None:
        self.good(bytes(len(data)))

    def dies(self, data: bytes) -> None:
        self.start(len(data))
        self.wfile.write(data[: len(data) // 2])
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        self.connection.close()  # with a reset in place of an end

    def log_message(self, *_: Any) -> None:
        """Quietly."""


@contextmanager
def serving(files: dict[str, bytes]) -> Iterator[tuple[str, list[str]]]:
    """Serve files; give the address and the list of manners that were asked for."""
    handler = type("Handler", (Misbehaving,), {"files": files, "requests": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", handler.requests
    finally:
        server.shutdown()
        server.server_close()
