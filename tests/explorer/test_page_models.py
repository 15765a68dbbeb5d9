"""The page in a real browser, for models of several kinds, alone and compared."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.explorer.helpers import array, small_run, untrained_run
from tests.explorer.live import Visit, launched, running
from tests.sampling import sample
from torchcaps.data import ImageSet
from torchcaps.explorer import ExploredRun
from torchcaps.models import MODELS


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as browser:
        yield browser


def smoke_run(model: str, **changes: Any) -> ExploredRun:
    return untrained_run(model, **{**MODELS.get(model).spec.smoke_changes(), **changes})


def shown_image(visit: Visit) -> Tensor:
    """Return the input of the page, ``[1, C, H, W]``."""
    return array(visit.value("explorer.results[0].image"))[None]


def check_network_without_capsules(browser: Any) -> None:
    """Convolution maps and the gradient are shown; all other panels are one line with the reason."""
    run = smoke_run("chen2019_lenet")
    with running([run], statistics=False) as address, Visit(browser, address) as visit:
        assert visit.page.locator(".panel.missing .reason").count() == 5
        assert visit.page.locator(".panel.missing .controls, .panel.missing .menu").count() == 0
        visit.page.click("#panel-primary .more summary")
        assert visit.page.locator("#panel-primary .more image").count() > 0
        assert visit.page.locator("#panel-credit image").count() == 3  # image, gradient, scale
        images = shown_image(visit).requires_grad_()
        target = int(visit.value("explorer.results[0].order[0]"))
        (gradient,) = torch.autograd.grad(run.pixels(images).scores[0, target], images)
        shown = visit.value("explorer.panels.credit.definition.data(explorer, 0).gradient")
        torch.testing.assert_close(torch.tensor(shown), gradient[0, 0].flatten(), atol=1e-4, rtol=1e-4)


def check_controls_follow_the_run_with_capsules(browser: Any) -> None:
    """The first run has no layers, the second one has: its controls work."""
    runs = [smoke_run("chen2019_lenet"), small_run(name="capsules")]
    with running(runs, statistics=False) as address, Visit(browser, address) as visit:
        current = "document.querySelector('#panel-couplings tr.current').dataset.iteration"
        assert visit.page.locator("#iteration").is_visible()
        visit.drag("iteration", 1)
        visit.settle()
        assert visit.value(current) == "0"
        visit.page.select_option("#parent", "4")
        visit.settle()
        assert visit.value("explorer.parents[1].parent") == 4
        visit.page.select_option("#primary-type", "1")
        assert visit.value("explorer.state.get().type") == 1
        assert "capsules: " in visit.page.inner_text("#message")


def check_runs_with_other_grids(browser: Any) -> None:
    """A position of the parents that only the first run has leaves the second one at its middle."""
    runs = [smoke_run("tsai2020_cifar10"), smoke_run("tsai2020_em_cifar10")]
    with running(runs, statistics=False) as address, Visit(browser, address) as visit:
        visit.page.select_option("#layer", "0")
        visit.settle()
        sites = visit.value("explorer.results.map((result) => result.layers[0].sites)")
        last = ",".join(str(size - 1) for size in sites[0])
        visit.page.select_option("#site", last)
        visit.settle()
        assert visit.value("explorer.results[0].layers[0].site.join(',')") == last
        link = visit.value("explorer.state.link()")
        with Visit(browser, link) as again:
            assert again.value("document.getElementById('layer').value") == "0"
            assert again.value("document.getElementById('site').value") == last


def check_colour(browser: Any) -> None:
    """A network for colour images with a decoder: brush, reconstruction and strip have three channels."""
    run = smoke_run("sabour2017_cifar10", reconstruction=True)
    with running([run], statistics=False) as address, Visit(browser, address) as visit:
        visit.page.click("#tab-draw")
        assert visit.page.locator("#tabpanel-draw input[type=color]").is_visible()
        visit.drag("dim-0", 0.1)
        visit.settle()
        with torch.no_grad():
            output = run.pixels(shown_image(visit))
        target = int(run.model.probabilities(output.scores)[0].argmax())
        pose = output.capsules.pose.clone()
        pose[0, target, 0] += 0.1
        assert run.capsules is not None
        with torch.no_grad():
            decoded = run.capsules.decode(pose, torch.tensor([target])).flatten()
        shown = torch.tensor(visit.value("Array.from(explorer.decoded[0])"))
        torch.testing.assert_close(shown, decoded, atol=1e-4, rtol=1e-4)


def check_several_objects(browser: Any) -> None:
    """Networks for two objects, and for any number of them."""
    for model in ("mazzia2021_multimnist", "tsai2020_diverse_matrix"):
        run = smoke_run(model)
        with running([run], statistics=False) as address, Visit(browser, address) as visit:
            with torch.no_grad():
                output = run.pixels(shown_image(visit))
            expected = run.model.probabilities(output.scores)[0]
            scores = visit.scores()
            shown = torch.tensor([scores[n] for n in range(len(expected))])
            torch.testing.assert_close(shown, expected, atol=1e-4, rtol=1e-4)
            predicted = run.model.predict_multi_hot(output.scores)[0].nonzero()[:, 0].tolist()
            assert sorted(visit.value("explorer.results[0].predicted")) == predicted
            assert visit.page.locator("#panel-classes .bar.predicted").count() == len(predicted)


def check_tour_lets_people_draw(browser: Any) -> None:
    with running([small_run()], statistics=False) as address, Visit(browser, address) as visit:
        visit.page.click("#tour")
        visit.settle()
        assert visit.value("explorer.sketch.enabled")
        visit.page.click("#tour-next")
        visit.wait("explorer.state.get().walk === 0.5")
        assert visit.value("document.activeElement.id") == "walk"
        visit.drag("walk", 1)
        visit.settle()
        assert visit.page.locator("#panel-decoder text:text('walk 1.00')").count() == 1
        visit.page.keyboard.press("Escape")
        assert visit.page.locator(".tour").count() == 1  # the focus is on the slider
        visit.page.click("#tour-end")
        assert visit.page.locator(".tour").count() == 0


def check_tour_names_existing_parts(browser: Any) -> None:
    """Steps without a decoder, iterations or capsules are left out, or have another text."""
    for run, n_steps, word in (
        (smoke_run("chen2019_lenet"), 4, "no capsules"),
        (small_run(reconstruction=False), 7, "step through them"),
        (small_run(routing="self_attention"), 8, "in one pass"),
    ):
        with running([run], statistics=False) as address, Visit(browser, address) as visit:
            visit.page.click("#tour")
            texts = []
            for n in range(n_steps):
                visit.settle()
                texts.append(visit.page.inner_text(".tour"))
                assert f"{n + 1} of {n_steps}" in texts[-1]
                visit.page.click("#tour-next")
            assert visit.page.locator(".tour").count() == 0
            assert any(word in text for text in texts)
            if n_steps < 8:
                assert not any("reconstruction" in text or "Walk from" in text for text in texts)


def check_keyboard(browser: Any) -> None:
    """Tabs follow the arrow keys; the arrows do not turn the samples meanwhile."""
    with running([small_run()], statistics=False) as address, Visit(browser, address) as visit:
        visit.page.focus("#tab-pick")
        for key, tab in (("ArrowRight", "upload"), ("ArrowRight", "draw"), ("ArrowLeft", "upload"), ("Home", "draw")):
            visit.page.keyboard.press(key)
            assert visit.value("document.activeElement.id") == f"tab-{tab}"
            assert visit.page.locator(f"#tabpanel-{tab}").is_visible()
        assert visit.value("explorer.state.get().source.sample") == 0
        assert visit.page.locator("[role=tab][tabindex='0']").count() == 1


def check_class_names(browser: Any) -> None:
    """Names of classes are complete and do not overlap, also with few classes; a long one stays inside its panel."""
    names = ("airplane", "cat", "a class with a name that is longer than a phone is wide")
    run = small_run(classes=3)
    run.run = replace(run.run, classes=names)
    images = torch.randint(0, 256, (9, *run.shape), dtype=torch.uint8)
    run.dataset, run.n_samples = ImageSet("named", "test", images, torch.arange(9) % 3, names), 9
    with running([run]) as address, Visit(browser, address) as visit:
        visit.page.set_viewport_size({"width": 390, "height": 844})
        visit.wait("document.querySelectorAll('#panel-stats .cell').length === 9")
        labels = visit.page.locator("#panel-stats svg").first.locator("text.tick")
        assert labels.all_text_contents().count("airplane") == 2
        boxes = [label.bounding_box() for label in labels.all()]
        assert max(min(box["width"], box["height"]) for box in boxes) <= 20  # letters are not magnified
        columns = sorted((box["x"], box["x"] + box["width"]) for box in boxes[1::2])
        assert all(end <= start for (_, end), (start, _) in pairwise(columns))
        panel, menu = (visit.page.locator(name).bounding_box() for name in ("#panel-equation", "#parent"))
        assert menu["x"] + menu["width"] <= panel["x"] + panel["width"]


SCENARIOS: dict[str, Callable[[Any], None]] = {
    "no-capsules": check_network_without_capsules,
    "controls": check_controls_follow_the_run_with_capsules,
    "grids": check_runs_with_other_grids,
    "colour": check_colour,
    "several-objects": check_several_objects,
    "tour": check_tour_lets_people_draw,
    "tour-of-parts": check_tour_names_existing_parts,
    "keyboard": check_keyboard,
    "class-names": check_class_names,
}


@pytest.mark.parametrize("scenario", sample(SCENARIOS, 1, seed=1))
def test_models(browser: Any, scenario: str) -> None:
    SCENARIOS[scenario](browser)
