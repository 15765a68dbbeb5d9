"""What is easy to get wrong about Choi 2019."""

import pytest
import torch

from tests.tolerances import EXACT
from torchcaps import Capsules
from torchcaps.nn import CapsuleActivation, ConvCapsules, length
from torchcaps.routing import Attention


def conv_caps(**changes: object) -> ConvCapsules:
    """A convolutional capsule layer in double, in evaluation mode."""
    options: dict = {"child_types": 3, "child_dim": 4, "parent_types": 2, "parent_dim": 5, "kernel_size": 3}
    options |= {"routing": Attention(), **changes}
    return ConvCapsules(**options).double().eval()


def children(grid: int = 5, types: int = 3, dim: int = 4) -> torch.Tensor:
    return torch.randn(2, grid, grid, types, dim, dtype=torch.float64)


def test_trap_17_the_softmax_is_over_child_channels_at_one_place() -> None:
    _, trace = conv_caps()(children(), trace=True)
    (coupling,) = trace.couplings
    assert coupling.shape == (2, 3, 3, 3, 2)  # one coupling for each place, child channel and parent
    assert torch.allclose(coupling.sum(-2), torch.ones(2, 3, 3, 2, dtype=torch.float64))
    assert not torch.allclose(coupling.sum(-1), torch.ones(2, 3, 3, 3, dtype=torch.float64))


def test_trap_18_a_logit_sees_all_child_channels() -> None:
    layer = conv_caps()
    pose = children()
    changed = pose.clone()
    changed[..., 1, :] = 0
    before, after = (layer(x, trace=True)[1].logits[0] for x in (pose, changed))
    assert not torch.allclose(before[..., 0, :], after[..., 0, :])  # the logit of channel 0, though 1 was changed


def test_trap_19_every_pair_of_channels_has_a_kernel_of_its_own() -> None:
    layer = ConvCapsules(8, 16, 8, 32, 3, 2, "same", routing=Attention())
    assert layer.weight.numel() == 294_912
    assert layer.bias is not None
    assert layer.bias.numel() == 2_048
    counts = {name: p.numel() for name, p in layer.coefficients.named_parameters()}
    assert counts == {"attention": 8 * 8 * 8 * 32, "matrix": 8 * 32 * 32, "offset": 8 * 32}


def test_the_encoder_of_the_mnist_net_has_the_published_count() -> None:
    """4,483,584 in the authors' notebook: the front, primary, one convolutional and the class layer."""
    front = 64 * 9 + 64 + 64 * 64 * 9 + 64 + 2 * 4 * 64  # two convolutions, batch norm with its moving averages
    primary = 64 * 128 * 9 + 128 + sum(p.numel() for p in CapsuleActivation(8, 16).parameters())
    conv = ConvCapsules(8, 16, 8, 32, 3, 2, "same", routing=Attention())
    final = ConvCapsules(8, 32, 10, 32, 7, routing=Attention())
    layers = sum(p.numel() for layer in (conv, final) for p in layer.parameters())
    assert front + primary + layers == 4_483_584


def test_trap_20_the_residual_is_added_before_the_tanh() -> None:
    layer = conv_caps(parent_types=3, parent_dim=4, padding="same", routing=Attention(residual=True))
    layer.coefficients["matrix"].data.zero_()
    layer.coefficients["offset"].data.zero_()
    pose = 3 * children()
    found = layer(pose).pose
    assert torch.allclose(found, pose.tanh(), atol=EXACT)
    assert float(found.detach().abs().max()) < 1
    with pytest.raises(ValueError, match="same number and size"):
        conv_caps(routing=Attention(residual=True))
    stride = conv_caps(parent_types=3, parent_dim=4, stride=2, routing=Attention(residual=True))
    with pytest.raises(ValueError, match="grid must stay the same"):
        stride(pose)


def test_trap_21_lengths_are_over_the_root_of_the_size() -> None:
    ones = torch.ones(2, 10, 32)
    assert torch.allclose(Capsules(ones).length(normalized=True), torch.ones(2, 10))
    assert torch.allclose(length(ones, normalized=True), torch.ones(2, 10))
    assert float(conv_caps()(children()).length(normalized=True).detach().max()) < 1


def test_trap_22_dropout_is_on_input_capsules_and_in_training_only() -> None:
    layer = conv_caps(routing=Attention(dropout=0.5))
    pose = children()
    assert torch.equal(layer(pose).pose, layer(pose).pose)
    layer.train()
    torch.manual_seed(3)
    dropped = torch.nn.functional.dropout(pose, 0.5)
    torch.manual_seed(3)
    found = layer(pose).pose
    assert torch.allclose(found, layer.eval()(dropped).pose, atol=EXACT)
    assert not torch.allclose(found, layer(pose).pose)


def test_trap_23_a_class_capsule_comes_from_its_own_channel() -> None:
    """Change what only parent n is made of: only class n changes."""
    layer = conv_caps(kernel_size=5, parent_types=4)
    pose = children()
    before = layer(pose).pose
    layer.weight.data[:, :, 2] += 1
    changed = (layer(pose).pose - before).abs().amax((0, 1, 2, 4)) > EXACT
    assert changed.tolist() == [False, False, True, False]


def test_votes_are_the_grouped_convolution() -> None:
    """The transform equals a grouped convolution by torch, with TensorFlow's padding at stride 2 (trap 51)."""
    layer = conv_caps(stride=2, padding="same")
    pose = children(6)
    kernel = layer.weight.detach().unflatten(1, (3, 3, 4))  # [m, k, l, x, n, y]
    kernel = kernel.permute(0, 4, 5, 3, 1, 2).reshape(3 * 2 * 5, 4, 3, 3)
    image = pose.permute(0, 3, 4, 1, 2).flatten(1, 2)  # channels m-major
    padded = torch.nn.functional.pad(image, (0, 1, 0, 1))
    expected = torch.nn.functional.conv2d(padded, kernel, layer.bias.detach().flatten(), stride=2, groups=3)  # type: ignore[union-attr]
    expected = expected.unflatten(1, (3, 2, 5)).permute(0, 4, 5, 1, 2, 3)
    assert torch.allclose(layer.votes(pose).dense(), expected, atol=EXACT)
    shifted = torch.nn.functional.conv2d(
        image,
        kernel,
        layer.bias.detach().flatten(),
        stride=2,
        padding=1,
        groups=3,  # type: ignore[union-attr]
    )
    assert not torch.allclose(layer.votes(pose).dense(), shifted.unflatten(1, (3, 2, 5)).permute(0, 4, 5, 1, 2, 3))
