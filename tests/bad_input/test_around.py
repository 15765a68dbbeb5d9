"""What stands around the layers: primary capsules, decoders, losses."""

import pytest
import torch

from tests.bad_input.examples import Refusal, check_refusal, decoder, hot, images, nan, scores
from torchcaps import Capsules
from torchcaps.losses import ClassLoss, MarginLoss, ReconstructionLoss, SpreadLoss
from torchcaps.nn import Decoder, PrimaryCapsules

REFUSALS: dict[str, Refusal] = {
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
    "margin soft": (lambda: MarginLoss()(scores, scores), ValueError, r"must hold zeros and ones only, got 0\."),
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
    "decoder rank": (
        lambda: decoder(torch.randn(3, 4)),
        ValueError,
        r"capsules\.pose must be \[B, 3, 4\], got \[3, 4\]",
    ),
    "decoder nan": (lambda: decoder(nan(2, 3, 4)), ValueError, r"capsules\.pose must hold finite numbers"),
    "decoder multi-hot": (
        lambda: decoder(torch.randn(2, 3, 4), torch.eye(3)[:2].long()),
        ValueError,
        "labels must be the numbers of the classes to decode, .* got zeros and ones for each of the 3 classes",
    ),
    "decoder size": (lambda: Decoder(3, 4, 36), ValueError, r"image must be \(channels, height, width\), got 36"),
    "decoder hidden": (lambda: Decoder(3, 4, (1, 6, 6), hidden=8), TypeError, "hidden must be the widths .* got 8"),
    "decoder activation": (
        lambda: decoder(Capsules(torch.randn(2, 3, 4), nan(2, 3))),
        ValueError,
        r"capsules\.activation must hold finite numbers",
    ),
    "lengths nan": (
        lambda: MarginLoss()(nan(2, 3), hot(0, 1)),
        ValueError,
        "lengths must hold numbers, got 3 NaN of 6",
    ),
    "margins": (
        lambda: MarginLoss(0.1, 0.9),
        ValueError,
        r"negative must be 0 or more and below positive, got 0\.9 and 0\.1",
    ),
    "scores kind": (
        lambda: ClassLoss()(scores.long(), hot(0, 1)),
        TypeError,
        r"logits must be a floating-point tensor, got torch\.int64",
    ),
    "margin step": (lambda: SpreadLoss().margin(-1), ValueError, "step must be 0 or more, got -1"),
    "images kind": (
        lambda: ReconstructionLoss()(None, None),
        TypeError,
        "images must be a floating-point tensor, got NoneType",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_bad_input_is_refused_in_one_sentence(name: str) -> None:
    check_refusal(REFUSALS[name])
