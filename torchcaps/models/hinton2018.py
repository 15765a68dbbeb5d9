"""Matrix capsules with EM routing: Hinton, Sabour, Frosst 2018."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from torchcaps.models.builder import Layers
from torchcaps.models.network import CapsuleNetwork
from torchcaps.models.recipe import LossConfig, OptimizerConfig, Recipe
from torchcaps.models.registry import register_model
from torchcaps.models.schedules import Exponential
from torchcaps.models.spec import CapsuleSpec, Image
from torchcaps.routing import EM, Routing

if TYPE_CHECKING:
    from torchcaps.models.tsai2020 import Tsai2020EM

__all__ = ["Hinton2018", "add_em_capsules"]


def add_em_capsules(layers: Layers, spec: "Hinton2018 | Tsai2020EM", primary_types: int) -> None:
    """Append the capsule layers of networks with EM routing: primary, two convolutional layers, class capsules.

    The class layer has a window over the complete grid, with transformation matrices shared by all positions. With
    ``coordinates`` the scaled position of each child is added to its votes (Coordinate Addition, section 4), so that
    sharing does not discard positions.
    """
    routing = spec.effective_routing
    layers.primary(primary_types, spec.dim, 1, activation="none", activations=spec.needs_activations)
    layers.conv_capsules("caps1", spec.types, spec.dim, 3, stride=2, routing=routing, pose="matrix")
    layers.conv_capsules("caps2", spec.types, spec.dim, 3, routing=routing, pose="matrix")
    if isinstance(routing, EM):
        routing = replace(routing, coordinates=spec.coordinates)
    options = {"routing": routing, "pose": "matrix", "weights": "type"}
    layers.conv_capsules("classes", spec.classes, spec.dim, layers.grid, **options)


@dataclass(frozen=True, kw_only=True)
class Hinton2018(CapsuleSpec):
    """Network of matrix capsules for smallNORB: Hinton 2018, figure 1, with A = B = C = D = 32.

    =========  =============================================  ==================
    layer      smallNORB                                      out
    =========  =============================================  ==================
    conv1      5x5 stride 2, A channels, ReLU                 32 x 14 x 14
    primary    1x1, B poses of 4x4 and B activations          14 x 14 x 32 x 16
    caps1      3x3 stride 2, C types                          6 x 6 x 32 x 16
    caps2      3x3, D types                                   4 x 4 x 32 x 16
    classes    complete grid, shared matrices, coordinates    5 x 16
    =========  =============================================  ==================

    Parameters: 316,394 for one image of a stereo pair; 67,154 with A = 64, B = 8 and C = D = 16. Both images of a pair
    are channels of ``image=(2, 32, 32)``.

    Args:
        width: channels of conv1 (A).
        primary_types: primary capsule types (B).
        types: capsule types of caps1 and caps2 (C and D).
        dim: pose size, a square number; 16 is a 4x4 matrix.
        coordinates: add the positions of children to their votes for classes.

    Deviation: the paper does not specify the number of iterations; 2 is the best one in Tsai 2020. To save memory,
    parents compete within one receptive field, as in most code, instead of all parents of a child
    (``routing=EM(2, competition="global")``).

    >>> import torch
    >>> with torch.device("meta"):  # shapes without memory
    ...     network = Hinton2018().build()
    >>> sum(parameter.numel() for parameter in network.parameters())
    316394
    """

    presets = ("paper",)
    smoke_fields: ClassVar[dict[str, Any]] = {"width": 16, "primary_types": 4, "types": 4}

    image: Image = (1, 32, 32)
    classes: int = 5
    routing: Routing | str = EM(2)
    width: int = 32
    primary_types: int = 32
    types: int = 32
    dim: int = 16
    coordinates: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_square(self.dim)

    def build_network(self) -> CapsuleNetwork:
        """Build the network with the layers in the table of the class docstring."""
        layers = self.new_layers()
        layers.conv("conv1", self.width, 5, stride=2)
        layers.relu()
        add_em_capsules(layers, self, self.primary_types)
        return CapsuleNetwork(self, layers, self.head, decoder=self.decoder)

    def recipe(self) -> Recipe:
        """Adam with lr 0.003, multiplied by 0.96 per 20,000 steps, weight decay 2e-7: the authors on OpenReview."""
        return Recipe(
            loss=self.adapt_loss(LossConfig("spread", margin_schedule="sigmoid")),
            optimizer=OptimizerConfig("adam", 3e-3, weight_decay=2e-7),
            lr_schedule=Exponential(0.96, 20_000),
            batch_size=64,
            steps=300_000,
            note="the paper does not specify the number of steps; 300,000 is our choice",
        )


register_model(
    "hinton2018_smallnorb",
    Hinton2018(),
    n_parameters=316_394,
    data="smallnorb-left",
    augmentation="hinton2018.smallnorb",
)
