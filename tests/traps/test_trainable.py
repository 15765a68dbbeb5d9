"""Traps of Chen 2019 (trainable couplings)."""

import pytest
import torch

from tests.tolerances import EXACT, assert_different
from torchcaps.nn import ConvCapsules, DenseCapsules, exp_squash
from torchcaps.routing import Trainable


def test_trap_42_couplings_are_unconstrained_and_per_output_position() -> None:
    layer = DenseCapsules(1152, 8, 10, 16, routing=Trainable())
    assert layer.coefficients["coupling"].shape == (1152, 10)
    assert sum(p.numel() for p in layer.parameters()) == 1152 * 8 * 160 + 11_520
    assert float(layer.coefficients["coupling"].detach().min()) < 0
    assert_different(layer.coefficients["coupling"].sum(-1), torch.ones(1152))
    printed = ConvCapsules(16, 8, 8, 8, 3, routing=Trainable(), grid=(9, 9))  # 7x7 outputs of a 3x3 kernel
    assert printed.coefficients["coupling"].numel() == 56_448
    first = ConvCapsules(16, 8, 8, 8, 4, routing=Trainable(), grid=(10, 10))
    assert (first.weight.numel(), first.coefficients["coupling"].numel()) == (131_072, 100_352)
    second = ConvCapsules(8, 8, 16, 8, 3, 2, routing=Trainable(), grid=7, pose=4)
    assert (second.weight.numel(), second.coefficients["coupling"].numel()) == (4_608, 10_368)
    with pytest.raises(ValueError, match="grid"):
        ConvCapsules(16, 8, 8, 8, 4, routing=Trainable())


def test_mnist_convolution_has_poses_of_two_by_four() -> None:
    layer = ConvCapsules(32, 8, 10, 8, 6, routing=Trainable(), grid=6, pose=2)
    convolutions = 81 * 256 + 256 + 256 * 256 * 81 + 256
    assert convolutions + sum(p.numel() for p in layer.parameters()) == 5_525_504
    assert layer(torch.randn(2, 6, 6, 32, 8)).flatten().pose.shape == (2, 10, 8)


def test_trap_43_exp_squash_saturates_as_printed_and_is_the_identity_at_zero() -> None:
    for size, expected in {0.5: 0.393469, 1.0: 0.632121, 2.0: 0.864665}.items():
        pose = torch.tensor([0.6, 0.8], dtype=torch.float64) * size
        assert float(exp_squash(pose).norm()) == pytest.approx(expected, abs=1e-6)
    identity = torch.eye(4, dtype=torch.float64)
    zero = torch.zeros(4, dtype=torch.float64)
    torch.testing.assert_close(torch.autograd.functional.jacobian(exp_squash, zero), identity, rtol=0, atol=0)
    tiny = torch.full((4,), 1e-12, dtype=torch.float64)
    torch.testing.assert_close(torch.autograd.functional.jacobian(exp_squash, tiny), identity)


def test_dense_layer_is_one_linear_map_before_the_squash() -> None:
    layer = DenseCapsules(6, 4, 3, 5, routing=Trainable(relu="none")).double()
    pose = torch.randn(2, 6, 4, dtype=torch.float64)
    merged = layer.weight * layer.coefficients["coupling"][:, None, :, None]
    expected = exp_squash(torch.einsum("bix,ixjy->bjy", pose, merged))
    torch.testing.assert_close(layer(pose).pose, expected, rtol=0, atol=EXACT)


def test_order_of_relu_and_squash() -> None:
    pose = torch.randn(2, 6, 4, dtype=torch.float64)
    parents = {}
    for order in ("none", "before", "after"):
        torch.manual_seed(0)
        layer = DenseCapsules(6, 4, 3, 5, routing=Trainable(relu=order), init=0.7).double()  # type: ignore[arg-type]
        parents[order] = layer(pose).pose
        total = layer.votes(pose).sum(layer.coefficients["coupling"])
    torch.testing.assert_close(parents["none"], exp_squash(total), rtol=0, atol=EXACT)
    torch.testing.assert_close(parents["before"], exp_squash(total.relu()), rtol=0, atol=EXACT)
    torch.testing.assert_close(parents["after"], exp_squash(total).relu(), rtol=0, atol=EXACT)


def test_initial_values_follow_caffe() -> None:
    layer = DenseCapsules(1152, 8, 10, 16, routing=Trainable())
    assert float(layer.weight.detach().abs().max()) == pytest.approx(0.0484, abs=1e-3)
    assert float(layer.coefficients["coupling"].detach().abs().max()) == pytest.approx(0.051, abs=1e-3)
    kernel = ConvCapsules(16, 8, 8, 8, 4, routing=Trainable(), grid=10)
    assert float(kernel.weight.detach().abs().max()) == pytest.approx(0.2165, abs=1e-3)
    assert float(kernel.coefficients["coupling"].detach().abs().max()) == pytest.approx(0.1083, abs=1e-3)
