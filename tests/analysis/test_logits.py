"""Change of the routing logits from iteration to iteration."""

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


def changes_by_loops(children: list[Any], weight: list[Any], iterations: int) -> list[float]:
    """Sabour 2017, Procedure 1, for one image in Python loops: mean change of a logit at each line 7."""
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
    """A CapsNet with 8 primary capsules and 3 classes, in float64."""
    sizes: dict[str, Any] = {"image": (1, 20, 20), "width": 4, "types": 2, "classes": 3, "dim": 4, "hidden": (8,)}
    return narrow("sabour2017_mnist", **(sizes | changes)).double()


def test_dynamic_routing_changes_logits_as_procedure_1_does() -> None:
    model = tiny()
    layers_of(model)[0].weight.data.mul_(20)  # large enough for couplings to change
    images, _, _ = batch(model, 3)
    with torch.no_grad():
        children = model.front(images.double()).pose.flatten(1, -2)
    weight = layers_of(model)[0].weight.tolist()  # [I, X, J, Y]
    expected = torch.tensor(
        [changes_by_loops(image, weight, 5) for image in children.tolist()], dtype=torch.float64
    ).mean(0)
    assert float(expected.max()) > 0.01
    result = logit_change(model, images, batch_size=2)
    assert largest_difference(result.change[0], expected) < REFERENCE
    assert (result.layers, result.measured, result.trained, result.n_images) == (("digit",), ("logits",), (3,), 3)


def test_the_model_is_not_changed() -> None:
    model = tiny()
    images, _, _ = batch(model, 2)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    calls: list[int] = []
    result = logit_change(model, images, iterations=7, batch_size=1, progress=lambda: calls.append(1))
    assert result.change.shape == result.coupling_change.shape == (1, 7)
    assert layers_of(model)[0].routing == Dynamic(3)
    assert model.training is True
    assert len(calls) == 2
    torch.testing.assert_close(dict(model.state_dict()), weights, rtol=0, atol=0)


def test_changes_do_not_depend_on_the_number_of_iterations() -> None:
    images, _, _ = batch(tiny(), 2)
    few, many = (logit_change(tiny(), images, iterations=n) for n in (2, 6))
    assert largest_difference(few.change, many.change[:, :2]) < EXACT
    other = logit_change(tiny(routing=Dynamic(1)), images, iterations=2)  # nor on the iterations of the model
    assert largest_difference(few.change, other.change) < EXACT
    assert other.trained == (1,)


def mean_changes(values: Any) -> Tensor:
    return torch.stack([(after - before).abs().mean() for before, after in itertools.pairwise(values)])


def test_concurrent_layers_are_measured_together() -> None:
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
    assert (
        relative_rms(result.change, torch.stack([mean_changes(trace.logits) for trace in traces])) < SAME[torch.float64]
    )
    couplings = torch.stack([mean_changes(trace.couplings) for trace in traces])
    assert relative_rms(result.coupling_change, couplings) < SAME[torch.float64]


def test_lower_layers_of_a_sequential_model_route_as_trained() -> None:
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
    expected = mean_changes([coupling.log() for coupling in trace.couplings])
    assert relative_rms(result.change[-1], expected) < SAME[torch.float64]


def test_couplings_that_underflow_have_finite_logarithms() -> None:
    model = narrow("sabour2017_mnist", routing=EM(2))
    layers_of(model)[0].weight.data.mul_(100)
    images, _, _ = batch(model, 2)
    local = logit_change(model, images)
    assert local.change[~torch.isfinite(local.change)].tolist() == []
    assert float(local.change[0, 0]) > 0
    model = narrow("hinton2018_smallnorb", routing=EM(2, competition="global"))
    change = logit_change(model, batch(model, 2)[0]).change
    assert change[~torch.isfinite(change)].tolist() == []


def test_a_layer_is_selected_by_name_or_index() -> None:
    model = narrow("tsai2020_cifar10")
    images, _, _ = batch(model, 2)
    all_layers = logit_change(model, images, 2)
    for layer in (1, all_layers.layers[1]):
        one = logit_change(model, images, 2, layer=layer)
        assert one.layers == all_layers.layers[1:2]
        torch.testing.assert_close(one.change[0], all_layers.change[1], rtol=0, atol=0)
    for layer, message in ((9, "layer .*9"), ("clases", "layer 'clases'.*'classes'")):
        with pytest.raises(ValueError, match=message):
            logit_change(model, images, 2, layer=layer)


def test_models_without_iterative_routing_and_invalid_arguments_are_rejected() -> None:
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("sabour2017_cnn_mnist", {}, "sabour2017_cnn_mnist"),
        ("choi2019_mnist", {}, "Attention"),
        ("choi2019_mnist", {"layer": "classes"}, "'classes' .*Attention"),
        ("chen2019_fc_mnist", {}, "Trainable"),
        ("sabour2017_mnist", {"iterations": 0}, "iterations .*0"),
    ]
    for name, changes, message in cases:
        model = narrow(name)
        with pytest.raises(ValueError, match=message):
            logit_change(model, batch(model, 1)[0], **changes)
    model = narrow("sabour2017_mnist")
    with pytest.raises(ValueError, match="images"):
        logit_change(model, batch(model, 1)[0][0])


def test_figure_of_several_results(tmp_path: Path) -> None:
    model = tiny()
    images, _, _ = batch(model, 2)
    settled = LogitChange(torch.zeros(1, 5), torch.zeros(1, 5), ("digit",), ("logits",), (3,), 2)
    draw_logit_change({"start": logit_change(model, images), "settled": settled}, tmp_path / "two.png", "a title")
    draw_logit_change({"settled": settled}, tmp_path / "one.svg")
    assert min((tmp_path / name).stat().st_size for name in ("two.png", "one.svg")) > 5000
    with pytest.raises(ValueError, match="results"):
        draw_logit_change({}, tmp_path / "no.png")
