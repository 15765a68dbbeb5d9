"""Flags out of dataclasses, and errors of one sentence."""

import dataclasses
import difflib
import re
import sys
import typing
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, set_parsing_settings

from torchcaps.models.schedules import LRSchedule
from torchcaps.routing import Routing
from torchcaps.routing.base import ROUTINGS

__all__ = ["Parser", "add_fields", "described", "kind_of"]

set_parsing_settings(subclasses_enabled=[Routing, LRSchedule])


class Parser(ArgumentParser):
    """A parser whose errors are one sentence.

    Attributes:
        shown: what flags are called in the help, where that differs from what the parser calls them.
    """

    shown: Mapping[str, str] = MappingProxyType({})

    @property
    def flags(self) -> set[str]:
        """All flags, ``--help`` among them."""
        return {flag for action in self._actions for flag in action.option_strings if flag.startswith("--")}

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        """Say nothing of types, nor of defaults that are none: the flag's own words tell what happens then."""
        text = super().format_help(*args, **kwargs)
        for name, other in self.shown.items():
            text = text.replace(name, other)
        text = re.sub(r"\(type:\s+[^()]*?,\s+default:\s+([^()]*)\)", r"(default: \1)", text)  # values tell their type
        # A choice of a class: the library would print its fields and the import paths of all others.
        text = re.sub(r"\s*\(default:\s+\{'class_path'.*?known\s+subclasses:[^()]*\)", "", text, flags=re.DOTALL)
        return re.sub(r"\s*\(default:\s+(null|False)\)|\s*\(required\)", "", text)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Say what was wrong, and leave."""
        sentence = " ".join(str(message).split())
        sentence = re.sub(r'^Parser key "([\w.]+)": ?', r"--\1: ", sentence)
        sentence = sentence.replace("Expected a <class 'int'>", "expected a whole number")
        sentence = re.sub(r"Expected a typing\.Literal\[(.*?)\]", r"expected one of \1", sentence)
        sentence = _choices(sentence)
        print(f"{self.prog}: {sentence.rstrip('.')} (see '{self.prog} --help')", file=sys.stderr)
        sys.exit(2)


def _choices(sentence: str) -> str:
    """Return a sentence about a value of several kinds: what was given, what there is, and what may have been meant."""
    start, found, rest = sentence.partition("Does not validate against any of the Union subtypes")
    if not found:
        return sentence
    known = re.findall(r"'([^']*)'", "".join(re.findall(r"Literal\[(.*?)\]", rest)[:1]))
    given = re.findall(r"Given value:\s*(\S+)", rest)
    if not known or not given:
        return f"{start}this is none of its values"
    value = given[0].strip("'\"")
    near = difflib.get_close_matches(value, known, n=1)
    return f"{start}{value!r} is none of {', '.join(known)}" + (f": did you mean {near[0]!r}?" if near else "")


def kind_of(spec: Any, field: str) -> Any:
    """Return what a field of a dataclass is annotated with."""
    return typing.get_type_hints(type(spec))[field]


def add_fields(
    parser: Parser, spec: Any, chosen_routing: bool = False, renamed: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Make a flag of every field of what one chooses, its value there the default.

    A routing that the user names starts from its own defaults, not from the fields of the model's. Fields whose names
    are taken have another in ``renamed``.
    """
    group = parser.add_argument_group(f"fields of {type(spec).__name__}")
    for field in dataclasses.fields(spec):
        routing = field.name == "routing"
        default = None if routing and chosen_routing else getattr(spec, field.name)
        kind = Routing if routing else kind_of(spec, field.name)
        flag = f"--{renamed.get(field.name, field.name)}"
        text = described(type(spec), field.name)
        if routing:
            text = f"{', '.join(ROUTINGS.list())}, or an import path; its fields are {flag}.FIELD. {text}"
        group.add_argument(flag, type=kind, default=default, help=text)


def described(cls: type, field: str) -> str:
    """Return what a class's docstring says of a field."""
    for owner in cls.__mro__:
        for names, text in re.findall(r"^ {8}([\w, ]+): (.*(?:\n {12}.*)*)", owner.__doc__ or "", re.MULTILINE):
            if field in names.split(", "):
                return " ".join(text.split()).replace("``", "").replace("%", "%%").replace('"', "'")
    return ""
