"""Layers and recipes of all models against snapshots that were reviewed against the papers; initialisation.

Parameter counts do not depend on ReLU, padding or momentum; the snapshots do. After an intended change run
`python -m tests.models.write_tables` and review the diff.
"""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchcaps
from tests.models.description import describe, describe_recipe
from tests.models.narrow import EVERY, batch, narrow
from tests.tolerances import SAME, assert_finite, relative_rms
from torchcaps.capsules import Capsules
from torchcaps.models import init
from torchcaps.models.blocks import BasicBlock
from torchcaps.models.heads import SharedClassifier
from torchcaps.nn import squash
from torchcaps.routing import EM, Dynamic, InvertedAttention, Quadratic, Uniform

HERE = Path(__file__).resolve().parent
CLOSE = SAME[torch.float64]


def layer_tables() -> dict[str, list[str]]:
    tables: dict[str, list[str]] = {}
    for line in (HERE / "layer_tables.txt").read_text().splitlines():
        if line.startswith(" "):
            tables[next(reversed(tables))].append(line.strip())
        else:
            tables[line] = []
    return tables


TABLES = layer_tables()
RECIPES = dict(line.split(": ", 1) for line in (HERE / "recipes.txt").read_text().splitlines())


@EVERY
def test_layers_and_recipe_match_the_snapshot(name: str) -> None:
    with torch.device("meta"):
        model = torchcaps.create_model(name)
    assert name in TABLES, "not in the snapshot: run python -m tests.models.write_tables"
    assert describe(model) == TABLES[name]
    assert describe_recipe(model.recipe) == RECIPES[name]


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (
            "sabour2017_mnist",
            ["primary 9x9 s2 p0 32x8 Squash 0.0312", "digit: dense 10x16 rows 1 Dynamic(iterations=3, bias=True)"],
        ),
        ("sabour2017_cifar10", ["primary 9x9 s2 psame 64x8 Squash 0.0154"]),
        ("sabour2017_cnn_multimnist", ["conv 5x5 s1 p2 512"]),
        (
            "chen2019_conv_mnist",
            ["primary 6x6 s2 p0 32x16 ExpSquash relu", "classes: conv 8x8 s1 p0 kernel 10x16 rows 4 Trainable()"],
        ),
        (
            "chen2019_dynamic_mnist",
            ["primary 9x9 s2 p0 32x8 Identity", "classes: dense 10x16 rows 1 Dynamic(iterations=4)"],
        ),
        ("chen2019_cnn_mnist", ["conv 5x5 s1 p0 256", "conv 5x5 s1 p0 128"]),
        ("yang2021_mnist", ["primary 9x9 s2 p0 32x8 Squash relu"]),
    ],
)
def test_layers_of_the_official_preset(name: str, lines: list[str]) -> None:
    with torch.device("meta"):
        model = torchcaps.create_model(name, preset="official")
    described = describe(model)
    assert [line for line in lines if line not in described] == []


def test_residual_block_equals_explicit_convolutions() -> None:
    for before, channels, stride in ((4, 4, 1), (4, 6, 2)):
        block = BasicBlock(before, channels, stride).double().eval()
        features = torch.randn(2, before, 8, 8, dtype=torch.float64)
        with torch.no_grad():
            for norm in (module for module in block.modules() if isinstance(module, torch.nn.BatchNorm2d)):
                norm.running_mean.normal_()
                norm.running_var.uniform_(0.5, 2)
        inner = block.norm1(F.conv2d(features, block.conv1.weight, stride=stride, padding=1)).relu()
        inner = block.norm2(F.conv2d(inner, block.conv2.weight, padding=1))
        around = features
        if stride == 2:
            around = block.shortcut[1](F.conv2d(features, block.shortcut[0].weight, stride=2))
        assert relative_rms(block(features), (inner + around).relu()) < CLOSE


def test_same_padding_pads_more_at_the_end() -> None:
    """As in TensorFlow: a 9x9 window of stride 2 on an even grid has padding 3 before and 4 after."""
    for name in ("sabour2017_cifar10", "yang2021_cifar10"):
        primary = narrow(name).double().front.primary
        features = torch.randn(1, 16, 24, 24, dtype=torch.float64)
        sums = F.conv2d(F.pad(features, (3, 4, 3, 4)), primary.pose.weight, primary.pose.bias, stride=2)
        assert relative_rms(primary(features).pose, squash(sums.unflatten(1, (4, 8)).permute(0, 3, 4, 1, 2))) < CLOSE


