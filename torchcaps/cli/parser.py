"""Command-line parser: flags from dataclass fields, checked values, and one-line errors.

The arguments are split once, into a `CommandLine` of positional arguments and flags. A command reads the model or data
set from it, adds the flags of that model to its `Parser`, and parses.
"""

import argparse
import dataclasses
import difflib
import functools
import math
import re
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, NoReturn

from jsonargparse import ArgumentParser, DefaultHelpFormatter, Namespace, set_parsing_settings

from torchcaps._core.registry import check_name, import_object
from torchcaps.cli.command_line import BOOL_WORDS, CommandLine, flag_of
from torchcaps.cli.console import ExitCode, escape_control
from torchcaps.models import schedules
from torchcaps.models.schedules import LRSchedule
from torchcaps.routing import Routing
from torchcaps.routing.base import ROUTINGS

__all__ = ["Parser", "add_fields", "annotation_of", "field_help"]

set_parsing_settings(subclasses_enabled=[Routing, LRSchedule])
MAX_FLAGS_LISTED = 25  # in the error for an unknown flag
NONE_WORDS = ("null", "none", "~")


# parsing ---------------------------------------------------------------------------------------------------


class _HelpFormatter(DefaultHelpFormatter):
    """Help with the type, the allowed values and the default of each flag."""

    def _get_help_string(self, action: argparse.Action) -> str:
        """Return the help text of a flag with its type and default (overrides `argparse.HelpFormatter`)."""
        text = action.help or ""
        if not action.option_strings or action.nargs == 0 or action.option_strings[-1].endswith("help"):
            return text
        annotation = _annotation(action)
        is_choice = all(o is bool or typing.get_origin(o) is Literal for o in _options(annotation))
        parts = [] if is_choice else [_type_text(annotation)]  # the metavar lists the choices
        if action.default not in (None, argparse.SUPPRESS, ""):
            parts.append(f"default: {_default_text(action.default)}")
        return f"{text} ({'; '.join(parts)})" if parts else text

    def _expand_help(self, action: argparse.Action) -> str:
        return self._get_help_string(action)

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return action.option_strings[-1].rpartition(".")[2].removeprefix("--").replace("-", "_").upper()


class Parser(ArgumentParser):
    """Parser with flags in kebab case that reports an error as one line and exits with `ExitCode.USAGE`."""

    def __init__(self, prog: str | None = None, description: str | None = None, **kwargs: Any) -> None:
        super().__init__(prog=prog, description=description, **{"formatter_class": _HelpFormatter, **kwargs})

    @property
    def flags(self) -> dict[str, argparse.Action]:
        """Actions of all flags, by name."""
        return {flag: action for action in self._actions for flag in action.option_strings if flag.startswith("--")}

    @property
    def switches(self) -> set[str]:
        """Boolean flags, whose value can be omitted."""
        return {flag for flag, action in self.flags.items() if _annotation(action) is bool}

    def parse(self, arguments: list[str] | CommandLine) -> tuple[Any, set[str]]:
        """Parse the arguments of a command.

        Returns:
            The options, and the names of the flags that were given.
        """
        line = arguments if isinstance(arguments, CommandLine) else CommandLine.split(arguments, self.switches)
        written = list(line.positionals)
        for flag, value in line.flags:
            self._check_flag(flag, line)
            action = self.flags.get(flag)
            if flag == "-h" or flag.endswith("help") or (action is not None and action.nargs == 0):
                if value is not None:
                    self.error(f"{flag} takes no value, got {value!r}")
                written.append(flag)
                continue
            if value is None:
                self.error(f"{flag} needs a value: {flag} VALUE")
            written.append(self._write(flag, action, value, line))
        return self.parse_args(written), line.names

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print one line and exit."""
        text = escape_control(" ".join(str(message).split()).rstrip("."))
        print(f"{self.prog}: {text} (see '{self.prog} --help')", file=sys.stderr)
        sys.exit(ExitCode.USAGE)

    def _check_flag(self, flag: str, line: CommandLine) -> None:
        """Exit if a flag does not exist."""
        owner, _, field = flag.partition(".")
        if flag in self.flags or flag == "-h":
            return
        known, prefix = sorted(name for name in self.flags if not name.endswith("help")), ""
        base = _annotation(self.flags[owner]) if owner in self.flags else None
        if field and base in (Routing, LRSchedule):
            value = line.get(owner)
            if value is not None and value.startswith("{"):  # JSON with class_path; jsonargparse checks its fields
                return
            known, prefix = _class_fields(base, value, self.flags[owner].default), f"{owner}."
            if field.partition(".")[0] in (*known, "class-path", "init-args", "help"):
                return
        close = difflib.get_close_matches(flag.removeprefix(prefix), known, n=2, cutoff=0.65)
        subject, as_name = f"unknown flag {flag}", str
        if flag in line.sources:
            path, key = line.sources[flag]
            subject, as_name = f"{path}: unknown key {key}", functools.partial(_as_key, key)
        close, known = ([as_name(prefix + name) for name in names] for names in (close, known))
        if close:
            self.error(f"{subject}: did you mean {' or '.join(close)}?")
        if len(known) <= MAX_FLAGS_LISTED:
            self.error(f"{subject}: expected one of {', '.join(known)}")
        self.error(subject)

    def _write(self, flag: str, action: argparse.Action | None, value: str, line: CommandLine) -> str:
        """Return a flag as jsonargparse reads it, after a check of its value."""
        if action is None:  # a field of a class, such as --routing.iterations
            owner, _, field = flag.partition(".")
            return f"{owner}.{field.replace('-', '_')}={value}"
        annotation = _annotation(action)
        if annotation in (Routing, LRSchedule):
            return f"{flag}={value if value.startswith('{') else _class_path(annotation, value)}"
        try:
            return f"{flag}={_check_value(annotation, value)}"
        except ValueError as error:
            self.error(f"{line.describe(flag)} {error}, got {value!r}")


def _as_key(similar: str, flag: str) -> str:
    """Return a flag as a key of a file of settings, in the same section as a similar key.

    >>> _as_key("epohcs", "--epochs"), _as_key("data_options.sorce", "--data.source")
    ('epochs', 'data_options.source')
    """
    section, dot, _ = similar.rpartition(".")
    return section + dot + flag.removeprefix("--").rpartition(".")[2].replace("-", "_")


def _annotation(action: argparse.Action) -> Any:
    """Return the type of a flag."""
    return getattr(action, "_typehint", None) or action.type or (str if action.nargs != 0 else None)


def _options(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself."""
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if union else (annotation,)


