"""Run the explorer's server: a free port, a limit of time for requests, a clean end on Ctrl-C."""

import asyncio
import contextlib
import socket
import sys
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from torchcaps._core.files import reason_of
from torchcaps.explorer.app import create_app
from torchcaps.explorer.session import ExploredRun

__all__ = ["bind_socket", "create_server", "serve"]

MAX_CONNECTIONS = 64
SHUTDOWN_TIMEOUT_S = 3
HEAD_TIMEOUT_S = 10.0  # for the request line and the headers
READ_TIMEOUT_S = 2.5  # of a client that reads nothing of its response; shorter than `SHUTDOWN_TIMEOUT_S`


class _Protocol(H11Protocol):
    """HTTP/1.1 that closes connections without a complete head, and those whose client does not read its responses.

    Otherwise they would hold all `MAX_CONNECTIONS`, and the latter the server itself: a request that can't be answered
    never ends.
    """

    _timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    @property
    def _awaits_head(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        """Stop the timer if the head of a request is complete, otherwise start it if it does not run."""
        super().data_received(data)
        if not self._awaits_head:
            self._stop_timer()
        elif self._timer is None:
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_write_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_write_timer()

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()

    def shutdown(self) -> None:
        super().shutdown()
        self.loop.call_later(READ_TIMEOUT_S, self._abort_unread)

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(HEAD_TIMEOUT_S, self._close_if_waiting)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close_if_waiting(self) -> None:
        self._timer = None
        if self._awaits_head:
            self.transport.close()

    def _start_write_timer(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self._write_timer = self.loop.call_later(READ_TIMEOUT_S, self._abort_if_stalled, unread)

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _abort_if_stalled(self, unread: int) -> None:
        """Close the connection if the client has read nothing since ``unread`` bytes were left."""
        self._write_timer = None
        if self.transport.get_write_buffer_size() < unread:
            self._start_write_timer()
        else:
            self.transport.abort()

    def _abort_unread(self) -> None:
        """Close the connection of a stopping server if the client has not read its responses."""
        if self.flow.write_paused or self.transport.is_closing():
            self.transport.abort()


def bind_socket(host: str, port: int) -> tuple[socket.socket, bool]:
    """Return a listening socket and whether it has the requested port; if that is in use, a free one is taken.

    Raises a ValueError if the address can't be bound at all.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for candidate in (port, 0):
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, candidate))
            listener.listen(128)
            return listener, candidate == port
        except OSError as error:
            listener.close()
            if candidate == 0 or isinstance(error, socket.gaierror):
                raise ValueError(f"--host {host} can't be bound: {reason_of(error)}") from error
        except OverflowError as error:
            listener.close()
            raise ValueError(f"--port must be in 0..65535, got {port}") from error
    raise AssertionError("unreachable")


def create_server(app: Any) -> uvicorn.Server:
    """Return the server of an application, with its limits; `uvicorn.Server.run` takes the listening socket."""
    config = uvicorn.Config(
        app,
        http=_Protocol,
        ws="none",
        log_level="error",  # a hostile client causes warnings
        access_log=False,
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
    )
    return uvicorn.Server(config)


def serve(
    runs: list[ExploredRun],
    host: str = "127.0.0.1",
    port: int = 8250,
    on_start: Callable[[str], object] | None = None,
) -> None:
    """Serve the page until Ctrl-C or SIGTERM.

    Args:
        runs: one or two runs.
        host: address to bind to. Only 127.0.0.1 is private: the server has no password.
        port: port; if it is in use, another one is taken and this is printed.
        on_start: called with the address of the page once the server listens.

    >>> import signal, threading
    >>> from http.client import HTTPConnection
    >>> from torchcaps.explorer import load_pretrained_run
    >>> run = ExploredRun(load_pretrained_run(), "pretrained", max_images=20)
    >>> def visit(url):
    ...     with contextlib.closing(HTTPConnection(url.split("/")[2])) as connection:
    ...         connection.request("GET", "/")
    ...         print(connection.getresponse().status)
    ...     signal.raise_signal(signal.SIGINT)  # Ctrl-C
    >>> serve([run], on_start=lambda url: threading.Thread(target=visit, args=[url]).start())
    200
    """
    listener, is_requested = bind_socket(host, port)
    actual = listener.getsockname()[1]
    if not is_requested:
        print(f"torchcaps: port {port} is in use; using {actual}", file=sys.stderr)
    name = f"[{host}]" if ":" in host else host
    url = f"http://{name}:{actual}/"
    server = create_server(create_app(runs, host))
    if on_start is not None:
        on_start(url)
    with contextlib.closing(listener), contextlib.suppress(KeyboardInterrupt):  # uvicorn raises it again after closing
        server.run(sockets=[listener])
