"""The command line: ``torchcaps list`` and ``torchcaps show``.

Each command is a function that takes the words after its name and prints. What a user did wrong is said in one sentence
on standard error, with a non-zero exit.
"""

import dataclasses
import json
import re
import sys
import typing
from collections.abc import Callable
from typing import Any, NoReturn

try:
    from jsonargparse import ArgumentParser, set_parsing_settings
    from rich import box
    from rich.console import Console
    from rich.table import Table
except ImportError as missing:
    sys.exit(f"torchcaps: the command line needs {missing.name}: pip install 'torchcaps[cli]'")

import torch

from torchcaps.fields import known_name
from torchcaps.models import Network, create_model
from torchcaps.models.memory import TrainingMemory, estimate_memory, streaming_layers
from torchcaps.models.registry import REGISTRY as MODELS
from torchcaps.models.spec import CapsuleSpec, ModelSpec
from torchcaps.models.summary import Summary, shortened
from torchcaps.routing import Routing
from torchcaps.routing.base import REGISTRY as ROUTINGS

__all__ = ["main"]

set_parsing_settings(subclasses_enabled=[Routing])

HELP = """\
usage: torchcaps COMMAND ...

  list    the models, with paper, data, parameters and routing
  show    one model's layers, what they cost, and the memory that training it takes

'torchcaps COMMAND --help' says more. For example:

  torchcaps list tsai
  torchcaps show sabour2017_mnist --image 3x64x64 --classes 196
"""


class Parser(ArgumentParser):
    """A parser whose errors are one sentence."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Say what was wrong, and leave."""
        sentence = " ".join(str(message).split())
        sys.exit(f"{self.prog}: {sentence} (see '{self.prog} --help')")


