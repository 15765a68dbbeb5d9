"""Invalid arguments of layers, stacks and routings."""

import pytest
import torch

import torchcaps
from tests.bad_input.rejection import Rejection, check_rejection, check_sentence, conv, dense, grid
from torchcaps import route
from torchcaps.nn import CapsuleStack
from torchcaps.routing import EM, Attention, Dynamic, InvertedAttention, Quadratic, Trainable, create_routing

votes = torch.randn(2, 6, 3, 4)

LAYERS = {
    "child_dim not square": Rejection(lambda: dense(child_dim=5, pose="matrix"), ValueError, "child_dim", "5"),
    "parent_dim not square": Rejection(lambda: conv(parent_dim=6, pose="matrix"), ValueError, "parent_dim", "6"),
    "another square": Rejection(lambda: dense(parent_dim=9, pose="matrix"), ValueError, "parent_dim", "9", "4"),
    "rows do not divide": Rejection(lambda: dense(pose=3), ValueError, "child_dim", "4", "3"),
    "pose": Rejection(lambda: dense(pose="tensor"), ValueError, "pose", "'tensor'", "'matrix'"),
    "no rows": Rejection(lambda: dense(pose=0), ValueError, "pose", "0", "1"),
    "no children": Rejection(lambda: dense(children=0), ValueError, "children", "0", "1"),
    "parents not an int": Rejection(lambda: conv(parent_types=2.5), TypeError, "parent_types", "2.5", "int"),
    "no kernel": Rejection(lambda: conv(kernel_size=0), ValueError, "kernel_size", "0", "1"),
    "kernel not an int": Rejection(lambda: conv(kernel_size=3.0), TypeError, "kernel_size", "3.0", "int"),
    "kernel of three sizes": Rejection(lambda: conv(kernel_size=(3, 3, 3)), ValueError, "kernel_size", "(3, 3, 3)"),
    "kernel beyond input": Rejection(lambda: conv(kernel_size=6)(grid), ValueError, "kernel_size", "6x6", "5x5"),
    "kernel beyond grid": Rejection(lambda: conv(kernel_size=6, grid=5), ValueError, "kernel_size", "6x6", "5x5"),
    "padding": Rejection(lambda: conv(padding="valid"), ValueError, "padding", "'valid'", "'same'"),
    "negative padding": Rejection(lambda: conv(padding=-1), ValueError, "padding", "-1", "0"),
    "streamed": Rejection(lambda: dense(streamed="yes"), ValueError, "streamed", "'yes'", "'auto'"),
    "streamed tensor": Rejection(lambda: dense(streamed=torch.zeros(2)), ValueError, "streamed", "", "'auto'"),
    "weights": Rejection(lambda: conv(weights="shared"), ValueError, "weights", "'shared'", "'kernel'"),
    "weights without grid": Rejection(lambda: conv(weights="position"), ValueError, "grid", "weights='position'"),
    "couplings without grid": Rejection(lambda: conv(routing=Trainable()), ValueError, "grid", "", "grid=(6, 6)"),
    "init": Rejection(lambda: dense(init=-1.0), ValueError, "init", "-1.0", "0"),
    "init by name": Rejection(lambda: dense(init="xavier"), ValueError, "init", "'xavier'", "function"),
    "unknown routing": Rejection(lambda: dense(routing="dinamic"), ValueError, "routing", "'dinamic'", "'dynamic'"),
    "routing class": Rejection(lambda: dense(routing=Dynamic), TypeError, "routing", "class", "Dynamic(3)"),
    "routing type": Rejection(lambda: dense(routing=3), TypeError, "routing", "int", "Dynamic(3)"),
    "coordinates of vectors": Rejection(
        lambda: conv(routing=EM(coordinates=True)), ValueError, "coordinates=True", "1", "matrix"
    ),
    "coordinates without grid": Rejection(
        lambda: dense(routing=EM(coordinates=True), pose="matrix"), ValueError, "coordinates=True", "dense", "grid"
    ),
}

