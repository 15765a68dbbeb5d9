"""Protection of the local server: Host and Origin checks, security headers, limits of size and concurrency."""

import asyncio
import ipaddress
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

__all__ = ["CONTENT_SECURITY_POLICY", "MAX_BODY_BYTES", "MAX_CONCURRENT_REQUESTS", "Guard"]

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_BODY_BYTES = 5 * 2**20
MAX_CONCURRENT_REQUESTS = 16  # of the API; several tabs may load at once
BODY_TIMEOUT_S = 2.5  # without a byte of the body; shorter than the server waits when it stops
TOO_LARGE = f"the body must have at most {MAX_BODY_BYTES // 2**20} MB"
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = (
    (b"content-security-policy", CONTENT_SECURITY_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)


class Guard:
    """ASGI middleware in front of the explorer.

    A page of another site must not read or steer the explorer. Its requests carry its own Origin, and a name that it
    points at 127.0.0.1 (DNS rebinding) appears as Host; both are rejected. No CORS header is ever sent.

    Args:
        app: the application.
        host: address that the server is bound to. A loopback address accepts loopback names only; any other address
            also accepts IP addresses and this name.
    """

    def __init__(self, app: App, host: str = "127.0.0.1") -> None:
        self.app, self.host = app, host
        self.n_requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request and pass it on."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # no web sockets
            await send({"type": "websocket.close", "code": 1008})
            return
        has_started = False

        async def noting_send(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self._answer(scope, receive, noting_send)
        except asyncio.CancelledError:  # the server stops and does not wait any longer
            if not has_started:  # a request has one response
                await _reject(send, 503, "the server is stopping")

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request, read its body and pass it on; reject an invalid one, or one of too many at once."""
        problem = self._check(scope)
        if problem is not None:
            await _reject(send, *problem)
            return
        try:
            body = await _read_body(receive)
        except TimeoutError:
            await _reject(send, 408, f"the body stopped for {BODY_TIMEOUT_S:g} seconds")
            return
        if body is None:
            return
        if len(body) > MAX_BODY_BYTES:
            await _reject(send, 413, TOO_LARGE)
            return
        if not scope.get("path", "").startswith("/api/"):  # files in memory: nothing to limit
            await self._forward(scope, body, receive, send)
            return
        if self.n_requests >= MAX_CONCURRENT_REQUESTS:  # a client that is slow to send holds no place
            await _reject(send, 503, f"more than {MAX_CONCURRENT_REQUESTS} requests at once: try again in a moment")
            return
        self.n_requests += 1
        try:
            await self._forward(scope, body, receive, send)
        finally:
            self.n_requests -= 1

    def _check(self, scope: Scope) -> tuple[int, str] | None:
        """Return status and sentence for a request that is rejected, otherwise ``None``."""
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.lower(), []).append(value)
        hosts = headers.get(b"host", [])
        host = hosts[0].decode("latin-1") if len(hosts) == 1 else ""
        if not self._accepts_host(host):
            return 421, "the Host header must be the address of this server, such as 127.0.0.1"
        for origin in headers.get(b"origin", []):
            if origin.decode("latin-1") != f"http://{host}":
                return 403, "requests of other sites are rejected: the Origin header must be this server's address"
        if headers.get(b"sec-fetch-site", [b"none"])[0] not in (b"same-origin", b"none"):
            return 403, "requests of other sites are rejected"
        lengths = headers.get(b"content-length", [])
        if any(not length.isdigit() for length in lengths):
            return 400, "the Content-Length header must be a number"
        if any(len(length) > 9 or int(length) > MAX_BODY_BYTES for length in lengths):
            return 413, TOO_LARGE
        kind = headers.get(b"content-type", [b""])[0].partition(b";")[0].strip().lower()
        path = scope.get("path", "")
        takes_json = scope.get("method") == "POST" and path.startswith("/api/") and path != "/api/upload"
        if takes_json and kind != b"application/json":
            return 415, "the Content-Type must be application/json"
        return None

    def _accepts_host(self, host: str) -> bool:
        """Return whether a Host header is loopback, ``self.host``, or any IP address if that is not loopback."""
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        name = name.removeprefix("[").removesuffix("]").lower()
        if name == "localhost":
            return True
        is_local = _is_loopback(self.host) or self.host == "localhost"
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return name != "" and name == self.host.lower()
        return address.is_loopback or not is_local

    async def _forward(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Pass a request with its body on, with security headers on its response."""
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        async def guarded_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *HEADERS]
            await send(message)

        await self.app(scope, replay, guarded_send)


async def _read_body(receive: Receive) -> bytes | None:
    """Return the body, cut after the limit; ``None`` if the client is gone. Raise a TimeoutError if it stalls."""
    body = bytearray()
    while len(body) <= MAX_BODY_BYTES:
        message = await asyncio.wait_for(receive(), BODY_TIMEOUT_S)
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if not message.get("more_body", False):
            break
    return bytes(body)


def _is_loopback(host: str) -> bool:
    """Return whether a host is a loopback IP address; false for names."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def _reject(send: Send, status: int, sentence: str) -> None:
    """Send an error as JSON."""
    body = json.dumps({"error": sentence}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *HEADERS]
    if status == 503:
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