def main(words: list[str] | None = None) -> None:
    """Run a command."""
    words = sys.argv[1:] if words is None else words
    commands: dict[str, Callable[[list[str]], None]] = {"list": list_command, "show": show_command}
    if not words or words[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return
    try:
        commands[known_name(words[0], commands, "the command")](words[1:])
    except (ValueError, TypeError) as error:
        sys.exit(f"torchcaps: {error}")
    except BrokenPipeError:
        sys.stderr.close()  # whoever read our output has seen enough


# list ------------------------------------------------------------------------------------------------------


def list_command(words: list[str]) -> None:
    """Print the models."""
    parser = Parser(
        prog="torchcaps list",
        description="The models, with paper, data, parameters (and what the paper prints) and routing. "
        "Example: torchcaps list tsai2020 --json",
    )
    parser.add_argument("pattern", nargs="?", default="", help="only those whose name has this in it")
    parser.add_argument("--json", action="store_true", help="for machines")
    options = parser.parse_args(words)
    names = [name for name in sorted(MODELS) if options.pattern in name]
    if not names:
        known_name(options.pattern, MODELS, "a model whose name has that in it")
    rows = [_listed(name) for name in names]
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    table = _table("model", "paper", "data", "parameters", "published", "routing", right=("parameters", "published"))
    for row in rows:
        cells = (row["name"], row["paper"], row["data"], f"{row['parameters']:,}", row["published"], row["routing"])
        table.add_row(*cells)
    _print(table)


def _listed(name: str) -> dict[str, Any]:
    entry = MODELS[name]
    with torch.device("meta"):
        model = create_model(name)
    routing = entry.spec.algorithm if isinstance(entry.spec, CapsuleSpec) else None
    return {
        "name": name,
        "paper": entry.paper,
        "data": model.recipe.data,
        "parameters": model.n_parameters,
        "published": entry.published,
        "routing": "" if routing is None else shortened(routing),
    }


# show ------------------------------------------------------------------------------------------------------


def show_command(words: list[str]) -> None:
    """Print one model."""
    parser = Parser(
        prog="torchcaps show",
        description="A model's layers with their shapes, parameters and multiply-adds, and the memory that training "
        "takes on a CPU. Nothing is trained. Any field of the model is a flag. "
        "Example: torchcaps show tsai2020_cifar10 --image 3x64x64 --classes 196 --routing em --batch 32",
    )
    parser.add_argument("name", help="as 'torchcaps list' has it")
    parser.add_argument("--batch", type=int, default=None, help="images in a batch (default: the recipe's)")
    parser.add_argument("--json", action="store_true", help="for machines")
    name = next((word for word in words if not word.startswith("-")), None)
    spec = MODELS[known_name(name, MODELS, "model")].spec if name is not None else None
    if spec is not None:
        _add_fields(parser, spec)
    options = parser.parse_args([_plain(word) for word in _named_routing(words)])
    assert spec is not None, "the parser requires a name"
    if options.batch is not None and options.batch < 1:
        parser.error(f"--batch must be 1 or more, got {options.batch}")
    chosen = parser.instantiate(options)
    with torch.device("meta"):
        model = create_model(options.name, **{field.name: chosen[field.name] for field in dataclasses.fields(spec)})
    batch = options.batch or model.recipe.batch_size
    summary = model.summary()
    memory = _memory(model, summary, batch)
    if options.json:
        print(json.dumps(_as_json(model, summary, memory, batch), indent=2))
    else:
        _show(model, summary, memory, batch)


def _add_fields(parser: Parser, spec: ModelSpec) -> None:
    """Make a flag of every field of a model, its value there the default."""
    group = parser.add_argument_group(f"fields of {type(spec).__name__} ({spec.paper})")
    for field in dataclasses.fields(spec):
        kind = typing.get_type_hints(type(spec))[field.name]
        kind = Routing if field.name == "routing" else kind
        group.add_argument(f"--{field.name}", type=kind, default=getattr(spec, field.name))


def _plain(word: str) -> str:
    """Write ``3x64x64`` as the list that the parser reads."""
    return re.sub(r"(?<![\w.])(\d+)x(\d+)x(\d+)$", r"[\1, \2, \3]", word)


def _named_routing(words: list[str]) -> list[str]:
    """Write the name of a routing as its class: ``em`` is ``EM``, and ``inverted_attention`` too has one."""
    named = []
    for before, word in zip(["", *words], words, strict=False):
        flag, _, value = word.rpartition("=")
        if before == "--routing" or flag == "--routing":
            cls = ROUTINGS[known_name(value, ROUTINGS, "routing")] if value in ROUTINGS or value.islower() else None
            value = f"{cls.__module__}.{cls.__qualname__}" if cls else value
            word = f"{flag}={value}" if flag else value
        named.append(word)
    return named


def _memory(model: Network, summary: Summary, batch: int) -> dict[str, TrainingMemory]:
    """Estimate what training takes, with votes stored and streamed where there are any."""
    ways: dict[str, Any] = {"stored": False, "streamed": True} if summary.votes else {"": None}
    with Console(stderr=True).status("working out the memory"):
        return {way: estimate_memory(model, batch, streamed) for way, streamed in ways.items()}


def _show(model: Network, summary: Summary, memory: dict[str, TrainingMemory], batch: int) -> None:
    entry, recipe = MODELS[model.name], model.recipe
    head, *rows, total = summary.cells()
    published = f" (the paper prints {entry.published})" if entry.published and model.spec == entry.spec else ""
    print(f"{summary.title}\n{entry.paper or 'of no paper'}, {model.n_parameters:,} parameters{published}\n")
    table = _table(*head, right=head[3:])
    for row in rows:
        table.add_row(*row)
    table.add_section()
    table.add_row(*total)
    _print(table)
    table = Table(box=box.SIMPLE_HEAD, title=f"Memory to train with batches of {batch}", title_justify="left")
    for heading in ("", "weights", f"optimizer ({recipe.optimizer.kind})", "one step", "in all"):
        table.add_column(heading, justify="right" if heading else "left")
    for way, needs in memory.items():
        table.add_row(
            f"votes {way}" if way else "", *map(_mebibytes, (needs.weights, needs.optimizer, needs.step, needs.total))
        )
    _print(table)
    if summary.votes:
        votes = next(iter(memory.values())).votes
        print(f"The votes of a batch, were they stored, are {_mebibytes(votes)}. {_who_streams(model, batch)}")
    print(f"Trained by default with {shortened(recipe)}.")


def _who_streams(model: Network, batch: int) -> str:
    """Say which capsule layers stream their votes at this batch, as they are set."""
    names = streaming_layers(model, batch)
    return (
        f"As the model is set, it streams those of {', '.join(names)}." if names else "As the model is set, they are."
    )


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB" if size < 10 * 2**30 else f"{size / 2**30:,.1f} GiB"


def _as_json(model: Network, summary: Summary, memory: dict[str, TrainingMemory], batch: int) -> dict[str, Any]:
    return {
        "name": model.name,
        "paper": MODELS[model.name].paper,
        "published": MODELS[model.name].published,
        "parameters": model.n_parameters,
        "multiply_adds": summary.multiply_adds,
        "layers": [dataclasses.asdict(row) for row in summary.rows],
        "batch": batch,
        "memory": {way or "all": dataclasses.asdict(needs) for way, needs in memory.items()},
    }


# ----------------------------------------------------------------------------------------------------------


def _table(*headings: str, right: tuple[str, ...] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for heading in headings:
        numbers = heading in right
        table.add_column(heading, justify="right" if numbers else "left", no_wrap=numbers)
    return table


def _print(table: Table) -> None:
    """Print a table: as wide as the terminal, or on a pipe as wide as it needs."""
    width = None if sys.stdout.isatty() else 400
    console = Console(width=width)
    with console.capture() as capture:
        console.print(table)
    lines = [line.rstrip() for line in capture.get().splitlines()]
    print("\n".join(lines).strip("\n") + "\n")


if __name__ == "__main__":
    main()
