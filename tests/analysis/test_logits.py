"""By how much logits change from iteration to iteration."""

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.narrow import batch, narrow
from tests.tolerances import EXACT, REFERENCE, SAME, largest_difference, relative_rms
from torchcaps.analysis.logits import LogitChange, draw_logit_change, logit_change
from torchcaps.models import Network
from torchcaps.routing import EM, Dynamic


def layers_of(model: Any) -> list[Any]:
    return list(model.capsules.layers.children())


def by_loops(children: list[Any], weight: list[Any], iterations: int) -> list[float]:
    """Procedure 1 of Sabour 2017 for one image, in plain numbers: the mean change of a logit at each line 7."""
    n_children, n_parents, dim = len(weight), len(weight[0][0]), len(weight[0][0][0])
    votes = [
        [
            [sum(children[i][x] * weight[i][x][j][d] for x in range(len(children[i]))) for d in range(dim)]
            for j in range(n_parents)
        ]
        for i in range(n_children)
    ]
    logits = [[0.0] * n_parents for _ in range(n_children)]
    changes = []
    for _ in range(iterations):
        coupling = [[math.exp(b) / sum(math.exp(other) for other in row) for b in row] for row in logits]
        change = 0.0
        for j in range(n_parents):
            total = [sum(coupling[i][j] * votes[i][j][d] for i in range(n_children)) for d in range(dim)]
            square = sum(s * s for s in total)
            pose = [square / (1 + square) * s / math.sqrt(square) for s in total]
            for i in range(n_children):
                agreement = sum(votes[i][j][d] * pose[d] for d in range(dim))
                logits[i][j] += agreement
                change += abs(agreement)
        changes.append(change / (n_children * n_parents))
    return changes


def tiny(**changes: Any) -> Network:
    """A CapsNet with 8 primary capsules and 3 classes, in double."""
    sizes: dict[str, Any] = {"image": (1, 20, 20), "width": 4, "types": 2, "classes": 3, "dim": 4, "hidden": (8,)}
    return narrow("sabour2017_mnist", **(sizes | changes)).double()


def test_dynamic_routing_changes_logits_as_the_papers_loop_does() -> None:
    model = tiny()
    layers_of(model)[0].weight.data.mul_(20)  # so that routing has something to do
    images, _, _ = batch(model, 3)
    with torch.no_grad():
        children = model.front(images.double()).pose.flatten(1, -2)
    weight = layers_of(model)[0].weight.tolist()  # [I, X, J, Y]
    expected = torch.tensor([by_loops(image, weight, 5) for image in children.tolist()], dtype=torch.float64).mean(0)
    assert float(expected.max()) > 0.01
    result = logit_change(model, images, batch_size=2)
    assert largest_difference(result.change[0], expected) < REFERENCE
    assert (result.layers, result.measured, result.trained, result.n_images) == (("digit",), ("logits",), (3,), 3)


def test_the_model_is_left_as_it_was() -> None:
    model = tiny()
    images, _, _ = batch(model, 2)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    calls: list[int] = []
    result = logit_change(model, images, iterations=7, batch_size=1, progress=lambda: calls.append(1))
    assert result.change.shape == result.coupling_change.shape == (1, 7)
    assert layers_of(model)[0].routing == Dynamic(3)
    assert model.training
    assert len(calls) == 2
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_the_first_changes_do_not_depend_on_how_many_are_asked_for() -> None:
    images, _, _ = batch(tiny(), 2)
    few, many = (logit_change(tiny(), images, iterations=n) for n in (2, 6))
    assert largest_difference(few.change, many.change[:, :2]) < EXACT
    other = logit_change(tiny(routing=Dynamic(1)), images, iterations=2)  # nor on what the model was trained with
    assert largest_difference(few.change, other.change) < EXACT
    assert other.trained == (1,)


def steps(values: Any) -> Tensor:
    return torch.stack([(after - before).abs().mean() for before, after in itertools.pairwise(values)])


