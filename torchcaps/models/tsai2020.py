"""Capsules with inverted dot-product attention routing: Tsai, Srivastava, Goh, Salakhutdinov 2020."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torchcaps.models import init
from torchcaps.models.blocks import add_resnet
from torchcaps.models.builder import Layers
from torchcaps.models.heads import HeadName, default_head
from torchcaps.models.hinton2018 import add_em_capsules
from torchcaps.models.network import CapsuleNetwork
from torchcaps.models.recipe import LossConfig, OptimizerConfig, Recipe
from torchcaps.models.registry import register_model
from torchcaps.models.schedules import Milestones
from torchcaps.models.spec import CapsuleSpec, Image
from torchcaps.routing import EM, Dynamic, Equilibrium, InvertedAttention, Routing

__all__ = ["Tsai2020", "Tsai2020Diverse", "Tsai2020Dynamic", "Tsai2020EM"]

RoutingSchedule = Literal["auto", "concurrent", "sequential"]
ClassifierName = Literal["auto", "linear", "sigmoid"]
SGD = OptimizerConfig("sgd", 0.1, momentum=0.9, weight_decay=5e-4)  # momentum and weight decay: the authors' code


def tsai_recipe(loss: LossConfig, optimizer: OptimizerConfig = SGD) -> Recipe:
    """Return the settings of all networks of the paper: 350 epochs, lr divided by 10 at epochs 150 and 250."""
    return Recipe(loss, optimizer, Milestones((150, 250), 0.1), batch_size=128, epochs=350)


@dataclass(frozen=True, kw_only=True)
class _BackboneSpec(CapsuleSpec):
    """Network for CIFAR with a convolution or a ResNet as backbone.

    Args:
        backbone: ``"simple"`` (one convolution) or ``"resnet"``.
        width: channels of the convolution, or of the last stage of the ResNet.
        stages: (channels, blocks) of each stage of the ResNet except the last; all but the first have stride 2.
        blocks: number of blocks in the last stage of the ResNet.
    """

    image: Image = (3, 32, 32)
    backbone: Literal["simple", "resnet"] = "simple"
    width: int = 256
    stages: tuple[tuple[int, int], ...] = ((64, 3),)
    blocks: int = 4

    def smoke_changes(self) -> dict[str, Any]:
        """Return the field values of a smoke test: one narrow block per stage, images of at most 32x32."""
        channels, height, width = self.image
        image = (channels, min(height, 32), min(width, 32))
        return {"image": image, "stages": ((16, 1),) * len(self.stages), **self.smoke_fields}

    def add_backbone(self, layers: Layers, kernel: int, stride: int = 1, padding: int = 0, norm: bool = False) -> None:
        """Append the ResNet, or the convolution with this kernel size."""
        if self.backbone == "resnet":
            add_resnet(layers, (*self.stages, (self.width, self.blocks)))
            return
        layers.conv("backbone", self.width, kernel, stride, padding)
        if norm:
            layers.batch_norm()
        layers.relu()


@dataclass(frozen=True, kw_only=True)
class Tsai2020(_BackboneSpec):
    """Capsule network with inverted dot-product attention routing for CIFAR: Tsai 2020, tables 8 and 9.

    ==========  ======================================================  ==================
    layer       CIFAR-10, simple backbone                               out
    ==========  ======================================================  ==================
    backbone    3x3 stride 2, 256 channels, ReLU                        256 x 16 x 16
    primary     1x1 without bias, 32 types of 4x4, LayerNorm            16 x 16 x 32 x 16
    caps1       3x3 stride 2, 32 types                                  7 x 7 x 32 x 16
    caps2       3x3, 32 types                                           5 x 5 x 32 x 16
    classes     dense, 800 children, matrices not shared                10 x 16
    head        linear map to a logit, shared by all classes            10
    ==========  ======================================================  ==================

    CIFAR-100 has 6x6 poses, 128 channels and another dense layer of 20 capsules. The ResNet backbone has a 3x3 stem
    of 64 channels, 3 blocks of 64 and 4 blocks of 128 channels, the first of those with stride 2.

    Parameters: 561,297 (printed 0.56M), CIFAR-100 1,462,989 (1.46M); with the ResNet 1,828,817 (1.83M) and 2,799,629
    (2.80M). Figure 1 shows two dense layers; tables and code have one for CIFAR-10. With a second one, 562,929
    parameters would round to 0.56M too.

    Args:
        types: capsule types of every layer.
        dim: pose size of every layer.
        dense: number of capsules of each dense layer below the class layer.
        pose: ``"matrix"`` or ``"vector"``.
        schedule: ``"concurrent"`` (Procedure 2), ``"sequential"`` (ablation B), or ``"auto"``: concurrent if the
            routing is `InvertedAttention`.
        classifier: ``"auto"`` (the shared classifier with `InvertedAttention`, otherwise the head that fits the
            routing), ``"linear"`` (the shared classifier for any routing), or ``"sigmoid"`` (the shared classifier
            with a sigmoid, for the margin loss and the spread loss).

    Official: the same network. The code divides the agreement by ``sqrt(D)``, the paper's equation does not; both
    presets follow the code (``routing=InvertedAttention(2, scale=False)`` is the equation). Not followed: the unfold
    of the first release, which scrambles the poses of a window; the first author's fork fixed it.

    >>> import torch
    >>> with torch.device("meta"):  # shapes without memory
    ...     network = Tsai2020().build()
    >>> sum(parameter.numel() for parameter in network.parameters())
    561297
    """

    smoke_fields: ClassVar[dict[str, Any]] = {"width": 16, "types": 4, "dim": 16, "blocks": 1}

    routing: Routing | str = InvertedAttention(2)
    types: int = 32
    dim: int = 16
    dense: tuple[int, ...] = ()
    pose: Literal["matrix", "vector"] = "matrix"
    schedule: RoutingSchedule = "auto"
    classifier: ClassifierName = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pose == "matrix":
            self.check_square(self.dim)

    @property
    def head(self) -> HeadName:
        """Name of the head that scores the class capsules."""
        return _resolve_head(self.classifier, self.effective_routing)

    def build_network(self) -> CapsuleNetwork:
        """Build the network with the layers in the table of the class docstring."""
        routing = self.effective_routing
        layers = self.new_layers()
        self.add_backbone(layers, kernel=3, stride=2, padding=1)
        layers.primary(self.types, self.dim, 1, bias=False, activation="layer_norm", activations=self.needs_activations)
        options = {"routing": routing, "pose": self.pose}
        layers.conv_capsules("caps1", self.types, self.dim, 3, stride=2, **options)
        layers.conv_capsules("caps2", self.types, self.dim, 3, **options)
        for layer, parents in enumerate(self.dense, start=3):
            layers.dense_capsules(f"caps{layer}", parents, self.dim, **options)
        layers.dense_capsules("classes", self.classes, self.dim, **options)
        return CapsuleNetwork(
            self, layers, self.head, schedule=_resolve_schedule(self.schedule, routing), decoder=self.decoder
        )

    def recipe(self) -> Recipe:
        """SGD with lr 0.1: appendix A.1 and the authors' code."""
        return tsai_recipe(self.adapt_loss(LossConfig("cross_entropy")))


