"""The page in a real browser: its numbers compared with the network's, and everything that a person can do."""

import base64
import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from tests.explorer.helpers import small_run
from tests.explorer.live import Visit, launched, running
from tests.sampling import sample
from torchcaps.analysis.common import capsule_layers
from torchcaps.explorer import ExploredRun, export_page
from torchcaps.routing.base import ROUTINGS

TOLERANCE = 1e-4
FIVE = [[(70, 25), (35, 25), (33, 48), (55, 45), (68, 58), (64, 75), (48, 80), (32, 73)]]


@pytest.fixture(scope="module")
def runs() -> list[ExploredRun]:
    return [small_run(name="dynamic"), small_run(name="em", routing="em")]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as browser:
        yield browser


@pytest.fixture(scope="module")
def address(browser: Any, runs: list[ExploredRun]) -> Iterator[str]:
    with running(runs[:1]) as address:
        yield address


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(
        torch.tensor(actual, dtype=torch.float64), expected.double(), atol=TOLERANCE, rtol=TOLERANCE
    )


def test_drawing_shows_the_values_of_the_network(browser: Any, address: str, runs: list[ExploredRun]) -> None:
    """Draw a 5, step through the iterations, move a slider of the decoder."""
    model = runs[0].model
    with Visit(browser, address) as visit:
        visit.draw(FIVE)
        pixels = base64.b64decode(visit.value("explorer.state.get().source.pixels"))
        image = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(1, 1, 28, 28) / 255
        assert 0.05 < float(image.mean()) < 0.3
        with torch.no_grad():
            output = model(image, trace=True)
        scores = visit.scores()
        close([scores[n] for n in range(10)], output.scores[0])
        # Couplings of every iteration.
        couplings = visit.value("explorer.panels.couplings.definition.data(explorer, 0).couplings")
        close(couplings, torch.stack([c[0] for c in output.trace[0].couplings]).flatten())
        cells = (
            "[...document.querySelectorAll('#panel-couplings [data-residual]')].map((c) => Number(c.dataset.residual))"
        )
        poses = [state.pose for state in output.trace[0].states]
        close(visit.value(cells), torch.stack([(b - a).norm() / b.norm() for a, b in pairwise(poses)]))
        current = "document.querySelector('#panel-couplings tr.current').dataset.iteration"
        assert visit.value(current) == "2"
        visit.page.keyboard.press(",")
        visit.settle()
        assert visit.value(current) == "1"
        # The decoder.
        target = int(output.scores.argmax())
        visit.drag("dim-1", 0.2)
        visit.settle()
        pose = output.capsules.pose.clone()
        pose[0, target, 1] += 0.2
        with torch.no_grad():
            decoded = model.decode(pose, torch.tensor([target]))
        close(visit.value("Array.from(explorer.decoded[0])"), decoded.flatten())


def test_samples_iterations_and_statistics(browser: Any, address: str, runs: list[ExploredRun]) -> None:
    with Visit(browser, address) as visit:
        visit.page.click("[data-sample='5']")
        visit.drag("iterations", 6)
        visit.settle()
        layer = next(iter(capsule_layers(runs[0].model).values()))
        original = layer.routing
        layer.routing = type(original)(6)
        with torch.no_grad():
            expected = runs[0].model(runs[0].sample([5])[0]).scores[0]
        layer.routing = original
        scores = visit.scores()
        close([scores[n] for n in range(10)], expected)
        assert visit.page.locator("#panel-couplings tbody tr").count() == 6
        visit.page.wait_for_selector("#panel-stats .cell")
        counts = visit.value("[...document.querySelectorAll('#panel-stats .cell')].map((c) => Number(c.dataset.count))")
        assert sum(counts) == runs[0].n_samples
        empty = "[...document.querySelectorAll('#panel-stats .cell[data-count=\"0\"] rect')]"
        assert counts[0] == 0 or counts[11] == 0  # a class without correct predictions
        assert set(visit.value(f"{empty}.map((cell) => cell.getAttribute('fill'))")) == {"var(--track)"}


def test_dragging_coalesces_requests(browser: Any, address: str, runs: list[ExploredRun]) -> None:
    with Visit(browser, address) as visit:
        visit.requests.clear()
        visit.page.evaluate(
            "() => { const input = document.getElementById('rotation'); for (let angle = 0; angle < 40; angle += 1) {"
            " input.value = angle; input.dispatchEvent(new Event('input', { bubbles: true })); } }"
        )
        visit.settle()
        # One for the first event, and one for the last of those that came while it was computed.
        assert sum(url.endswith("/api/forward") for url in visit.requests) == 2
        assert visit.value("explorer.state.get().placement.rotation") == 39


