"""Models that are equal by construction give equal outputs."""

import pytest
import torch
from torch import nn

import torchcaps
from tests.models.narrow import batch, narrow
from tests.tolerances import SAME, relative_rms
from torchcaps.nn import CapsuleStack, ConvCapsules, DenseCapsules, PrimaryCapsules
from torchcaps.routing import Attention, Dynamic, InvertedAttention, Uniform

CLOSE = SAME[torch.float64]


def test_dense_and_conv_networks_of_chen2019_are_equal_on_cifar10() -> None:
    dense, conv = narrow("chen2019_fc_cifar10").double(), narrow("chen2019_conv_cifar10").double()
    weights = dense.state_dict()
    like = conv.state_dict()
    conv.load_state_dict({name: tensor.view_as(like[name]) for name, tensor in weights.items()})
    images, labels, _ = batch(dense, 4)
    results = []
    for model in (dense, conv):
        output = model(images.double())
        model.loss()(output, labels).backward()
        results.append([output.scores, *(p.grad.flatten() for p in model.parameters())])
    for found, expected in zip(*results, strict=True):
        assert relative_rms(found, expected) < CLOSE


def test_couplings_of_chen2019_are_factors_of_the_matrices() -> None:
    """There is no nonlinearity between transform and coupling: c_ij W_ij with couplings of 1 is the same network."""
    model = narrow("chen2019_fc_mnist").double()
    images = batch(model, 3)[0].double()
    expected = model(images).scores
    layer = model.capsules.layers["classes"]
    with torch.no_grad():
        coupling = layer.coefficients["coupling"]  # [I, J]
        layer.weight.mul_(coupling[:, None, :, None])
        coupling.fill_(1.0)
    assert relative_rms(model(images).scores, expected) < CLOSE


def test_choi2019_of_depth_0_is_its_class_layer() -> None:
    model = narrow("choi2019_cifar10", depth=0).double().eval()
    assert list(model.capsules.layers) == ["classes"]
    images = batch(model, 3)[0].double()
    primary = model.front(images)
    own = model.capsules.layers["classes"](primary).flatten()
    assert relative_rms(model(images).capsules.pose, own.pose) < CLOSE
    assert own.pose.shape[1] == 10
    assert model.capsules.layers["classes"].kernel_size == primary.pose.shape[1:3]


def test_class_n_of_choi2019_depends_on_channel_n_only() -> None:
    """The reshape of the authors' code would mix the classes."""
    model = narrow("choi2019_mnist").double().eval()
    images = batch(model, 2)[0].double()
    before = model(images).capsules.pose
    with torch.no_grad():
        model.capsules.layers["classes"].coefficients["offset"][3] += 1
    changed = (model(images).capsules.pose - before).abs().amax((0, 2)) > 0
    assert changed.tolist() == [n == 3 for n in range(10)]


@pytest.mark.parametrize("name", ["tsai2020_cifar10", "tsai2020_resnet_cifar100", "tsai2020_diverse_vector"])
def test_schedules_of_tsai2020_are_equal_for_one_iteration(name: str) -> None:
    for iterations, same in ((1, True), (2, False)):
        models = [
            narrow(name, routing=InvertedAttention(iterations), schedule=schedule).double().eval()
            for schedule in ("concurrent", "sequential")
        ]
        models[1].load_state_dict(models[0].state_dict())
        images = batch(models[0], 2)[0].double()
        concurrent, sequential = (model(images).scores for model in models)
        assert (relative_rms(concurrent, sequential) < CLOSE) is same


def test_capsnet_equals_its_layers_in_sequence() -> None:
    """Layers in an `nn.Sequential`, as in the README, against the model by name."""
    torch.manual_seed(0)
    model = torchcaps.create_model("sabour2017_mnist", width=16, types=4).double()
    hand = nn.Sequential(
        nn.Conv2d(1, 16, 9),
        nn.ReLU(),
        PrimaryCapsules(16, 4, 8, 9, 2),
        DenseCapsules(144, 8, 10, 16, routing=Dynamic(3)),
    ).double()
    tensors = [tensor for name, tensor in model.named_parameters() if not name.startswith("decoder")]
    for own, tensor in zip(hand.parameters(), tensors, strict=True):
        own.data.copy_(tensor.data)
    images = batch(model, 3)[0].double()
    assert relative_rms(model(images).scores, hand(images).length()) < CLOSE


def test_tsai2020_equals_its_layers_in_sequence() -> None:
    torch.manual_seed(0)
    model = torchcaps.create_model("tsai2020_cifar10", width=16, types=4).double()
    routing = InvertedAttention(2)
    primary = PrimaryCapsules(16, 4, 16, 1, bias=False, activation="layer_norm")
    layers = [
        ConvCapsules(4, 16, 4, 16, 3, 2, routing=routing, pose="matrix"),
        ConvCapsules(4, 16, 4, 16, 3, 1, routing=routing, pose="matrix"),
        DenseCapsules(100, 16, 10, 16, routing=routing, pose="matrix"),
    ]
    hand = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), primary, CapsuleStack(layers)).double()
    tensors = [tensor for name, tensor in model.named_parameters() if not name.startswith("head")]
    for own, tensor in zip(hand.parameters(), tensors, strict=True):
        own.data.copy_(tensor.data)
    images = batch(model, 3)[0].double()
    assert relative_rms(model(images).capsules.pose, hand(images).pose) < CLOSE


def test_capsnet_with_one_iteration_equals_uniform_routing() -> None:
    one, uniform = (narrow("sabour2017_mnist", routing=routing).double() for routing in (Dynamic(1), Uniform()))
    uniform.load_state_dict(one.state_dict())
    images = batch(one, 3)[0].double()
    assert relative_rms(one(images).scores, uniform(images).scores) < CLOSE


@pytest.mark.parametrize("name", ["sabour2017_mnist", "tsai2020_cifar10", "choi2019_cifar10", "tsai2020_em_cifar10"])
def test_stored_and_streamed_models_are_equal(name: str) -> None:
    changes = {"routing": Attention(dropout=0)} if name.startswith("choi") else {}
    models = [narrow(name, streamed=streamed, **changes).double() for streamed in (False, True)]
    models[1].load_state_dict(models[0].state_dict())
    images, labels, _ = batch(models[0], 3)
    results = []
    for model in models:
        output = model(images.double(), labels)
        model.loss()(output, labels, images.double()).backward()
        # All at once: some gradients are 0 but for rounding (a bias below a batch norm, one under a softmax).
        gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        results.append([output.scores, gradients])
    for found, expected in zip(*results, strict=True):
        assert relative_rms(found, expected) < CLOSE
