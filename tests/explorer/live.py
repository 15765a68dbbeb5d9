"""A running server and a browser, for tests of the page."""

import contextlib
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from torchcaps.explorer import ExploredRun, create_app
from torchcaps.explorer.server import create_server

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NO_BROWSER = "no browser: install one with 'apt-get install chromium' to test the explorer's page"
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


SERVER_THREAD = "explorer-server"


@contextlib.contextmanager
def running(runs: list[ExploredRun], statistics: bool = True) -> Iterator[str]:
    """Serve runs on a free port in a thread; yield the address."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    server = create_server(create_app(runs, statistics=statistics))
    thread = threading.Thread(target=lambda: server.run(sockets=[listener]), name=SERVER_THREAD, daemon=True)
    thread.start()
    try:
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=30)
        listener.close()


@contextlib.contextmanager
def launched() -> Iterator[Any]:
    """Start the browser; skip the tests if there is none."""
    if CHROMIUM is None:
        pytest.skip(NO_BROWSER)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()


class Visit:
    """A page that must not report errors."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.page = browser.new_page(viewport={"width": 1280, "height": 900}, **options)
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda m: self.problems.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(url)
        self.wait("window.explorer?.version > 0")
        self.settle()

    def __enter__(self) -> "Visit":
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self.page.close()
        assert kind is not None or self.problems == [], self.problems

    def settle(self) -> None:
        """Wait until nothing is being computed or drawn."""
        idle = "!explorer.computing && Object.values(explorer.panels).every((panel) => !panel.busy)"
        before = -1
        while (now := self.page.evaluate("explorer.version")) != before:
            before = now
            self.page.wait_for_timeout(120)
            self.wait(idle)

    def wait(self, condition: str) -> None:
        """Wait until an expression is true; Playwright's own way needs eval, which the page's policy forbids."""
        for _ in range(6000):
            if self.page.evaluate(condition):
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"{condition} did not become true; {self.problems}")

    def value(self, script: str) -> Any:
        return self.page.evaluate(script)

    def scores(self, pane: int = 0) -> dict[int, float]:
        """Return the numbers of the bars."""
        script = (
            "(pane) => [...document.querySelectorAll('#panel-classes .pane')[pane].querySelectorAll('.bar')]"
            ".map((bar) => [Number(bar.dataset.class), Number(bar.dataset.value)])"
        )
        return dict(self.page.evaluate(script, pane))

    def drag(self, id: str, value: float) -> None:
        """Move a slider."""
        self.page.evaluate(
            "([id, value]) => { const input = document.getElementById(id); input.value = value;"
            " input.dispatchEvent(new Event('input', { bubbles: true })); }",
            [id, value],
        )

    def draw(self, strokes: list[list[tuple[int, int]]]) -> None:
        """Draw with the mouse; points are in percent of the surface."""
        self.page.click("#tab-draw")
        box = self.page.locator("#canvas").bounding_box()
        for points in strokes:
            at = [(box["x"] + x * box["width"] / 100, box["y"] + y * box["height"] / 100) for x, y in points]
            self.page.mouse.move(*at[0])
            self.page.mouse.down()
            for point in at[1:]:
                self.page.mouse.move(*point, steps=4)
            self.page.mouse.up()
        self.settle()
