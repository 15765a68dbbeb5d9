"""The models by name."""

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchcaps._core.registry import check_name
from torchcaps._core.validation import check_field_names
from torchcaps.models.network import Network
from torchcaps.models.recipe import Recipe
from torchcaps.models.spec import ModelSpec

__all__ = ["REGISTRY", "Entry", "by_preset", "create_model", "list_models", "register"]


@dataclass(frozen=True)
class Entry:
    """A named model.

    Args:
        name: what it is built by.
        spec: its architecture and sizes.
        published: the number of parameters that its paper prints, as printed; empty where it prints none.
        training: what its recipe changes in that of its spec; a function is called with the spec.
    """

    name: str
    spec: ModelSpec
    published: str
    training: dict[str, Any]

    @property
    def paper(self) -> str:
        """The paper that the name says, ``Sabour 2017``; empty for models that are no paper's."""
        found = re.match(r"([a-z]+)(\d{4})_", self.name)
        return f"{found[1].title()} {found[2]}" if found else ""

    def recipe(self, spec: ModelSpec) -> Recipe:
        """Return the recipe for this model, with a spec that may have been changed."""
        changes = {key: value(spec) if callable(value) else value for key, value in self.training.items()}
        return dataclasses.replace(spec.training(), **changes)


REGISTRY: dict[str, Entry] = {}


def register(name: str, spec: ModelSpec, published: str = "", **training: Any) -> None:
    """Give a model a name."""
    if not isinstance(spec, ModelSpec):
        raise TypeError(f"spec must be a model's choice such as Sabour2017(...), got {type(spec).__name__}")
    check_field_names(Recipe, training)
    if name in REGISTRY:
        raise ValueError(f"a model named {name!r} exists already")
    REGISTRY[name] = Entry(name, spec, published, training)


def list_models() -> list[str]:
    """Return the names of all models, sorted.

    >>> "sabour2017_mnist" in list_models()
    True
    """
    return sorted(REGISTRY)


def create_model(name: str, **changes: Any) -> Network:
    """Build a model by its name, with other values for any of its fields.

    >>> from torchcaps.routing import EM
    >>> model = create_model("sabour2017_mnist", image=(3, 32, 32), classes=5, routing=EM(2), reconstruction=False)
    >>> model.spec.classes
    5
    """
    entry = REGISTRY[check_name(name, REGISTRY, "model")]
    check_field_names(type(entry.spec), changes, name)
    spec = dataclasses.replace(entry.spec, **changes)
    model = spec.build(name)
    model.name, model.recipe = name, entry.recipe(spec)
    return model


def by_preset(paper: Any, official: Any) -> Callable[[ModelSpec], Any]:
    """Return what a recipe has in each of the presets."""
    return lambda spec: official if spec.official else paper
