"""Official presets of the papers, recipes and learning-rate schedules."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

import torchcaps
from tests.models.narrow import EVERY, batch, narrow
from tests.tolerances import EXACT, SAME, assert_all_equal, assert_finite, relative_rms
from torchcaps import create_model
from torchcaps.models import LossConfig, OptimizerConfig, Recipe
from torchcaps.models.registry import MODELS
from torchcaps.models.schedules import Constant, Exponential, Inverse, Milestones, OneCycle, Product, TimeDecay
from torchcaps.nn import squash
from torchcaps.routing import Dynamic, Quadratic


@EVERY
def test_both_presets_build_and_run(name: str) -> None:
    for preset in MODELS.get(name).spec.presets:
        model = narrow(name, preset=preset).eval()
        assert model(batch(model, 1)[0]).scores.shape == (1, model.spec.classes)
        assert model.spec.preset == preset


def test_official_sabour2017_divides_primary_outputs_by_types() -> None:
    for name, divisor in (("sabour2017_mnist", 4), ("sabour2017_cifar10", 4 + 1)):  # one more with the leak
        model = narrow(name, preset="official", padding="valid", image=(1, 28, 28)).double()
        features = torch.rand(2, 16, 20, 20, dtype=torch.float64)
        primary = model.front.primary
        sums = F.conv2d(features, primary.pose.weight, None, stride=2) / divisor + primary.pose.bias[:, None, None]
        expected = squash(sums.unflatten(1, (4, 8)).permute(0, 3, 4, 1, 2))
        assert relative_rms(primary(features).pose, expected) < SAME[torch.float64]


def test_official_sabour2017_initialisation() -> None:
    torch.manual_seed(0)
    model = create_model("sabour2017_mnist", preset="official")
    layer = model.capsules.layers["digit"]
    assert_all_equal(layer.coefficients["bias"], 0.1)
    assert layer.routing == Dynamic(3, bias=True)
    for weight, bias, std in (
        (model.front.conv1.weight, model.front.conv1.bias, 0.05),
        (model.front.primary.pose.weight, model.front.primary.pose.bias, 0.1),
        (model.decoder.layers[0].weight, model.decoder.layers[0].bias, 0.1),
        (layer.weight, layer.coefficients["bias"], 0.1),
    ):
        # truncation at two standard deviations multiplies the standard deviation by 0.8796
        assert float(weight.detach().abs().max()) <= 2 * std * (1 + 1e-6)
        assert float(weight.detach().std()) == pytest.approx(0.8796 * std, rel=0.03)
        assert_all_equal(bias, 0.1)


def test_official_sabour2017_weights_reconstruction_20_times() -> None:
    paper, official = (narrow("sabour2017_mnist", preset=preset) for preset in ("paper", "official"))
    images, labels, _ = batch(paper, 4)
    output = paper(images, labels)
    bare = output._replace(reconstruction=None)
    margin, error = (paper.loss()(bare, labels), paper.loss()(output, labels, images) - paper.loss()(bare, labels))
    torch.testing.assert_close(official.loss()(bare, labels), margin / 20)
    torch.testing.assert_close(official.loss()(output, labels, images), margin / 20 + error)


def test_official_chen2019_margins_and_baseline() -> None:
    for name, positive in (("fc_mnist", 0.7), ("fc_cifar10", 0.6), ("multi_cifar10", 0.6), ("dynamic_cifar10", 0.6)):
        assert official(f"chen2019_{name}").recipe.loss.positive_margin == positive
        assert narrow(f"chen2019_{name}").recipe.loss.positive_margin == 0.9
    assert narrow("chen2019_fc_cifar10", image=(1, 32, 32)).recipe == narrow("chen2019_fc_cifar10").recipe
    baseline = official("chen2019_dynamic_mnist")
    assert baseline.capsules.layers["classes"].routing.iterations == 4
    assert baseline.recipe.optimizer == OptimizerConfig("sgd", 1e-2, momentum=0.9)
    assert isinstance(baseline.front.primary.activation, torch.nn.Identity)


def official(name: str):
    return narrow(name, preset="official")


def test_official_yang2021_objective() -> None:
    model = official("yang2021_mnist")
    routing = model.capsules.layers["classes"].routing
    assert (routing.method, routing.objective, routing.initial, routing.lr) == ("adam", "capsule", 1.0, 1e-4)
    assert model.front.primary.relu
    assert not narrow("yang2021_mnist").front.primary.relu
    assert narrow("yang2021_mnist").capsules.layers["classes"].routing == Quadratic(initial=0.1)


def test_presets_change_only_defaults() -> None:
    chosen = Quadratic(initial=0.3, lr=0.5)
    assert narrow("yang2021_mnist", preset="official", routing=chosen).capsules.layers["classes"].routing == chosen
    routing = narrow("chen2019_dynamic_mnist", preset="official", routing=Dynamic(2)).capsules.layers["classes"].routing
    assert routing == Dynamic(2)
    assert narrow("chen2019_conv_mnist", preset="official", kernel=7).front.primary.kernel_size == (7, 7)
    assert narrow("chen2019_conv_mnist", preset="official").front.primary.kernel_size == (6, 6)
    assert not narrow("hinton2018_smallnorb", coordinates=False).capsules.layers["classes"].routing.coordinates


def test_official_augmentation_and_data() -> None:
    for name in ("choi2019_mnist", "choi2019_affnist", "sabour2017_smallnorb"):
        paper, official = (narrow(name, preset=preset).recipe.augmentation for preset in ("paper", "official"))
        assert official.startswith(paper)
        assert official.removeprefix(paper) in ("official", "-official")
    for name in ("sabour2017_multimnist", "sabour2017_cnn_multimnist"):
        data = [narrow(name, preset=preset).recipe.data for preset in ("paper", "official")]
        assert data == ["multimnist", "multimnist-official"]


def test_batch_size_and_ascents_of_yang2021() -> None:
    assert narrow("yang2021_mnist").recipe.batch_size == 128
    assert narrow("yang2021_mnist", reconstruction=False).recipe.batch_size == 32
    assert narrow("yang2021_mnist").recipe.ascents == 1  # Algorithm 1
    assert narrow("sabour2017_mnist", routing="quadratic").recipe.ascents == 1
    assert narrow("sabour2017_mnist").recipe.ascents == 0
    assert narrow("yang2021_mnist").spec.build().recipe.ascents == 1


def test_trap_16_lr_of_sabour2017_decays_at_every_step() -> None:
    recipe = create_model("sabour2017_mnist", width=4, types=2).recipe
    assert recipe.lr_at(0) == 1e-3
    assert abs(recipe.lr_at(1000) - 1e-3 * 0.96**0.5) < EXACT
    assert recipe.lr_at(10_000_000) == 1e-6
    multi = create_model("sabour2017_multimnist", width=4, types=2).recipe
    assert abs(multi.lr_at(10_000) - 1e-3 * 0.96**0.5) < EXACT


def test_trap_24_lr_of_choi2019_is_halved_after_10000_steps() -> None:
    paper, official = (narrow("choi2019_mnist", preset=preset).recipe for preset in ("paper", "official"))
    assert paper.lr_at(10_000) == pytest.approx(0.5e-3)
    assert official.lr_at(10_000, epoch=50) == paper.lr_at(10_000)
    assert official.lr_at(10_000, epoch=51) == pytest.approx(0.25e-3)


def test_lr_schedules() -> None:
    assert [Milestones((150, 250), 0.1).factor(0, epoch) for epoch in (149, 150, 250)] == pytest.approx([1, 0.1, 0.01])
    assert Inverse(1e-4, 0.75).factor(10_000) == pytest.approx(2**-0.75)
    assert [Exponential(0.6, 8000, staircase=True).factor(step) for step in (7999, 8000)] == [1, 0.6]
    assert Product(Constant(), TimeDecay(0.5)).factor(2) == 0.5
    cycle = [OneCycle().factor(step, total=100) for step in range(100)]
    assert cycle[0] == pytest.approx(0.04)
    assert max(cycle) == cycle[30] == 1
    assert cycle[99] == pytest.approx(1e-4)
    assert cycle[:31] == sorted(cycle[:31])
    assert cycle[30:] == sorted(cycle[30:], reverse=True)
    with pytest.raises(ValueError, match="total"):
        OneCycle().factor(3)


@EVERY
def test_recipes_are_complete_and_train(name: str) -> None:
    """Each recipe has loss, optimiser, schedule, data and duration; one optimiser step leaves finite parameters."""
    model = narrow(name)
    recipe = model.recipe
    assert isinstance(recipe, Recipe)
    assert recipe.data
    assert (recipe.steps is None) != (recipe.epochs is None)
    assert 0 < recipe.lr_at(0, total=1000) <= recipe.optimizer.lr
    images, labels, targets = batch(model, 2)
    optimizer = recipe.optimizer.make(model.parameters())
    model.loss()(model(images, labels), labels, targets).backward()
    optimizer.step()
    states = [tensor for state in optimizer.state.values() for tensor in state.values() if torch.is_tensor(tensor)]
    n_kept = sum(tensor.numel() for tensor in states if tensor.dim() > 0)
    assert n_kept == recipe.optimizer.n_states * model.n_parameters
    for name, parameter in model.named_parameters():
        assert_finite(parameter, name)


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        ("sabour2017_mnist", LossConfig("margin", reconstruction_weight=0.0005)),
        ("choi2019_mnist", LossConfig("margin", reconstruction_reduction="mean", reconstruction_weight=0.3)),
        ("tsai2020_cifar10", LossConfig("cross_entropy")),
        ("tsai2020_em_cifar10", LossConfig("spread", margin_steps=350 * 391)),
        ("tsai2020_diverse_dynamic", LossConfig("margin")),
        ("tsai2020_diverse_vector", LossConfig("binary")),
        ("hinton2018_smallnorb", LossConfig("spread", margin_schedule="sigmoid")),
        ("sabour2017_cnn_multimnist", LossConfig("binary")),
        ("chen2019_fc_mnist", LossConfig("margin", reconstruction_reduction="half")),
    ],
)
def test_losses_of_the_papers(name: str, loss: LossConfig) -> None:
    assert narrow(name).recipe.loss == loss


def test_spread_loss_depends_on_the_step() -> None:
    model = narrow("hinton2018_smallnorb")
    images, labels, _ = batch(model, 4)
    output = model(images)
    early, late = (model.loss()(output, labels, step=step) for step in (0, math.inf))
    assert float((late - early).detach()) > 0


def test_recipes_are_changed_by_replace() -> None:
    recipe = narrow("capsnet_small").recipe
    assert dataclasses.replace(recipe, batch_size=7).batch_size == 7


def test_official_presets_are_documented() -> None:
    for entry in map(MODELS.get, torchcaps.list_models()):
        if "official" in entry.spec.presets:
            assert "Official:" in (type(entry.spec).__doc__ or ""), entry.name
