"""What an analysis returns, as a record holds it, and back, so that a figure can be drawn again without the network."""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["flat", "revived"]

Kind = TypeVar("Kind")


def flat(result: Any, prefix: str = "") -> dict[str, Any]:
    """Return the fields of a result by their names."""
    return {f"{prefix}{field.name}": getattr(result, field.name) for field in dataclasses.fields(result)}


def revived(kind: type[Kind], found: Mapping[str, Any], prefix: str = "") -> Kind:
    """Return the result that a record holds."""
    hints = typing.get_type_hints(kind)
    values = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        value = found[f"{prefix}{field.name}"]
        if hints[field.name] is Tensor:
            value = torch.as_tensor(value)
            value = value.float() if value.is_floating_point() else value
        elif isinstance(value, list):
            value = _as_tuple(value)
        values[field.name] = value
    return kind(**values)


def _as_tuple(value: Any) -> Any:
    return tuple(_as_tuple(item) for item in value) if isinstance(value, list) else value