STACKS = {
    "empty": Rejection(lambda: CapsuleStack([]), ValueError, "layers", "none"),
    "not a capsule layer": Rejection(lambda: CapsuleStack([torch.nn.ReLU()]), TypeError, "layers", "ReLU"),
    "names": Rejection(lambda: CapsuleStack(["a"]), TypeError, "layers", "str", "DenseCapsules"),
    "not a sequence": Rejection(lambda: CapsuleStack(3), TypeError, "layers", "int", "sequence"),
    "one layer": Rejection(lambda: CapsuleStack(dense()), TypeError, "layers", "DenseCapsules", "sequence"),
    "schedule": Rejection(lambda: CapsuleStack([dense()], "both"), ValueError, "schedule", "'both'", "'concurrent'"),
    "iterations differ": Rejection(
        lambda: CapsuleStack([dense(), dense(children=3, routing=Dynamic(3))]), ValueError, "iterations", "[2, 3]"
    ),
    "gradient of the last iteration": Rejection(
        lambda: CapsuleStack([dense(routing=Dynamic(2, "last")), dense(children=3)]),
        ValueError,
        "gradient='full'",
        "gradient='last'",
        "schedule='sequential'",
    ),
}

ROUTINGS = {
    "no iterations": Rejection(lambda: Dynamic(0), ValueError, "Dynamic: iterations", "0", "1"),
    "iterations not an int": Rejection(lambda: EM(1.5), TypeError, "EM: iterations", "1.5", "int"),
    "iterations bool": Rejection(lambda: EM(True), TypeError, "EM: iterations", "True", "int"),
    "choice": Rejection(lambda: Dynamic(gradient="none"), ValueError, "Dynamic: gradient", "'none'", "'last'"),
    "flag": Rejection(lambda: Dynamic(leak=1), TypeError, "Dynamic: leak", "1", "True"),
    "number": Rejection(lambda: Quadratic(lr="fast"), TypeError, "Quadratic: lr", "'fast'", "number"),
    "dropout": Rejection(lambda: Attention(dropout=1.0), ValueError, "Attention: dropout", "1.0", "0"),
    "variance floor": Rejection(lambda: EM(variance_floor=-1.0), ValueError, "EM: variance_floor", "-1.0", "0"),
    "NaN": Rejection(lambda: EM(variance_floor=float("nan")), ValueError, "EM: variance_floor", "nan", "0"),
    "annealing": Rejection(lambda: EM(annealing=1.0), ValueError, "EM: annealing", "1.0", "below 1"),
    "temperature": Rejection(lambda: EM(inverse_temperature=0.0), ValueError, "EM: inverse_temperature", "0.0", "0"),
    "learning rate": Rejection(lambda: Quadratic(lr=-1.0), ValueError, "Quadratic: lr", "-1.0", "0"),
    "penalty": Rejection(lambda: Quadratic(penalty_weight=-1.0), ValueError, "Quadratic: penalty_weight", "-1.0", "0"),
    "limit": Rejection(lambda: Quadratic(limit=0.0), ValueError, "Quadratic: limit", "0.0", "0"),
    "initial": Rejection(lambda: Quadratic(initial=0.0), ValueError, "Quadratic: initial", "0"),
    "unknown name": Rejection(lambda: create_routing("xyz"), ValueError, "routing", "'xyz'", "'attention'"),
    "upper case": Rejection(lambda: create_routing("EM"), ValueError, "routing", "'EM'", "'em'"),
    "not a name": Rejection(lambda: create_routing(3), TypeError, "routing", "3", "name"),
    "unknown field": Rejection(
        lambda: create_routing("dynamic", iteration=3), ValueError, "Dynamic", "'iteration'", "'iterations'"
    ),
    "random coefficient": Rejection(lambda: route(votes, Trainable()), ValueError, "coefficients", "", "[6, 3]"),
    "residual of votes": Rejection(
        lambda: route(votes[:, :3], Attention(True)), ValueError, "residual=True", "votes", "layer"
    ),
    "coefficient shape": Rejection(
        lambda: route(votes, InvertedAttention(), coefficients={"gamma": torch.ones(3)}),
        ValueError,
        "coefficients['gamma']",
        "[3]",
        "[4]",
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_invalid_layer_is_rejected(name: str) -> None:
    check_rejection(LAYERS[name])


@pytest.mark.parametrize("name", STACKS)
def test_invalid_stack_is_rejected(name: str) -> None:
    check_rejection(STACKS[name])


@pytest.mark.parametrize("name", ROUTINGS)
def test_invalid_routing_is_rejected(name: str) -> None:
    check_rejection(ROUTINGS[name])


def test_registered_routing_name_is_rejected() -> None:
    with pytest.raises(ValueError, match="dynamic") as raised:
        type("Dynamic", (torchcaps.routing.Routing,), {"step": Dynamic.step})
    check_sentence(str(raised.value), "routing", "'dynamic'")
    assert create_routing("dynamic") == Dynamic()
