"""Capsule layers, primary capsules, activations, decoder and layer stacks."""

from torchcaps._core.values import deferred_checks
from torchcaps.nn.activations import CapsuleActivation, ExpSquash, Squash, exp_squash, length, squash
from torchcaps.nn.decoder import Decoder
from torchcaps.nn.dropout import ImageDropout, image_dropout
from torchcaps.nn.homogeneous import BranchMerge, HomogeneousCapsules, ShiftNorm
from torchcaps.nn.layers import CapsuleLayer, ConvCapsules, DenseCapsules
from torchcaps.nn.primary import PrimaryCapsules
from torchcaps.nn.residual import ResidualCapsules
from torchcaps.nn.stack import CapsuleStack
from torchcaps.nn.transposed import TransposedConvCapsules

__all__ = [
    "BranchMerge",
    "CapsuleActivation",
    "CapsuleLayer",
    "CapsuleStack",
    "ConvCapsules",
    "Decoder",
    "DenseCapsules",
    "ExpSquash",
    "HomogeneousCapsules",
    "ImageDropout",
    "PrimaryCapsules",
    "ResidualCapsules",
    "ShiftNorm",
    "Squash",
    "TransposedConvCapsules",
    "deferred_checks",
    "exp_squash",
    "image_dropout",
    "length",
    "squash",
]
