"""Models and data sets by name, and a user's own by import path."""

from typing import Any

from torchcaps._core.registry import check_name, import_object
from torchcaps.data.registry import find_spec
from torchcaps.models.registry import REGISTRY as MODELS
from torchcaps.models.registry import Entry
from torchcaps.models.registry import register as register_model
from torchcaps.models.spec import ModelSpec

__all__ = ["find_data", "find_model"]


def find_model(name: str) -> Entry:
    """Return a model by its name, or by the import path of a `ModelSpec`, which gets a name by that."""
    if name not in MODELS and _is_path(name):
        register_model(name, _made(name, ModelSpec, "model", "class MyNet(torchcaps.models.ModelSpec)"))
    return MODELS[check_name(name, MODELS, "model")]


def find_data(name: str) -> str:
    """Return the name of a data set, after a user's own was given one by its import path."""
    find_spec(name)
    return name


def _is_path(name: str) -> bool:
    return isinstance(name, str) and "." in name and all(part.isidentifier() for part in name.split("."))


def _made(path: str, kind: type, what: str, example: str) -> Any:
    found = import_object(path)
    if isinstance(found, kind):
        return found
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise ValueError(f"{path} must be a {what} of your own, such as '{example}', or one that is made already")
    try:
        return found()
    except TypeError as error:
        raise ValueError(f"{path} must have a default for each of its fields: {error}") from error
