"""Generalised capsule networks with trainable routing (G-CapsNets): Chen, Wang, Zhao, Crandall 2019."""

import functools
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from torch import nn

from torchcaps.models import init
from torchcaps.models.network import CapsuleNetwork
from torchcaps.models.recipe import LossConfig, OptimizerConfig, Recipe
from torchcaps.models.registry import by_preset, register_model
from torchcaps.models.schedules import Exponential, Inverse
from torchcaps.models.spec import CapsuleSpec, Image, ModelSpec
from torchcaps.routing import Dynamic, Routing, Trainable

__all__ = ["Chen2019", "Chen2019Dynamic", "Chen2019Multi"]


def chen_recipe(spec: CapsuleSpec, steps: int = 10_000) -> Recipe:
    """Return the settings of the released MNIST solver: batches of 100, Adam with lr 0.001, Caffe's ``inv`` policy.

    The paper uses the margins of Sabour 2017; the released networks have m+ = 0.7 (MNIST) or 0.6 (CIFAR-10). The
    reconstruction loss is half the squared error, as in Caffe.
    """
    loss = LossConfig(
        "margin",
        positive_margin=0.7 if spec.official else 0.9,
        reconstruction_reduction="half",
        reconstruction_weight=0.0005,
    )
    optimizer, schedule = OptimizerConfig("adam", 1e-3), Inverse(1e-4, 0.75)
    return Recipe(spec.adapt_loss(loss), optimizer, schedule, batch_size=100, steps=steps)


def _cifar_loss(spec: ModelSpec) -> LossConfig:
    """Return the loss of the spec, with the margin of the released CIFAR-10 networks in the official preset."""
    loss = spec.recipe().loss
    return replace(loss, positive_margin=0.6) if spec.official else loss


@dataclass(frozen=True, kw_only=True)
class Chen2019(CapsuleSpec):
    """G-CapsNet with one capsule layer: Chen 2019, section 4.1.

    ========  ======================================================  ===============
    layer     MNIST                                                   out
    ========  ======================================================  ===============
    conv1     9x9, 256 channels, ReLU                                 256 x 20 x 20
    primary   9x9 stride 2, ReLU, 32 types of 8, squash               6 x 6 x 32 x 8
    classes   dense: 1152 x 8 to 10 x 16, 11,520 couplings            10 x 16
    classes   conv: 6x6 window, poses of 2x4, 4x4 matrices            10 x 8
    decoder   160 (80), 512, 1024, 784; ReLU, ReLU, sigmoid           28 x 28
    ========  ======================================================  ===============

    Parameters, without and with the decoder: dense 6,815,744 (6.8M) and 8,227,088 (8.2M); conv 5,525,504 (5.5M) and
    6,895,888 (6.9M); CIFAR-10 2,674,176 (2.67M) for both layers, which are the same function there: a window over
    the complete grid with poses of one row is a dense layer. Caffe's default bias of the transform is omitted; with it
    the dense MNIST network would have 8,411,408 parameters.

    Args:
        layer: class capsule layer, ``"dense"`` or ``"conv"``.
        width: channels of conv1.
        types: primary capsule types.
        primary_dim: pose size of the primary capsules.
        dim: pose size of dense class capsules; convolutional ones keep that of the primary capsules.
        rows: rows of a pose matrix in the convolutional layer.
        kernel: kernel size of the primary convolution.

    Official: margins of 0.7 and 0.6 instead of 0.9. The released convolutional MNIST network has a 6x6 primary kernel
    and 32 types of 4x4: 5,088,256 parameters without the decoder, which does not round to 5.5M. Not followed: its
    mask, which always keeps capsule 9; the diagonal Jacobian of its squash; a reshape that combines neighbouring pixels
    into capsules.

    >>> import torch
    >>> with torch.device("meta"):  # shapes without memory
    ...     network = Chen2019().build()
    >>> sum(parameter.numel() for parameter in network.parameters())
    8227088
    """

    smoke_fields: ClassVar[dict[str, Any]] = {"width": 16, "types": 4, "hidden": (32,)}

    image: Image = (1, 28, 28)
    routing: Routing | str = Trainable()
    reconstruction: bool = True
    layer: Literal["dense", "conv"] = "dense"
    width: int = 256
    types: int = 32
    primary_dim: int = 8
    dim: int = 16
    rows: int = 2
    kernel: int = 9

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layer == "conv" and self.primary_dim % self.rows:
            raise ValueError(
                f"rows must divide primary_dim, {self.primary_dim}, since a pose is a matrix with that many rows, "
                f"got {self.rows}"
            )

    def build_network(self) -> CapsuleNetwork:
        """Build the network with the layers in the table of the class docstring."""
        shape = (self.layer, self.kernel, self.primary_dim, self.rows)
        released = self.official and shape == ("conv", 9, 8, 2)  # default fields: the released network
        kernel, dim, rows = (6, 16, 4) if released else (self.kernel, self.primary_dim, self.rows)
        layers = self.new_layers()
        layers.conv("conv1", self.width, 9)
        layers.relu()
        layers.primary(self.types, dim, kernel, stride=2, relu=True, activation="exp_squash")
        if self.layer == "dense":
            layers.dense_capsules("classes", self.classes, self.dim, routing=self.effective_routing)
        else:
            layers.conv_capsules("classes", self.classes, dim, layers.grid, routing=self.effective_routing, pose=rows)
        model = CapsuleNetwork(self, layers, self.head, decoder=self.decoder)
        init.init_layers(model, init.caffe_xavier)
        return model

    def recipe(self) -> Recipe:
        """The settings of `chen_recipe`."""
        return chen_recipe(self)


