"""What a layer or a routing is built with."""

import pytest
import torch

import torchcaps
from tests.bad_input.examples import Refusal, check_refusal, conv, dense, grid
from torchcaps import route
from torchcaps.nn import CapsuleStack
from torchcaps.routing import EM, Attention, Dynamic, InvertedAttention, Quadratic, Trainable, create_routing

REFUSALS: dict[str, Refusal] = {
    "no square child": (
        lambda: dense(child_dim=5, pose="matrix"),
        ValueError,
        "child_dim must be a square.*got 5",
    ),
    "no square parent": (
        lambda: conv(parent_dim=6, pose="matrix"),
        ValueError,
        "parent_dim must be a square.*got 6",
    ),
    "other square": (
        lambda: dense(parent_dim=9, pose="matrix"),
        ValueError,
        "parent_dim must equal child_dim.*4 and 9",
    ),
    "rows": (
        lambda: dense(pose=3),
        ValueError,
        "child_dim must be a multiple of the 3 rows that pose asks for, got 4",
    ),
    "pose": (
        lambda: dense(pose="tensor"),
        ValueError,
        "pose must be 'vector', 'matrix' or the number of rows",
    ),
    "children": (lambda: dense(children=0), ValueError, "children must be 1 or more, got 0"),
    "parents": (lambda: conv(parent_types=2.5), TypeError, r"parent_types must be a whole number, got 2\.5"),
    "kernel": (lambda: conv(kernel_size=0), ValueError, "kernel_size must be 1 or more, got 0"),
    "kernel pair": (
        lambda: conv(kernel_size=(3, 3, 3)),
        ValueError,
        "kernel_size must be a number or a pair",
    ),
    "kernel too large": (
        lambda: conv(kernel_size=6)(grid),
        ValueError,
        "kernel_size must fit .* got 6x6 for a grid of 5x5",
    ),
    "kernel too large for grid": (lambda: conv(kernel_size=6, grid=5), ValueError, "kernel_size must fit"),
    "padding": (
        lambda: conv(padding="valid"),
        ValueError,
        "padding must be a number, a pair of them or 'same', got 'valid'",
    ),
    "negative padding": (lambda: conv(padding=-1), ValueError, "padding must be 0 or more, got -1"),
    "streamed": (
        lambda: dense(streamed="yes"),
        ValueError,
        "streamed must be True, False or 'auto', got 'yes'",
    ),
    "weights": (lambda: conv(weights="shared"), ValueError, "weights must be 'kernel', 'position' or 'type'"),
    "weights by position": (
        lambda: conv(weights="position"),
        ValueError,
        "grid must be given with weights='position'",
    ),
    "couplings by position": (
        lambda: conv(routing=Trainable()),
        ValueError,
        "grid must be given: .*every output position",
    ),
    "stack": (lambda: CapsuleStack([]), ValueError, "layers must hold one capsule layer or more"),
    "stack kind": (
        lambda: CapsuleStack([torch.nn.ReLU()]),
        TypeError,
        "layers must be DenseCapsules or ConvCapsules, got ReLU",
    ),
    "schedule": (
        lambda: CapsuleStack([dense()], "both"),
        ValueError,
        "schedule must be 'concurrent' or 'sequential', got 'both'",
    ),
    "iterations differ": (
        lambda: CapsuleStack([dense(), dense(children=3, routing=Dynamic(3))]),
        ValueError,
        r"same number of iterations to step concurrently, got \[2, 3\]",
    ),
    "iterations": (lambda: Dynamic(0), ValueError, "Dynamic: iterations must be 1 or more, got 0"),
    "iterations kind": (lambda: EM(1.5), TypeError, r"EM: iterations must be a whole number, got 1\.5"),
    "iterations truth": (lambda: EM(True), TypeError, "EM: iterations must be a whole number, got True"),
    "choice": (
        lambda: Dynamic(gradient="none"),
        ValueError,
        "Dynamic: gradient must be 'full' or 'last', got 'none'",
    ),
    "truth": (lambda: Dynamic(leak=1), TypeError, "Dynamic: leak must be True or False, got 1"),
    "number": (
        lambda: Quadratic(lr="fast"),
        TypeError,
        "Quadratic: rate must be a number or None, got 'fast'",
    ),
    "dropout": (
        lambda: Attention(dropout=1.0),
        ValueError,
        r"dropout must be at least 0 and below 1, got 1\.0",
    ),
    "unknown routing": (
        lambda: dense(routing="dinamic"),
        ValueError,
        "routing must be the name of one, got 'dinamic': did you mean 'dynamic'",
    ),
    "far from any": (
        lambda: create_routing("xyz"),
        ValueError,
        "there are 'attention', 'dynamic'.*'uniform'",
    ),
    "unknown field": (
        lambda: create_routing("dynamic", iteration=3),
        ValueError,
        "Dynamic has no field 'iteration': it has 'iterations', ",
    ),
    "routing class": (
        lambda: dense(routing=Dynamic),
        TypeError,
        "routing must be a Routing such as .*a class: call it",
    ),
    "routing kind": (lambda: dense(routing=3), TypeError, "routing must be a Routing such as .* got int"),
    "coordinates, vector": (
        lambda: conv(routing=EM(coordinates=True)),
        ValueError,
        "needs matrix poses of two rows or more",
    ),
    "coordinates, dense": (
        lambda: dense(routing=EM(coordinates=True), pose="matrix"),
        ValueError,
        "needs children on a grid, and a dense layer has none",
    ),
    "random couplings": (
        lambda: route(torch.randn(2, 6, 3, 4), Trainable()),
        ValueError,
        r"starts at random.*\[6, 3\]",
    ),
    "residual": (
        lambda: route(torch.randn(2, 3, 3, 4), Attention(True)),
        ValueError,
        "votes don't tell them: put it into a layer",
    ),
    "coefficient shape": (
        lambda: route(torch.randn(2, 6, 3, 4), InvertedAttention(), coefficients={"gamma": torch.ones(3)}),
        ValueError,
        r"coefficients\['gamma'\] must have the shape \[4\], got \[3\]",
    ),
    "init": (lambda: dense(init=-1.0), ValueError, r"init must be a standard deviation of 0 or more, .* got -1\.0"),
    "init name": (lambda: dense(init="xavier"), ValueError, "init must be .* got 'xavier'"),
    "no rows": (lambda: dense(pose=0), ValueError, "pose must be 1 row or more, got 0"),
    "kernel kind": (lambda: conv(kernel_size=3.0), TypeError, r"kernel_size must be a whole number, got 3\.0"),
    "streamed tensor": (lambda: dense(streamed=torch.zeros(2)), ValueError, "streamed must be True, False or 'auto'"),
    "no layers": (lambda: CapsuleStack(3), TypeError, "layers must be a list of capsule layers, got int"),
    "names of layers": (
        lambda: CapsuleStack(["a"]),
        TypeError,
        "layers must be DenseCapsules or ConvCapsules, got str",
    ),
    "one layer": (
        lambda: CapsuleStack(dense()),
        TypeError,
        "layers must be a list of capsule layers, got DenseCapsules",
    ),
    "gradient of the last": (
        lambda: CapsuleStack([dense(routing=Dynamic(2, "last")), dense(children=3)]),
        ValueError,
        "layers that step concurrently must have gradient='full'.*take schedule='sequential'",
    ),
    "floor": (lambda: EM(variance_floor=-1.0), ValueError, r"EM: variance_floor must be 0 or more .*got -1\.0"),
    "floor nan": (
        lambda: EM(variance_floor=float("nan")),
        ValueError,
        "EM: variance_floor must be 0 or more .*got nan",
    ),
    "annealing": (lambda: EM(annealing=2.0), ValueError, r"EM: annealing must be 0 or more and at most 1, got 2\.0"),
    "temperature": (lambda: EM(inverse_temperature=0.0), ValueError, "EM: inverse_temperature must be over 0"),
    "rate": (lambda: Quadratic(lr=-1.0), ValueError, "Quadratic: rate must be over 0 .*got -1"),
    "strength": (lambda: Quadratic(penalty_weight=-1.0), ValueError, "Quadratic: strength must be 0 or more .*got -1"),
    "limit": (lambda: Quadratic(limit=0.0), ValueError, r"Quadratic: limit must be over 0, got 0\.0"),
    "other case": (lambda: create_routing("EM"), ValueError, "got 'EM': did you mean 'em'"),
    "no name": (lambda: create_routing(3), TypeError, "routing must be the name of one, got 3"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_bad_input_is_refused_in_one_sentence(name: str) -> None:
    check_refusal(REFUSALS[name])


def test_a_name_that_is_taken_is_refused() -> None:
    with pytest.raises(ValueError, match="a routing named 'dynamic' exists already"):
        type("Dynamic", (torchcaps.routing.Routing,), {"step": Dynamic.step})
    assert create_routing("dynamic") == Dynamic()