def _check_value(annotation: Any, value: str) -> str:
    """Validate a flag's value against its type and return it as YAML; raise a ValueError that lists accepted values."""
    options = _options(annotation)
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
    raise ValueError(f"must be {_type_text(annotation)}{_suggestion(annotation, value)}")


def _tuple_text(annotation: Any, value: str) -> str:
    """Return ints such as ``3x64x64`` or ``32,16`` as a YAML list; an empty string if the value is not a tuple."""
    items = typing.get_args(annotation)
    if value.startswith("["):
        return value
    if items[0] is not int or not re.fullmatch(r"\d+([xX,]\d+)*", value):
        return ""
    numbers = re.split("[xX,]", value)
    return "" if items[-1] is not Ellipsis and len(numbers) != len(items) else f"[{', '.join(numbers)}]"


def _type_text(annotation: Any) -> str:
    """Return a type as help and errors state it: ``int``, ``one of margin, spread``, ``3 ints such as 3x64x64``."""
    parts = []
    for option in _options(annotation):
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


def _default_text(value: Any) -> str:
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
    choices = [str(c) for option in _options(annotation) for c in typing.get_args(option) if isinstance(c, str)]
    close = difflib.get_close_matches(value, choices, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


# classes as values -----------------------------------------------------------------------------------------


def _classes(base: type) -> dict[str, type]:
    """Return the routings or schedules by name: ``em``, ``one_cycle``."""
    if base is Routing:
        return {name: ROUTINGS.get(name) for name in ROUTINGS}
    known = [getattr(schedules, name) for name in schedules.__all__ if name != LRSchedule.__name__]
    return {re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower(): cls for cls in known}


def _class_path(base: type, name: str) -> str:
    """Return the import path of a routing or schedule, given by name (``em``), class name (``EM``) or import path."""
    if "." in name:
        if not isinstance(import_object(name), type):
            raise ValueError(f"{name} must be a class, got an instance: --flag.FIELD sets the fields")
        return name
    classes = _classes(base)
    by_class = {cls.__name__.lower(): cls for cls in classes.values()}
    kind = "routing" if base is Routing else "learning rate schedule"
    key = name.lower().replace("-", "_")
    cls = classes.get(key) or by_class.get(key.replace("_", "")) or classes[check_name(name, classes, kind)]
    return f"{cls.__module__}.{cls.__name__}"


def _class_fields(base: type, name: str | None, default: Any) -> list[str]:
    """Return the fields of a routing or schedule as parts of flags: those of the given class, or of the default's."""
    cls = type(default) if name is None else import_object(_class_path(base, name))
    classes = [cls] if dataclasses.is_dataclass(cls) else list(_classes(base).values())
    fields = {field.name for cls in classes if dataclasses.is_dataclass(cls) for field in dataclasses.fields(cls)}
    return sorted(name.replace("_", "-") for name in fields)


# flags of dataclasses --------------------------------------------------------------------------------------


def annotation_of(spec: Any, field: str) -> Any:
    """Return the annotation of a field of a dataclass instance."""
    return typing.get_type_hints(type(spec))[field]


def field_help(cls: type, field: str) -> str:
    """Return the description of a field in the docstring of a class or of its bases."""
    for owner in cls.__mro__:
        for names, text in re.findall(r"^ {8}([\w, ]+): (.*(?:\n {12}.*)*)", owner.__doc__ or "", re.MULTILINE):
            if field in names.split(", "):
                return " ".join(text.split()).replace("``", "").replace('"', "'").rstrip(".")
    return ""


def add_fields(
    parser: Parser,
    spec: Any,
    prefix: str = "",
    line: CommandLine | None = None,
    renamed: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Add a flag for each field of a dataclass instance; the defaults are its values.

    Args:
        parser: parser of the command.
        spec: specification of a model or data set.
        prefix: key of the parsed options under which the values are, such as ``"model_options"``; default: top level.
        line: the command line; if it names another routing, that routing starts from its own defaults.
        renamed: flags of fields that are not derived from their names.

    Returns:
        The flag of each field.
    """
    group = parser.add_argument_group(f"fields of {type(spec).__name__}")
    flags = {}
    for field in dataclasses.fields(spec):
        flag = flags[field.name] = (renamed or {}).get(field.name, flag_of(field.name))
        is_routing = field.name == "routing"
        default = None if is_routing and line is not None and flag in line else getattr(spec, field.name)
        text = field_help(type(spec), field.name)
        if is_routing:
            text = f"{text}. One of {', '.join(ROUTINGS)}, or an import path; {flag}.FIELD sets its fields"
        dest = f"{prefix}.{field.name}" if prefix else field.name
        annotation = Routing if is_routing else annotation_of(spec, field.name)
        group.add_argument(flag, dest=dest, type=annotation, default=default, help=text)
    return flags
