"""Every refusal names the argument, what was expected and what came."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchcaps
from torchcaps import Capsules, route
from torchcaps.losses import ClassLoss, MarginLoss, ReconstructionLoss, SpreadLoss
from torchcaps.nn import CapsuleStack, ConvCapsules, Decoder, DenseCapsules, PrimaryCapsules
from torchcaps.routing import EM, Attention, Dynamic, InvertedAttention, Quadratic, Trainable, create_routing


def dense(**changes: Any) -> DenseCapsules:
    sizes = {"children": 6, "child_dim": 4, "parents": 3, "parent_dim": 4}
    return DenseCapsules(**(sizes | {"routing": Dynamic(2)} | changes))


def conv(**changes: Any) -> ConvCapsules:
    sizes = {"child_types": 2, "child_dim": 4, "parent_types": 3, "parent_dim": 4, "kernel_size": 3}
    return ConvCapsules(**(sizes | {"routing": Dynamic(2)} | changes))


def nan(*shape: int) -> torch.Tensor:
    return torch.zeros(shape).index_fill(0, torch.tensor([0]), float("nan"))


def hot(*labels: int) -> torch.Tensor:
    return torch.tensor(labels)


pose, grid, images = torch.randn(2, 6, 4), torch.randn(2, 5, 5, 2, 4), torch.rand(2, 1, 6, 6)
scores = torch.rand(2, 3)
decoder = Decoder(3, 4, (1, 6, 6), hidden=(5,))

REFUSALS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    # Rank, counts and sizes
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
    # What layers are made of
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
    # Routings
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
        lambda: Quadratic(rate="fast"),
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
        "did you mean 'attention', 'dynamic'.* or 'uniform'",
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
    # Around the layers
    "primary rank": (
        lambda: PrimaryCapsules(1, 2, 4, 3)(images[0]),
        ValueError,
        r"features must be \[B, 1, H, W\], got \[1, 6, 6\]",
    ),
    "primary channels": (
        lambda: PrimaryCapsules(3, 2, 4, 3)(images),
        ValueError,
        r"must be \[B, 3, H, W\], got \[2, 1",
    ),
    "primary kernel": (
        lambda: PrimaryCapsules(1, 2, 4, 7)(images),
        ValueError,
        "kernel_size must fit into the features, got 7x7 for 6x6",
    ),
    "primary nan": (
        lambda: PrimaryCapsules(1, 2, 4, 3)(nan(2, 1, 6, 6)),
        ValueError,
        "features must hold finite numbers",
    ),
    "primary kind": (
        lambda: PrimaryCapsules(1, 2, 4, 3)(images.long()),
        TypeError,
        "floating-point tensor, got torch.int64",
    ),
    "primary activation": (
        lambda: PrimaryCapsules(1, 2, 4, 3, activation="relu"),
        ValueError,
        "activation must be 'squash'.*got 'relu'",
    ),
    "primary types": (lambda: PrimaryCapsules(1, 0, 4, 3), ValueError, "types must be 1 or more, got 0"),
    "decoder image": (
        lambda: Decoder(3, 4, (28, 28)),
        ValueError,
        r"image must be \(channels, height, width\), got \(28, 28\)",
    ),
    "decoder shape": (
        lambda: decoder(torch.randn(2, 3, 5)),
        ValueError,
        r"capsules\.pose must be \[B, 3, 4\], got \[2, 3, 5\]",
    ),
    "decoder range": (
        lambda: decoder(torch.randn(2, 3, 4), hot(0, 3)),
        ValueError,
        r"labels must lie in 0\.\.2, got 3",
    ),
    "decoder negative": (
        lambda: decoder(torch.randn(2, 3, 4), hot(0, -1)),
        ValueError,
        r"labels must lie in 0\.\.2, got -1",
    ),
    "decoder dtype": (
        lambda: decoder(torch.randn(2, 3, 4), torch.rand(2)),
        TypeError,
        r"labels must be whole numbers .*got torch\.float32",
    ),
    "decoder batch": (
        lambda: decoder(torch.randn(2, 3, 4), hot(0, 1, 2)),
        ValueError,
        r"for 2 images, got \[3\]",
    ),
    "decoder top": (
        lambda: decoder(torch.randn(2, 3, 4), top=4),
        ValueError,
        r"top must lie in 1\.\.3, got 4",
    ),
    "decoder both": (
        lambda: decoder(torch.randn(2, 3, 4), hot(0, 1), top=2),
        ValueError,
        "can't be given beside labels",
    ),
    # Losses
    "margin labels": (
        lambda: MarginLoss()(scores, hot(0, 3)),
        ValueError,
        r"labels must lie in 0\.\.2, got 3",
    ),
    "margin dtype": (lambda: MarginLoss()(scores, torch.rand(2)), TypeError, "labels must be whole numbers"),
    "margin batch": (
        lambda: MarginLoss()(scores, hot(0, 1, 2)),
        ValueError,
        r"one for each of the 2 images, got \[3\]",
    ),
    "margin columns": (
        lambda: MarginLoss()(scores, torch.ones(2, 4)),
        ValueError,
        "one column for each of the 3 classes, got 4",
    ),
    "margin soft": (lambda: MarginLoss()(scores, scores), ValueError, "must hold zeros and ones only"),
    "margin rank": (
        lambda: MarginLoss()(scores[0], hot(0)),
        ValueError,
        r"lengths must be \[B, classes\], got \[3\]",
    ),
    "margin reduction": (
        lambda: MarginLoss(reduction="sum"),
        ValueError,
        "reduction must be one of 'paper', 'official', got 'sum'",
    ),
    "margin list": (lambda: MarginLoss()(scores, [0, 1]), TypeError, "labels must be a tensor, got list"),
    "spread labels": (
        lambda: SpreadLoss()(scores, torch.eye(3)[:2].long()),
        ValueError,
        "one class is the target",
    ),
    "spread steps": (lambda: SpreadLoss(steps=0), ValueError, "steps must be 1 or more, got 0"),
    "class labels": (lambda: ClassLoss()(scores, torch.eye(3)[:2]), ValueError, "take MultiLabelLoss"),
    "reconstruction": (
        lambda: ReconstructionLoss()(images, images[:1]),
        ValueError,
        r"must both be \[B, C, H, W\].*got \[2, 1, 6, 6\] and \[1, 1, 6, 6\]",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_bad_input_is_refused_in_one_sentence(name: str) -> None:
    call, kind, message = REFUSALS[name]
    with pytest.raises(kind, match=message) as refusal:
        call()
    assert "\n" not in str(refusal.value)


def test_a_name_that_is_taken_is_refused() -> None:
    with pytest.raises(ValueError, match="a routing named 'dynamic' exists already"):
        type("Dynamic", (torchcaps.routing.Routing,), {"step": Dynamic.step})
    assert create_routing("dynamic") == Dynamic()
