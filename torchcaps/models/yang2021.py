"""Routing towards discriminative power of class capsules: Yang, Li, Yu 2021."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from torchcaps._core.validation import check_range
from torchcaps.models import init
from torchcaps.models.network import CapsuleNetwork
from torchcaps.models.recipe import LossConfig, OptimizerConfig, Recipe
from torchcaps.models.registry import register_model
from torchcaps.models.schedules import Exponential
from torchcaps.models.spec import CapsuleSpec, Image
from torchcaps.routing import Quadratic, Routing

__all__ = ["Yang2021"]


@dataclass(frozen=True, kw_only=True)
class Yang2021(CapsuleSpec):
    """CapsNet with routing by a regularised quadratic program: Yang 2021, table I.

    =========  ===========================================================  ===============
    layer      MNIST and Fashion-MNIST                                      out
    =========  ===========================================================  ===============
    conv1      9x9, 256 channels, ReLU (CIFAR-10: leaky)                    256 x 20 x 20
    primary    9x9 stride 2, 32 types of 8 (CIFAR-10: 64), squash           6 x 6 x 32 x 8
    classes    dense, 1152 children; one coefficient per child and class    10 x 16
    decoder    160, 512, 1024, 784; none for CIFAR-10, nor in "/FC" columns 28 x 28
    =========  ===========================================================  ===============

    Parameters: 8,215,568 (MNIST, Fashion-MNIST), 22,476,288 (CIFAR-10, padded as in the code of Sabour 2017),
    9,425,664 (MultiMNIST). The coefficients (1152 x 10 for MNIST) are buffers, updated by
    `torchcaps.routing.Quadratic.ascend` after each optimiser step (Algorithm 1), with a learning rate that follows the
    schedule of the weights.

    Args:
        penalty: ``"l1"`` or ``"l2"``; by default that of the routing.
        slope: slope of the leaky ReLU; 0 is a ReLU. The paper does not specify it; 0.2 is the default of TensorFlow.
        width, types, primary_dim, dim, padding, n_objects, hidden: as in `Sabour2017`.

    Official: the released code that implements the paper (its authorship is inferred) has a ReLU before the primary
    squash and maximises ``|squash(v)|²`` by Adam with the learning rate of the weights, 0.0001, lambda 0.00001 and
    initial coefficients of 1. It has no decoder (``reconstruction=False``). Not followed: its Xavier-initialised
    matrices, which saturate every class capsule.

    Deviation: the paper does not specify the initial coefficients. The 1 of the code sums the votes of all children
    without dividing them: with the paper's learning rate of 0.001 one step saturates every class capsule, and training
    stops. Here they are 0.1, the initial coupling of dynamic routing with ten classes. The number of steps is published
    for MultiMNIST only; the 100,000 steps of the other networks are our choice.

    >>> import torch
    >>> with torch.device("meta"):  # shapes without memory
    ...     network = Yang2021().build()
    >>> sum(parameter.numel() for parameter in network.parameters())
    8215568
    """

    smoke_fields: ClassVar[dict[str, Any]] = {"width": 16, "types": 4, "hidden": (32,)}

    image: Image = (1, 28, 28)
    routing: Routing | str = Quadratic(initial=0.1)
    reconstruction: bool = True
    penalty: Literal["l1", "l2"] | None = None
    slope: float = 0.0
    width: int = 256
    types: int = 32
    primary_dim: int = 8
    dim: int = 16
    padding: Literal["valid", "same"] = "valid"
    n_objects: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "slope", 0, 1)
        if self.penalty not in (None, "l1", "l2"):
            raise ValueError(f"penalty must be 'l1' or 'l2', got {self.penalty!r}")
        if self.penalty is not None and not isinstance(self.routing, Quadratic):
            raise ValueError(
                f"penalty must be None unless the routing is Quadratic, got {self.penalty!r} with {self.routing}"
            )

    @property
    def effective_routing(self) -> Routing:
        """Routing of the layers, with the penalty and the changes of the preset."""
        routing = super().effective_routing
        if not isinstance(routing, Quadratic):
            return routing
        if self.penalty is not None:
            routing = replace(routing, penalty=self.penalty)
        if self.official and self.has_default_routing:
            return replace(routing, method="adam", initial=1.0, lr=1e-4, penalty_weight=1e-5, objective="capsule")
        return routing

    def build_network(self) -> CapsuleNetwork:
        """Build the network with the layers in the table of the class docstring."""
        same = self.padding == "same"
        layers = self.new_layers()
        layers.conv("conv1", self.width, 9, padding=4 if same else 0)
        layers.relu(self.slope)
        layers.primary(self.types, self.primary_dim, 9, stride=2, padding="same" if same else 0, relu=self.official)
        layers.dense_capsules("classes", self.classes, self.dim, routing=self.effective_routing)
        model = CapsuleNetwork(self, layers, self.head, decoder=self.decoder, n_objects=self.n_objects)
        init.init_layers(model.front, init.he_normal)
        return model

    def recipe(self) -> Recipe:
        """Adam; each data set has its own learning-rate schedule: section IV-B-2."""
        return Recipe(
            loss=self.adapt_loss(LossConfig("margin"), self.n_objects),
            optimizer=OptimizerConfig("adam", 1e-4 if self.official else 1e-3),
            lr_schedule=Exponential(0.96, 1000, staircase=True),
            batch_size=128,
            steps=100_000,
        )


register_model(
    "yang2021_mnist",
    Yang2021(),
    n_parameters=8_215_568,
    data="mnist",
    augmentation="sabour2017.mnist",
    lr_schedule=Exponential(0.5, 1000, staircase=True),
    steps=15_000,  # our choice: the learning rate then is a thirty-thousandth of its initial value
    batch_size=lambda spec: 128 if spec.reconstruction else 32,
    note="the paper does not specify the initial lr, the steps and the batch size with reconstruction",
)
register_model(
    "yang2021_fashion_mnist",
    Yang2021(),
    n_parameters=8_215_568,
    data="fashion-mnist",
    note="the paper does not specify the number of steps",
)
register_model(
    "yang2021_cifar10",
    Yang2021(image=(3, 24, 24), types=64, slope=0.2, padding="same", reconstruction=False),
    n_parameters=22_476_288,
    data="cifar10",
    augmentation="sabour2017.cifar10",
    lr_schedule=Exponential(0.96, 2000, floor=1e-3),
    steps=600_000,
    note="settings of Sabour 2017, single model",
)
register_model(
    "yang2021_multimnist",
    Yang2021(image=(1, 36, 36), n_objects=2, reconstruction=False),
    n_parameters=9_425_664,
    data="multimnist",
    augmentation="sabour2017.multimnist",
    lr_schedule=Exponential(0.96, 20_000, staircase=True),
    steps=200_000,
)
