"""Primary capsules and capsule activations."""

import pytest
import torch
import torch.nn.functional as F

from tests.tolerances import EXACT, assert_different, assert_finite
from torchcaps.nn import CapsuleActivation, ExpSquash, PrimaryCapsules, Squash, exp_squash, length, squash


def test_trap_51_same_padding_pads_at_the_end() -> None:
    primary = PrimaryCapsules(3, 2, 4, 3, 2, "same", activation="none").double()
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    channels = primary(images).pose.permute(0, 3, 4, 1, 2).flatten(1, 2)
    expected = F.conv2d(F.pad(images, (0, 1, 0, 1)), primary.pose.weight, primary.pose.bias, stride=2)
    torch.testing.assert_close(channels, expected, rtol=0, atol=EXACT)
    symmetric = F.conv2d(images, primary.pose.weight, primary.pose.bias, stride=2, padding=1)
    assert_different(channels, symmetric)


@pytest.mark.parametrize(("relu", "name"), [(True, "squash"), (True, "exp_squash"), (False, "squash")])
def test_pose_and_activation_equal_convolutions(relu: bool, name: str) -> None:
    """On a rectangular grid, with a rectangular stride and asymmetric padding."""
    primary = PrimaryCapsules(
        3,
        2,
        4,
        (3, 3),
        (2, 1),
        "same",
        relu=relu,
        activation=name,
        activations=True,  # type: ignore[arg-type]
    ).double()
    images = torch.randn(2, 3, 6, 5, dtype=torch.float64)
    padded = F.pad(images, (1, 1, 0, 1))  # columns: one on each side; rows: one at the end
    channels = F.conv2d(padded, primary.pose.weight, primary.pose.bias, stride=(2, 1))
    channels = channels.relu() if relu else channels
    function = {"squash": squash, "exp_squash": exp_squash}[name]
    expected = function(channels.unflatten(1, (2, 4)).permute(0, 3, 4, 1, 2))
    capsules = primary(images)
    assert capsules.pose.shape == (2, 3, 5, 2, 4)
    torch.testing.assert_close(capsules.pose, expected, rtol=0, atol=EXACT)
    assert primary.activity is not None
    activation = torch.sigmoid(F.conv2d(padded, primary.activity.weight, primary.activity.bias, stride=(2, 1)))
    torch.testing.assert_close(capsules.activation, activation.permute(0, 2, 3, 1), rtol=0, atol=EXACT)


@pytest.mark.parametrize(
    ("name", "function"), [("squash", squash), ("exp_squash", exp_squash), ("none", lambda pose: pose)]
)
def test_activation_by_name(name: str, function: object) -> None:
    plain = PrimaryCapsules(3, 2, 4, 3, activation="none")
    named = PrimaryCapsules(3, 2, 4, 3, activation=name)  # type: ignore[arg-type]
    named.load_state_dict(plain.state_dict())
    images = torch.randn(2, 3, 6, 6)
    expected = function(plain(images).pose)  # type: ignore[operator]
    torch.testing.assert_close(named(images).pose, expected, rtol=0, atol=0)


def test_relu_layer_norm_and_modules() -> None:
    images = torch.randn(2, 3, 6, 6)
    assert float(PrimaryCapsules(3, 2, 4, 3, relu=True, activation="none")(images).pose.detach().min()) == 0
    normalized = PrimaryCapsules(3, 2, 4, 3, activation="layer_norm")(images).pose.detach()
    torch.testing.assert_close(normalized.mean(-1), torch.zeros(2, 4, 4, 2), rtol=0, atol=1e-5)
    tanh = PrimaryCapsules(3, 2, 4, 3, activation="capsule")
    assert isinstance(tanh.activation, CapsuleActivation)
    assert float(tanh(images).pose.detach().abs().max()) < 1
    capsules = PrimaryCapsules(3, 2, 4, 3, activation=Squash(), activations=True)(images)
    assert capsules.activation is not None
    assert capsules.activation.shape == (2, 4, 4, 2)
    assert isinstance(PrimaryCapsules(3, 2, 4, 3, activation="exp_squash").activation, ExpSquash)


def test_capsule_activation_is_an_affine_map_per_type() -> None:
    module = CapsuleActivation(3, 4).double()
    module.offset.data.normal_()
    pose = torch.randn(2, 5, 3, 4, dtype=torch.float64)
    expected = torch.tanh(pose[1, 2, 2] @ module.matrix[2] + module.offset[2])
    torch.testing.assert_close(module(pose)[1, 2, 2], expected, rtol=0, atol=EXACT)
    assert sum(p.numel() for p in module.parameters()) == 3 * (4 * 4 + 4)


