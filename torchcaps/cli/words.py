"""What people write, as the parser reads it: ``3x64x64`` as a list, ``em`` as a class, a YAML file as flags."""

import dataclasses
import difflib
import itertools
import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchcaps._core.registry import check_name, import_object
from torchcaps.cli.parser import Parser
from torchcaps.models import schedules
from torchcaps.models.schedules import LRSchedule
from torchcaps.routing.base import ROUTINGS

__all__ = ["Flags", "flag_words", "free_words"]

FEW = 25  # flags that can be listed in a sentence
CHOICES = ("--routing", "--lr-schedule")  # whose values are classes, with fields of their own below them


@dataclass(frozen=True)
class Flags:
    """The flags of a command.

    Args:
        names: all of them; ``--batch-size`` and ``--batch_size`` are one.
        tuples: those whose values are several whole numbers.
        switches: those that may stand alone.
        short: flags that stand for another: ``--optimizer adam`` for ``--optimizer.name adam``.
        below: the same for what flags begin with: ``--data.`` for ``--data-options.``.
        who: has these flags.
    """

    names: Collection[str]
    tuples: Collection[str] = ()
    switches: Collection[str] = ()
    short: Mapping[str, str] = field(default_factory=dict)
    below: Mapping[str, str] = field(default_factory=dict)
    who: str = "this command"

    def read(self, parser: Parser, words: list[str]) -> tuple[list[str], set[str]]:
        """Return the words as the parser reads them, each flag with its value, and the flags that are among them."""
        canonical = {name.replace("-", "_"): name for name in self.names}
        written, given, rest = [], set(), list(words)
        while rest:
            word = rest.pop(0)
            if not word.startswith("--"):
                written.append(word)
                continue
            flag, equals, value = word.partition("=")
            for start, longer in self.below.items():
                if flag.replace("_", "-").startswith(start):
                    flag = longer + flag[len(start) :]
            flag = canonical.get(flag.replace("-", "_"), flag)
            self._check(parser, flag, words)
            flag = self.short.get(flag, flag)
            given.add(flag)
            if flag.endswith("help") or flag == "--json":  # these take no value
                written.append(flag)
                continue
            if not equals:
                alone = not rest or (flag in self.switches and rest[0].lower() not in ("true", "false"))
                if alone and flag not in self.switches:
                    parser.error(f"{flag} needs a value")
                value = "true" if alone else rest.pop(0)
            written.append(f"{flag}={self._value(parser, flag, value)}")
        return written, given

    def _check(self, parser: Parser, flag: str, words: list[str]) -> None:
        choice = flag.partition(".")[0]
        if flag in self.names or flag in self.short:
            return
        if "." in flag and choice in CHOICES and choice in self.names:
            if not _is_own(choice, words):
                _check_field(parser, choice, flag.partition(".")[2])
            return
        named = sorted(f for f in self.names if not f.endswith("help"))
        for start, longer in self.below.items():
            flag, named = flag.replace(longer, start), [name.replace(longer, start) for name in named]
        near = [] if len(named) <= FEW else difflib.get_close_matches(flag, named, n=3, cutoff=0.6)
        advice = f"{self.who} has {', '.join(named)}" if len(named) <= FEW else "the help lists those that there are"
        if near:
            advice = f"did you mean {' or '.join(near)}?"
        parser.error(f"there is no flag {flag}: {advice}")

    def _value(self, parser: Parser, flag: str, value: str) -> str:
        if flag == "--image" and not re.fullmatch(r"\[.*\]|\d+([xX,]\d+){2}", value):
            parser.error(f"--image must be CHANNELSxHEIGHTxWIDTH, such as 3x64x64, got {value!r}")
        if flag in self.tuples and re.fullmatch(r"\d+([xX,]\d+)*", value):
            return f"[{', '.join(re.split('[xX,]', value))}]"
        if flag in CHOICES and not value.startswith("{"):
            return _choice_class(flag, value)
        return value


def free_words(words: list[str], switches: Collection[str] = ()) -> list[str]:
    """Return the words that are no flag and no flag's value."""
    free, flag = [], ""
    for word in words:
        if word.startswith("--"):
            flag = "" if "=" in word or word.endswith("help") else word
        elif not flag or (flag in switches and word.lower() not in ("true", "false")):
            free.append(word)
        else:
            flag = ""
    return free


def _is_own(choice: str, words: list[str]) -> bool:
    """Return whether the user gives an import path for a choice: then only the class knows its fields."""
    values = [value for word, value in itertools.pairwise(words) if word == choice]
    values += [word.partition("=")[2] for word in words if word.startswith(f"{choice}=")]
    return any("." in value or value.startswith("{") for value in values)


def _check_field(parser: Parser, choice: str, name: str) -> None:
    """Refuse a field that no routing, or no schedule, has."""
    own = ROUTINGS.values() if choice == "--routing" else (getattr(schedules, cls) for cls in schedules.__all__)
    known = sorted({field.name for cls in own if dataclasses.is_dataclass(cls) for field in dataclasses.fields(cls)})
    if name.partition(".")[0] not in (*known, "class_path", "init_args", "dict_kwargs", "help"):
        near = difflib.get_close_matches(name, known, n=1)
        parser.error(
            f"there is no flag {choice}.{name}: "
            + (f"did you mean {choice}.{near[0]}?" if near else f"there are {', '.join(known)}")
        )


def _choice_class(flag: str, name: str) -> str:
    """Return the import path of a routing or a schedule by its name, ``em``, or by that of its class, ``EM``."""
    if "." in name:
        if not isinstance(import_object(name), type):
            raise ValueError(f"{name} must be a class, such as a routing of your own")
        return name
    if flag == "--routing":
        classes = {cls.__name__: cls for cls in ROUTINGS.values()}
        cls = classes[name] if name in classes else ROUTINGS.get(name)
    else:
        known = {cls: getattr(schedules, cls) for cls in schedules.__all__ if cls != LRSchedule.__name__}
        plain = {cls.lower(): cls for cls in known}
        cls = known[check_name(plain.get(re.sub("[-_ ]", "", name.lower()), name), known, "lr_schedule")]
    return f"{cls.__module__}.{cls.__qualname__}"


def flag_words(path: str) -> list[str]:
    """Return the flags that a YAML file stands for, as words."""
    import yaml

    try:
        values = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} can't be read: {getattr(error, 'strerror', None) or error}") from error
    except yaml.YAMLError as error:
        mark, problem = (
            getattr(error, "problem_mark", None),
            getattr(error, "problem", None) or "it can't be read as one",
        )
        where = f", line {mark.line + 1}" if mark is not None else ""
        raise ValueError(f"{path} is no YAML file: {problem}{where}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must be a list of settings, such as 'epochs: 5'")
    return list(_flags(values))


def _flags(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        name = f"{prefix}{key}"
        if value is None or name == "note":
            continue
        if name in ("model_options", "data_options", "test_options") and not isinstance(value, dict):
            raise ValueError(f"{name} must be a list of settings, such as '{name}: {{...}}', got {value!r}")
        if name == "model":
            yield str(value)
        elif name == "model_options":
            yield from _flags(value)
        elif name in ("data_options", "test_options"):
            yield from _flags(value, "data." if name == "data_options" else "test_data.")
        elif isinstance(value, dict) and "class_path" not in value:
            yield from _flags(value, f"{name}.")
        else:
            yield f"--{name}={value if isinstance(value, str) else json.dumps(value)}"
