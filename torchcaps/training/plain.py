"""What one chooses, as plain values that a YAML file holds, and back.

A class that stands for a choice of its own (a routing, a schedule) is written as ``class_path`` and ``init_args``, as
jsonargparse writes it, so that the file of a run is a file of flags.
"""

import dataclasses
import importlib
import types
import typing
from typing import Any

from torchcaps.models.schedules import Schedule
from torchcaps.routing import Routing

__all__ = ["from_plain", "imported", "to_plain"]

CHOICES = (Routing, Schedule)  # of which one is chosen: written with its class


def imported(path: str) -> Any:
    """Return what an import path such as ``my_module.MyRouting`` names."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ValueError(f"{path} can't be imported: {error}") from error
    except AttributeError as error:
        raise ValueError(f"{path} can't be imported: {module} has no {name!r}") from error


def to_plain(value: Any) -> Any:
    """Return a value as dictionaries, lists, numbers and strings.

    >>> from torchcaps.routing import EM
    >>> to_plain(EM(2))["class_path"]
    'torchcaps.routing.em.EM'
    """
    if isinstance(value, CHOICES):
        fields = {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"class_path": f"{type(value).__module__}.{type(value).__qualname__}", "init_args": fields}
    if dataclasses.is_dataclass(value):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a run's file holds numbers, words and choices only, got {value!r}")


def from_plain(kind: Any, value: Any) -> Any:
    """Return what plain values stand for, where one of a kind is wanted.

    >>> from torchcaps.routing import EM, Routing
    >>> from_plain(Routing, to_plain(EM(2))) == EM(2)
    True
    """
    if isinstance(value, dict) and "class_path" in value:
        cls = imported(value["class_path"])
        if not (isinstance(cls, type) and issubclass(cls, CHOICES)):
            raise ValueError(f"{value['class_path']} is no routing and no schedule")
        return _made(cls, value.get("init_args") or {})
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise ValueError(f"{kind.__name__} must be a list of fields, got {value!r}")
        return _made(kind, value)
    if isinstance(value, list):
        return tuple(from_plain(_inner(kind), item) for item in value)
    return value


def _made(cls: type, fields: dict[str, Any]) -> Any:
    hints = typing.get_type_hints(cls)
    known = {field.name for field in dataclasses.fields(cls)}
    for name in fields:
        if name not in known:
            raise ValueError(f"{cls.__name__} has no field {name!r}")
    return cls(**{name: from_plain(hints[name], value) for name, value in fields.items()})


def _inner(kind: Any) -> Any:
    """Return what a tuple is made of."""
    options = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
    for option in options:
        if typing.get_origin(option) is tuple:
            return typing.get_args(option)[0]
    return Any
