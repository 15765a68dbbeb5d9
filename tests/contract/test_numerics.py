"""Finite values and gradients for zero, tiny and large inputs, in single precision and under autocast."""

import pytest
import torch

from tests.contract.cases import CASES, Case, over
from tests.tolerances import assert_finite
from torchcaps._core.validation import DomainError
from torchcaps.capsules import Capsules


@over(
    CASES,
    n=200,
    size={"0": 0.0, "1e-20": 1e-20, "1e4": 1e4},
    autocast={"float32": False, "bfloat16": True},
    streamed={"stored": False, "streamed": True},
)
def test_values_and_gradients_are_finite(case: Case, size: float, autocast: bool, streamed: bool) -> None:
    layer, children = case.layer(streamed, torch.float32), case.children(torch.float32)
    pose = (children.pose * size).requires_grad_()
    if autocast:
        pose_in, activation = pose.bfloat16(), children.activation.bfloat16()
    else:
        pose_in, activation = pose, children.activation
    limit = layer.routing.max_vote(torch.float32)
    if limit is not None and size * float(layer.weight.detach().abs().max()) > limit:  # outside of the domain
        with pytest.raises(DomainError):
            layer(Capsules(pose, children.activation))
        return
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        parents = layer(Capsules(pose_in, activation))
    total = sum(tensor.float().sum() for tensor in (*parents, parents.length()) if tensor is not None)
    total.backward()
    assert_finite(parents.pose, "pose")
    if parents.activation is not None:
        assert_finite(parents.activation, "activation")
    for name, tensor in {"children": pose, **dict(layer.named_parameters())}.items():
        if tensor.grad is not None:
            assert_finite(tensor.grad, f"gradient of {name}")


@over(
    [case for case in CASES if case.geometry in ("dense", "conv_s2")],
    n=80,
    activation={"inactive": 0.0, "active": 1.0},
)
def test_inactive_and_fully_active_children_are_finite(case: Case, activation: float) -> None:
    layer, children = case.layer(dtype=torch.float32), case.children(torch.float32)
    pose = children.pose.clone().requires_grad_()
    parents = layer(Capsules(pose, torch.full_like(children.activation, activation)))
    parents.pose.sum().backward()
    assert_finite(parents.pose, "pose")
    assert_finite(pose.grad, "gradient of children")


@over(CASES, n=80)
def test_routing_under_autocast_uses_the_dtype_of_the_weights(case: Case) -> None:
    """Under bfloat16 autocast the result is that of the rounded children in float32."""
    layer, children = case.layer(dtype=torch.float32), case.children(torch.float32)
    rounded = Capsules(*(tensor.bfloat16() for tensor in children))
    expected = layer(Capsules(*(tensor.float() for tensor in rounded)))
    with torch.autocast("cpu", torch.bfloat16):
        actual = layer(rounded)
    assert actual.pose.dtype == torch.float32
    torch.testing.assert_close(actual.pose, expected.pose, rtol=0, atol=0)
