"""Protection of the server: foreign sites, hostile requests, limits."""

import asyncio
from typing import Any

import pytest

from tests.explorer.helpers import SAMPLE, post, request, small_run
from torchcaps.explorer import create_app, security
from torchcaps.explorer.security import MAX_BODY_BYTES, MAX_CONCURRENT_REQUESTS, Guard


@pytest.fixture(scope="module")
def app() -> Any:
    return create_app([small_run()], statistics=False)


@pytest.mark.parametrize("host", ["127.0.0.1:8250", "localhost:9", "[::1]:8250", "127.0.0.1"])
def test_local_names_are_accepted(app: Any, host: str) -> None:
    assert request(app, "GET", "/", headers={"host": host}).status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8250", "127.0.0.1.evil.example", "192.168.0.7", "", "::"]
)
def test_other_names_are_rejected(app: Any, host: str) -> None:
    """A foreign name that points at this machine: DNS rebinding."""
    reply = request(app, "GET", "/api/info", headers={"host": host})
    assert reply.status == 421
    assert "Host" in reply.json()["error"]


def test_a_public_address_accepts_ip_addresses_and_its_own_name() -> None:
    guard = Guard(None, "0.0.0.0")  # type: ignore[arg-type]
    assert guard._accepts_host("192.168.0.7:8250")
    assert not guard._accepts_host("evil.example")
    assert Guard(None, "my-machine")._accepts_host("my-machine:8250")  # type: ignore[arg-type]


def test_foreign_origins_are_rejected_and_no_cors_header_is_sent(app: Any) -> None:
    own = request(app, "GET", "/api/info", headers={"origin": "http://127.0.0.1:8250"})
    assert own.status == 200
    foreign = ["https://evil.example", "null", "http://127.0.0.1:9999", "https://127.0.0.1:8250"]
    for headers in [{"origin": origin} for origin in foreign] + [{"sec-fetch-site": "cross-site"}]:
        assert request(app, "POST", "/api/forward", {"image": SAMPLE}, headers).status == 403
    preflight = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    for reply in (own, request(app, "OPTIONS", "/api/forward", headers=preflight)):
        assert not [name for name in reply.headers if name.startswith("access-control")]


def test_responses_have_security_headers(app: Any) -> None:
    for path in ("/", "/api/info", "/static/main.js", "/nothing"):
        headers = request(app, "GET", path).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "path",
    ["/static/../app.py", "/static/..%2fapp.py", "/static/%2e%2e/app.py", "/static//etc/passwd", "/static/", "/app.py"],
)
def test_only_files_of_the_page_are_served(app: Any, path: str) -> None:
    assert request(app, "GET", path).status == 404


def test_large_bodies_are_rejected_by_header_and_by_content(app: Any) -> None:
    too_large = str(MAX_BODY_BYTES + 1)
    assert request(app, "POST", "/api/upload", b"", {"content-length": too_large}).status == 413
    assert request(app, "POST", "/api/upload", b"", {"content-length": "9" * 40}).status == 413
    assert request(app, "POST", "/api/upload", b"", {"content-length": "-1"}).status == 400
    body = b"x" * (MAX_BODY_BYTES + 1)
    for path, kind in (("/api/upload", "image/png"), ("/api/forward", "application/json")):
        assert request(app, "POST", path, body, {"content-type": kind}).status == 413


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[" * 100_000, b"null", b"NaN", b'{"image": {"source": {"sample": 1e999}}}', b"\xff\xfe", b"1" * 5000],
)
def test_broken_json_is_one_sentence(app: Any, body: bytes) -> None:
    reply = request(app, "POST", "/api/forward", body)
    assert reply.status in (400, 422)
    assert "body" in reply.json()["error"] or "sample" in reply.json()["error"]


