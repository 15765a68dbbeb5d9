"""Finite values and gradients where others have NaN."""

import pytest
import torch

from tests.contract.cases import CASES, Case, over
from torchcaps.capsules import Capsules

SIZES = pytest.mark.parametrize("size", [0.0, 1e-20, 1e4])


@pytest.mark.parametrize("streamed", [False, True], ids=["stored", "streamed"])
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
@SIZES
@over(CASES)
def test_values_and_gradients_are_finite(case: Case, size: float, autocast: bool, streamed: bool) -> None:
    layer, children = case.layer(streamed, torch.float32), case.children(torch.float32)
    pose = (children.pose * size).requires_grad_()
    if autocast:
        pose_in, activation = pose.bfloat16(), children.activation.bfloat16()
    else:
        pose_in, activation = pose, children.activation
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        parents = layer(Capsules(pose_in, activation))
    total = sum(tensor.float().sum() for tensor in (*parents, parents.length()) if tensor is not None)
    total.backward()
    for tensor in (parents.pose, parents.activation, pose.grad, *(p.grad for p in layer.parameters())):
        assert tensor is None or bool(torch.isfinite(tensor).all())


@pytest.mark.parametrize("activation", [0.0, 1.0])
@over([case for case in CASES if case.geometry in ("dense", "conv_s2")])
def test_dead_and_certain_children_are_finite(case: Case, activation: float) -> None:
    layer, children = case.layer(dtype=torch.float32), case.children(torch.float32)
    pose = children.pose.clone().requires_grad_()
    parents = layer(Capsules(pose, torch.full_like(children.activation, activation)))
    parents.pose.sum().backward()
    assert bool(torch.isfinite(parents.pose).all())
    assert bool(torch.isfinite(pose.grad).all())


@over(CASES)
def test_bfloat16_autocast_changes_nothing_but_the_input(case: Case) -> None:
    """Routing works in the dtype of the weights: under autocast the result is that of the rounded children."""
    layer, children = case.layer(dtype=torch.float32), case.children(torch.float32)
    rounded = Capsules(*(tensor.bfloat16() for tensor in children))
    expected = layer(Capsules(*(tensor.float() for tensor in rounded)))
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(rounded)
    assert found.pose.dtype == torch.float32
    assert torch.equal(found.pose, expected.pose)