def _resolve_schedule(schedule: RoutingSchedule, routing: Routing) -> Literal["concurrent", "sequential"]:
    """Return the schedule of the routing iterations; ``"auto"`` is resolved."""
    if schedule != "auto":
        return schedule
    return "concurrent" if isinstance(routing, InvertedAttention) else "sequential"


def _resolve_head(classifier: ClassifierName, routing: Routing) -> HeadName:
    """Return the name of the head; ``"auto"`` is resolved."""
    return default_head(routing) if classifier == "auto" else classifier


@dataclass(frozen=True, kw_only=True)
class Tsai2020Dynamic(_BackboneSpec):
    """Baseline with dynamic routing: Tsai 2020, tables 4 and 5.

    ========  ================================================  ================
    layer     CIFAR-10, simple backbone                         out
    ========  ================================================  ================
    backbone  9x9, 256 channels, ReLU                           256 x 24 x 24
    primary   9x9 stride 2, 32 types of 8, squash               8 x 8 x 32 x 8
    classes   dense, 2048 children                              10 x 16
    ========  ================================================  ================

    Parameters: 7,992,576 (printed 7.99M), CIFAR-100 31,585,536 (31.59M). With the ResNet backbone the primary
    convolution has stride 1; the printed 12.45M and 36.04M (12,451,136 and 36,044,096) need 256 channels in the last
    stage, while appendix A.1 states 128 (6,616,128 parameters).

    Deviation: the paper specifies neither the initialisation nor the iterations; both follow
    `torchcaps.models.sabour2017.Sabour2017`.

    Official: the same network; its code was not released.

    >>> import torch
    >>> with torch.device("meta"):  # shapes without memory
    ...     network = Tsai2020Dynamic().build()
    >>> sum(parameter.numel() for parameter in network.parameters())
    7992576
    """

    smoke_fields: ClassVar[dict[str, Any]] = {"width": 16, "types": 4, "blocks": 1}

    routing: Routing | str = Dynamic(3)
    types: int = 32
    primary_dim: int = 8
    dim: int = 16

    def build_network(self) -> CapsuleNetwork:
        """Build the network with the layers in the table of the class docstring."""
        layers = self.new_layers()
        self.add_backbone(layers, kernel=9)
        simple = self.backbone == "simple"
        primary = layers.primary(self.types, self.primary_dim, 9, stride=2 if simple else 1)
        layers.dense_capsules("classes", self.classes, self.dim, routing=self.effective_routing)
        for module in (primary, layers.front["backbone"]) if simple else (primary,):
            init.init_layers(module, init.he_normal)
        return CapsuleNetwork(self, layers, self.head, decoder=self.decoder)

    def recipe(self) -> Recipe:
        """Adam with lr 0.001 and the margin loss: appendix A.1."""
        return tsai_recipe(self.adapt_loss(LossConfig("margin")), OptimizerConfig("adam", 1e-3))