def test_concurrent_layers_are_measured_as_a_model_of_so_many_iterations_runs() -> None:
    model = narrow("tsai2020_cifar10").double()
    images, _, _ = batch(model, 2)
    result = logit_change(model, images, iterations=3)
    longer = narrow("tsai2020_cifar10").double().eval()
    assert longer.capsules.schedule == "concurrent"  # type: ignore[union-attr]
    for layer in layers_of(longer):
        layer.routing = dataclasses.replace(layer.routing, iterations=4)
    with torch.no_grad():
        traces = longer(images, trace=True).trace
    assert traces is not None
    assert len(result.layers) == len(traces) > 1
    assert relative_rms(result.change, torch.stack([steps(trace.logits) for trace in traces])) < SAME[torch.float64]
    couplings = torch.stack([steps(trace.couplings) for trace in traces])
    assert relative_rms(result.coupling_change, couplings) < SAME[torch.float64]


def test_of_layers_in_turn_those_below_stay_as_they_were_trained() -> None:
    model = narrow("hinton2018_smallnorb").double()
    images, _, _ = batch(model, 2)
    result = logit_change(model, images, iterations=3)
    assert set(result.measured) == {"log couplings"}
    names = list(model.capsules.layers._modules)  # type: ignore[union-attr]
    assert result.layers == tuple(names)
    last = layers_of(model.eval())[-1]
    last.routing = dataclasses.replace(last.routing, iterations=4)
    with torch.no_grad():
        trace = model(images, trace=True).trace[-1]
    expected = steps([coupling.log() for coupling in trace.couplings])
    assert relative_rms(result.change[-1], expected) < SAME[torch.float64]


def test_couplings_too_small_to_write_down_still_have_logarithms() -> None:
    model = narrow("sabour2017_mnist", routing=EM(2))
    layers_of(model)[0].weight.data.mul_(100)
    images, _, _ = batch(model, 2)
    local = logit_change(model, images)
    assert bool(torch.isfinite(local.change).all())
    assert float(local.change[0, 0]) > 0
    everywhere = narrow("hinton2018_smallnorb", routing=EM(2, competition="global"))
    assert bool(torch.isfinite(logit_change(everywhere, batch(everywhere, 2)[0]).change).all())


def test_one_layer_can_be_asked_by_name_or_number() -> None:
    model = narrow("tsai2020_cifar10")
    images, _, _ = batch(model, 2)
    every = logit_change(model, images, 2)
    for layer in (1, every.layers[1]):
        one = logit_change(model, images, 2, layer=layer)
        assert one.layers == every.layers[1:2]
        assert torch.equal(one.change[0], every.change[1])
    for layer, words in ((9, "0..2"), ("clases", "did you mean 'classes'")):
        with pytest.raises(ValueError, match=words):
            logit_change(model, images, 2, layer=layer)


def test_what_has_no_iterations_is_refused() -> None:
    refusals: list[tuple[str, dict[str, Any], str]] = [
        ("sabour2017_cnn_mnist", {}, "needs class capsules"),
        ("choi2019_mnist", {}, "Attention, which goes through the votes once"),
        ("choi2019_mnist", {"layer": "classes"}, "'classes' has Attention routing"),
        ("chen2019_fc_mnist", {}, "Trainable, which"),
        ("sabour2017_mnist", {"iterations": 0}, "1 or more"),
    ]
    for name, changes, words in refusals:
        model = narrow(name)
        with pytest.raises(ValueError, match=words):
            logit_change(model, batch(model, 1)[0], **changes)
    model = narrow("sabour2017_mnist")
    with pytest.raises(ValueError, match=r"\[B, C, H, W\]"):
        logit_change(model, batch(model, 1)[0][0])


def test_stages_of_training_are_drawn_together(tmp_path: Path) -> None:
    model = tiny()
    images, _, _ = batch(model, 2)
    settled = LogitChange(torch.zeros(1, 5), torch.zeros(1, 5), ("digit",), ("logits",), (3,), 2)
    draw_logit_change({"start": logit_change(model, images), "settled": settled}, tmp_path / "two.png", "a title")
    draw_logit_change({"settled": settled}, tmp_path / "one.svg")
    assert all((tmp_path / name).stat().st_size > 5000 for name in ("two.png", "one.svg"))
    with pytest.raises(ValueError, match="none"):
        draw_logit_change({}, tmp_path / "no.png")
