"""Small networks to start from, for digits and for photographs."""

import itertools
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torchcaps.models.builder import Layers
from torchcaps.models.mazzia2021 import Mazzia2021
from torchcaps.models.network import CapsuleNetwork, ConvNetwork
from torchcaps.models.recipe import LossConfig, OptimizerConfig, Recipe
from torchcaps.models.registry import register_model
from torchcaps.models.sabour2017 import Sabour2017
from torchcaps.models.schedules import OneCycle
from torchcaps.models.spec import CapsuleSpec, Image, ModelSpec
from torchcaps.routing import InvertedAttention, Routing

__all__ = ["PhotoCaps", "PlainCNN"]

MAX_GRID = 7  # height and width of the grid of primary capsules


@dataclass(frozen=True, kw_only=True)
class PhotoCaps(CapsuleSpec):
    """Capsule network for photographs that trains in minutes on a CPU. Not published.

    ========  =====================================================  ================
    layer     32x32 images                                           out
    ========  =====================================================  ================
    conv1     3x3 stride 2, batch norm, ReLU                         32 x 16 x 16
    conv2     3x3, batch norm, ReLU, 2x2 max pooling                 64 x 8 x 8
    conv3     3x3, batch norm, ReLU, 2x2 max pooling                 128 x 4 x 4
    primary   1x1 without bias, 16 types of 8, LayerNorm             4 x 4 x 16 x 8
    classes   dense, 256 children, inverted attention routing        classes x 16
    head      linear map to a logit, shared by all classes           classes
    ========  =====================================================  ================

    Larger images get further blocks like the last one until the grid is at most 7x7: 64x64 images one, 128x128 two.
    The routing and the head are those of Tsai 2020. 437,601 parameters for ten classes.

    Args:
        channels: channels of each convolution.
        types: types of primary capsules.
        primary_dim: pose size of the primary capsules.
        dim: pose size of the class capsules.
        primary_activation: function of the primary poses: ``"layer_norm"``, or ``"squash"`` for routings that score by
            length: dynamic routing of layer-normalised children stays at chance.
    """

    presets = ("paper",)
    smoke_fields: ClassVar[dict[str, Any]] = {"channels": (8, 8, 8), "types": 2}

    image: Image = (3, 32, 32)
    routing: Routing | str = InvertedAttention(2)
    channels: tuple[int, ...] = (32, 64, 128)
    types: int = 16
    primary_dim: int = 8
    dim: int = 16
    primary_activation: Literal["layer_norm", "squash"] = "layer_norm"

    def build_network(self) -> CapsuleNetwork:
        """Build the network with the layers in the table of the class docstring."""
        layers = self.new_layers()
        first, *others = self.channels
        layers.conv("conv1", first, 3, stride=2, padding=1, bias=False)
        layers.batch_norm()
        layers.relu()
        for index in itertools.count(2):
            if not others and max(layers.grid) <= MAX_GRID:
                break
            layers.conv(f"conv{index}", others.pop(0) if others else layers.channels, 3, padding=1, bias=False)
            layers.batch_norm()
            layers.relu()
            layers.max_pool(2)
        options = {"bias": False, "activation": self.primary_activation, "activations": self.needs_activations}
        layers.primary(self.types, self.primary_dim, 1, **options)
        layers.dense_capsules("classes", self.classes, self.dim, routing=self.effective_routing)
        return CapsuleNetwork(self, layers, self.head, decoder=self.decoder)

    def recipe(self) -> Recipe:
        """AdamW with one cycle of the learning rate, flips, and shifts by up to an eighth of the image."""
        return Recipe(
            self.adapt_loss(LossConfig("cross_entropy", label_smoothing=0.1)),
            OptimizerConfig("adamw", 2e-3, weight_decay=0.05),
            OneCycle(),
            batch_size=64,
            epochs=60,
            augmentation="photos",
        )


@dataclass(frozen=True, kw_only=True)
class PlainCNN(ModelSpec):
    """Small convolutional network for photographs, the baseline of `torchcaps train --compare cnn`. Not published.

    Blocks of a 3x3 convolution, batch normalisation, ReLU and 2x2 max pooling; global average pooling; a linear layer.
    94,986 parameters for ten classes, 94,341 for five.

    Args:
        channels: channels of each block.
        features: units of hidden fully-connected layers with ReLU. If there are any, they read the channels at all
            positions instead of their averages.
    """

    presets = ("paper",)
    smoke_fields: ClassVar[dict[str, Any]] = {"channels": (8, 8, 8)}

    image: Image = (3, 32, 32)
    channels: tuple[int, ...] = (32, 64, 128)
    features: tuple[int, ...] = ()

    def build_network(self) -> ConvNetwork:
        """Build the layers in the order of the class docstring."""
        layers = Layers(self.image)
        for index, channels in enumerate(self.channels, start=1):
            layers.conv(f"conv{index}", channels, 3, padding=1)
            layers.batch_norm()
            layers.relu()
            layers.max_pool(2)
        if not self.features:
            layers.avg_pool()
        layers.flatten()
        for index, features in enumerate(self.features, start=1):
            layers.linear(f"fc{index}", features)
            layers.relu()
        layers.linear("classes", self.classes)
        return ConvNetwork(self, layers)

    def recipe(self) -> Recipe:
        """AdamW with the learning rate of one cycle up to 2e-3, flips, and shifts of up to 4 pixels."""
        return Recipe(
            LossConfig("cross_entropy"),
            OptimizerConfig("adamw", 2e-3, weight_decay=0.01),
            OneCycle(),
            batch_size=64,
            epochs=30,
            augmentation="photos-4px",
        )


def _digits_loss(spec: Mazzia2021) -> LossConfig:
    """Return the loss of `capsnet_digits`, with the name that fits the routing."""
    return spec.adapt_loss(LossConfig("margin", reconstruction_reduction="mean", reconstruction_weight=8.0))


# Efficient-CapsNet whose first convolution has stride 2, with the decoder: the default of `torchcaps train`. Strides,
# batch size and weight of the reconstruction were chosen on a fifth of the training digits.
register_model(
    "capsnet_digits",
    Mazzia2021(strides=(2, 1, 1, 1), reconstruction=True, hidden=(256, 512)),
    n_parameters=731_056,
    data="digits",
    augmentation="mazzia2021.mnist",
    loss=_digits_loss,
    optimizer=OptimizerConfig("adam", 4e-3, beta2=0.99),
    lr_schedule=OneCycle(warmup=0.2),
    batch_size=64,
    epochs=60,
    val_fraction=0.05,
)
# CapsNet of Sabour 2017 with a quarter of the channels and capsule types.
register_model(
    "capsnet_small",
    Sabour2017(width=64, types=8, hidden=(256, 512)),
    data="digits",
    augmentation="sabour2017.mnist",
    optimizer=OptimizerConfig("adam", 3e-3),
    lr_schedule=OneCycle(),
    batch_size=64,
    steps=None,
    epochs=16,
    val_fraction=0.1,
)
# Light front and few capsules: at least as accurate as cnn_images after the same CPU time (torchcaps bench images).
register_model("capsnet_images", PhotoCaps(), n_parameters=437_601, data="folder")
# The baseline that capsnet_images is compared with.
register_model("cnn_images", PlainCNN(), n_parameters=94_986, data="folder")