def test_two_runs_are_compared_on_the_same_input(browser: Any, runs: list[ExploredRun]) -> None:
    with running(runs, statistics=False) as address, Visit(browser, address) as visit:
        visit.page.click("[data-sample='2']")
        visit.settle()
        for n, run in enumerate(runs):
            with torch.no_grad():
                output = run.model(runs[0].sample([2])[0])
            scores = visit.scores(n)
            close([scores[index] for index in range(10)], run.model.probabilities(output.scores)[0])
        assert visit.page.locator("#panel-couplings .pane").count() == 2


def test_exported_file_opens_from_disk(browser: Any, runs: list[ExploredRun], tmp_path: Path) -> None:
    """The decoder runs in the page, with weights rounded to float16."""
    path = tmp_path / "page.html"
    size = export_page(runs[:1], path)
    assert size == path.stat().st_size < 5_000_000
    with Visit(browser, path.as_uri()) as visit:
        assert [url for url in visit.requests if not url.startswith(("file:", "data:", "blob:"))] == []
        sample = visit.value("explorer.state.get().source.sample")
        with torch.no_grad():
            output = runs[0].model(runs[0].sample([sample])[0], trace=True)
        scores = visit.scores()
        close([scores[n] for n in range(10)], output.scores[0])
        visit.drag("dim-0", -0.15)
        visit.settle()
        target = int(output.scores.argmax())
        pose = torch.zeros(1, 10, 4)
        pose[0, target] = output.capsules.pose[0, target]
        pose[0, target, 0] -= 0.15
        values = pose.flatten(1)
        layers = [layer for layer in runs[0].capsules.decoder.layers if hasattr(layer, "weight")]
        for n, layer in enumerate(layers):
            values = values @ layer.weight.detach().half().float().T + layer.bias.detach().half().float()
            values = values.relu() if n < len(layers) - 1 else values.sigmoid()
        close(visit.value("Array.from(explorer.decoded[0])"), values.flatten())
        visit.page.keyboard.press("ArrowRight")
        visit.settle()
        assert visit.value("explorer.state.get().source.sample") != sample


def check_links(browser: Any, address: str) -> None:
    with Visit(browser, address) as visit:
        visit.draw(FIVE)
        visit.drag("rotation", 25)
        visit.page.select_option("#coupling-view", "matrix")
        visit.settle()
        link, scores = visit.value("explorer.state.link()"), visit.scores()
    with Visit(browser, link) as visit:
        assert visit.scores() == scores
        assert visit.value("explorer.state.get().view") == "matrix"
        assert visit.value("document.getElementById('rotation').value") == "25"
    state = {"offsets": None, "source": {"sample": "x"}, "kept": {"target": 0}, "t": [], "placement": {"scale": 0.5}}
    hostile = base64.urlsafe_b64encode(json.dumps({**state, "view": "matrix"}).encode()).decode().rstrip("=")
    for fragment, view in (("damaged", "maps"), (hostile, "matrix")):  # fields of the wrong type are ignored
        with Visit(browser, f"{address}/#{fragment}") as visit:
            assert visit.value("explorer.state.get().source.sample") == 0
            assert visit.value("explorer.state.get().view") == view
            assert len(visit.scores()) == 10


def check_downloads(browser: Any, address: str, panel: str, words: tuple[str, ...]) -> None:
    with Visit(browser, address) as visit:
        visit.page.wait_for_selector("#panel-stats .cell")
        for kind, start in (("PNG", b"\x89PNG"), ("SVG", b"<svg"), ("JSON", b"{")):
            visit.page.click(f"#panel-{panel} .menu summary")
            with visit.page.expect_download() as download:
                visit.page.click(f"#panel-{panel} .menu button:text-is('{kind}')")
            content = Path(download.value.path()).read_bytes()
            assert content.startswith(start)
            if kind == "JSON":
                assert json.loads(content)["result"]
            if kind == "SVG":  # one file with the drawings and the tables
                texts = [node.text for node in ElementTree.fromstring(content).iter("{http://www.w3.org/2000/svg}text")]
                assert set(words) <= set(texts)


def check_redraws(browser: Any, address: str) -> None:
    """A redraw keeps what is open and the keyboard focus; numbers appear where one points."""
    with Visit(browser, address) as visit:
        visit.page.click("#panel-primary .more summary")
        visit.page.locator("#panel-classes [data-class='7']").focus()
        visit.page.keyboard.press("Enter")
        visit.drag("rotation", 20)
        visit.settle()
        assert visit.value("document.activeElement.dataset.class") == "7"
        assert visit.value("explorer.state.get().target") == 7
        assert visit.value("document.getElementById('parent').value") == "7"
        assert visit.page.locator("#panel-primary .more image").count() > 0
        visit.page.locator("#panel-couplings [data-key='parent 3'] image").click()
        assert visit.value("explorer.state.get().target") == 3
        assert "coupling 0." in visit.page.inner_text(".tip")
        visit.page.locator("#panel-primary svg.drawing g").nth(7).hover()
        assert visit.page.inner_text(".tip").startswith("row 1, column 1: ")


