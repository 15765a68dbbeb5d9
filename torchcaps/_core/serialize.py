"""Conversion of settings and results to plain values (dicts, lists, numbers, strings) for YAML and JSON, and back.

An object of a polymorphic base class (a routing, a schedule) is written as ``class_path`` and ``init_args``, as
jsonargparse writes it, so that the configuration of a run can be passed back on the command line.
"""

import dataclasses
import os
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchcaps._core.registry import UntrustedCodeError, import_object

__all__ = [
    "find_class",
    "from_plain",
    "is_identity",
    "is_resumable",
    "is_subset",
    "non_default",
    "pack_bits",
    "polymorphic",
    "result_from_dict",
    "result_to_dict",
    "setting",
    "to_json",
    "to_plain",
    "unpack_bits",
]

T = TypeVar("T")
# Base classes whose subclass is part of the value, and a function that imports the subclasses of the library.
_POLYMORPHIC: dict[type, Callable[[], None]] = {}


def polymorphic(discover: Callable[[], None] = lambda: None) -> Callable[[type[T]], type[T]]:
    """Return a class decorator: instances of subclasses are written with their class.

    Args:
        discover: imports the library's subclasses, if they are in modules that may not be imported yet.
    """

    def decorate(base: type[T]) -> type[T]:
        _POLYMORPHIC[base] = discover
        return base

    return decorate


def setting(
    default: Any = dataclasses.MISSING,
    *,
    default_factory: Any = dataclasses.MISSING,
    identity: bool = True,
    resumable: bool = False,
) -> Any:
    """Return a dataclass field with the two flags of a run's setting.

    Args:
        default: default value.
        default_factory: as for `dataclasses.field`; such a field does not take part in the hash.
        identity: the setting decides the result of a run, so it is part of a record's identity.
        resumable: the setting may change when a run is resumed.

    A field without flags is part of the identity and not resumable.
    """
    mutable = default_factory is not dataclasses.MISSING
    return dataclasses.field(
        default=default,
        default_factory=default_factory,
        hash=False if mutable else None,
        metadata={"identity": identity, "resumable": resumable},
    )


def is_identity(cls: type, name: str) -> bool:
    """Return whether a field is part of a record's identity (see `setting`)."""
    return _flag(cls, name, "identity", True)


def is_resumable(cls: type, name: str) -> bool:
    """Return whether a field may change when a run is resumed (see `setting`)."""
    return _flag(cls, name, "resumable", False)


def _flag(cls: type, name: str, flag: str, default: bool) -> bool:
    """Return a flag of a field. A subclass that declares the field again, for another default, inherits its flags."""
    for owner in cls.__mro__:
        field = getattr(owner, "__dataclass_fields__", {}).get(name)
        if field is not None and flag in field.metadata:
            return field.metadata[flag]
    return default


def non_default(value: Any) -> Any:
    """Return a setting as JSON values, without the fields of dataclasses that have their default.

    The class of a polymorphic value is written by its name, so that the result does not change if a module moves.

    >>> from torchcaps.routing import EM
    >>> non_default(EM(3)), non_default(EM())
    ({'class': 'EM', 'iterations': 3}, {'class': 'EM'})
    """
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return to_plain(value)
    changed = {"class": type(value).__name__} if isinstance(value, tuple(_POLYMORPHIC)) else {}
    for field in dataclasses.fields(value):
        factory, now = field.default_factory, getattr(value, field.name)
        if now != (field.default if factory is dataclasses.MISSING else factory()):
            changed[field.name] = non_default(now)
    return changed


def to_plain(value: Any) -> Any:
    """Return a setting as dicts, lists, numbers and strings; raise a TypeError for anything else.

    >>> from torchcaps.routing import EM
    >>> to_plain(EM(2))["class_path"]
    'torchcaps.routing.EM'
    """
    if isinstance(value, tuple(_POLYMORPHIC)):
        fields = {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"class_path": _class_path(type(value)), "init_args": fields}
    if dataclasses.is_dataclass(value):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a setting must be a number, string, list, mapping or dataclass, got {value!r}")


def _class_path(cls: type) -> str:
    """Return the import path of a class; that of its package if the package exports the class."""
    package = cls.__module__.rpartition(".")[0]
    public = getattr(sys.modules.get(package), cls.__qualname__, None) is cls
    return f"{package if public else cls.__module__}.{cls.__qualname__}"


def find_class(path: str) -> type | None:
    """Return the routing or schedule with an import path, if it is a loaded subclass; never import a module by path.

    >>> find_class("torchcaps.routing.EM").__name__, find_class("os.system")
    ('EM', None)
    """
    for base, discover in _POLYMORPHIC.items():
        discover()
        for cls in _subclasses(base):
            is_loaded = cls.__module__ in sys.modules  # a class outlives a module that was removed
            if is_loaded and path in (_class_path(cls), f"{cls.__module__}.{cls.__qualname__}"):
                return cls
    return None


def _subclasses(base: type) -> Iterator[type]:
    """Yield all direct and indirect subclasses."""
    for cls in base.__subclasses__():
        yield cls
        yield from _subclasses(cls)


