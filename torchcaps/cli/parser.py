"""Command-line parser: flags from dataclass fields, checked values, and one-line errors.

The arguments are split once, into a `CommandLine` of positional arguments and flags. A command reads the model or data
set from it, adds the flags of that model to its `Parser`, and parses.
"""

import argparse
import contextlib
import contextvars
import dataclasses
import functools
import re
import sys
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, NoReturn

from jsonargparse import ArgumentParser, DefaultHelpFormatter, set_parsing_settings

from torchcaps._core.validation import type_hints
from torchcaps.cli.command_line import NO_VALUE, CommandLine, flag_of
from torchcaps.cli.console import ExitCode, escape_control
from torchcaps.cli.synonyms import similar_flags
from torchcaps.cli.values import (
    check_flag_value,
    class_path,
    default_text,
    field_annotation,
    field_names,
    flag_annotation,
    type_text,
    union_members,
)
from torchcaps.models.schedules import LRSchedule
from torchcaps.routing import Routing
from torchcaps.routing.base import ROUTINGS

__all__ = ["Parser", "ParserRequest", "add_fields", "annotation_of", "field_help", "requesting_parser"]

set_parsing_settings(subclasses_enabled=[Routing, LRSchedule])
MAX_FLAGS_LISTED = 25  # in the error for an unknown flag


# parsing ---------------------------------------------------------------------------------------------------


class _HelpFormatter(DefaultHelpFormatter):
    """Help with the type, the allowed values and the default of each flag."""

    def _get_help_string(self, action: argparse.Action) -> str:
        """Return the help text of a flag with its type and default (overrides `argparse.HelpFormatter`)."""
        text = action.help or ""
        if not action.option_strings or action.nargs == 0 or action.option_strings[-1].endswith("help"):
            return text
        annotation = flag_annotation(action)
        is_choice = all(o is bool or typing.get_origin(o) is Literal for o in union_members(annotation))
        parts = [] if is_choice else [type_text(annotation)]  # the metavar lists the choices
        if action.default not in (None, argparse.SUPPRESS, ""):
            parts.append(f"default: {default_text(action.default)}")
        return f"{text} ({'; '.join(parts)})" if parts else text

    def _expand_help(self, action: argparse.Action) -> str:
        return self._get_help_string(action)

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return action.option_strings[-1].rpartition(".")[2].removeprefix("--").replace("-", "_").upper()


class ParserRequest(Exception):
    """A command has built its parser, inside `requesting_parser`."""

    def __init__(self, parser: "Parser") -> None:
        super().__init__(parser.prog)
        self.parser = parser


_IS_REQUESTED: contextvars.ContextVar[bool] = contextvars.ContextVar("_IS_REQUESTED", default=False)


@contextlib.contextmanager
def requesting_parser() -> Iterator[None]:
    """Context manager in which a command raises `ParserRequest` with its parser instead of parsing and running."""
    token = _IS_REQUESTED.set(True)
    try:
        yield
    finally:
        _IS_REQUESTED.reset(token)