def test_shared_classifier_scales_poses_by_activations() -> None:
    head = SharedClassifier(4).double()
    pose, activation = torch.randn(2, 3, 4, dtype=torch.float64), torch.rand(2, 3, dtype=torch.float64)
    expected = (pose * activation[..., None]) @ head.linear.weight[0] + head.linear.bias
    assert relative_rms(head(Capsules(pose, activation)), expected) < CLOSE
    assert relative_rms(head(Capsules(pose)), pose @ head.linear.weight[0] + head.linear.bias) < CLOSE


def test_initial_weights_follow_the_frameworks() -> None:
    """Uniform up to the bound of the framework; biases 0."""
    for name, factor in (
        ("chen2019_fc_mnist", 3),
        ("chen2019_multi_cifar10", 3),
        ("chen2019_cnn_mnist", 3),
        ("choi2019_mnist", 6),
    ):
        torch.manual_seed(0)
        model = torchcaps.create_model(name, width=32)
        weight = model.front.conv1.weight
        fans = weight[0].numel() + (weight[:, 0].numel() if factor == 6 else 0)
        largest = float(weight.detach().abs().max())
        assert 0.95 < largest / (factor / fans) ** 0.5 <= 1 + 1e-6, name
        bias = model.front.conv1.bias
        assert bias is None or float(bias.detach().abs().max()) == 0, name
    torch.manual_seed(0)
    weight = torchcaps.create_model("sabour2017_mnist").front.conv1.weight
    assert float(weight.detach().std()) == pytest.approx((2 / 81) ** 0.5, rel=0.02)


def test_squash_std() -> None:
    """The vote sum has length 0.7, single votes at most length 1; the leak counts as another parent."""
    assert init.squash_std(Dynamic(3), 1152, 10, 16, 0.7) == pytest.approx(0.7 * 10 / (1152 * 16) ** 0.5)
    assert init.squash_std(Uniform(), 1152, 10, 16, 0.7) == pytest.approx(0.7 * 10 / (1152 * 16) ** 0.5)
    assert init.squash_std(Dynamic(3, leak=True), 1152, 10, 16, 0.7) == pytest.approx(0.7 * 11 / (1152 * 16) ** 0.5)
    assert init.squash_std(Quadratic(initial=0.5), 1152, 10, 16, 0.7) == pytest.approx(1.4 / (1152 * 16) ** 0.5)
    assert init.squash_std(Dynamic(3), 100, 100, 16, 0.7) == 0.25
    assert init.squash_std(EM(2), 1152, 10, 16, 0.7) is None
    assert init.squash_std(InvertedAttention(2), 1152, 10, 16, 0.7) is None


def test_lengths_do_not_vanish_in_hidden_layers() -> None:
    model = narrow("tsai2020_cifar10", routing="dynamic", types=16)
    trace = model(batch(model, 2)[0], trace=True).trace
    lengths = [float(states.states[-1].capsules().length().detach().mean()) for states in trace]
    assert min(lengths) > 0.001, lengths


@pytest.mark.parametrize("before", [4, 8, 12])
def test_sliced_shortcut_equals_strided_convolution(before: int) -> None:
    """The gradient of a strided 1x1 convolution of few channels in channels-last format writes out of bounds on
    processors with AVX2 only, so the input is sliced instead.
    """
    torch.manual_seed(0)
    block = BasicBlock(before, 8, stride=2).double()
    shortcut = block.shortcut[0]
    assert isinstance(shortcut, nn.Conv2d)
    assert shortcut.stride == (1, 1)
    images = torch.randn(3, before, 7, 6, dtype=torch.float64)
    strided = F.conv2d(images, shortcut.weight, stride=2)
    inner = block.norm2(block.conv2(F.relu(block.norm1(block.conv1(images)))))
    torch.testing.assert_close(block(images), F.relu(inner + block.shortcut[1](strided)))
    for _ in range(5):  # overwritten memory shows when it is freed
        last = torch.randn(16, before, 28, 28).to(memory_format=torch.channels_last).requires_grad_()
        block.float()(last).sum().backward()
        assert last.grad is not None
        assert_finite(last.grad)


def test_hidden_units_of_the_plain_cnn_read_all_positions() -> None:
    """An average over positions is invariant to their order; the units before the class layer are not."""
    images = torch.zeros(2, 1, 32, 32)
    images[0, :, 10:13, 10:13], images[1, :, 18:21, 18:21] = 1, 1  # moved by two pixels of the last grid
    for features, invariant in (((), True), ((6,), False)):
        torch.manual_seed(0)
        model = torchcaps.create_model("cnn_images", image=(1, 32, 32), channels=(4, 4), features=features).eval()
        first, second = model(images).scores
        assert (relative_rms(first, second) < 1e-5) == invariant, features
    hidden = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert [layer.in_features for layer in hidden] == [4 * 8 * 8, 6]
