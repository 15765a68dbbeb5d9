"""Capsule network with variational Bayes routing: Ribeiro, Leontidis, Kollias 2020."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor, nn

from torchcaps.capsules import Capsules
from torchcaps.models import init
from torchcaps.models.heads import HeadName
from torchcaps.models.network import CapsuleNetwork
from torchcaps.models.recipe import LossConfig, OptimizerConfig, Recipe
from torchcaps.models.registry import register_model
from torchcaps.models.spec import CapsuleSpec, Image
from torchcaps.nn import ConvCapsules
from torchcaps.routing import Routing, VariationalBayes

__all__ = ["NormalizedConvCapsules", "Ribeiro2020"]


class NormalizedConvCapsules(ConvCapsules):
    """Convolutional capsules with batch normalisation of the parents of each type, without scale and shift.

    Poses are normalised over images, positions and pose elements, activation logits over images and positions; the
    sigmoid follows. For routings that return activation logits: ``VariationalBayes(activation="logit")``.

    >>> import torch
    >>> options = {"routing": "variational_bayes", "pose": "matrix", "grid": (5, 5)}
    >>> layer = NormalizedConvCapsules(4, 16, 8, 16, kernel_size=3, **options)
    >>> layer(torch.randn(2, 5, 5, 4, 16)).pose.shape
    torch.Size([2, 3, 3, 8, 16])
    """

    def __init__(self, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.pose_norm = nn.BatchNorm1d(self.geometry.parents, affine=False)
        self.activation_norm = nn.BatchNorm1d(self.geometry.parents, affine=False)

    def forward(self, capsules: Capsules | Tensor, trace: bool = False) -> Any:
        """Route children to parents and normalise them; the trace has the parents before the normalisation."""
        parents, states = super().forward(capsules, trace=True) if trace else (super().forward(capsules), None)
        assert parents.activation is not None
        pose = _normalize(self.pose_norm, parents.pose.movedim(-2, 1)).movedim(1, -2)
        activation = _normalize(self.activation_norm, parents.activation.movedim(-1, 1)).movedim(1, -1).sigmoid()
        parents = Capsules(pose, activation)
        return (parents, states) if trace else parents


def _normalize(norm: nn.BatchNorm1d, x: Tensor) -> Tensor:
    """Apply a batch normalisation to the second axis of a tensor of any number of axes."""
    return norm(x.flatten(2)).unflatten(2, x.shape[2:])


@dataclass(frozen=True, kw_only=True)
class Ribeiro2020(CapsuleSpec):
    """Capsule network with variational Bayes routing for smallNORB: Ribeiro 2020, from the authors' code.

    =========  ====================================================  ==================
    layer      smallNORB                                             out
    =========  ====================================================  ==================
    conv1      5x5 stride 2, 64 channels, batch norm, ReLU           64 x 14 x 14
    primary    1x1, 8 poses of 4x4 and 8 activations, batch norm     14 x 14 x 8 x 16
    caps1      3x3 stride 2, 16 types, batch norm                    6 x 6 x 16 x 16
    caps2      3x3, 16 types, batch norm                             4 x 4 x 16 x 16
    classes    complete grid, shared matrices, coordinates           5 x 16
    =========  ====================================================  ==================

    Parameters: 68,714. The batch normalisation of activations removes the costs ``beta_a`` and ``beta_u`` of each type
    again, so that these have no gradient. Other routings are not followed by a batch normalisation.

    Args:
        width: channels of conv1.
        primary_types: primary capsule types.
        types: capsule types of caps1 and caps2.
        dim: pose size, a square number.

    Official: the authors' code applies the cross-entropy to activations in 0..1, so that the loss of five classes can't
    fall below 0.905; ``preset="official"`` does so. Otherwise the class probabilities are the activations divided by
    their sum.

    >>> import torch
    >>> with torch.device("meta"):  # shapes without memory
    ...     network = Ribeiro2020().build()
    >>> sum(parameter.numel() for parameter in network.parameters())
    68714
    """

    smoke_fields: ClassVar[dict[str, Any]] = {"width": 8, "primary_types": 3, "types": 4, "dim": 4}

    image: Image = (2, 32, 32)
    classes: int = 5
    routing: Routing | str = VariationalBayes()
    width: int = 64
    primary_types: int = 8
    types: int = 16
    dim: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_square(self.dim)

    @property
    def effective_routing(self) -> Routing:
        """Routing of the layers: variational Bayes returns logits, which are normalised."""
        routing = super().effective_routing
        return replace(routing, activation="logit") if isinstance(routing, VariationalBayes) else routing

    @property
    def head(self) -> HeadName:
        """Name of the head: log-probabilities, or the activations themselves in the official preset."""
        head = super().head
        return "log_activation" if head == "activation" and not self.official else head

    def build_network(self) -> CapsuleNetwork:
        """Build the network with the layers in the table of the class docstring."""
        routing = self.effective_routing
        options: dict[str, Any] = {"routing": routing, "pose": "matrix"}
        if isinstance(routing, VariationalBayes):
            options["layer_class"] = NormalizedConvCapsules
        layers = self.new_layers()
        layers.conv("conv1", self.width, 5, stride=2, bias=False)
        layers.batch_norm()
        layers.relu()
        activations = self.needs_activations
        layers.primary(
            self.primary_types, self.dim, 1, bias=False, activation="none", norm="type", activations=activations
        )
        layers.conv_capsules("caps1", self.types, self.dim, 3, stride=2, **options)
        layers.conv_capsules("caps2", self.types, self.dim, 3, **options)
        if isinstance(routing, VariationalBayes):
            options["routing"] = replace(routing, coordinates=True)
        layers.conv_capsules("classes", self.classes, self.dim, layers.grid, weights="type", **options)
        model = CapsuleNetwork(self, layers, self.head, decoder=self.decoder)
        init.init_layers(model.front, init.he_normal)
        return model

    def recipe(self) -> Recipe:
        """Adam with lr 0.001, 300 epochs; a fifth of the training set selects the epoch: the authors' code."""
        loss = LossConfig("cross_entropy")
        return Recipe(
            loss=loss if self.official and self.head == "activation" else self.adapt_loss(loss),
            optimizer=OptimizerConfig("adam", 1e-3),
            batch_size=128,
            epochs=300,
            val_fraction=0.2,
            eval_weights="best",
        )


register_model(
    "ribeiro2020_smallnorb",
    Ribeiro2020(),
    n_parameters=68_714,
    data="smallnorb",
    augmentation="sabour2017.smallnorb",
    note="images are standardised over both channels together; the authors standardise each channel",
)