@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.float16, 200.0), (torch.bfloat16, 1e18), (torch.float32, 1e18)], ids=str
)
def test_squash_of_long_vectors_does_not_overflow(dtype: torch.dtype, size: float) -> None:
    pose = torch.full((4,), size, dtype=dtype, requires_grad=True)
    squashed = squash(pose)
    assert float(length(squashed).detach()) == pytest.approx(1, abs=0.01)
    squashed.sum().backward()
    assert_finite(pose.grad, "gradient")


@pytest.mark.parametrize(("kernel", "stride"), [((5, 4), 1), ((3, 3), 2), ((2, 2), 1)])
def test_depthwise_capsules_equal_a_grouped_convolution(kernel: tuple[int, int], stride: int) -> None:
    """A kernel of the size of the grid is computed as a product and a sum; others as a convolution."""
    primary = PrimaryCapsules(6, 2, 3, kernel, stride, activation="none", depthwise=True).double()
    images = torch.randn(2, 6, 5, 4, dtype=torch.float64, requires_grad=True)
    weight, bias = primary.pose.weight, primary.pose.bias
    assert weight.shape == (6, 1, *kernel)
    expected = F.conv2d(images, weight, bias, stride=stride, groups=6)
    actual = primary(images).pose.permute(0, 3, 4, 1, 2).flatten(1, 2)
    torch.testing.assert_close(actual, expected, rtol=0, atol=EXACT)
    direction = torch.randn_like(expected)
    for a, e in zip(
        *(torch.autograd.grad(y, [images, weight, bias], direction) for y in (actual, expected)), strict=True
    ):
        torch.testing.assert_close(a, e, rtol=0, atol=EXACT)


def test_depthwise_capsules_reject_other_numbers_of_channels() -> None:
    with pytest.raises(ValueError, match=r"in_channels must be types \* dim = 6"):
        PrimaryCapsules(8, 2, 3, 3, depthwise=True)


@pytest.mark.parametrize("norm", ["channel", "type"])
def test_normalised_capsules(norm: str) -> None:
    """Training statistics of each channel, or of all elements of a type; activations of each type."""
    primary = PrimaryCapsules(3, 2, 4, 1, bias=False, activation="none", activations=True, norm=norm).double()  # type: ignore[arg-type]
    capsules = primary(torch.randn(5, 3, 6, 6, dtype=torch.float64))
    axes = (0, 1, 2) if norm == "channel" else (0, 1, 2, 4)
    mean, std = capsules.pose.mean(axes), capsules.pose.std(axes, correction=0)
    torch.testing.assert_close(mean, torch.zeros_like(mean), rtol=0, atol=1e-9)
    torch.testing.assert_close(std, torch.ones_like(std), rtol=0, atol=1e-3)
    logit = torch.logit(capsules.activation).mean((0, 1, 2))
    torch.testing.assert_close(logit, torch.zeros_like(logit), rtol=0, atol=1e-9)
    with pytest.raises(ValueError, match="'none', 'channel', 'type' or 'input'"):
        PrimaryCapsules(3, 2, 4, 1, norm="batch")  # type: ignore[arg-type]


def test_normalisation_of_the_input_is_separate_for_poses_and_activations() -> None:
    """norm="input" (Heinsen 2019): each convolution reads the features after a batch normalisation of its own."""
    primary = PrimaryCapsules(3, 2, 4, 1, activation="none", activations=True, norm="input").double()
    assert isinstance(primary.pose_norm, torch.nn.BatchNorm2d)
    assert primary.activity is not None
    assert primary.activity_norm is not None
    with torch.no_grad():
        primary.pose_norm.weight.fill_(2.0)
        primary.activity_norm.bias.fill_(-1.0)
    features = 3 + torch.randn(5, 3, 4, 4, dtype=torch.float64)
    normed = F.batch_norm(features, None, None, training=True)
    pose = F.conv2d(2 * normed, primary.pose.weight, primary.pose.bias).unflatten(1, (2, 4)).permute(0, 3, 4, 1, 2)
    logits = F.conv2d(normed - 1, primary.activity.weight, primary.activity.bias)
    capsules = primary(features)
    torch.testing.assert_close(capsules.pose, pose, rtol=0, atol=EXACT)
    torch.testing.assert_close(capsules.activation, logits.sigmoid().permute(0, 2, 3, 1), rtol=0, atol=EXACT)