def from_plain(annotation: Any, value: Any, trust_remote_code: bool = False) -> Any:
    """Return the setting of type ``annotation`` that plain values describe.

    Args:
        annotation: type of the setting.
        value: result of `to_plain`, for example from a file.
        trust_remote_code: import classes that are not loaded. By default, such a class raises `UntrustedCodeError`.

    >>> from torchcaps.routing import EM, Routing
    >>> from_plain(Routing, to_plain(EM(2))) == EM(2)
    True
    """
    if isinstance(value, dict) and "class_path" in value:
        path, fields = value["class_path"], value.get("init_args") or {}
        if not isinstance(path, str) or not isinstance(fields, dict):
            raise ValueError(f"class_path must be an import path and init_args a mapping of fields, got {value!r}")
        cls = find_class(path)
        if cls is None:
            if not trust_remote_code:
                raise UntrustedCodeError(path, "class_path")
            cls = import_object(path)
        if not (isinstance(cls, type) and issubclass(cls, tuple(_POLYMORPHIC))):
            raise ValueError(f"{path} is not a routing or schedule")
        expected = [option for option in _options(annotation) if isinstance(option, type) and option is not Any]
        if expected and not issubclass(cls, tuple(expected)):
            raise ValueError(f"{path} must be {' or '.join(option.__name__ for option in expected)} here")
        return _build(cls, fields, trust_remote_code)
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        if not isinstance(value, dict):
            raise ValueError(f"{annotation.__name__} must be a mapping of fields, got {value!r}")
        return _build(annotation, value, trust_remote_code)
    if isinstance(value, list):
        return tuple(from_plain(_item_type(annotation), item, trust_remote_code) for item in value)
    return value


def _build(cls: type, fields: dict[str, Any], trust_remote_code: bool) -> Any:
    """Return a dataclass from JSON values of its fields; raise a ValueError for an unknown field."""
    hints = typing.get_type_hints(cls)
    known = {field.name for field in dataclasses.fields(cls)}
    for name in fields:
        if name not in known:
            raise ValueError(f"{cls.__name__} has no field {name!r}")
    return cls(**{name: from_plain(hints[name], value, trust_remote_code) for name, value in fields.items()})


def _options(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the annotation alone."""
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if is_union else (annotation,)


def _item_type(annotation: Any) -> Any:
    """Return the element type of a tuple annotation."""
    for option in _options(annotation):
        if typing.get_origin(option) is tuple:
            return typing.get_args(option)[0]
    return Any


def to_json(value: Any) -> Any:
    """Return a result as JSON values: tensors as lists, dataclasses as objects, paths as strings."""
    if isinstance(value, Tensor):
        return value.tolist() if value.ndim else value.item()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value


def result_to_dict(result: Any, prefix: str = "") -> dict[str, Any]:
    """Return the fields of a result dataclass by name, each name with a prefix."""
    return {f"{prefix}{field.name}": getattr(result, field.name) for field in dataclasses.fields(result)}


def result_from_dict(cls: type[T], values: Mapping[str, Any], prefix: str = "") -> T:
    """Rebuild a result dataclass from a record, so that its figure can be drawn without the network.

    A field that an older record lacks has its default.
    """
    hints = typing.get_type_hints(cls)
    fields = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        name = f"{prefix}{field.name}"
        if name not in values and field.default is not dataclasses.MISSING:
            continue
        value = values[name]
        hint = hints[field.name]
        if value is not None and Tensor in (hint, *typing.get_args(hint)):
            value = torch.as_tensor(value)
            value = value.float() if value.is_floating_point() else value
        elif isinstance(value, list):
            value = _as_tuple(value)
        fields[field.name] = value
    return cls(**fields)


def _as_tuple(value: Any) -> Any:
    """Convert nested lists to tuples."""
    return tuple(_as_tuple(item) for item in value) if isinstance(value, list) else value


def is_subset(recorded: Any, current: Any) -> bool:
    """Return whether all recorded values, at any depth of nested mappings, equal the current ones.

    >>> is_subset({"a": {"b": 1}}, {"a": {"b": 1, "c": 2}, "d": 3})
    True
    """
    if isinstance(recorded, dict) and isinstance(current, dict):
        return all(name in current and is_subset(value, current[name]) for name, value in recorded.items())
    return recorded == current


def pack_bits(bits: Tensor) -> str:
    """Return a bool tensor as hexadecimal digits: eight values per byte, the first in the highest bit.

    >>> pack_bits(torch.tensor([True, False, False, False, False, False, False, True, True]))
    '8180'
    """
    padded = torch.cat([bits.to(torch.uint8), bits.new_zeros(-len(bits) % 8, dtype=torch.uint8)]).view(-1, 8)
    weights = 2 ** torch.arange(7, -1, -1)
    return bytes((padded * weights).sum(1).tolist()).hex()


def unpack_bits(text: str, n: int) -> Tensor:
    """Return the first ``n`` values of a bool tensor that `pack_bits` has packed.

    >>> unpack_bits("8180", 9).nonzero().flatten().tolist()
    [0, 7, 8]
    """
    packed = torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)
    return (packed[:, None] >> torch.arange(7, -1, -1) & 1).flatten()[:n].bool()
