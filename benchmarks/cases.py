"""The layers that are measured."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from torchcaps.capsules import Capsules
from torchcaps.nn import ConvCapsules, DenseCapsules
from torchcaps.nn.layers import CapsuleLayer
from torchcaps.routing import EM, Dynamic, InvertedAttention


@dataclass(frozen=True)
class Case:
    """A layer, stored or streamed, and children for it."""

    title: str
    layer: Callable[[bool], CapsuleLayer]
    shape: tuple[int, ...]

    def build(self, streamed: bool) -> tuple[CapsuleLayer, Capsules]:
        """Return the layer and its children, the same numbers for both ways."""
        torch.manual_seed(0)
        layer = self.layer(streamed)
        return layer, Capsules(torch.randn(self.shape).requires_grad_())

    def vote_bytes(self) -> int:
        """Return what the votes would take."""
        layer, children = self.build(True)
        n_votes = 1
        for size in layer.votes(children).shape:
            n_votes *= size
        return 4 * n_votes


def _conv(routing: InvertedAttention | EM, dim: int) -> Callable[[bool], CapsuleLayer]:
    return lambda streamed: ConvCapsules(32, dim, 32, dim, 3, 2, routing=routing, pose="matrix", streamed=streamed)


CASES = {
    "digit-caps": Case(
        "Dynamic(3), 1152x8 to 10x16, batch 128",
        lambda streamed: DenseCapsules(1152, 8, 10, 16, routing=Dynamic(3), streamed=streamed),
        (128, 1152, 8),
    ),
    "tsai-cifar10": Case(
        "InvertedAttention(2), 3x3 s2, 32 to 32 types of 4x4, batch 8",
        _conv(InvertedAttention(2), 16),
        (8, 16, 16, 32, 16),
    ),
    "tsai-cifar100": Case(
        "InvertedAttention(2), 3x3 s2, 32 to 32 types of 6x6, batch 8",
        _conv(InvertedAttention(2), 36),
        (8, 16, 16, 32, 36),
    ),
    "em-cifar10": Case("EM(2), 3x3 s2, 32 to 32 types of 4x4, batch 8", _conv(EM(2), 16), (8, 16, 16, 32, 16)),
}
