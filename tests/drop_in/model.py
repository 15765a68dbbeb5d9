"""A network of one convolution and two capsule layers."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torchcaps.models import init
from torchcaps.models.network import CapsuleNetwork
from torchcaps.models.recipe import LossConfig, Recipe
from torchcaps.models.registry import register_model
from torchcaps.models.spec import CapsuleSpec, Image
from torchcaps.routing import Dynamic, Routing


@dataclass(frozen=True, kw_only=True)
class DropIn2026(CapsuleSpec):
    """A small network: no paper."""

    presets = ("paper",)
    smoke_fields: ClassVar[dict[str, Any]] = {"width": 8, "hidden": (16,)}

    image: Image = (1, 28, 28)
    routing: Routing | str = Dynamic(2)
    reconstruction: bool = True
    hidden: tuple[int, ...] = (64,)
    width: int = 64

    def build_network(self) -> CapsuleNetwork:
        layers = self.new_layers()
        layers.conv("conv1", self.width, 5, stride=2)
        layers.relu()
        layers.primary(4, 8, 3, stride=2)
        layers.dense_capsules("classes", self.classes, 8, routing=self.effective_routing)
        model = CapsuleNetwork(self, layers, self.head, decoder=self.decoder)
        init.init_layers(model.front, init.he_normal)
        return model

    def recipe(self) -> Recipe:
        return Recipe(self.adapt_loss(LossConfig()), batch_size=32, steps=100)


register_model("dropin2026_digits", DropIn2026(), "0.14M", n_parameters=140_272, data="digits")
