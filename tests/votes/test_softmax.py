"""The softmax for few parents equals torch's: values, gradients, second derivatives and batched gradients."""

import pytest
import torch

from torchcaps.votes import Wiring
from torchcaps.votes.softmax import LANES, MIN_ELEMENTS, NarrowSoftmax, is_narrow, softmax_over_parents

SHAPE = (2, MIN_ELEMENTS // 4, LANES - 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_torch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (30 * torch.randn(SHAPE, dtype=dtype)).requires_grad_()
    with torch.no_grad():
        logits[0, :50, 0] = -torch.inf  # masked parents
        logits[0, 50:60] = 1e30
    assert is_narrow(logits)
    actual, expected = softmax_over_parents(logits), logits.softmax(-1)
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)
    direction = torch.randn_like(logits)
    (found,) = torch.autograd.grad(actual, logits, direction)
    torch.testing.assert_close(found, torch.autograd.grad(expected, logits, direction)[0], rtol=0, atol=4 * tolerance)


def test_derivatives() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(NarrowSoftmax.apply, logits, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(NarrowSoftmax.apply, logits)


def test_transforms_and_wide_logits_use_torch() -> None:
    assert not is_narrow(torch.zeros(MIN_ELEMENTS, LANES))
    assert not is_narrow(torch.zeros(SHAPE, dtype=torch.float16))
    logits = torch.randn(SHAPE)
    expected = logits.softmax(-1)
    torch.testing.assert_close(torch.vmap(softmax_over_parents)(logits), expected)
    torch.testing.assert_close(torch.func.jvp(softmax_over_parents, (logits,), (logits,))[0], expected)


@pytest.mark.parametrize("leak", [False, True])
def test_global_competition_at_a_single_position_is_local(leak: bool) -> None:
    """Every child is read once, so that the parents of one position are all of its parents."""
    torch.manual_seed(0)
    logits = torch.randn(2, 1, 1, 18, 3)
    geometry = {"types": 2, "grid": (3, 3), "kernel": (3, 3)}
    single, local = (Wiring(**geometry, competition=kind) for kind in ("global", "local"))
    assert single.is_local
    assert Wiring(6, competition="global").is_local
    assert not Wiring(2, (4, 3), (3, 3), competition="global").is_local
    assert not Wiring(2, (2, 3), (3, 3), padding=(1, 0, 0, 0), competition="global").is_local
    assert torch.equal(single.softmax(logits, leak), local.softmax(logits, leak))
    assert torch.equal(single.uniform_coupling(3, logits, leak), local.uniform_coupling(3, logits, leak))
