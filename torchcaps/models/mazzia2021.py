"""Efficient-CapsNet, capsule network with self-attention routing: Mazzia, Salvetti, Chiaberge 2021."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torchcaps.models import init
from torchcaps.models.network import CapsuleNetwork
from torchcaps.models.recipe import LossConfig, OptimizerConfig, Recipe
from torchcaps.models.registry import register_model
from torchcaps.models.schedules import Exponential
from torchcaps.models.spec import CapsuleSpec, Image
from torchcaps.routing import Routing, SelfAttention

__all__ = ["Mazzia2021"]

BATCH_SIZE = 16


@dataclass(frozen=True, kw_only=True)
class Mazzia2021(CapsuleSpec):
    """Efficient-CapsNet: Mazzia 2021, layers, initialisation and training from the authors' code.

    =========  ==========================================================  ==================
    layer      MNIST                                                       out
    =========  ==========================================================  ==================
    conv1      5x5, 1 to 32 channels, ReLU, batch norm                     32 x 24 x 24
    conv2      3x3, 64 channels, ReLU, batch norm                          64 x 22 x 22
    conv3      3x3, 64 channels, ReLU, batch norm                          64 x 20 x 20
    conv4      3x3 stride 2, 128 channels, ReLU, batch norm                128 x 9 x 9
    primary    9x9 depthwise, 16 types of dim 8, exponential squash        1 x 1 x 16 x 8
    digit      dense, 16 children, self-attention routing                  10 x 16
    decoder    160, 512, 1024, 784; ReLU, ReLU, sigmoid                    28 x 28
    =========  ==========================================================  ==================

    The kernel of the primary capsules covers the grid for any image size, so that there are always 16 of them; that for
    MultiMNIST leaves out the last row and column. Batch normalisation comes after the ReLU. The network for smallNORB
    has leaky ReLUs of slope 0.3 and instance normalisation instead. Parameters: 161,824 without the decoder, which
    ``reconstruction=True`` adds (1,411,344), 154,656 for MultiMNIST and 151,664 for smallNORB. Keras also counts 576
    moving averages of batch normalisation.

    Args:
        widths: channels of the convolutions; the last must be ``types * primary_dim``.
        kernels, strides: kernel sizes and strides of the convolutions.
        norm: ``"batch"``: ReLU and batch normalisation; ``"instance"``: leaky ReLU and instance normalisation.
        trim: rows and columns at the bottom and right that the primary capsules do not read.
        n_objects: objects per image, each decoded separately: 2 for MultiMNIST.
        types: primary capsule types.
        primary_dim: pose size of the primary capsules.
        dim: pose size of the class capsules.
        hidden: widths of the hidden layers of the decoder.

    Official: both presets follow the authors' code and are equal.

    Deviation: the authors' code keeps the checkpoint with the best accuracy on the test set; here the weights after the
    last step are used. Their decoder for smallNORB is convolutional and reconstructs standardised images with a
    sigmoid; here it is that of the other networks, and its targets are in 0..1.

    >>> import torch
    >>> with torch.device("meta"):  # shapes without memory
    ...     network = Mazzia2021().build()
    >>> sum(parameter.numel() for parameter in network.parameters())
    161824
    """

    minimums: ClassVar[dict[str, int]] = {**CapsuleSpec.minimums, "trim": 0}
    smoke_fields: ClassVar[dict[str, Any]] = {"widths": (8, 16, 16, 32), "types": 4, "hidden": (32,)}

    image: Image = (1, 28, 28)
    routing: Routing | str = SelfAttention()
    widths: tuple[int, ...] = (32, 64, 64, 128)
    kernels: tuple[int, ...] = (5, 3, 3, 3)
    strides: tuple[int, ...] = (1, 1, 1, 2)
    norm: Literal["batch", "instance"] = "batch"
    trim: int = 0
    n_objects: int = 1
    types: int = 16
    primary_dim: int = 8
    dim: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if not len(self.widths) == len(self.kernels) == len(self.strides) > 0:
            raise ValueError(
                f"widths, kernels and strides must have equal lengths of at least 1, got {self.widths}, "
                f"{self.kernels} and {self.strides}"
            )
        if self.widths[-1] != self.types * self.primary_dim:
            raise ValueError(
                f"widths must end in types * primary_dim = {self.types * self.primary_dim}, since the primary capsules "
                f"are depthwise, got {self.widths}"
            )

    def build_network(self) -> CapsuleNetwork:
        """Build the network with the layers in the table of the class docstring."""
        layers = self.new_layers()
        for index, sizes in enumerate(zip(self.widths, self.kernels, self.strides, strict=True), start=1):
            layers.conv(f"conv{index}", *sizes)
            if self.norm == "batch":
                layers.relu()
                layers.batch_norm(momentum=0.01, eps=1e-3)  # Keras' defaults in PyTorch's convention
            else:
                layers.relu(0.3)
                layers.instance_norm(eps=1e-3)
        kernel = (max(layers.grid[0] - self.trim, 1), max(layers.grid[1] - self.trim, 1))
        options: dict[str, Any] = {"activation": "exp_squash", "depthwise": True, "stride": self.trim + 1}
        primary = layers.primary(self.types, self.primary_dim, kernel, **options)
        layers.dense_capsules("digit", self.classes, self.dim, routing=self.effective_routing)
        model = CapsuleNetwork(self, layers, self.head, decoder=self.decoder, n_objects=self.n_objects)
        init.init_layers(model, init.keras_he_normal)
        init.init_layers(primary, init.glorot_uniform)
        if model.decoder is not None:
            init.init_layers(model.decoder.layers[-2], init.glorot_normal)
        return model

    def recipe(self) -> Recipe:
        """Adam with lr 5e-4, times 0.97 per epoch down to 5e-5, margin loss plus 0.392 mean squared error."""
        weight = 0.392 if self.n_objects == 1 else 0.196
        loss = LossConfig("margin", reconstruction_reduction="mean", reconstruction_weight=weight)
        return Recipe(
            loss=self.adapt_loss(loss, self.n_objects),
            optimizer=OptimizerConfig("adam", 5e-4),
            lr_schedule=Exponential(0.97, 60_000 // BATCH_SIZE, floor=0.1, staircase=True),
            batch_size=BATCH_SIZE,
            epochs=150,
        )


register_model(
    "mazzia2021_mnist",
    Mazzia2021(),
    n_parameters=161_824,
    data="mnist",
    augmentation="mazzia2021.mnist",
    note="the authors' code keeps the epoch with the best accuracy on the test set; here the last weights are kept",
)
register_model(
    "mazzia2021_multimnist",
    Mazzia2021(image=(1, 36, 36), strides=(1, 1, 2, 2), trim=1, n_objects=2),
    n_parameters=154_656,
    data="multimnist",
    augmentation="sabour2017.multimnist",
    lr_schedule=Exponential(0.97, 37_500, floor=0.1, staircase=True),
    epochs=None,
    steps=150 * 37_500,
    note="the authors' code counts half a hit if one of two digits is correct; here both must be correct",
)
register_model(
    "mazzia2021_smallnorb",
    Mazzia2021(image=(2, 48, 48), classes=5, kernels=(7, 3, 3, 3), strides=(2, 1, 1, 2), norm="instance"),
    n_parameters=151_664,
    data="smallnorb-64",
    augmentation="mazzia2021.smallnorb",
    lr_schedule=Exponential(0.97, 24_300 // BATCH_SIZE, floor=0.1, staircase=True),
    note="images are standardised one by one; the authors' code standardises each split by its own statistics",
)
