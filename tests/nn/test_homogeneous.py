"""Homogeneous capsules, merging of branches, residual blocks: golden values and bad input."""

import pytest
import torch

from tests.routing.golden import assert_golden, wave
from tests.tolerances import EXACT
from torchcaps._core.validation import DomainError
from torchcaps.nn import BranchMerge, DenseCapsules, HomogeneousCapsules, ResidualCapsules
from torchcaps.routing import Dynamic


def test_golden_values_of_homogeneous_capsules() -> None:
    layer = HomogeneousCapsules(2, (3, 1), 2).double().eval()
    layer.weight.data.copy_(wave((2, 3, 2), 0.6))
    layer.norm.shift.data.fill_(0.1)
    capsules = layer(wave((3, 2), 0.2).T[None, :, :, None])
    assert_golden(capsules.pose[0], [[1.0848467, 1.60614112], [0, 0]])
    assert_golden(capsules.length(), [[1.9381903, 0]])


def test_golden_values_of_merged_branches() -> None:
    merge = BranchMerge(2).double().train()
    merge.weight.data.copy_(torch.tensor([1.5, 0.5]))
    logits = [[1.26142907, 1.70767722], [-1.56977191, -3.13019582], [-0.38154234, 2.11240379]]
    assert_golden(merge(wave((3, 2, 2), 0.4)), logits)


def test_dead_capsules_have_finite_gradients() -> None:
    layer = HomogeneousCapsules(2, 3, 4)
    layer.norm.shift.data.fill_(-100.0)
    features = torch.randn(2, 2, 3, 3, requires_grad=True)
    layer(features).length().sum().backward()
    assert features.grad is not None
    assert float(features.grad.abs().max()) == 0


def test_residual_blocks() -> None:
    layers = [DenseCapsules(5, 4, 5, 4, routing=Dynamic(2)).double() for _ in range(2)]
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    middle = x + layers[0](x).pose
    expected = middle + layers[1](middle).pose
    torch.testing.assert_close(ResidualCapsules(layers)(x).pose, expected, rtol=0, atol=EXACT)
    speed = 0.25 * layers[0](x).pose
    middle = x + speed
    speed = 0.75 * speed + 0.25 * layers[1](middle).pose
    torch.testing.assert_close(ResidualCapsules(layers, momentum=0.75)(x).pose, middle + speed, rtol=0, atol=EXACT)


@pytest.mark.parametrize("kind", ["capsules", "branches"])
@pytest.mark.parametrize("exponent", [-45, -20, 0, 10, 15, 20, 30, 38])
def test_running_statistics_stay_finite_or_values_are_rejected(exponent: int, kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(6, 4, 3, 3, generator=generator).clamp(-3, 3) * 10.0**exponent
    values = values if kind == "capsules" else values[..., 0]
    layer = HomogeneousCapsules(4, 3, 5) if kind == "capsules" else BranchMerge(3)
    values.requires_grad_()
    try:
        out = layer(values)
    except DomainError:
        assert exponent > 15
        return
    except ValueError:
        assert exponent == 38  # infinite
        return
    out = out.pose if kind == "capsules" else out
    out.backward(torch.arange(out.numel()).view(out.shape).cos())
    tensors = [out, values.grad, *(parameter.grad for parameter in layer.parameters()), *layer.buffers()]
    assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="keep the shape"):
        ResidualCapsules([DenseCapsules(5, 4, 3, 4, routing="dynamic")])(torch.randn(2, 5, 4))
    with pytest.raises(ValueError, match="at least one"):
        ResidualCapsules([])
    with pytest.raises(ValueError, match=r"momentum.*got 1"):
        ResidualCapsules([DenseCapsules(5, 4, 5, 4, routing="dynamic")], momentum=1)
    with pytest.raises(ValueError, match=r"\[B, 3, 4, 4\], got \[2, 3, 4, 5\]"):
        HomogeneousCapsules(3, 4, 10)(torch.randn(2, 3, 4, 5))
    with pytest.raises(ValueError, match=r"\[B, J, 2\], got \[2, 3, 3\]"):
        BranchMerge(2)(torch.randn(2, 3, 3))
    with pytest.raises(ValueError, match="'one' or 'normal'"):
        BranchMerge(2, initial="zero")
