"""Model specs: frozen dataclasses with the sizes of an architecture, from which networks are built."""

import dataclasses
import math
import typing
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from torchcaps._core.serialize import setting
from torchcaps._core.validation import check_fields
from torchcaps.models.builder import ImageTooSmallError, Layers
from torchcaps.models.heads import HeadName, default_head
from torchcaps.models.network import Network
from torchcaps.models.recipe import LossConfig, Recipe
from torchcaps.nn.sizes import as_count
from torchcaps.routing import Quadratic, Routing, as_routing

__all__ = ["CapsuleSpec", "Image", "ModelSpec", "Preset", "Streamed"]

Image = tuple[int, int, int]
Preset = Literal["paper", "official"]
Streamed = Literal[True, False, "auto"]
MAX_IMAGE_SIDE = 1024  # upper limit of the search for the smallest possible image


@dataclass(frozen=True, kw_only=True)
class ModelSpec(ABC):
    """Architecture with its sizes. Subclasses are the networks of the papers; `build` makes the network.

    Args:
        image: image size ``(channels, height, width)``.
        classes: number of classes.
        preset: ``"paper"``, or ``"official"`` to follow the authors' code where it differs from the paper; the
            docstring of each class lists the differences.

    Attributes:
        presets: presets that the class accepts.
        smoke_fields: field values of a smoke test: few channels and capsule types, so that a test builds and trains
            the network in a moment.
        minimums: smallest values of int fields, if not 1.

    >>> import torchcaps
    >>> spec = torchcaps.create_model("capsnet_small", classes=3).spec
    >>> isinstance(spec, ModelSpec), spec.image, spec.classes
    (True, (1, 28, 28), 3)
    """

    presets: ClassVar[tuple[str, ...]] = ("paper", "official")
    smoke_fields: ClassVar[dict[str, Any]] = {}
    minimums: ClassVar[dict[str, int]] = {"classes": 2, "depth": 0}

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
            value, annotation = getattr(self, field.name), hints[field.name]
            if annotation is int:
                as_count(value, field.name, least=self.minimums.get(field.name, 1))
            elif typing.get_origin(annotation) is tuple:
                object.__setattr__(self, field.name, _as_counts(value, annotation, field.name))
        check_fields(self)
        if self.preset not in self.presets:
            raise ValueError(
                f"preset must be 'paper' for {type(self).__name__}, got {self.preset!r}: "
                "its authors have not released code for it"
            )

    @property
    def official(self) -> bool:
        """Whether the network follows the authors' code where it differs from the paper."""
        return self.preset == "official"

    @abstractmethod
    def build_network(self) -> Network:
        """Build the network layer by layer."""

    @abstractmethod
    def recipe(self) -> Recipe:
        """Return the training settings of the paper."""

    def default_recipe(self) -> Recipe:
        """Return the training settings of the paper, adapted to the field values of this spec."""
        return self.recipe()

    def smoke_changes(self) -> dict[str, Any]:
        """Return the field values that reduce this spec to the size of a smoke test."""
        return dict(self.smoke_fields)

    def build(self, name: str | None = None, recipe: Recipe | None = None) -> Network:
        """Build the network; if the image is too small, raise a ValueError with the smallest possible size.

        Args:
            name: name of the network; by default that of this class.
            recipe: its training settings; by default those of the paper.
        """
        name = name or type(self).__name__
        try:
            network = self.build_network()
        except ImageTooSmallError as error:
            _, height, width = self.image
            side = self.min_image_side()
            hint = " (the channels come first)" if width <= 4 < self.image[0] else ""
            raise ValueError(
                f"image must be {side}x{side} or larger for {name}, got {height}x{width}{hint}: {error}"
            ) from None
        network.set_origin(self, name, recipe or self.default_recipe(), network.n_objects)
        return network

    def min_image_side(self) -> int:
        """Return the side length of the smallest square image that passes through all layers."""
        for side in range(1, MAX_IMAGE_SIDE):
            try:
                with torch.device("meta"):
                    dataclasses.replace(self, image=(self.image[0], side, side)).build_network()
            except ImageTooSmallError:
                continue
            return side
        raise ValueError(f"image: no size up to {MAX_IMAGE_SIDE}x{MAX_IMAGE_SIDE} passes through the layers of {self}")


