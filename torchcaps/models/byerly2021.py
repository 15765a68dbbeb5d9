"""Homogeneous vector capsules without routing (BMCNN): Byerly, Kalganova, Dear 2021."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from torchcaps.models import init
from torchcaps.models.builder import Layers
from torchcaps.models.heads import Output
from torchcaps.models.network import ConvNetwork
from torchcaps.models.recipe import LossConfig, OptimizerConfig, Recipe
from torchcaps.models.registry import register_model
from torchcaps.models.schedules import Exponential
from torchcaps.models.spec import Image, ModelSpec
from torchcaps.nn import BranchMerge, HomogeneousCapsules, ShiftNorm

__all__ = ["Byerly2021"]

BATCH_SIZE = 120


class BranchNetwork(ConvNetwork):
    """Convolutions with class capsules after some of them, whose lengths are merged to logits.

    Args:
        spec: spec that the model is built from.
        layers: its convolutions.
        branches: class capsules by the name of the layer whose output they read.
        merge: merges the lengths of the branches.
    """

    def __init__(
        self, spec: ModelSpec, layers: Layers, branches: dict[str, HomogeneousCapsules], merge: BranchMerge
    ) -> None:
        super().__init__(spec, layers)
        self.branches, self.merge = nn.ModuleDict(branches), merge

    def forward(self, images: Tensor, labels: Tensor | None = None, trace: bool = False) -> Output:
        """Compute logits. Labels are validated only; the trace is empty.

        The class capsules are not returned, since those of each branch have their own size.
        """
        features, _ = self._prepare(images, labels)
        lengths = []
        for name, layer in self.front.named_children():
            features = layer(features)
            if name in self.branches:
                lengths.append(self.branches[name](features).length())
        return Output(self.merge(torch.stack(lengths, dim=-1)), trace=() if trace else None)


@dataclass(frozen=True, kw_only=True)
class Byerly2021(ModelSpec):
    """Branching and merging network with homogeneous vector capsules: Byerly 2021, from the authors' code.

    =========  ==========================================================  ==================
    layer      MNIST                                                       out
    =========  ==========================================================  ==================
    conv1      3x3, 32 channels, shift-only batch norm, ReLU               32 x 26 x 26
    conv2 ...  3x3, 16 channels more than the one before, same             ...
    conv9      3x3, 160 channels, same                                     160 x 10 x 10
    branches   homogeneous capsules after conv3, conv6 and conv9           10 x 64, 112, 160
    merge      weighted, normalised and summed lengths                     10
    =========  ==========================================================  ==================

    No pooling, no stride, no routing, no bias in the convolutions. Parameters: 1,513,686 for MNIST, 1,952,022 for
    CIFAR-10, 1,827,878 for smallNORB.

    Args:
        depth: number of convolutions.
        width: channels of the first convolution.
        growth: channels that each convolution adds.
        branches: convolutions, counted from 1, after which class capsules branch off.
        branch_weights: weights of the branches in the merge: ``"fixed"`` at 1, learned from ``"one"``, or learned from
            a ``"normal"`` distribution.

    Official: ``preset="official"`` has the running averages of the authors' code, with a momentum of 0.0003, which are
    useless before about 10,000 steps; otherwise the momentum is 0.01.

    Deviation: the authors select ensembles on the test set, which is not copied. Their decoder receives no loss in the
    published runs and is left out.

    >>> import torch
    >>> with torch.device("meta"):  # shapes without memory
    ...     network = Byerly2021().build()
    >>> sum(parameter.numel() for parameter in network.parameters())
    1513686
    """

    minimums: ClassVar[dict[str, int]] = {"classes": 2}
    smoke_fields: ClassVar[dict[str, Any]] = {"depth": 3, "width": 4, "growth": 4, "branches": (2, 3)}

    image: Image = (1, 28, 28)
    depth: int = 9
    width: int = 32
    growth: int = 16
    branches: tuple[int, ...] = (3, 6, 9)
    branch_weights: Literal["fixed", "one", "normal"] = "one"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.branches or max(self.branches) > self.depth or len(set(self.branches)) < len(self.branches):
            raise ValueError(f"branches must be different convolutions of 1..{self.depth}, got {self.branches}")

    def build_network(self) -> BranchNetwork:
        """Build the network with the layers in the table of the class docstring."""
        momentum = 0.0003 if self.official else 0.01
        layers, branches = Layers(self.image), {}
        for index in range(1, self.depth + 1):
            channels = self.width + (index - 1) * self.growth
            layers.conv(f"conv{index}", channels, 3, bias=False)
            layers.add(f"conv{index}_norm", ShiftNorm(channels, momentum=momentum, channels_first=True))
            layers.relu()
            if index in self.branches:
                options: dict[str, Any] = {"momentum": momentum}
                branches[f"conv{index}_relu"] = HomogeneousCapsules(channels, layers.grid, self.classes, **options)
        initial = "normal" if self.branch_weights == "normal" else "one"
        learned = self.branch_weights != "fixed"
        merge = BranchMerge(len(branches), initial=initial, learned=learned, momentum=momentum)
        model = BranchNetwork(self, layers, branches, merge)
        init.init_layers(model, _normal)
        return model

    def recipe(self) -> Recipe:
        """Adam with lr 0.001, times 0.98 per epoch, cross-entropy, EMA weights: the authors' code."""
        return Recipe(
            loss=LossConfig("cross_entropy"),
            optimizer=OptimizerConfig("adam", 1e-3),
            lr_schedule=Exponential(0.98, 60_000 // BATCH_SIZE, floor=1e-4, staircase=True),
            batch_size=BATCH_SIZE,
            epochs=300,
            eval_weights="ema",
        )


@torch.no_grad()
def _normal(layer: nn.Conv2d | nn.Linear) -> None:
    """Initialise from ``N(0, 0.05)``."""
    layer.weight.normal_(0, 0.05)


register_model("byerly2021_mnist", Byerly2021(), n_parameters=1_513_686, data="mnist", augmentation="byerly2021.mnist")
register_model(
    "byerly2021_cifar10",
    Byerly2021(image=(3, 32, 32)),
    n_parameters=1_952_022,
    data="cifar10",
    augmentation="tsai2020.cifar10",
    lr_schedule=Exponential(0.98, 50_000 // BATCH_SIZE, floor=1e-4, staircase=True),
    note="crop and flip; the authors also distort aspect ratio, brightness, saturation, hue and contrast",
)
register_model(
    "byerly2021_smallnorb",
    Byerly2021(image=(1, 32, 32), classes=5, depth=11, branches=(5, 8, 11)),
    n_parameters=1_827_878,
    data="smallnorb-left",
    augmentation="byerly2021.smallnorb",
    note="the authors invert the gray levels, 1 - x",
    lr_schedule=Exponential(0.98, 24_300 // BATCH_SIZE, floor=1e-4, staircase=True),
)