@dataclass(frozen=True, kw_only=True)
class Tsai2020EM(_BackboneSpec):
    """Baseline with EM routing: Tsai 2020, tables 6 and 7.

    ========  ================================================  ==================
    layer     CIFAR-10, simple backbone                         out
    ========  ================================================  ==================
    backbone  4x4 stride 2, 256 channels, batch norm, ReLU      256 x 16 x 16
    primary   1x1, 32 poses of 4x4 and 32 activations           16 x 16 x 32 x 16
    caps1     3x3 stride 2, 32 types                            7 x 7 x 32 x 16
    caps2     3x3, 32 types                                     5 x 5 x 32 x 16
    classes   complete grid, shared matrices, coordinates       10 x 16
    ========  ================================================  ==================

    Parameters: 453,044 (printed 0.45M), CIFAR-100 499,304 (0.50M); with the ResNet backbone 1,710,580 (1.71M) and
    1,756,840 (1.76M). Separate matrices for every position, a literal reading of "800 x 4 x 4", would give 575,924.

    Args:
        types: capsule types of every layer.
        dim: pose size, a square number.
        coordinates: add the positions of children to their votes for classes.

    Deviation: the paper does not mention coordinates; they are added as in Hinton 2018.

    Official: the same network; its code was not released.

    >>> import torch
    >>> with torch.device("meta"):  # shapes without memory
    ...     network = Tsai2020EM().build()
    >>> sum(parameter.numel() for parameter in network.parameters())
    453044
    """

    smoke_fields: ClassVar[dict[str, Any]] = {"image": (3, 20, 20), "width": 16, "types": 4, "blocks": 1}

    routing: Routing | str = EM(2)
    types: int = 32
    dim: int = 16
    coordinates: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_square(self.dim)

    def build_network(self) -> CapsuleNetwork:
        """Build the network with the layers in the table of the class docstring."""
        layers = self.new_layers()
        self.add_backbone(layers, kernel=4, stride=2, padding=1, norm=True)
        add_em_capsules(layers, self, self.types)
        return CapsuleNetwork(self, layers, self.head, decoder=self.decoder)

    def recipe(self) -> Recipe:
        """Adam with lr 0.01 and the spread loss: appendix A.1. That the margin grows over all epochs is our choice."""
        steps = 350 * 391  # epochs times batches of 128 from 50,000 images
        return tsai_recipe(
            self.adapt_loss(LossConfig("spread", margin_schedule="linear", margin_steps=steps)),
            OptimizerConfig("adam", 1e-2),
        )