def test_only_json_is_accepted(app: Any) -> None:
    """A form of another site can send text/plain without a preflight request."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        assert request(app, "POST", "/api/forward", {"image": SAMPLE}, {"content-type": kind}).status == 415
    charset = {"content-type": "Application/JSON; charset=utf-8"}
    assert request(app, "POST", "/api/forward", {"image": SAMPLE}, charset).status == 200


@pytest.mark.parametrize(
    "image",
    [
        {"source": {}},
        {"source": {"sample": 0, "pixels": "AAAA"}},
        {"source": {"sample": 100_000}},
        {"source": {"sample": -1}},
        {"source": {"sample": True}},
        {"source": {"pixels": "AAAA"}},
        {"source": {"pixels": "not base64"}},
        {**SAMPLE, "placement": {"rotation": float("nan")}},
        {**SAMPLE, "placement": {"scale": 0.0}},
        {**SAMPLE, "attack": {"method": "other"}},
        {**SAMPLE, "unknown": 1},
    ],
)
def test_invalid_images_are_rejected(app: Any, image: dict[str, Any]) -> None:
    reply = request(app, "POST", "/api/forward", {"image": image})
    assert reply.status in (400, 422)
    assert "\n" not in reply.json()["error"]
    assert post(app, "/api/forward", {"image": SAMPLE})["scores"]  # the server still computes


def test_requests_beyond_the_limit_get_503() -> None:
    entered, release = 0, asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        nonlocal entered
        entered += 1
        await release.wait()

    async def scenario() -> list[int]:
        guard, statuses = Guard(slow), []
        scope = {"type": "http", "path": "/api/info", "headers": [(b"host", b"localhost")]}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        async def receive() -> Any:
            return {"type": "http.request"}

        waiting = [asyncio.create_task(guard(scope, receive, send)) for _ in range(MAX_CONCURRENT_REQUESTS)]
        await asyncio.sleep(0)
        await guard(scope, receive, send)
        release.set()
        await asyncio.gather(*waiting)
        await guard(scope, receive, send)
        return statuses

    assert asyncio.run(scenario()) == [503]
    assert entered == MAX_CONCURRENT_REQUESTS + 1


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_stalled_body_holds_no_place_and_ends(monkeypatch: pytest.MonkeyPatch, is_cancelled: bool) -> None:
    """Clients that announce a body and do not send it: the others are served, also while the server stops."""
    monkeypatch.setattr(security, "BODY_TIMEOUT_S", 1000 if is_cancelled else 0.001)
    statuses: list[int] = []

    async def stalled() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    async def scenario() -> int:
        guard = Guard(None)  # type: ignore[arg-type]
        scope = {"type": "http", "path": "/api/info", "headers": [(b"host", b"localhost")]}
        tasks = [asyncio.create_task(guard(scope, stalled, send)) for _ in range(MAX_CONCURRENT_REQUESTS)]
        await asyncio.sleep(0)
        n_requests = guard.n_requests
        if is_cancelled:  # by uvicorn, once its graceful shutdown takes too long
            for task in tasks:
                task.cancel()
        await asyncio.gather(*tasks)
        return n_requests

    assert asyncio.run(scenario()) == 0
    assert statuses == [503 if is_cancelled else 408] * MAX_CONCURRENT_REQUESTS


def test_a_cancelled_request_has_one_response() -> None:
    """A request that the server cancels while its response is being sent gets no second one."""
    sent: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.Event().wait()

    async def receive() -> Any:
        return {"type": "http.request"}

    async def send(message: Any) -> None:
        sent.append(message["type"])

    async def scenario() -> None:
        scope = {"type": "http", "path": "/api/info", "headers": [(b"host", b"localhost")]}
        task = asyncio.create_task(Guard(app)(scope, receive, send))
        while not sent:
            await asyncio.sleep(0)
        task.cancel()
        await task

    asyncio.run(scenario())
    assert sent == ["http.response.start"]


def test_web_sockets_are_closed() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message["type"])

    asyncio.run(Guard(None)({"type": "websocket"}, None, send))  # type: ignore[arg-type]
    assert sent == ["websocket.close"]
