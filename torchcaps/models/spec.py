"""What a model is chosen by: a frozen dataclass, whose fields are what one may change."""

import dataclasses
import math
import typing
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from torchcaps._core.serialize import setting
from torchcaps._core.validation import check_fields
from torchcaps.models.builder import ImageTooSmall, Layers
from torchcaps.models.heads import HeadName, head_for
from torchcaps.models.network import Network
from torchcaps.models.recipe import LossConfig, Recipe
from torchcaps.nn.sizes import as_count
from torchcaps.routing import EM, Quadratic, Routing, as_routing

__all__ = ["CapsuleSpec", "Image", "ModelSpec", "Preset", "Streamed"]

Image = tuple[int, int, int]
Preset = Literal["paper", "official"]
Streamed = Literal[True, False, "auto"]
LARGEST_SIDE = 1024  # the search for the smallest possible image ends here


@dataclass(frozen=True, kw_only=True)
class ModelSpec(ABC):
    """An architecture with its sizes. Subclasses are the papers' nets; `build` makes the network.

    Args:
        image: ``(channels, height, width)``.
        classes: how many.
        preset: ``"paper"``, or ``"official"`` for what the authors' code does otherwise; each class says what that is.
    """

    presets: ClassVar[tuple[str, ...]] = ("paper", "official")
    least: ClassVar[dict[str, int]] = {"classes": 2, "depth": 0}  # of whole numbers that don't begin at 1

    image: Image = dataclasses.field(metadata={"identity": False})  # follows the data
    classes: int = setting(10, identity=False)  # follows the data
    preset: Preset = "paper"

    def __post_init__(self) -> None:
        image = self.image
        if not isinstance(image, tuple | list) or len(image) != 3:
            raise ValueError(f"image must be (channels, height, width), got {image!r}")
        for size, name in zip(image, ("channels", "height", "width"), strict=True):
            as_count(size, f"image's {name}")
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value, kind = getattr(self, field.name), hints[field.name]
            if kind is int:
                as_count(value, field.name, least=self.least.get(field.name, 1))
            elif typing.get_origin(kind) is tuple:
                object.__setattr__(self, field.name, _as_counts(value, kind, field.name))
        check_fields(self)
        if self.preset not in self.presets:
            raise ValueError(
                f"preset must be 'paper' for {type(self).__name__}, got {self.preset!r}: "
                "its authors have released no code of it"
            )

    @property
    def official(self) -> bool:
        """Whether the authors' code is followed where it differs from the paper."""
        return self.preset == "official"

    @abstractmethod
    def network(self) -> Network:
        """Build the network, layer by layer."""

    @abstractmethod
    def recipe(self) -> Recipe:
        """Return what the paper trains it with."""

    def training(self) -> Recipe:
        """Return the recipe with what the model's own choices add to it."""
        return self.recipe()

    def build(self, name: str | None = None) -> Network:
        """Build the network; where the image is too small for it, say which would do."""
        try:
            return self.network()
        except ImageTooSmall as reason:
            _, height, width = self.image
            least = self._smallest()
            hint = ". The channels come first" if width <= 4 < self.image[0] else ""
            raise ValueError(
                f"image must be {least}x{least} or larger for {name or type(self).__name__}, got {height}x{width}: "
                f"{reason}{hint}"
            ) from None

    def _smallest(self) -> int:
        """Return the side of the smallest square image that passes through all layers."""
        for side in range(1, LARGEST_SIDE):
            try:
                with torch.device("meta"):
                    dataclasses.replace(self, image=(self.image[0], side, side)).network()
            except ImageTooSmall:
                continue
            return side
        raise ValueError(f"no image up to {LARGEST_SIDE}x{LARGEST_SIDE} fits {self}")


def _as_counts(value: Any, kind: Any, name: str) -> tuple[Any, ...]:
    """Return whole numbers, or tuples of them, as a tuple of the annotated kind; a list will do."""
    parts = typing.get_args(kind)
    open_end = parts[-1] is Ellipsis
    if not isinstance(value, tuple | list) or not (open_end or len(value) == len(parts)):
        count = "a tuple of" if open_end else str(len(parts))
        raise ValueError(f"{name} must be {count} whole numbers, got {value!r}")
    inner = parts[0]
    if typing.get_origin(inner) is tuple:
        return tuple(_as_counts(part, inner, name) for part in value)
    return tuple(as_count(part, name) for part in value)


@dataclass(frozen=True, kw_only=True)
class CapsuleSpec(ModelSpec):
    """An architecture with capsules.

    Args:
        routing: any, or the name of one. What scores the class capsules, and the loss, follow it where the paper's
            own don't fit: activations where it has them, a shared classifier with a cross-entropy where neither
            length nor activation tells whether a capsule is there.
        reconstruction: with the decoder, as a regulariser and for looking.
        hidden: widths of the decoder's hidden layers.
        streamed: of all capsule layers: ``False`` stores votes, ``True`` never does, ``"auto"`` decides by size.
    """

    routing: Routing | str = "dynamic"
    reconstruction: bool = False
    hidden: tuple[int, ...] = (512, 1024)
    streamed: Streamed = setting("auto", identity=False)  # follows the memory: results are equal

    def __post_init__(self) -> None:
        object.__setattr__(self, "routing", as_routing(self.routing))
        super().__post_init__()

    @property
    def decoder(self) -> tuple[int, ...] | None:
        """Widths of the decoder's hidden layers, or ``None`` where there is none."""
        return self.hidden if self.reconstruction else None

    @property
    def default_routing(self) -> bool:
        """Whether the routing is the paper's own, and not one that a user has chosen."""
        return self.routing == as_routing(type(self).__dataclass_fields__["routing"].default)

    @property
    def algorithm(self) -> Routing:
        """The routing of the layers, with what the preset changes in it."""
        return as_routing(self.routing)

    @property
    def head(self) -> HeadName:
        """What scores the class capsules."""
        return head_for(self.algorithm)

    @property
    def with_activations(self) -> bool:
        """Whether the routing reads activations of its children, so that the primary capsules need some."""
        return isinstance(self.algorithm, EM) or getattr(self.algorithm, "activations", False)

    def training(self) -> Recipe:
        """Return the recipe, with a step of ascent for each of descent where the routing is `Quadratic`."""
        return dataclasses.replace(self.recipe(), ascents=1) if isinstance(self.algorithm, Quadratic) else self.recipe()

    def check_square(self, dim: int) -> None:
        """Raise where a pose of this size is no square matrix."""
        if math.isqrt(dim) ** 2 != dim:
            raise ValueError(f"dim must be a square number (4, 9, 16, ...), since poses are square matrices, got {dim}")

    def layers(self) -> Layers:
        """Start the list of layers."""
        return Layers(self.image, self.streamed)

    def fitting(self, loss: LossConfig, n_objects: int | None = 1) -> LossConfig:
        """Return a loss that fits what the head gives: margins want 0 to 1, cross-entropies want logits.

        Activations get the spread loss, with which EM routing comes, where an image has one object.
        """
        if self.head == "linear":
            name = "cross_entropy" if n_objects == 1 else "binary"
        elif self.head == "activation" and n_objects == 1:
            name = "spread"
        else:
            name = "margin"
        return dataclasses.replace(loss, name=name)
