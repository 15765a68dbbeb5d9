"""What is easy to get wrong about Chen 2019."""

import pytest
import torch

from tests.tolerances import EXACT
from torchcaps.nn import ConvCapsules, DenseCapsules, exp_squash
from torchcaps.routing import Trainable


def test_trap_42_couplings_are_free_and_one_for_each_output_position() -> None:
    layer = DenseCapsules(1152, 8, 10, 16, routing=Trainable())
    assert layer.coefficients["coupling"].shape == (1152, 10)
    assert sum(p.numel() for p in layer.parameters()) == 1152 * 8 * 160 + 11_520
    assert bool((layer.coefficients["coupling"] < 0).any())
    assert not torch.allclose(layer.coefficients["coupling"].sum(-1), torch.ones(1152))
    printed = ConvCapsules(16, 8, 8, 8, 3, routing=Trainable(), grid=(9, 9))  # 7x7 outputs of a 3x3 kernel
    assert printed.coefficients["coupling"].numel() == 56_448
    first = ConvCapsules(16, 8, 8, 8, 4, routing=Trainable(), grid=(10, 10))
    assert (first.weight.numel(), first.coefficients["coupling"].numel()) == (131_072, 100_352)
    second = ConvCapsules(8, 8, 16, 8, 3, 2, routing=Trainable(), grid=7, pose=4)
    assert (second.weight.numel(), second.coefficients["coupling"].numel()) == (4_608, 10_368)
    with pytest.raises(ValueError, match="grid must be given"):
        ConvCapsules(16, 8, 8, 8, 4, routing=Trainable())


def test_the_mnist_convolution_takes_poses_of_two_by_four() -> None:
    layer = ConvCapsules(32, 8, 10, 8, 6, routing=Trainable(), grid=6, pose=2)
    front = 81 * 256 + 256 + 256 * 256 * 81 + 256
    assert front + sum(p.numel() for p in layer.parameters()) == 5_525_504
    assert layer(torch.randn(2, 6, 6, 32, 8)).flatten().pose.shape == (2, 10, 8)


def test_trap_43_the_squash_saturates_as_printed_and_is_the_identity_at_zero() -> None:
    for size, expected in {0.5: 0.393469, 1.0: 0.632121, 2.0: 0.864665}.items():
        pose = torch.tensor([0.6, 0.8], dtype=torch.float64) * size
        assert abs(float(exp_squash(pose).norm()) - expected) < 1e-6
    zero = torch.zeros(4, dtype=torch.float64)
    assert torch.equal(torch.autograd.functional.jacobian(exp_squash, zero), torch.eye(4, dtype=torch.float64))
    tiny = torch.full((4,), 1e-12, dtype=torch.float64)
    assert torch.allclose(torch.autograd.functional.jacobian(exp_squash, tiny), torch.eye(4, dtype=torch.float64))


def test_a_dense_layer_is_one_linear_map() -> None:
    layer = DenseCapsules(6, 4, 3, 5, routing=Trainable(relu="none")).double()
    pose = torch.randn(2, 6, 4, dtype=torch.float64)
    joined = layer.weight * layer.coefficients["coupling"][:, None, :, None]
    expected = exp_squash(torch.einsum("bix,ixjy->bjy", pose, joined))
    assert torch.allclose(layer(pose).pose, expected, atol=EXACT)


def test_relu_and_squash_stand_in_the_order_asked_for() -> None:
    pose = torch.randn(2, 6, 4, dtype=torch.float64)
    found = {}
    for order in ("none", "before", "after"):
        torch.manual_seed(0)
        layer = DenseCapsules(6, 4, 3, 5, routing=Trainable(relu=order), init=0.7).double()  # type: ignore[arg-type]
        found[order] = layer(pose).pose
        total = layer.votes(pose).sum(layer.coefficients["coupling"])
    assert torch.allclose(found["none"], exp_squash(total), atol=EXACT)
    assert torch.allclose(found["before"], exp_squash(total.relu()), atol=EXACT)
    assert torch.allclose(found["after"], exp_squash(total).relu(), atol=EXACT)


def test_first_values_are_caffes() -> None:
    layer = DenseCapsules(1152, 8, 10, 16, routing=Trainable())
    assert abs(float(layer.weight.detach().abs().max()) - 0.0484) < 1e-3
    assert abs(float(layer.coefficients["coupling"].detach().abs().max()) - 0.051) < 1e-3
    kernel = ConvCapsules(16, 8, 8, 8, 4, routing=Trainable(), grid=10)
    assert abs(float(kernel.weight.detach().abs().max()) - 0.2165) < 1e-3
    assert abs(float(kernel.coefficients["coupling"].detach().abs().max()) - 0.1083) < 1e-3
