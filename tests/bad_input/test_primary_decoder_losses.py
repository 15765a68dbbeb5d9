"""Invalid arguments and inputs of primary capsules, decoders and losses."""

import pytest
import torch

from tests.bad_input.rejection import Rejection, check_rejection, decoder, images, labels, scores, with_nan
from torchcaps import Capsules
from torchcaps.losses import ClassLoss, MarginLoss, ReconstructionLoss, SpreadLoss
from torchcaps.nn import Decoder, PrimaryCapsules

classes = torch.randn(2, 3, 4)
one_hot = torch.eye(3)[:2]

PRIMARY = {
    "rank": Rejection(
        lambda: PrimaryCapsules(1, 2, 4, 3)(images[0]), ValueError, "features", "[1, 6, 6]", "[B, 1, H, W]"
    ),
    "channels": Rejection(
        lambda: PrimaryCapsules(3, 2, 4, 3)(images), ValueError, "features", "[2, 1, 6, 6]", "[B, 3, H, W]"
    ),
    "kernel": Rejection(lambda: PrimaryCapsules(1, 2, 4, 7)(images), ValueError, "kernel_size", "7x7", "6x6"),
    "NaN": Rejection(lambda: PrimaryCapsules(1, 2, 4, 3)(with_nan(2, 1, 6, 6)), ValueError, "features", "36", "finite"),
    "integers": Rejection(
        lambda: PrimaryCapsules(1, 2, 4, 3)(images.long()), TypeError, "features", "torch.int64", "floating-point"
    ),
    "activation": Rejection(
        lambda: PrimaryCapsules(1, 2, 4, 3, activation="relu"), ValueError, "activation", "'relu'", "'squash'"
    ),
    "types": Rejection(lambda: PrimaryCapsules(1, 0, 4, 3), ValueError, "types", "0", "1"),
    "scale": Rejection(lambda: PrimaryCapsules(1, 2, 4, 3, scale=0.0), ValueError, "scale", "0.0", "0"),
}

DECODER = {
    "image": Rejection(lambda: Decoder(3, 4, (28, 28)), ValueError, "image", "(28, 28)", "(channels, height, width)"),
    "image size": Rejection(lambda: Decoder(3, 4, 36), ValueError, "image", "36", "(channels, height, width)"),
    "hidden": Rejection(lambda: Decoder(3, 4, (1, 6, 6), hidden=8), TypeError, "hidden", "8", "sequence"),
    "size": Rejection(lambda: decoder(torch.randn(2, 3, 5)), ValueError, "capsules.pose", "[2, 3, 5]", "[B, 3, 4]"),
    "rank": Rejection(lambda: decoder(classes[0]), ValueError, "capsules.pose", "[3, 4]", "[B, 3, 4]"),
    "NaN": Rejection(lambda: decoder(with_nan(2, 3, 4)), ValueError, "capsules.pose", "12", "finite"),
    "activation NaN": Rejection(
        lambda: decoder(Capsules(classes, with_nan(2, 3))), ValueError, "capsules.activation", "3", "finite"
    ),
    "label too large": Rejection(lambda: decoder(classes, labels(0, 3)), ValueError, "labels", "3", "0..2"),
    "label negative": Rejection(lambda: decoder(classes, labels(0, -1)), ValueError, "labels", "-1", "0..2"),
    "label dtype": Rejection(
        lambda: decoder(classes, torch.rand(2)), TypeError, "labels", "torch.float32", "torch.int64"
    ),
    "label count": Rejection(lambda: decoder(classes, labels(0, 1, 2)), ValueError, "labels", "[3]", "2"),
    "label rows": Rejection(lambda: decoder(classes, one_hot.long()), ValueError, "labels", "multi-hot", "[B, K]"),
    "top": Rejection(lambda: decoder(classes, top=4), ValueError, "top", "4", "1..3"),
    "labels and top": Rejection(lambda: decoder(classes, labels(0, 1), top=2), ValueError, "top", "labels"),
}

