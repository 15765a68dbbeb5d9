"""What is given to a layer or to `route`: ranks, counts, sizes, kinds, NaN."""

import pytest
import torch

from tests.bad_input.examples import Refusal, check_refusal, conv, dense, grid, nan, pose
from torchcaps import Capsules, route
from torchcaps.routing import EM, Dynamic

REFUSALS: dict[str, Refusal] = {
    "dense rank": (lambda: dense()(pose[0]), ValueError, r"capsules\.pose must be \[B, 6, 4\].*got \[6, 4\]"),
    "dense count": (
        lambda: dense()(torch.randn(2, 5, 4)),
        ValueError,
        "6 children of size 4, got .*5 of size 4",
    ),
    "dense size": (
        lambda: dense()(torch.randn(2, 6, 3)),
        ValueError,
        "6 children of size 4, got .*6 of size 3",
    ),
    "conv rank": (lambda: conv()(pose), ValueError, r"must be \[B, H, W, 2, 4\], got \[2, 6, 4\]"),
    "conv count": (
        lambda: conv()(torch.randn(2, 5, 5, 3, 4)),
        ValueError,
        "2 child types of size 4.*3 of size 4",
    ),
    "conv grid": (
        lambda: conv(grid=(6, 5))(grid),
        ValueError,
        r"on the grid \[6, 5\] of the layer, got \[5, 5\]",
    ),
    "activation shape": (
        lambda: dense()(Capsules(pose, torch.ones(2, 5))),
        ValueError,
        r"capsules\.activation must have .*\[2, 6\], got \[2, 5\]",
    ),
    "no tensor": (lambda: dense()([1, 2]), TypeError, "capsules must be Capsules or a pose tensor, got list"),
    "whole numbers": (
        lambda: dense()(torch.ones(2, 6, 4).long()),
        TypeError,
        "floating-point tensor, got torch.int64",
    ),
    "nan pose": (
        lambda: dense()(nan(2, 6, 4)),
        ValueError,
        r"capsules\.pose must hold finite numbers, got 24 NaN or infinite of 48",
    ),
    "nan activation": (
        lambda: dense(routing=EM())(Capsules(pose, nan(2, 6))),
        ValueError,
        r"capsules\.activation must hold finite numbers, got 6 NaN",
    ),
    "votes rank": (
        lambda: route(pose, "dynamic"),
        ValueError,
        r"votes must have the axes \[B, I, J, D\], got \[2, 6, 4\]",
    ),
    "votes nan": (
        lambda: route(nan(2, 6, 3, 4), "dynamic"),
        ValueError,
        "votes must hold finite numbers, got 72 NaN",
    ),
    "votes kind": (
        lambda: route([1.0], "dynamic"),
        TypeError,
        "votes must be a floating-point tensor, got list",
    ),
    "infinite pose": (
        lambda: dense()(pose / 0),
        ValueError,
        r"capsules\.pose must hold finite numbers, got 48 NaN or inf",
    ),
    "negative activation": (
        lambda: dense(routing=EM())(Capsules(pose, -torch.ones(2, 6))),
        ValueError,
        r"capsules\.activation must not be negative, got -1",
    ),
    "activation kind": (
        lambda: dense()(Capsules(pose, torch.ones(2, 6).long())),
        TypeError,
        r"capsules\.activation must be a floating-point tensor, got torch\.int64",
    ),
    "activation list": (lambda: dense()(Capsules(pose, [1])), TypeError, r"capsules\.activation must be .* got list"),
    "route activation": (
        lambda: route(torch.randn(2, 6, 3, 4), EM(), torch.ones(2, 5)),
        ValueError,
        r"activation must be a tensor \[2, 6\], one for each child, got \[2, 5\]",
    ),
    "route activation nan": (
        lambda: route(torch.randn(2, 6, 3, 4), EM(), nan(2, 6)),
        ValueError,
        "activation must hold finite numbers, got 6 NaN",
    ),
    "route activation negative": (
        lambda: route(torch.randn(2, 6, 3, 4), EM(), -torch.ones(2, 6)),
        ValueError,
        "activation must not be negative, got -1",
    ),
    "votes of nothing": (
        lambda: route(torch.zeros(2, 6, 0, 4), EM()),
        ValueError,
        "one child, parent and number or more",
    ),
    "unknown coefficient": (
        lambda: route(torch.randn(2, 6, 3, 4), Dynamic(prior=True), coefficients={"priors": torch.zeros(6, 3)}),
        ValueError,
        r"coefficients has 'priors', and Dynamic.* owns \['prior'\]",
    ),
    "coefficient kind": (
        lambda: route(torch.randn(2, 6, 3, 4), Dynamic(prior=True), coefficients={"prior": 0.0}),
        TypeError,
        r"coefficients\['prior'\] must be a tensor, got float",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_bad_input_is_refused_in_one_sentence(name: str) -> None:
    check_refusal(REFUSALS[name])