def check_routing(browser: Any, routing: str) -> None:
    """A run of every routing opens without an error."""
    with running([small_run(routing=routing)], statistics=False) as address, Visit(browser, address) as visit:
        assert len(visit.scores()) == 10
        assert visit.page.locator("#panel-couplings [data-iteration]").count() > 0
        assert visit.page.locator("#panel-equation tbody tr").count() > 0


def check_no_samples(browser: Any) -> None:
    run = small_run()
    run.dataset, run.n_samples, run.why_no_samples = None, 0, "no test images: they are not here"
    with running([run], statistics=False) as address, Visit(browser, address) as visit:
        assert len(visit.scores()) == 10
        visit.page.click("#tab-pick")
        assert "they are not here" in visit.page.inner_text("#tabpanel-pick")


def check_input_and_tour(browser: Any, address: str, directory: Path) -> None:
    from PIL import Image

    with Visit(browser, address) as visit:
        visit.page.click("summary:text-is('Attack')")
        visit.page.select_option("#attack", "pgd")
        visit.settle()
        assert visit.page.locator(".perturbation svg").count() == 1
        visit.page.click("summary:text-is('Overlap')")
        visit.page.click("#second")
        visit.settle()
        assert visit.page.locator("#panel-decoder text:text(' and ')").count() == 1
        Image.new("L", (60, 60), 255).save(directory / "blank.png")
        visit.page.click("#tab-upload")
        visit.page.set_input_files("#upload", directory / "blank.png")
        visit.wait("document.getElementById('upload-note').textContent.includes('one colour')")
        visit.problems.clear()  # the browser reports the status 400
        visit.page.click("#tour")
        for _ in range(8):
            visit.settle()
            visit.page.click("#tour-next")
        assert visit.page.locator(".tour").count() == 0
        visit.page.keyboard.press("?")
        assert visit.page.locator("dialog[open]").count() == 1


def check_width(browser: Any, address: str, width: int, scheme: str) -> None:
    with Visit(browser, address, color_scheme=scheme) as visit:
        visit.page.set_viewport_size({"width": width, "height": 800})
        assert visit.value("document.documentElement.scrollWidth") <= width
        assert visit.value("document.documentElement.dataset.theme") == scheme
        unnamed = "[...document.querySelectorAll('button, input, select, [role=img], [role=button]')].filter((e) =>"
        unnamed += " !(e.getAttribute('aria-label') || e.textContent.trim() || e.closest('label'))).length"
        assert visit.value(unnamed) == 0


def check_missing_parts(browser: Any, address: str, changes: dict[str, Any]) -> None:
    run = small_run(**changes)
    with running([run], statistics=False) as other, Visit(browser, other) as visit:
        for part, reason in run.missing_parts().items():
            assert visit.page.locator(f"#panel-{part} .reason").inner_text() == reason


# Each panel with words of its drawing or of its table.
PANELS: dict[str, tuple[str, ...]] = {
    "classes": ("0.1", "0.9"),
    "couplings": ("entropy", "1.0000"),
    "decoder": ("input",),
    "tree": (),
    "primary": ("Convolution",),
    "iterations": ("residual",),
    "credit": ("input",),
    "equation": ("logit", "pose"),
    "stats": ("dead", "capsules"),
    "training": ("parameters", "total"),
    "input": (),
}
SCENARIOS: dict[str, Callable[[Any, str, Path], None]] = {
    "links": lambda browser, address, _: check_links(browser, address),
    "input-and-tour": check_input_and_tour,
    "redraws": lambda browser, address, _: check_redraws(browser, address),
    "no-samples": lambda browser, address, _: check_no_samples(browser),
    **{
        f"routing-{routing}": lambda browser, address, _, routing=routing: check_routing(browser, routing)
        for routing in sorted(ROUTINGS)
    },
    **{
        f"download-{panel}": lambda browser, address, _, case=(panel, words): check_downloads(browser, address, *case)
        for panel, words in PANELS.items()
    },
    **{
        f"{scheme}-{width}": lambda browser, address, _, size=(width, scheme): check_width(browser, address, *size)
        for scheme in ("light", "dark")
        for width in (360, 768, 1280)
    },
    **{
        f"missing-{n}": lambda browser, address, _, changes=changes: check_missing_parts(browser, address, changes)
        for n, changes in enumerate(({"reconstruction": False}, {"routing": "trainable"}, {"routing": "attention"}))
    },
}


@pytest.mark.parametrize("scenario", sample(SCENARIOS, 1, seed=1))
def test_page(browser: Any, address: str, tmp_path: Path, scenario: str) -> None:
    SCENARIOS[scenario](browser, address, tmp_path)
