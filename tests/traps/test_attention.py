"""Traps of Choi 2019 (attention routing)."""

import pytest
import torch

from tests.tolerances import EXACT, assert_different
from torchcaps import Capsules
from torchcaps.nn import CapsuleActivation, ConvCapsules, length
from torchcaps.routing import Attention


def conv_caps(**changes: object) -> ConvCapsules:
    """Return a convolutional capsule layer in float64 and eval mode."""
    options: dict = {"child_types": 3, "child_dim": 4, "parent_types": 2, "parent_dim": 5, "kernel_size": 3}
    options |= {"routing": Attention(), **changes}
    return ConvCapsules(**options).double().eval()


def children(grid: int = 5, types: int = 3, dim: int = 4) -> torch.Tensor:
    return torch.randn(2, grid, grid, types, dim, dtype=torch.float64)


def test_trap_17_softmax_is_over_child_channels_at_one_position() -> None:
    _, trace = conv_caps()(children(), trace=True)
    (coupling,) = trace.couplings
    assert coupling.shape == (2, 3, 3, 3, 2)  # one coupling per position, child channel and parent
    torch.testing.assert_close(coupling.sum(-2), torch.ones(2, 3, 3, 2, dtype=torch.float64))
    assert_different(coupling.sum(-1), torch.ones(2, 3, 3, 3, dtype=torch.float64))


def test_trap_18_logit_depends_on_all_child_channels() -> None:
    layer = conv_caps()
    pose = children()
    changed = pose.clone()
    changed[..., 1, :] = 0
    before, after = (layer(x, trace=True)[1].logits[0] for x in (pose, changed))
    assert_different(before[..., 0, :], after[..., 0, :])  # the logit of channel 0 after a change of channel 1


def test_trap_19_each_pair_of_channels_has_its_own_kernel() -> None:
    layer = ConvCapsules(8, 16, 8, 32, 3, 2, "same", routing=Attention())
    assert layer.weight.numel() == 294_912
    assert layer.bias is not None
    assert layer.bias.numel() == 2_048
    counts = {name: p.numel() for name, p in layer.coefficients.named_parameters()}
    assert counts == {"attention": 8 * 8 * 8 * 32, "matrix": 8 * 32 * 32, "offset": 8 * 32}


def test_encoder_of_the_mnist_net_has_the_published_parameter_count() -> None:
    """4,483,584 in the authors' notebook: convolutions, primary, one convolutional and the class layer."""
    front = 64 * 9 + 64 + 64 * 64 * 9 + 64 + 2 * 4 * 64  # two convolutions, batch norm with its running statistics
    primary = 64 * 128 * 9 + 128 + sum(p.numel() for p in CapsuleActivation(8, 16).parameters())
    conv = ConvCapsules(8, 16, 8, 32, 3, 2, "same", routing=Attention())
    final = ConvCapsules(8, 32, 10, 32, 7, routing=Attention())
    layers = sum(p.numel() for layer in (conv, final) for p in layer.parameters())
    assert front + primary + layers == 4_483_584


def test_trap_20_residual_is_added_before_the_tanh() -> None:
    layer = conv_caps(parent_types=3, parent_dim=4, padding="same", routing=Attention(residual=True))
    layer.coefficients["matrix"].data.zero_()
    layer.coefficients["offset"].data.zero_()
    pose = 3 * children()
    parents = layer(pose).pose
    torch.testing.assert_close(parents, pose.tanh(), rtol=0, atol=EXACT)
    assert float(parents.detach().abs().max()) < 1


def test_trap_20_residual_needs_equal_shapes() -> None:
    residual = Attention(residual=True)
    with pytest.raises(ValueError, match=r"residual=True.*3 children of size 4.*2 parents of size 5"):
        conv_caps(routing=residual)
    strided = conv_caps(parent_types=3, parent_dim=4, stride=2, routing=residual)
    with pytest.raises(ValueError, match=r"residual=True.*\[5, 5\].*\[2, 2\]"):
        strided(children())


def test_trap_21_length_is_divided_by_the_root_of_the_size() -> None:
    ones = torch.ones(2, 10, 32)
    torch.testing.assert_close(Capsules(ones).length(normalized=True), torch.ones(2, 10))
    torch.testing.assert_close(length(ones, normalized=True), torch.ones(2, 10))
    assert float(conv_caps()(children()).length(normalized=True).detach().max()) < 1


def test_trap_22_dropout_is_on_input_capsules_and_in_training_only() -> None:
    layer = conv_caps(routing=Attention(dropout=0.5))
    pose = children()
    torch.testing.assert_close(layer(pose).pose, layer(pose).pose, rtol=0, atol=0)
    layer.train()
    torch.manual_seed(3)
    dropped = torch.nn.functional.dropout(pose, 0.5)
    torch.manual_seed(3)
    parents = layer(pose).pose
    torch.testing.assert_close(parents, layer.eval()(dropped).pose, rtol=0, atol=EXACT)
    assert_different(parents, layer(pose).pose)


def test_trap_23_class_capsule_is_its_own_channel() -> None:
    """A change of the weights of parent n changes class n only."""
    layer = conv_caps(kernel_size=5, parent_types=4)
    pose = children()
    before = layer(pose).pose
    layer.weight.data[:, :, 2] += 1
    changed = (layer(pose).pose - before).abs().amax((0, 1, 2, 4)) > EXACT
    assert changed.tolist() == [False, False, True, False]


def test_votes_equal_a_grouped_convolution() -> None:
    """With TensorFlow's SAME padding at stride 2 (trap 51)."""
    layer = conv_caps(stride=2, padding="same")
    pose = children(6)
    kernel = layer.weight.detach().unflatten(1, (3, 3, 4))  # [m, k, l, x, n, y]
    kernel = kernel.permute(0, 4, 5, 3, 1, 2).reshape(3 * 2 * 5, 4, 3, 3)
    image = pose.permute(0, 3, 4, 1, 2).flatten(1, 2)  # channels m-major
    padded = torch.nn.functional.pad(image, (0, 1, 0, 1))
    expected = torch.nn.functional.conv2d(padded, kernel, layer.bias.detach().flatten(), stride=2, groups=3)  # type: ignore[union-attr]
    expected = expected.unflatten(1, (3, 2, 5)).permute(0, 4, 5, 1, 2, 3)
    torch.testing.assert_close(layer.votes(pose).dense(), expected, rtol=0, atol=EXACT)
    shifted = torch.nn.functional.conv2d(
        image,
        kernel,
        layer.bias.detach().flatten(),
        stride=2,
        padding=1,
        groups=3,  # type: ignore[union-attr]
    )
    assert_different(layer.votes(pose).dense(), shifted.unflatten(1, (3, 2, 5)).permute(0, 4, 5, 1, 2, 3))
