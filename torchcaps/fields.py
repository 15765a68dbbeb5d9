"""The fields of what a user chooses (routings, models): checked at the door, and named when one is wrong."""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Collection, Iterable
from typing import Any, Literal

__all__ = ["check_fields", "check_range", "known_name", "listed", "refuse_unknown"]


def check_fields(owner: Any) -> None:
    """Hold the fields of a dataclass against their annotations; those of other types are the owner's business."""
    hints = typing.get_type_hints(type(owner))
    for field in dataclasses.fields(owner):
        _check_field(owner, field.name, hints[field.name])


def _check_field(owner: Any, name: str, kind: Any) -> None:
    """Check a choice out of a Literal, a whole number, a number, a truth value."""
    value = getattr(owner, name)
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        if value not in choices:
            raise ValueError(f"{type(owner).__name__}: {name} must be {listed(choices)}, got {value!r}")
        return
    union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    kinds = typing.get_args(kind) if union else (kind,)
    if not set(kinds) <= {bool, int, float, type(None)}:
        return
    allowed = (*kinds, int) if float in kinds else kinds
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in kinds):
        words = {bool: "True or False", int: "a whole number", float: "a number"}
        wanted = " or ".join(words.get(kind, "None") for kind in kinds)
        raise TypeError(f"{type(owner).__name__}: {name} must be {wanted}, got {value!r}")


def check_range(owner: Any, name: str, least: float, most: float = math.inf, strict: bool = False) -> None:
    """Raise where a number is out of range, NaN or, unless ``most`` allows it, infinite."""
    value = getattr(owner, name)
    if value is None or (least < value <= most if strict else least <= value <= most):
        return
    bounds = f"over {least:g}" if strict else f"{least:g} or more"
    bounds += "" if most == math.inf else f" and at most {most:g}"
    raise ValueError(f"{type(owner).__name__}: {name} must be {bounds}, got {value}")


def known_name(name: str, known: Collection[str], what: str) -> str:
    """Return a name out of the known ones; refuse another with the nearest of them."""
    if not isinstance(name, str):
        raise TypeError(f"{what} must be the name of one, got {name!r}")
    if name not in known:
        near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.4)
        if near:
            raise ValueError(f"{what} must be the name of one, got {name!r}: did you mean {listed(near)}?")
        some = sorted(known)[:8]
        more = f" and {len(known) - len(some)} more" if len(known) > len(some) else ""
        raise ValueError(f"{what} must be the name of one, got {name!r}: there are {', '.join(map(repr, some))}{more}")
    return name


def refuse_unknown(cls: Any, changes: Iterable[str], name: str | None = None) -> None:
    """Raise where a change names no field of a dataclass, and list the fields that it has."""
    known = [field.name for field in dataclasses.fields(cls)]
    for change in changes:
        if change not in known:
            there = listed(known, "and") if known else "none"
            raise ValueError(f"{name or cls.__name__} has no field {change!r}: it has {there}")


def listed(names: Iterable[Any], word: str = "or") -> str:
    """Return names as a person would list them.

    >>> listed(["l1", "l2"])
    "'l1' or 'l2'"
    """
    quoted = [repr(name) for name in names]
    return quoted[0] if len(quoted) == 1 else ", ".join(quoted[:-1]) + f" {word} " + quoted[-1]
