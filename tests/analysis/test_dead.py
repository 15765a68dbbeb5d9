"""Dead capsules, by layer, type and measure of activity."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.narrow import batch, narrow
from tests.tolerances import EXACT, SAME, largest_difference, relative_rms
from torchcaps import metrics
from torchcaps.analysis.dead import DeadCapsules, DeadLayer, dead_capsules, draw_dead
from torchcaps.routing import InvertedAttention


def layers_of(result: DeadCapsules) -> dict[str, DeadLayer]:
    return {layer.name: layer for layer in result.layers}


def test_types_without_weights_are_dead_at_every_position() -> None:
    model: Any = narrow("sabour2017_mnist")
    with torch.no_grad():
        for kind in (1, 3):
            model.front.primary.pose.weight[8 * kind : 8 * kind + 8] = 0
            model.front.primary.pose.bias[8 * kind : 8 * kind + 8] = 0
        model.front.primary.pose.weight *= 50  # the others are well above the threshold
    result = layers_of(dead_capsules(model, batch(model)[0], batch_size=3))
    primary = result["primary"]
    assert primary.by_type is not None
    assert primary.peak is not None
    assert primary.by_type.tolist() == [0, 1, 0, 1]
    assert (primary.n, primary.n_dead, primary.fraction, primary.n_dead_types) == (144, 72, 0.5, 2)
    assert primary.peak.shape == (6, 6, 4)
    assert primary.measure == "length"


def test_a_class_without_votes_is_dead() -> None:
    model: Any = narrow("sabour2017_mnist")
    with torch.no_grad():
        model.capsules.layers["digit"].weight *= 20
        model.capsules.layers["digit"].weight[:, :, 2] = 0
    digit = layers_of(dead_capsules(model, batch(model)[0]))["digit"]
    assert digit.by_type is not None
    assert digit.by_type.tolist() == [0, 0, 1, 0, 0, 0, 0, 0, 0, 0]


def test_a_capsule_active_on_one_image_is_not_dead() -> None:
    model: Any = narrow("sabour2017_mnist").eval()
    images = batch(model)[0]
    lengths = model.front(images).length().detach()
    peaks = lengths.amax(0).flatten().sort().values
    threshold = float(peaks[71] + peaks[72]) / 2
    primary = dead_capsules(model, images, threshold, batch_size=3).layers[0]
    assert primary.peak is not None
    assert relative_rms(primary.peak, lengths.amax(0)) < SAME[torch.float32]
    assert abs(primary.fraction - float(metrics.dead_fraction(lengths, threshold))) < SAME[torch.float32]
    assert (primary.n, primary.n_dead) == (144, 72)


def test_layer_normalised_parents_are_measured_by_received_couplings() -> None:
    model: Any = narrow("tsai2020_cifar10").double()
    result = layers_of(dead_capsules(model, batch(model, 2)[0].double()))
    assert result["primary"].peak is None
    assert result["primary"].why != ""
    for name in ("caps1", "caps2", "classes"):
        assert result[name].measure == "couplings received"


def test_uniform_couplings_give_an_activity_of_1() -> None:
    model: Any = narrow("tsai2020_cifar10", routing=InvertedAttention(iterations=1)).double()
    for layer in dead_capsules(model, batch(model, 2)[0].double()).layers[1:]:
        assert layer.peak is not None
        assert largest_difference(layer.peak, torch.ones_like(layer.peak)) < EXACT
        assert layer.fraction == 0


def test_a_parent_that_receives_no_couplings_is_dead() -> None:
    """A parent without votes: large votes agree far more with the other parents."""
    model: Any = narrow("tsai2020_cifar10")
    with torch.no_grad():
        model.capsules.layers["classes"].weight *= 1e3
        model.capsules.layers["classes"].weight[:, :, 2] = 0
    layer = layers_of(dead_capsules(model, batch(model, 2)[0]))["classes"]
    assert layer.by_type is not None
    assert layer.by_type.tolist() == [0, 0, 1, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("name", "measures"),
    [
        ("hinton2018_smallnorb", ["activation"] * 4),
        ("choi2019_mnist", ["length / sqrt(D)"] * 3),
        ("chen2019_fc_mnist", ["length"] * 2),
        ("yang2021_multimnist", ["length"] * 2),
        ("tsai2020_diverse_dynamic", ["length"] * 3),
    ],
)
def test_the_measure_is_the_presence_of_the_layers_paper(name: str, measures: list[str]) -> None:
    model: Any = narrow(name)
    result = dead_capsules(model, batch(model, 2)[0])
    assert [layer.measure for layer in result.layers] == measures
    assert result.n_images == 2
    for layer in result.layers:
        assert layer.peak is not None
        assert float(layer.peak.min()) >= 0
        assert float(layer.peak.max()) <= 1


def test_invalid_arguments_are_rejected() -> None:
    model: Any = narrow("sabour2017_mnist")
    images = batch(model, 2)[0]
    with pytest.raises(ValueError, match="threshold"):
        dead_capsules(model, images, threshold=1.5)
    with pytest.raises(ValueError, match="images"):
        dead_capsules(model, images[:0])
    plain: Any = narrow("sabour2017_cnn_mnist")
    with pytest.raises(ValueError, match="sabour2017_cnn_mnist"):
        dead_capsules(plain, images)


@pytest.mark.parametrize("name", ["sabour2017_mnist", "tsai2020_cifar10"])
def test_figure(name: str, tmp_path: Path) -> None:
    model: Any = narrow(name)
    draw_dead(dead_capsules(model, batch(model, 2)[0]), tmp_path / "dead.png", name)
    assert (tmp_path / "dead.png").stat().st_size > 0