LOSSES = {
    "label too large": Rejection(lambda: MarginLoss()(scores, labels(0, 3)), ValueError, "labels", "3", "0..2"),
    "label dtype": Rejection(
        lambda: MarginLoss()(scores, torch.rand(2)), TypeError, "labels", "torch.float32", "torch.int64"
    ),
    "label count": Rejection(lambda: MarginLoss()(scores, labels(0, 1, 2)), ValueError, "labels", "[3]", "2"),
    "label columns": Rejection(lambda: MarginLoss()(scores, torch.ones(2, 4)), ValueError, "labels", "4", "3"),
    "soft labels": Rejection(lambda: MarginLoss()(scores, torch.full((2, 3), 0.5)), ValueError, "labels", "0.5", "0"),
    "label list": Rejection(lambda: MarginLoss()(scores, [0, 1]), TypeError, "labels", "list", "tensor"),
    "rank": Rejection(lambda: MarginLoss()(scores[0], labels(0)), ValueError, "lengths", "[3]", "[B, classes]"),
    "NaN": Rejection(lambda: MarginLoss()(with_nan(2, 3), labels(0, 1)), ValueError, "lengths", "3", "NaN"),
    "reduction": Rejection(lambda: MarginLoss(reduction="paper"), ValueError, "reduction", "'paper'", "'mean'"),
    "weighting": Rejection(lambda: MarginLoss(weighting="sum"), ValueError, "weighting", "'sum'", "'official'"),
    "pixels": Rejection(lambda: ReconstructionLoss("all"), ValueError, "pixels", "'all'", "'half'"),
    "pose as lengths": Rejection(
        lambda: MarginLoss()(torch.rand(2, 3, 4), labels(0, 1)), ValueError, "lengths", "[2, 3, 4]", "Capsules(pose)"
    ),
    "capsules as logits": Rejection(
        lambda: ClassLoss()(Capsules(torch.rand(2, 3, 4)), labels(0, 1)), TypeError, "logits", "Capsules", "MarginLoss"
    ),
    "margins": Rejection(lambda: MarginLoss(0.1, 0.9), ValueError, "negative", "0.9", "positive=0.1"),
    "spread of several labels": Rejection(
        lambda: SpreadLoss()(scores, one_hot.long()), ValueError, "labels", "[2, 3]", "[B]"
    ),
    "spread steps": Rejection(lambda: SpreadLoss(steps=0), ValueError, "steps", "0", "1"),
    "spread step": Rejection(lambda: SpreadLoss().margin(-1), ValueError, "step", "-1", "0"),
    "class of several labels": Rejection(
        lambda: ClassLoss()(scores, one_hot), ValueError, "labels", "[2, 3]", "MultiLabelLoss"
    ),
    "integer scores": Rejection(
        lambda: ClassLoss()(scores.long(), labels(0, 1)), TypeError, "logits", "torch.int64", "floating-point"
    ),
    "reconstruction shapes": Rejection(
        lambda: ReconstructionLoss()(images, images[:1]), ValueError, "targets", "[1, 1, 6, 6]", "[2, 1, 6, 6]"
    ),
    "reconstruction rank": Rejection(
        lambda: ReconstructionLoss()(images[0], images[0]), ValueError, "images", "[1, 6, 6]", "[B, C, H, W]"
    ),
    "not a tensor": Rejection(lambda: ReconstructionLoss()(None, None), TypeError, "images", "NoneType", "tensor"),
}


@pytest.mark.parametrize("name", PRIMARY)
def test_invalid_primary_capsules_are_rejected(name: str) -> None:
    check_rejection(PRIMARY[name])


@pytest.mark.parametrize("name", DECODER)
def test_invalid_decoder_input_is_rejected(name: str) -> None:
    check_rejection(DECODER[name])


@pytest.mark.parametrize("name", LOSSES)
def test_invalid_loss_input_is_rejected(name: str) -> None:
    check_rejection(LOSSES[name])
