"""Command line as positional arguments and flags, and import paths in it."""

import json
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torchcaps._core.registry import is_import_path

__all__ = [
    "BOOL_WORDS",
    "NO_VALUE",
    "TRUST_FLAG",
    "CommandLine",
    "append_working_directory",
    "flag_of",
    "is_flag",
    "search_working_directory",
    "settings_flags",
]

BOOL_WORDS = ("true", "false")
TRUST_FLAG = "--trust-remote-code"
NO_VALUE = frozenset({"--help", "--help-all", "-h", "--json", "--csv", "--quiet", "-q", TRUST_FLAG})
SHORT_FLAGS = {"-q": "--quiet"}  # besides -h


def flag_of(field: str) -> str:
    """Return the flag of a field.

    >>> flag_of("batch_size")
    '--batch-size'
    """
    return "--" + field.replace("_", "-")


def is_flag(argument: str) -> bool:
    """Return whether an argument is a flag, and not a value, a negative number or a lone dash.

    >>> is_flag("--epochs"), is_flag("-b"), is_flag("-1e-3"), is_flag("-")
    (True, True, False, False)
    """
    is_short = re.match(r"-[A-Za-z]", argument) is not None and argument != "-inf"
    return is_short or argument.startswith("--")


@dataclass
class CommandLine:
    """Arguments of a command, split into positional arguments and flags.

    Args:
        positionals: arguments that are neither a flag nor the value of one.
        flags: flags in kebab case with their values, in the given order; ``None`` is a missing value.
        sources: file and key of each flag that was read from a file of settings.
    """

    positionals: list[str]
    flags: list[tuple[str, str | None]]
    sources: dict[str, tuple[str, str]] = field(default_factory=dict, repr=False)

    @classmethod
    def split(
        cls, arguments: list[str], switches: Collection[str] = (), no_value: Collection[str] = NO_VALUE
    ) -> "CommandLine":
        """Split arguments. Flags may be written as ``--flag value`` or ``--flag=value``, with ``-`` or ``_``.

        Args:
            arguments: the arguments behind the name of the command.
            switches: boolean flags, whose value can be omitted.
            no_value: flags that take no value, so that the next argument is not theirs.

        >>> CommandLine.split(["net", "--batch_size=4", "--json", "--seed", "1"])
        CommandLine(positionals=['net'], flags=[('--batch-size', '4'), ('--json', None), ('--seed', '1')])
        """
        line, rest = cls([], []), list(arguments)
        while rest:
            argument = rest.pop(0)
            if not is_flag(argument):
                line.positionals.append(argument)
                continue
            name, equals, value = argument.partition("=")
            name = SHORT_FLAGS.get(name, name.replace("_", "-"))
            if equals:
                line.flags.append((name, value))
            elif name in no_value or name.endswith(".help") or not rest or rest[0].startswith("--"):
                line.flags.append((name, "true" if name in switches else None))
            elif name in switches and rest[0].lower() not in BOOL_WORDS:
                line.flags.append((name, "true"))
            else:
                line.flags.append((name, rest.pop(0)))
        return line

    def get(self, flag: str) -> str | None:
        """Return the last value of a flag, ``None`` if it is not given."""
        return next((value for name, value in reversed(self.flags) if name == flag), None)

    def __contains__(self, flag: object) -> bool:
        return any(name == flag for name, _ in self.flags)

    @property
    def names(self) -> set[str]:
        """Names of the given flags."""
        return {name for name, _ in self.flags}

    def without(self, *names: str) -> "CommandLine":
        """Return the arguments without some flags."""
        flags = [(name, value) for name, value in self.flags if name not in names]
        return CommandLine(self.positionals, flags, self.sources)

    def describe(self, flag: str) -> str:
        """Return the name of a flag in error messages: ``FILE: key`` if it was read from a file of settings."""
        return ": ".join(self.sources[flag]) if flag in self.sources else flag


def append_working_directory(names: Iterable[str | None]) -> None:
    """Append the current directory to ``sys.path`` if a name on the command line is an import path.

    It comes last, so that its files never replace installed packages, and it is not searched if all names are
    registered.

    Args:
        names: names of models, data sets, routings and schedules; JSON with a ``class_path`` counts too.
    """
    if any(name is not None and (is_import_path(name) or name.startswith("{")) for name in names):
        search_working_directory()


def search_working_directory() -> None:
    """Append the current directory to ``sys.path``, if it is not in it."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def settings_flags(values: Mapping[str, Any], prefix: str = "--") -> Iterator[tuple[str, str]]:
    """Yield the flags of nested settings: ``{"loss": {"reduction": "official"}}`` as ``--loss.reduction official``."""
    for key, value in values.items():
        name = f"{prefix}{key}".replace("_", "-")
        if isinstance(value, dict) and "class_path" not in value:
            yield from settings_flags(value, f"{name}.")
        elif value is not None:
            yield name, value if isinstance(value, str) else json.dumps(value)
