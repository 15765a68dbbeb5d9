"""Invalid inputs of layers and of `route`: rank, shape, dtype, NaN, negative activations."""

import pytest
import torch

from tests.bad_input.rejection import Rejection, check_rejection, conv, dense, grid, pose, with_nan
from torchcaps import Capsules, route
from torchcaps.routing import EM, Dynamic

votes = torch.randn(2, 6, 3, 4)

POSE, ACTIVATION = "capsules.pose", "capsules.activation"

LAYER_INPUTS = {
    "dense rank": Rejection(lambda: dense()(pose[0]), ValueError, POSE, "[6, 4]", "[B, 6, 4]"),
    "dense count": Rejection(lambda: dense()(torch.randn(2, 5, 4)), ValueError, POSE, "[2, 5, 4]", "[B, 6, 4]"),
    "dense size": Rejection(lambda: dense()(torch.randn(2, 6, 3)), ValueError, POSE, "[2, 6, 3]", "[B, 6, 4]"),
    "conv rank": Rejection(lambda: conv()(pose), ValueError, POSE, "[2, 6, 4]", "[B, H, W, 2, 4]"),
    "conv count": Rejection(lambda: conv()(torch.randn(2, 5, 5, 3, 4)), ValueError, POSE, "3 of size 4", "2"),
    "conv grid": Rejection(lambda: conv(grid=(6, 5))(grid), ValueError, POSE, "[5, 5]", "[6, 5]"),
    "not a tensor": Rejection(lambda: dense()([1, 2]), TypeError, "capsules", "list", "Capsules"),
    "integers": Rejection(lambda: dense()(pose.long()), TypeError, POSE, "torch.int64", "floating-point"),
    "NaN": Rejection(lambda: dense()(with_nan(2, 6, 4)), ValueError, POSE, "24", "finite"),
    "infinity": Rejection(lambda: dense()(pose / 0), ValueError, POSE, "48", "finite"),
    "activation shape": Rejection(
        lambda: dense()(Capsules(pose, torch.ones(2, 5))), ValueError, ACTIVATION, "[2, 5]", "[2, 6]"
    ),
    "activation NaN": Rejection(
        lambda: dense(routing=EM())(Capsules(pose, with_nan(2, 6))), ValueError, ACTIVATION, "6", "finite"
    ),
    "activation negative": Rejection(
        lambda: dense(routing=EM())(Capsules(pose, -torch.ones(2, 6))), ValueError, ACTIVATION, "-1", "negative"
    ),
    "activation integers": Rejection(
        lambda: dense()(Capsules(pose, torch.ones(2, 6).long())), TypeError, ACTIVATION, "torch.int64", "floating-point"
    ),
    "activation list": Rejection(lambda: dense()(Capsules(pose, [1])), TypeError, ACTIVATION, "list", "floating-point"),
}

ROUTE_INPUTS = {
    "rank": Rejection(lambda: route(pose, "dynamic"), ValueError, "votes", "[2, 6, 4]", "[B, I, J, D]"),
    "not a tensor": Rejection(lambda: route([1.0], "dynamic"), TypeError, "votes", "list", "floating-point"),
    "NaN": Rejection(lambda: route(with_nan(2, 6, 3, 4), "dynamic"), ValueError, "votes", "72", "finite"),
    "no parents": Rejection(lambda: route(votes[:, :, :0], EM()), ValueError, "votes", "[2, 6, 0, 4]", "one"),
    "activation shape": Rejection(
        lambda: route(votes, EM(), torch.ones(2, 5)), ValueError, "activation", "[2, 5]", "[2, 6]"
    ),
    "activation NaN": Rejection(lambda: route(votes, EM(), with_nan(2, 6)), ValueError, "activation", "6", "finite"),
    "activation negative": Rejection(
        lambda: route(votes, EM(), -torch.ones(2, 6)), ValueError, "activation", "-1", "negative"
    ),
    "children dtype": Rejection(
        lambda: route(votes, "self_routing", children=pose.double()), ValueError, "children", "torch.float64", "float32"
    ),
    "children empty": Rejection(
        lambda: route(votes, "self_routing", children=pose[..., :0]), ValueError, "children", "[2, 6, 0]", "one"
    ),
    "coefficient NaN": Rejection(
        lambda: route(votes, Dynamic(prior=True), coefficients={"prior": with_nan(6, 3)}),
        ValueError,
        "coefficients['prior']",
        "18",
        "finite",
    ),
    "coefficient dtype": Rejection(
        lambda: route(votes, Dynamic(prior=True), coefficients={"prior": torch.zeros(6, 3).double()}),
        ValueError,
        "coefficients['prior']",
        "torch.float64",
        "float32",
    ),
    "coefficients list": Rejection(
        lambda: route(votes, Dynamic(prior=True), coefficients=[0.0]), TypeError, "coefficients", "list", "mapping"
    ),
    "unknown coefficient": Rejection(
        lambda: route(votes, Dynamic(prior=True), coefficients={"priors": torch.zeros(6, 3)}),
        ValueError,
        "coefficient",
        "'priors'",
        "'prior'",
    ),
    "coefficient not a tensor": Rejection(
        lambda: route(votes, Dynamic(prior=True), coefficients={"prior": 0.0}),
        TypeError,
        "coefficients['prior']",
        "float",
        "tensor",
    ),
}


@pytest.mark.parametrize("name", LAYER_INPUTS)
def test_invalid_layer_input_is_rejected(name: str) -> None:
    check_rejection(LAYER_INPUTS[name])


@pytest.mark.parametrize("name", ROUTE_INPUTS)
def test_invalid_input_of_route_is_rejected(name: str) -> None:
    check_rejection(ROUTE_INPUTS[name])