@dataclass(frozen=True, kw_only=True)
class Tsai2020Diverse(CapsuleSpec):
    """Networks for DiverseMultiMNIST, with any number of digits per image: Tsai 2020, appendix B.2, tables 10 and 11.

    ========  ==============================================  ==================
    layer     matrix poses                                    out
    ========  ==============================================  ==================
    conv1     3x3 stride 2, 1024 channels, ReLU               1024 x 18 x 18
    primary   3x3 stride 2 without bias, 16 types of 8x8, LN  8 x 8 x 16 x 64
    caps1     3x3, 16 types                                   6 x 6 x 16 x 64
    classes   dense, 576 children                             10 x 64
    head      linear map to a logit, shared by all classes    10
    ========  ==============================================  ==================

    Parameters: 9,963,969 with matrix poses, 42,478,017 with vector poses, for one input channel. The tables print 3
    channels, with which the convolutional baseline would have 42,509,194 parameters instead of the printed 42.49M.
    The paper does not specify how the matrix network was "increased to 42M", as many as with vector poses; 64 types
    give 41,593,281. With dynamic routing there are 42,477,568.

    With `Dynamic` routing capsules are squashed instead of normalised and their lengths are trained with the margin
    loss, as the table in section 4.3 gives it; a class is predicted if its length exceeds 0.5.

    Args:
        width: channels of the convolution. In the paper it equals ``types * dim``: all layers have equally many
            neurons per position.
        types: capsule types of every layer.
        dim: pose size of every layer.
        pose: ``"matrix"`` or ``"vector"``.
        schedule: see `Tsai2020`.
        classifier: see `Tsai2020`. With ``"linear"`` and squashed capsules the initial logits have a standard
            deviation below 0.01, and the network does not learn within 160,000 images.

    Deviation: the paper does not specify the number of iterations; 2 are used.

    Official: the same network; its code was not released.

    >>> import torch
    >>> with torch.device("meta"):  # shapes without memory
    ...     network = Tsai2020Diverse().build()
    >>> sum(parameter.numel() for parameter in network.parameters())
    9963969
    """

    smoke_fields: ClassVar[dict[str, Any]] = {"width": 16, "types": 4, "dim": 16}

    image: Image = (1, 36, 36)
    routing: Routing | str = InvertedAttention(2)
    width: int = 1024
    types: int = 16
    dim: int = 64
    pose: Literal["matrix", "vector"] = "matrix"
    schedule: RoutingSchedule = "auto"
    classifier: ClassifierName = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pose == "matrix":
            self.check_square(self.dim)
        if self.reconstruction:
            raise ValueError(
                "reconstruction must be False for Tsai2020Diverse, got True: images have any number of objects"
            )

    @property
    def head(self) -> HeadName:
        """Name of the head that scores the class capsules."""
        return _resolve_head(self.classifier, self.effective_routing)

    def build_network(self) -> CapsuleNetwork:
        """Build the network with the layers in the table of the class docstring."""
        routing = self.effective_routing
        layers = self.new_layers()
        layers.conv("conv1", self.width, 3, stride=2, padding=1)
        layers.relu()
        normalized = isinstance(routing, InvertedAttention)
        activation = "layer_norm" if normalized else "squash"
        layers.primary(
            self.types, self.dim, 3, stride=2, bias=False, activation=activation, activations=self.needs_activations
        )
        layers.conv_capsules("caps1", self.types, self.dim, 3, routing=routing, pose=self.pose)
        layers.dense_capsules("classes", self.classes, self.dim, routing=routing, pose=self.pose)
        model = CapsuleNetwork(
            self, layers, self.head, schedule=_resolve_schedule(self.schedule, routing), n_objects=None
        )
        if not normalized:
            init.init_layers(model.front, init.he_normal)
        return model

    def recipe(self) -> Recipe:
        """SGD with lr 0.1 (appendix B.1) and the loss that fits the head; an epoch is 60,000 generated images."""
        return tsai_recipe(self.adapt_loss(LossConfig("binary"), n_objects=None))


