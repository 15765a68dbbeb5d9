"""Capsule layers, primary capsules, activations, decoder and layer stacks."""

from torchcaps._core.values import deferred_checks
from torchcaps.nn.activations import CapsuleActivation, ExpSquash, Squash, exp_squash, length, squash
from torchcaps.nn.decoder import Decoder
from torchcaps.nn.dropout import ImageDropout, image_dropout
from torchcaps.nn.layers import CapsuleLayer, ConvCapsules, DenseCapsules
from torchcaps.nn.primary import PrimaryCapsules
from torchcaps.nn.stack import CapsuleStack

__all__ = [
    "CapsuleActivation",
    "CapsuleLayer",
    "CapsuleStack",
    "ConvCapsules",
    "Decoder",
    "DenseCapsules",
    "ExpSquash",
    "ImageDropout",
    "PrimaryCapsules",
    "Squash",
    "deferred_checks",
    "exp_squash",
    "image_dropout",
    "length",
    "squash",
]