class Parser(ArgumentParser):
    """Parser with flags in kebab case that reports an error as one line and exits with `ExitCode.USAGE`.

    Args:
        prog: the command.
        description: text above the flags in the help.
        examples: command lines, one per line at the end of the help.
        common: flags that ``--help`` shows; ``--help-all`` shows all of them. Empty: ``--help`` shows all.
    """

    def __init__(
        self,
        prog: str | None = None,
        description: str | None = None,
        *,
        examples: Sequence[str] = (),
        common: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(prog=prog, description=description, **{"formatter_class": _HelpFormatter, **kwargs})
        self.examples, self.common = tuple(examples), tuple(common)
        if common:
            self.add_argument("--help-all", action="help", help="show all flags and exit")

    @property
    def flags(self) -> dict[str, argparse.Action]:
        """Actions of all flags, by name."""
        return {flag: action for action in self._actions for flag in action.option_strings if flag.startswith("--")}

    @property
    def switches(self) -> set[str]:
        """Boolean flags, whose value can be omitted."""
        return {flag for flag, action in self.flags.items() if flag_annotation(action) is bool}

    @property
    def no_value(self) -> set[str]:
        """Flags that take no value."""
        return {flag for flag, action in self.flags.items() if action.nargs == 0} | NO_VALUE

    def parse(self, arguments: list[str] | CommandLine) -> tuple[Any, set[str]]:
        """Parse the arguments of a command.

        Returns:
            The options, and the names of the flags that were given.
        """
        if _IS_REQUESTED.get():
            raise ParserRequest(self)
        line = arguments
        if not isinstance(line, CommandLine):
            line = CommandLine.split(line, self.switches, self.no_value)
        written = list(line.positionals)
        for flag, value in line.flags:
            self._check_flag(flag, line)
            action = self.flags.get(flag)
            if flag in ("-h", "--help", "--help-all"):
                self.print_help_of(flag)
            if flag.endswith("help") or (action is not None and action.nargs == 0):
                if value is not None:
                    self.error(f"{flag} takes no value, got {value!r}")
                written.append(flag)
                continue
            if value is None:
                accepted = "" if action is None else f", {type_text(flag_annotation(action))}"
                self.error(f"{flag} needs a value{accepted}: {flag} VALUE")
            written.append(self._write(flag, action, value, line))
        return self.parse_args(written), line.names

    def print_help_of(self, flag: str) -> NoReturn:
        """Print the help that ``--help`` or ``--help-all`` requests, and exit."""
        print(self.format_help_of(complete=flag == "--help-all" or not self.common), end="")
        sys.exit(ExitCode.OK)

    def format_help_of(self, complete: bool) -> str:
        """Return the help with all flags, or with the common ones."""
        shown = {"--help", "--help-all", *self.common}
        hidden = [a for a in self._actions if a.option_strings and not shown & set(a.option_strings)]
        texts = {action: action.help for action in hidden}
        try:
            for action in () if complete else hidden:
                action.help = argparse.SUPPRESS
            return self.format_help()
        finally:
            for action, text in texts.items():
                action.help = text

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        """Return the help with all flags, and the examples at its end."""
        return super().format_help(*args, **kwargs).rstrip("\n") + "\n" + self._examples_text()

    def _examples_text(self) -> str:
        return "\nexamples:\n" + "".join(f"  {example}\n" for example in self.examples) if self.examples else ""

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
        known: Collection[str] = sorted(name for name in self.flags if not name.endswith("help"))
        prefix = ""
        base = flag_annotation(self.flags[owner]) if owner in self.flags else None
        if field and base in (Routing, LRSchedule):
            value = line.get(owner)
            if value is not None and value.startswith("{"):  # JSON with class_path; jsonargparse checks its fields
                return
            known, prefix = field_names(base, value, self.flags[owner].default), f"{owner}."
            if field.partition(".")[0] in (*known, "class-path", "init-args", "help"):
                return
        close = similar_flags(flag.removeprefix(prefix), known)
        subject, as_name = f"unknown flag {flag}", str
        if flag in line.sources:
            path, key = line.sources[flag]
            subject, as_name = f"{path}: unknown key {key}", functools.partial(_as_key, key)
        close, known = ([as_name(prefix + name) for name in names] for names in (close, known))
        if close:
            self.error(f"{subject}: did you mean {' or '.join(close)}?")
        if not known:
            self.error(f"{subject}: the {owner.removeprefix('--')} of this run has no settings; choose another one")
        if len(known) <= MAX_FLAGS_LISTED:
            self.error(f"{subject}: expected one of {', '.join(known)}")
        self.error(f"{subject}; '{self.prog} {'--help-all' if self.common else '--help'}' lists all flags")

    def _write(self, flag: str, action: argparse.Action | None, value: str, line: CommandLine) -> str:
        """Return a flag as jsonargparse reads it, after a check of its value."""
        name, annotation = flag, Any
        if action is None:  # a field of a class, such as --routing.iterations
            owner, _, field = flag.partition(".")
            name, base = f"{owner}.{field.replace('-', '_')}", flag_annotation(self.flags[owner])
            if not (line.get(owner) or "").startswith("{"):
                default = self.flags[owner].default
                annotation = field_annotation(base, line.get(owner), default, field.replace("-", "_"))
        else:
            annotation = flag_annotation(action)
            if annotation in (Routing, LRSchedule):
                return f"{flag}={value if value.startswith('{') else class_path(annotation, value)}"
        try:
            return f"{name}={value if annotation in (None, Any) else check_flag_value(annotation, value)}"
        except ValueError as error:
            self.error(f"{line.describe(flag)} {error}, got {value!r}")


def _as_key(similar: str, flag: str) -> str:
    """Return a flag as a key of a file of settings, in the same section as a similar key.

    >>> _as_key("epohcs", "--epochs"), _as_key("data_options.sorce", "--data.source")
    ('epochs', 'data_options.source')
    """
    section, dot, _ = similar.rpartition(".")
    return section + dot + flag.removeprefix("--").rpartition(".")[2].replace("-", "_")


# flags of dataclasses --------------------------------------------------------------------------------------


def annotation_of(spec: Any, field: str) -> Any:
    """Return the annotation of a field of a dataclass instance."""
    return type_hints(type(spec))[field]


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