def _register(name: str, spec: CapsuleSpec, published: str, n_parameters: int, data: str) -> None:
    """Register a model with the augmentation of its data set."""
    augmentation = "" if data == "diverse-multimnist" else f"tsai2020.{data}"
    register_model(f"tsai2020_{name}", spec, published, n_parameters=n_parameters, data=data, augmentation=augmentation)


_CIFAR100 = {"classes": 100, "dim": 36, "dense": (20,)}
_register("cifar10", Tsai2020(), "0.56M", 561_297, "cifar10")
_register("cifar100", Tsai2020(width=128, **_CIFAR100), "1.46M", 1_462_989, "cifar100")
_register("resnet_cifar10", Tsai2020(backbone="resnet", width=128), "1.83M", 1_828_817, "cifar10")
_register("resnet_cifar100", Tsai2020(backbone="resnet", width=128, **_CIFAR100), "2.80M", 2_799_629, "cifar100")
_register("dynamic_cifar10", Tsai2020Dynamic(), "7.99M", 7_992_576, "cifar10")
_register("dynamic_cifar100", Tsai2020Dynamic(classes=100), "31.59M", 31_585_536, "cifar100")
_register("dynamic_resnet_cifar10", Tsai2020Dynamic(backbone="resnet"), "12.45M", 12_451_136, "cifar10")
_register("dynamic_resnet_cifar100", Tsai2020Dynamic(backbone="resnet", classes=100), "36.04M", 36_044_096, "cifar100")
_register("em_cifar10", Tsai2020EM(), "0.45M", 453_044, "cifar10")
_register("em_cifar100", Tsai2020EM(classes=100), "0.50M", 499_304, "cifar100")
_register("em_resnet_cifar10", Tsai2020EM(backbone="resnet", width=128), "1.71M", 1_710_580, "cifar10")
_register("em_resnet_cifar100", Tsai2020EM(backbone="resnet", width=128, classes=100), "1.76M", 1_756_840, "cifar100")
_register("diverse_matrix", Tsai2020Diverse(), "", 9_963_969, "diverse-multimnist")
_register("diverse_vector", Tsai2020Diverse(pose="vector"), "", 42_478_017, "diverse-multimnist")
_register("diverse_matrix42m", Tsai2020Diverse(types=64), "42M", 41_593_281, "diverse-multimnist")
_register("diverse_dynamic", Tsai2020Diverse(pose="vector", routing=Dynamic(2)), "", 42_477_568, "diverse-multimnist")
# Own variant, future work of the paper: every layer routes to its fixed point. The spectral radius is above 0.9 at
# first, so that plain iteration would need more than 60 steps.
_EQUILIBRIUM = Equilibrium(InvertedAttention(), solver="anderson", max_steps=60)
_register("equilibrium_cifar10", Tsai2020(routing=_EQUILIBRIUM), "", 561_297, "cifar10")
