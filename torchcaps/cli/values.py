"""Values of flags: checks against the annotated type, texts for help and errors, routings and schedules by name."""

import argparse
import dataclasses
import difflib
import math
import re
import types
import typing
from typing import Any, Literal

from jsonargparse import Namespace

from torchcaps._core.registry import check_name, import_object
from torchcaps.cli.command_line import BOOL_WORDS
from torchcaps.models import schedules
from torchcaps.models.schedules import LRSchedule
from torchcaps.routing import Routing
from torchcaps.routing.base import ROUTINGS

__all__ = [
    "check_flag_value",
    "class_choices",
    "class_path",
    "default_text",
    "field_annotation",
    "field_names",
    "flag_annotation",
    "type_text",
    "union_members",
]

# Other names of values of flags, for the suggestions in errors.
VALUE_SYNONYMS = {"gpu": "cuda", "metal": "mps", "fp32": "32-true", "bf16": "bf16-mixed", "amp": "bf16-mixed"}
NONE_WORDS = ("null", "none", "~")


def flag_annotation(action: argparse.Action) -> Any:
    """Return the type of a flag."""
    return getattr(action, "_typehint", None) or action.type or (str if action.nargs != 0 else None)


def union_members(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself."""
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if union else (annotation,)


def check_flag_value(annotation: Any, value: str) -> str:
    """Validate a flag's value against its type and return it as YAML; raise a ValueError that lists accepted values."""
    options = union_members(annotation)
    if types.NoneType in options and value.lower() in NONE_WORDS:
        return "null"
    for option in (option for option in options if option is not types.NoneType):
        if option is str or not (option in (int, float, bool) or typing.get_origin(option) in (Literal, tuple)):
            return value
        if option in (int, float):
            try:
                number = option(value)
            except ValueError:
                continue
            if not math.isfinite(number):
                raise ValueError("must be finite")
            return value
        if option is bool and value.lower() in BOOL_WORDS:
            return value.lower()
        if typing.get_origin(option) is Literal:
            choices = {
                str(choice).lower() if isinstance(choice, bool) else choice for choice in typing.get_args(option)
            }
            if value in choices:
                return value
            if value.lower() in choices & set(BOOL_WORDS):
                return value.lower()
        if typing.get_origin(option) is tuple and (written := _tuple_text(option, value)):
            return written
    raise ValueError(f"must be {type_text(annotation)}{_suggestion(annotation, value)}")


def _tuple_text(annotation: Any, value: str) -> str:
    """Return ints such as ``3x64x64`` or ``32,16`` as a YAML list; an empty string if the value is not a tuple."""
    items = typing.get_args(annotation)
    if value.startswith("["):
        return value
    if items[0] is not int or not re.fullmatch(r"\d+([xX,]\d+)*", value):
        return ""
    numbers = re.split("[xX,]", value)
    return "" if items[-1] is not Ellipsis and len(numbers) != len(items) else f"[{', '.join(numbers)}]"


def type_text(annotation: Any) -> str:
    """Return a type as help and errors state it: ``int``, ``one of margin, spread``, ``3 ints such as 3x64x64``."""
    parts = []
    for option in union_members(annotation):
        if typing.get_origin(option) is Literal:
            choices = [str(c).lower() if isinstance(c, bool) else str(c) for c in typing.get_args(option)]
            parts.append(f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0])
        elif typing.get_origin(option) is tuple:
            items = typing.get_args(option)
            if items[0] is not int:
                parts.append("list of lists of ints, such as [[64, 1], [128, 2]]")
            elif items[-1] is Ellipsis:
                parts.append("ints such as 32,16")
            else:
                parts.append(f"{len(items)} ints such as {'x'.join(['3', '64', '64', '64'][: len(items)])}")
        elif option is bool:
            parts.append("true or false")
        elif option in (Routing, LRSchedule):
            parts.append("name or import path")
        elif option is not types.NoneType:
            parts.append(getattr(option, "__name__", str(option)))
    return " or ".join(parts)


def default_text(value: Any) -> str:
    """Return a default value as it is written on the command line."""
    if isinstance(value, Namespace | dict) and "class_path" in value:
        fields = ", ".join(f"{name}={item!r}" for name, item in dict(value["init_args"]).items())
        return f"{value['class_path'].rpartition('.')[2]}({fields})"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple) and all(isinstance(item, int) for item in value):
        return ",".join(map(str, value))
    return str(list(map(list, value)) if isinstance(value, tuple) else value)


def _suggestion(annotation: Any, value: str) -> str:
    """Return a hint with the choice of the annotation that is closest to a value, ``""`` if none is close."""
    choices = [str(c) for option in union_members(annotation) for c in typing.get_args(option) if isinstance(c, str)]
    meant = VALUE_SYNONYMS.get(value.lower(), value.lower())
    close = difflib.get_close_matches(meant, choices, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


# classes as values -----------------------------------------------------------------------------------------


def class_choices(base: type) -> dict[str, type]:
    """Return the routings or schedules by name: ``em``, ``one_cycle``."""
    if base is Routing:
        return {name: ROUTINGS.get(name) for name in ROUTINGS}
    known = [getattr(schedules, name) for name in schedules.__all__ if name != LRSchedule.__name__]
    return {re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower(): cls for cls in known}


def class_path(base: type, name: str) -> str:
    """Return the import path of a routing or schedule, given by name (``em``), class name (``EM``) or import path."""
    if "." in name:
        if not isinstance(import_object(name), type):
            raise ValueError(f"{name} must be a class, got an instance: --flag.FIELD sets the fields")
        return name
    classes = class_choices(base)
    by_class = {cls.__name__.lower(): cls for cls in classes.values()}
    kind = "routing" if base is Routing else "learning rate schedule"
    key = name.lower().replace("-", "_")
    cls = classes.get(key) or by_class.get(key.replace("_", "")) or classes[check_name(name, classes, kind)]
    return f"{cls.__module__}.{cls.__name__}"


def field_names(base: type, name: str | None, default: Any) -> list[str]:
    """Return the fields of a routing or schedule as parts of flags: those of the given class, or of the default's."""
    fields = {field.name for cls in _candidates(base, name, default) for field in dataclasses.fields(cls)}
    return sorted(name.replace("_", "-") for name in fields)


def field_annotation(base: type, name: str | None, default: Any, field: str) -> Any:
    """Return the type of a field of a routing or schedule; ``None`` if no class has it or classes differ."""
    found = {}
    for cls in _candidates(base, name, default):
        if field in (f.name for f in dataclasses.fields(cls)):
            annotation = typing.get_type_hints(cls)[field]
            found[str(annotation)] = annotation
    return next(iter(found.values())) if len(found) == 1 else None


def _candidates(base: type, name: str | None, default: Any) -> list[Any]:
    """Return the dataclass that a flag names, or that of its default; all known ones if neither is a dataclass."""
    path = default.get("class_path") if isinstance(default, Namespace | dict) else None
    cls = type(default) if path is None else import_object(path)
    if name is not None:
        cls = import_object(class_path(base, name))
    classes = [cls] if dataclasses.is_dataclass(cls) else list(class_choices(base).values())
    return [cls for cls in classes if dataclasses.is_dataclass(cls)]