@dataclass(frozen=True, kw_only=True)
class Chen2019Multi(CapsuleSpec):
    """G-CapsNet with three capsule layers: Chen 2019, supplement, table 1.

    ========  ============================================  ================
    layer     CIFAR-10                                      out
    ========  ============================================  ================
    conv1     7x7 without bias, 64 channels, ReLU           64 x 26 x 26
    primary   7x7 stride 2 without bias, 16 types of 8      10 x 10 x 16 x 8
    caps1     4x4, 8 types, poses of 1x8                    7 x 7 x 8 x 8
    caps2     3x3 stride 2, 16 types, poses of 4x2          3 x 3 x 16 x 8
    classes   dense, 144 children                           10 x 8
    ========  ============================================  ================

    Parameters: 750,816, as in the released code. The paper prints 716K; the rows of its table add up to 716,992. The
    table gives caps1 (3, 3, 16) x (7, 7, 8) = 56,448 couplings, but its window is 4x4, which needs 100,352; and the
    class layer 11,520, one per pose entry, while equation and code have one per pair of capsules, 1,440.

    Every capsule layer is followed by squash and then ReLU; in the networks with one capsule layer ReLU comes first.

    Official: a margin of 0.6.

    >>> import torch
    >>> with torch.device("meta"):  # shapes without memory
    ...     network = Chen2019Multi().build()
    >>> sum(parameter.numel() for parameter in network.parameters())
    750816
    """

    smoke_fields: ClassVar[dict[str, Any]] = {"width": 16, "types": 4}

    image: Image = (3, 32, 32)
    routing: Routing | str = Trainable(relu="after")
    width: int = 64
    types: int = 16
    dim: int = 8
    rows: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dim % self.rows:
            raise ValueError(
                f"rows must divide dim, {self.dim}, since a pose is a matrix with that many rows, got {self.rows}"
            )

    def build_network(self) -> CapsuleNetwork:
        """Build the network with the layers in the table of the class docstring."""
        routing = self.effective_routing
        layers = self.new_layers()
        layers.conv("conv1", self.width, 7, bias=False)
        layers.relu()
        layers.primary(self.types, self.dim, 7, stride=2, bias=False, relu=True, activation="exp_squash")
        layers.conv_capsules("caps1", max(1, self.types // 2), self.dim, 4, routing=routing)
        layers.conv_capsules("caps2", self.types, self.dim, 3, stride=2, routing=routing, pose=self.rows)
        layers.dense_capsules("classes", self.classes, self.dim, routing=routing)
        model = CapsuleNetwork(self, layers, self.head, decoder=self.decoder)
        init.init_layers(model, init.caffe_xavier)
        return model

    def recipe(self) -> Recipe:
        """Adam with lr 0.002 for 20,000 steps: the released solver."""
        recipe = chen_recipe(self, steps=20_000)
        return replace(recipe, optimizer=OptimizerConfig("adam", 2e-3))


@dataclass(frozen=True, kw_only=True)
class Chen2019Dynamic(CapsuleSpec):
    """Baseline "CapsNets**" with dynamic routing: Chen 2019, table 2.

    Parameters: 8,215,568 for MNIST, the CapsNet of Sabour 2017. For CIFAR-10, with 64 channels and class capsules of
    dim 8, 2,653,696; the paper prints 2.67M, the count of the network with couplings.

    Official: 4 iterations, SGD with lr 0.01, the margins of the other networks, Caffe's Xavier initialisation, and
    primary capsules without squash: a weaker baseline than the text describes. The momentum of 0.9 and the learning
    rate schedule are those of the other networks.

    >>> import torch
    >>> with torch.device("meta"):  # shapes without memory
    ...     network = Chen2019Dynamic().build()
    >>> sum(parameter.numel() for parameter in network.parameters())
    8215568
    """

    smoke_fields: ClassVar[dict[str, Any]] = {"width": 16, "types": 4, "hidden": (32,)}

    image: Image = (1, 28, 28)
    routing: Routing | str = Dynamic(3)
    reconstruction: bool = True
    width: int = 256
    types: int = 32
    primary_dim: int = 8
    dim: int = 16

    @property
    def effective_routing(self) -> Routing:
        """Routing of the layers; the released network has 4 iterations."""
        routing = super().effective_routing
        return Dynamic(4) if self.official and self.has_default_routing else routing

    def build_network(self) -> CapsuleNetwork:
        """Build the layers of CapsNet."""
        layers = self.new_layers()
        layers.conv("conv1", self.width, 9)
        layers.relu()
        activation = "none" if self.official else "squash"
        layers.primary(self.types, self.primary_dim, 9, stride=2, activation=activation)
        # official: Caffe's Xavier initialisation, as in the networks that it is compared with
        bound = (3 / (self.primary_dim * self.classes * self.dim)) ** 0.5
        options = {"init": functools.partial(nn.init.uniform_, a=-bound, b=bound)} if self.official else {}
        layers.dense_capsules("classes", self.classes, self.dim, routing=self.effective_routing, **options)
        model = CapsuleNetwork(self, layers, self.head, decoder=self.decoder)
        if self.official:
            init.init_layers(model, init.caffe_xavier)
        else:
            init.init_layers(model.front, init.he_normal)
        return model

    def recipe(self) -> Recipe:
        """The settings of `chen_recipe`; in the official preset SGD with lr 0.01."""
        recipe = chen_recipe(self)
        return replace(recipe, optimizer=OptimizerConfig("sgd", 1e-2, momentum=0.9)) if self.official else recipe


_SMALL: dict[str, Any] = {"image": (3, 32, 32), "width": 64, "dim": 8, "reconstruction": False}
_MNIST: dict[str, Any] = {"data": "mnist", "augmentation": "chen2019.mnist"}
_CIFAR: dict[str, Any] = {"data": "cifar10", "augmentation": "chen2019.cifar10", "loss": _cifar_loss}
_SGD, _STEPS = OptimizerConfig("sgd", 1e-3, momentum=0.9), Exponential(0.6, 8000, staircase=True)
register_model("chen2019_fc_mnist", Chen2019(), "8.2M", n_parameters=8_227_088, **_MNIST)
register_model("chen2019_conv_mnist", Chen2019(layer="conv"), "6.9M", n_parameters=6_895_888, **_MNIST)
register_model(
    "chen2019_fc_cifar10",
    Chen2019(**_SMALL),
    "2.67M",
    n_parameters=2_674_176,
    **_CIFAR,
    optimizer=_SGD,
    lr_schedule=_STEPS,
)
register_model(
    "chen2019_conv_cifar10",
    Chen2019(**_SMALL, layer="conv", rows=1),
    "2.67M",
    n_parameters=2_674_176,
    **_CIFAR,
    optimizer=_SGD,
    lr_schedule=_STEPS,
)
register_model(
    "chen2019_multi_cifar10", Chen2019Multi(), "716K", n_parameters=750_816, published_rule="unmatched", **_CIFAR
)
register_model("chen2019_dynamic_mnist", Chen2019Dynamic(), "8.2M", n_parameters=8_215_568, **_MNIST)
register_model(
    "chen2019_dynamic_cifar10",
    Chen2019Dynamic(**_SMALL),
    "2.67M",
    n_parameters=2_653_696,
    published_rule="unmatched",
    **_CIFAR,
    optimizer=by_preset(_SGD, replace(_SGD, lr=1e-2)),
    lr_schedule=_STEPS,
)
