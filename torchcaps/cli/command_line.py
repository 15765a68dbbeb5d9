"""Command line as positional arguments and flags, split from arguments or read from a YAML file of settings."""

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["BOOL_WORDS", "CommandLine", "flag_of", "read_settings", "settings_flags"]

BOOL_WORDS = ("true", "false")
NO_VALUE = ("--help", "-h", "--json")


def flag_of(field: str) -> str:
    """Return the flag of a field.

    >>> flag_of("batch_size")
    '--batch-size'
    """
    return "--" + field.replace("_", "-")


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
    def split(cls, arguments: list[str], switches: Collection[str] = ()) -> "CommandLine":
        """Split arguments. Flags may be written as ``--flag value`` or ``--flag=value``, with ``-`` or ``_``.

        Args:
            arguments: the arguments behind the name of the command.
            switches: boolean flags, whose value can be omitted.

        >>> CommandLine.split(["net", "--batch_size=4", "--json", "--seed", "1"])
        CommandLine(positionals=['net'], flags=[('--batch-size', '4'), ('--json', None), ('--seed', '1')])
        """
        line, rest = cls([], []), list(arguments)
        while rest:
            argument = rest.pop(0)
            if not argument.startswith("--") and argument != "-h":
                line.positionals.append(argument)
                continue
            name, equals, value = argument.partition("=")
            name = name.replace("_", "-")
            if equals:
                line.flags.append((name, value))
            elif name in NO_VALUE or name.endswith(".help") or not rest:
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


def read_settings(path: str) -> dict[str, Any]:
    """Return the settings in a YAML file."""
    import yaml

    try:
        values = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} can't be read: {getattr(error, 'strerror', None) or error}") from error
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise ValueError(f"{path} is not a YAML file: {problem or 'it cannot be parsed'}{line}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must be a mapping of settings, such as 'epochs: 5', got {type(values).__name__}")
    return values


def settings_flags(values: Mapping[str, Any], prefix: str = "--") -> Iterator[tuple[str, str]]:
    """Yield the flags of nested settings: ``{"loss": {"reduction": "official"}}`` as ``--loss.reduction official``."""
    for key, value in values.items():
        name = f"{prefix}{key}".replace("_", "-")
        if isinstance(value, dict) and "class_path" not in value:
            yield from settings_flags(value, f"{name}.")
        elif value is not None:
            yield name, value if isinstance(value, str) else json.dumps(value)
