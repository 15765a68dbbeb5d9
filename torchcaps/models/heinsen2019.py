"""Capsule network with Heinsen routing: Heinsen 2019."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torchcaps.models import init
from torchcaps.models.network import CapsuleNetwork
from torchcaps.models.recipe import LossConfig, OptimizerConfig, Recipe
from torchcaps.models.registry import register_model
from torchcaps.models.schedules import OneCycle
from torchcaps.models.spec import CapsuleSpec, Image
from torchcaps.routing import HeinsenEM, Routing

__all__ = ["CoordinateChannels", "Heinsen2019"]


class CoordinateChannels(nn.Module):
    """Append two channels to an image: row and column of each pixel, from -1 to 1.

    Shapes:
        ``[B, C, H, W] -> [B, C + 2, H, W]``
    """

    def forward(self, images: Tensor) -> Tensor:
        """Return images with coordinates."""
        batch, _, height, width = images.shape
        options: dict[str, Any] = {"device": images.device, "dtype": images.dtype}
        rows = torch.linspace(-1, 1, height, **options)[:, None].expand(batch, 1, height, width)
        columns = torch.linspace(-1, 1, width, **options).expand(batch, 1, height, width)
        return torch.cat([images, rows, columns], dim=1)


@dataclass(frozen=True, kw_only=True)
class Heinsen2019(CapsuleSpec):
    """Capsule network with Heinsen routing for smallNORB: Heinsen 2019, from the authors' code.

    =========  ==============================================================  ==================
    layer      smallNORB                                                       out
    =========  ==============================================================  ==================
    coords     row and column of each pixel as two further channels            4 x 96 x 96
    conv1..6   batch norm, 3x3, 64 channels, Swish; every second of stride 2   64 x 9 x 9
    primary    batch norm, 1x1; 64 poses of 4x4 and 64 activations             9 x 9 x 64 x 16
    parts      dense, 5,184 children, matrices shared by all children          64 x 16
    classes    dense, 64 children                                              5 x 16
    =========  ==============================================================  ==================

    Parameters: 271,688. Since the matrices of the first layer are shared, the number of its children is that of any
    image size. The scores are logits. Votes of the first layer would take 21 MB per image; they are streamed.

    Args:
        width: channels of the convolutions.
        strides: stride of each convolution.
        types: primary capsule types.
        parts: number of capsules between the primary and the class capsules.
        dim: pose size, a square number.

    Official: both presets follow the authors' code and are equal.

    Deviation: the authors' code also trains with mixup, and reports the best of ten runs by the accuracy on randomly
    cropped test images; here neither is done.
    """

    smoke_fields: ClassVar[dict[str, Any]] = {"width": 16, "strides": (2, 2, 2), "types": 4, "parts": 8, "dim": 4}

    image: Image = (2, 96, 96)
    classes: int = 5
    routing: Routing | str = HeinsenEM()
    width: int = 64
    strides: tuple[int, ...] = (1, 2, 1, 2, 1, 2)
    types: int = 64
    parts: int = 64
    dim: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_square(self.dim)

    def build_network(self) -> CapsuleNetwork:
        """Build the network with the layers in the table of the class docstring."""
        routing = self.effective_routing
        layers = self.new_layers()
        layers.add("coords", CoordinateChannels(), layers.channels + 2)
        for index, stride in enumerate(self.strides, start=1):
            layers.add(f"norm{index}", nn.BatchNorm2d(layers.channels))
            layers.conv(f"conv{index}", self.width, 3, stride=stride)
            layers.add(f"conv{index}_swish", nn.SiLU())
        activations = self.needs_activations
        layers.primary(self.types, self.dim, 1, activation="none", norm="input", activations=activations)
        layers.dense_capsules("parts", self.parts, self.dim, routing=routing, pose="matrix", shared=True)
        if isinstance(routing, HeinsenEM):
            routing = replace(routing, activation="logit")
        layers.dense_capsules("classes", self.classes, self.dim, routing=routing, pose="matrix")
        model = CapsuleNetwork(self, layers, self.head, decoder=self.decoder)
        init.init_layers(model.front, init.he_normal)
        return model

    def recipe(self) -> Recipe:
        """RAdam with one cycle of the learning rate from 1e-5 to 5e-4 and back, cross-entropy: the authors' code."""
        loss = LossConfig("cross_entropy")
        return Recipe(
            loss=loss if isinstance(self.effective_routing, HeinsenEM) else self.adapt_loss(loss),
            optimizer=OptimizerConfig("radam", 5e-4),
            lr_schedule=OneCycle(warmup=0.1, first=0.02, last=0.02),
            batch_size=20,
            epochs=50,
        )


register_model(
    "heinsen2019_smallnorb",
    Heinsen2019(),
    n_parameters=271_688,
    data="smallnorb-96",
    augmentation="heinsen2019.smallnorb",
    note="the authors' code also uses mixup",
)
