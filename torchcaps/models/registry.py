"""Models by name: registration, look-up and construction."""

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torchcaps._core.registry import Registry, import_instance, is_import_path
from torchcaps._core.validation import check_field_names
from torchcaps.models.network import Network
from torchcaps.models.pretrained import load_pretrained
from torchcaps.models.recipe import Recipe
from torchcaps.models.spec import ModelSpec

__all__ = ["MODELS", "ModelEntry", "by_preset", "create_model", "find_model", "list_models", "register_model"]

# Arguments of other libraries' models, and how to set the same here.
SYNONYMS = {
    "num_classes": "classes=10",
    "n_classes": "classes=10",
    "in_chans": "image=(channels, height, width)",
    "in_channels": "image=(channels, height, width)",
    "img_size": "image=(channels, height, width)",
    "image_size": "image=(channels, height, width)",
    "input_size": "image=(channels, height, width)",
    "input_shape": "image=(channels, height, width)",
}
PublishedRule = Literal["rounded", "keras", "unmatched"]


@dataclass(frozen=True)
class ModelEntry:
    """A registered model.

    Args:
        name: name in `create_model` and on the command line.
        spec: architecture with its sizes.
        published: parameter count as printed in the paper (``"8.2M"``); empty if the paper prints none.
        published_rule: relation of the printed count to the parameters: ``"rounded"``; ``"keras"``, rounded and with
            the moving averages of batch normalisation; ``"unmatched"`` if no reading of the paper gives it.
        n_parameters: number of parameters; ``None`` if not stated. A test compares it with the built module.
        recipe_changes: fields in which the recipe differs from that of the spec; a callable is called with the spec.
    """

    name: str
    spec: ModelSpec
    published: str = ""
    published_rule: PublishedRule = "rounded"
    n_parameters: int | None = None
    recipe_changes: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def paper(self) -> str:
        """Paper by the prefix of the name, ``"Sabour 2017"``; empty for models that belong to no paper."""
        match = re.match(r"([a-z]+)(\d{4})_", self.name)
        return f"{match[1].title()} {match[2]}" if match else ""

    def recipe(self, spec: ModelSpec | None = None) -> Recipe:
        """Return the recipe of this model for its own spec, or for a spec with other field values."""
        spec = self.spec if spec is None else spec
        changes = {key: value(spec) if callable(value) else value for key, value in self.recipe_changes.items()}
        return dataclasses.replace(spec.default_recipe(), **changes)


MODELS: Registry[ModelEntry] = Registry("model", "torchcaps.models")


def register_model(
    name: str,
    spec: ModelSpec,
    published: str = "",
    *,
    published_rule: PublishedRule = "rounded",
    n_parameters: int | None = None,
    **recipe_changes: Any,
) -> None:
    """Register a model; see `ModelEntry` for the arguments. ``recipe_changes`` are fields of `Recipe`.

    A module of ``torchcaps/models`` that calls this is found by itself: adding the file is enough.

    >>> from torchcaps.models import MODELS, Sabour2017, create_model
    >>> with MODELS.restored():  # only for this example
    ...     register_model("my_capsnet", Sabour2017(width=8, types=2))
    ...     network = create_model("my_capsnet", classes=3)
    >>> network.name, network.spec.classes
    ('my_capsnet', 3)
    """
    if not isinstance(spec, ModelSpec):
        raise TypeError(f"spec must be an instance of ModelSpec such as Sabour2017(...), got {type(spec).__name__}")
    check_field_names(Recipe, recipe_changes)
    MODELS.register(name, ModelEntry(name, spec, published, published_rule, n_parameters, recipe_changes))


def find_model(name: str) -> ModelEntry:
    """Return the entry of a model.

    Args:
        name: a registered name, or the import path of a `ModelSpec` of your own, ``my_module.MyNet``. It is imported
            and not registered: files of settings may name registered models without ``trust_remote_code``.
    """
    if is_import_path(name) and name not in MODELS:
        return ModelEntry(name, import_instance(name, ModelSpec))
    return MODELS.get(name)


def list_models(pattern: str | None = None) -> list[str]:
    """Return the names of all models, sorted; ``pattern`` filters them by shell wildcards.

    >>> "sabour2017_mnist" in list_models()
    True
    >>> list_models("yang2021_*mnist")
    ['yang2021_fashion_mnist', 'yang2021_mnist', 'yang2021_multimnist']
    """
    return MODELS.list(pattern)


def create_model(name: str, *, pretrained: bool = False, recipe: Recipe | None = None, **changes: Any) -> Network:
    """Build a model by its name.

    Args:
        name: one of `list_models`, or the import path of a `ModelSpec` of your own.
        pretrained: load trained weights, which are part of the package (`torchcaps.models.list_pretrained`), and set
            the model to evaluation mode.
        recipe: training settings of the model; by default those of its paper.
        changes: other values for any fields of the model's spec.

    >>> from torchcaps.routing import EM
    >>> model = create_model("sabour2017_mnist", image=(3, 32, 32), classes=5, routing=EM(2), reconstruction=False)
    >>> model.spec.classes
    5
    """
    entry = find_model(name)
    check_field_names(type(entry.spec), changes, name, SYNONYMS)
    spec = dataclasses.replace(entry.spec, **changes)
    model = spec.build(name, entry.recipe(spec) if recipe is None else recipe)
    if pretrained:
        load_pretrained(model)
        model.eval()
    return model


def by_preset(paper: Any, official: Any) -> Callable[[ModelSpec], Any]:
    """Return a recipe value that depends on the preset of the spec."""
    return lambda spec: official if spec.official else paper