def _as_counts(value: Any, annotation: Any, name: str) -> tuple[Any, ...]:
    """Return a (nested) tuple or list of ints as tuples of the annotated form; raise if it does not match."""
    parts = typing.get_args(annotation)
    variable_length = parts[-1] is Ellipsis
    if not isinstance(value, tuple | list) or not (variable_length or len(value) == len(parts)):
        count = "a tuple of" if variable_length else str(len(parts))
        raise ValueError(f"{name} must be {count} ints, got {value!r}")
    inner = parts[0]
    if typing.get_origin(inner) is tuple:
        return tuple(_as_counts(part, inner, name) for part in value)
    return tuple(as_count(part, name) for part in value)


@dataclass(frozen=True, kw_only=True)
class CapsuleSpec(ModelSpec):
    """Architecture with capsules.

    Args:
        routing: routing algorithm or its name. Head and loss follow it if those of the paper do not fit: activations
            if the routing has them, otherwise lengths; a shared classifier with cross-entropy if neither the length
            nor the activation of a capsule indicates its presence.
        reconstruction: whether the network has a decoder.
        hidden: widths of the hidden layers of the decoder.
        streamed: of all capsule layers: ``False`` stores the votes, ``True`` never does, ``"auto"`` decides by size.

    >>> import torchcaps
    >>> spec = torchcaps.create_model("capsnet_small", routing="em").spec
    >>> isinstance(spec, CapsuleSpec), type(spec.routing).__name__
    (True, 'EM')
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
        """Widths of the hidden layers of the decoder; ``None`` without a decoder."""
        return self.hidden if self.reconstruction else None

    @property
    def has_default_routing(self) -> bool:
        """Whether the routing is the default of the class."""
        return self.routing == as_routing(type(self).__dataclass_fields__["routing"].default)

    @property
    def effective_routing(self) -> Routing:
        """Routing of the layers: ``routing`` with the changes of the preset."""
        return as_routing(self.routing)

    @property
    def head(self) -> HeadName:
        """Name of the head that scores the class capsules."""
        return default_head(self.effective_routing)

    @property
    def needs_activations(self) -> bool:
        """Whether the routing reads the activations of its children, so that primary capsules must have them."""
        routing = self.effective_routing
        return routing.presence == "activation" or getattr(routing, "activations", False)

    def default_recipe(self) -> Recipe:
        """Return the training settings of the paper, with one ascent step per optimiser step for `Quadratic`."""
        recipe = self.recipe()
        return dataclasses.replace(recipe, ascents=1) if isinstance(self.effective_routing, Quadratic) else recipe

    def check_square(self, dim: int) -> None:
        """Raise a ValueError if a pose of size ``dim`` is not a square matrix."""
        if math.isqrt(dim) ** 2 != dim:
            raise ValueError(f"dim must be a square number (4, 9, 16, ...), since poses are square matrices, got {dim}")

    def new_layers(self) -> Layers:
        """Return an empty `Layers` for the image size and vote storage of this spec."""
        return Layers(self.image, self.streamed)

    def adapt_loss(self, loss: LossConfig, n_objects: int | None = 1) -> LossConfig:
        """Return the loss with the name that fits the scores of the head.

        Logits need a cross-entropy, binary for several objects. Activations get the spread loss of Hinton 2018 for one
        object per image. Other scores in 0..1 get the margin loss.
        """
        if self.head in ("linear", "log_activation"):
            name = "cross_entropy" if n_objects == 1 else "binary"
        elif self.head == "activation" and n_objects == 1:
            name = "spread"
        else:
            name = "margin"
        return dataclasses.replace(loss, name=name)
