"""Self-routing capsule networks: Hahn, Pyeon, Kim 2019."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torchcaps.models import init
from torchcaps.models.blocks import add_resnet
from torchcaps.models.builder import Layers
from torchcaps.models.heads import HeadName
from torchcaps.models.network import CapsuleNetwork, ConvNetwork
from torchcaps.models.recipe import LossConfig, OptimizerConfig, Recipe
from torchcaps.models.registry import register_model
from torchcaps.models.schedules import Milestones
from torchcaps.models.spec import CapsuleSpec, Image, ModelSpec
from torchcaps.routing import Routing, SelfRouting

__all__ = ["Hahn2019", "HahnPool"]

RESNET20 = ((16, 3), (32, 3), (64, 3))
SMOKE: dict[str, Any] = {"stages": ((8, 1), (16, 1))}


def _recipe(loss: LossConfig) -> Recipe:
    """Return the authors' settings for CIFAR-10."""
    return Recipe(
        loss=loss,
        optimizer=OptimizerConfig("sgd", 0.1, momentum=0.9, weight_decay=1e-4),
        lr_schedule=Milestones((150, 250)),
        batch_size=64,
        epochs=350,
        val_fraction=0.1,
    )


@dataclass(frozen=True, kw_only=True)
class Hahn2019(CapsuleSpec):
    """Self-routing capsule network on ResNet-20: Hahn 2019, layers and training from the authors' code.

    =========  ==========================================================  ==================
    layer      CIFAR-10                                                    out
    =========  ==========================================================  ==================
    ResNet-20  three stages of three blocks, shortcuts without weights     64 x 8 x 8
    primary    3x3, batch norm; 32 poses of dim 16 and 32 activations      8 x 8 x 32 x 16
    classes    dense, 2048 children, activations only                      10
    =========  ==========================================================  ==================

    Parameters: 931,664. The class layer has no transformation matrices, since its parents have no pose; a score is the
    logarithm of an activation, and the activations of self-routing sum to 1. Other routings need matrices and poses, of
    size ``dim``, and have more parameters.

    Args:
        stages: channels and number of blocks of each stage.
        types, dim: capsule types and pose size of the primary capsules.

    Official: both presets follow the authors' code and are equal.

    >>> import torch
    >>> with torch.device("meta"):  # shapes without memory
    ...     network = Hahn2019().build()
    >>> sum(parameter.numel() for parameter in network.parameters())
    931664
    """

    smoke_fields: ClassVar[dict[str, Any]] = SMOKE | {"types": 4, "dim": 4, "hidden": (32,)}

    image: Image = (3, 32, 32)
    routing: Routing | str = SelfRouting()
    stages: tuple[tuple[int, int], ...] = RESNET20
    types: int = 32
    dim: int = 16

    @property
    def head(self) -> HeadName:
        """Name of the head: the logarithm of the activations, if there are any."""
        head = super().head
        return "log_activation" if head == "activation" else head

    def build_network(self) -> CapsuleNetwork:
        """Build the network with the layers in the table of the class docstring."""
        routing = self.effective_routing
        layers = self.new_layers()
        add_resnet(layers, self.stages, stem=self.stages[0][0], projection=False)
        options = {"bias": False, "activation": "none", "norm": "channel", "activations": self.needs_activations}
        layers.primary(self.types, self.dim, 3, padding="same", **options)
        poses = not isinstance(routing, SelfRouting) or self.reconstruction
        layers.dense_capsules("classes", self.classes, self.dim if poses else 1, routing=routing, poses=poses)
        model = CapsuleNetwork(self, layers, self.head, decoder=self.decoder)
        init.init_layers(model.front, init.he_normal)
        return model

    def recipe(self) -> Recipe:
        """SGD with lr 0.1, divided by 10 at epochs 150 and 250; a tenth of the training set is held out."""
        return _recipe(self.adapt_loss(LossConfig("cross_entropy")))


@dataclass(frozen=True, kw_only=True)
class HahnPool(ModelSpec):
    """Baseline of Hahn 2019: ResNet-20 with average pooling and a linear layer. Parameters: 269,722.

    Official: the same network.

    >>> import torch
    >>> with torch.device("meta"):  # shapes without memory
    ...     network = HahnPool().build()
    >>> sum(parameter.numel() for parameter in network.parameters())
    269722
    """

    smoke_fields: ClassVar[dict[str, Any]] = SMOKE

    image: Image = (3, 32, 32)
    stages: tuple[tuple[int, int], ...] = RESNET20

    def build_network(self) -> ConvNetwork:
        """Build the ResNet and its classifier."""
        layers = Layers(self.image)
        add_resnet(layers, self.stages, stem=self.stages[0][0], projection=False)
        layers.avg_pool()
        layers.flatten()
        layers.linear("classes", self.classes)
        model = ConvNetwork(self, layers)
        init.init_layers(model, init.he_normal)
        return model

    def recipe(self) -> Recipe:
        """The settings of the capsule network it is compared with."""
        return _recipe(LossConfig("cross_entropy"))


_DATA: dict[str, Any] = {
    "data": "cifar10",
    "augmentation": "tsai2020.cifar10",
}  # crop, flip and normalisation are the same
register_model("hahn2019_cifar10", Hahn2019(), n_parameters=931_664, **_DATA)
register_model("hahn2019_pool_cifar10", HahnPool(), n_parameters=269_722, **_DATA)
