"""``torchcaps list`` and ``torchcaps show``."""

import dataclasses
import json
import sys
import typing
from typing import Any

import torch
from rich.console import Console

from torchcaps.cli.console import print_table, start_table
from torchcaps.cli.parser import Parser, add_fields, kind_of
from torchcaps.cli.words import Flags
from torchcaps.models import Network, Recipe, create_model
from torchcaps.models.registry import MODELS
from torchcaps.models.spec import CapsuleSpec, ModelSpec
from torchcaps.nn.layers import KERNEL_BYTES, KERNEL_LANES, STORED_BYTES, CapsuleLayer
from torchcaps.profiling.memory import TrainingMemory, estimate_memory, streaming_layers
from torchcaps.profiling.summary import Summary, shortened, summarize

__all__ = ["list_command", "show_command"]

WIDE = 128  # columns that the whole list takes


# list ------------------------------------------------------------------------------------------------------


def list_command(words: list[str]) -> None:
    """Print the models."""
    parser = Parser(
        prog="torchcaps list",
        description="The models, with paper, data, parameters (and what the paper prints) and routing. "
        "Example: torchcaps list tsai2020 --json",
    )
    parser.add_argument("pattern", nargs="?", default="", help="only those with this in their name, paper or data")
    parser.add_argument("--json", action="store_true", help="for machines")
    options = parser.parse_args(words)
    rows = [_listed(name) for name in MODELS]
    wanted = options.pattern.lower()
    rows = [row for row in rows if any(wanted in row[key].lower() for key in ("name", "paper", "data"))]
    if not rows:
        parser.error(f"no model has {options.pattern!r} in its name, paper or data")
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    narrow = sys.stdout.isatty() and Console().width < WIDE
    columns = ["model", "parameters"] if narrow else ["model", "paper", "data", "parameters", "published"]
    table = start_table(*columns, "routing", right=("parameters", "published"))
    table.columns[-1].no_wrap, table.columns[-1].overflow = True, "ellipsis"
    for row in rows:
        cells = {**row, "model": row["name"], "parameters": f"{row['parameters']:,}"}
        table.add_row(*(cells[column] for column in columns), row["routing"])
    print_table(table)
    if narrow:
        print(f"A terminal of {WIDE} columns has room for paper, data and published counts too; --json has all.")


def _listed(name: str) -> dict[str, Any]:
    entry = MODELS.get(name)
    with torch.device("meta"):
        model = create_model(name)
    routing = entry.spec.effective_routing if isinstance(entry.spec, CapsuleSpec) else None
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
        "takes on a CPU. Nothing is trained. Any field of the model is a flag: 'torchcaps show MODEL --help'. "
        "Example: torchcaps show tsai2020_cifar10 --image 3x64x64 --classes 196 --routing em --batch 32",
    )
    parser.add_argument("name", help="as 'torchcaps list' has it")
    parser.add_argument("--batch", type=int, default=None, help="images in a batch (default: the recipe's)")
    parser.add_argument("--json", action="store_true", help="for machines")
    name = _model_name(words)
    spec = None if name is None else MODELS.get(name).spec
    if spec is not None:
        parser.prog = f"torchcaps show {name}"
        chosen_routing = any(word.partition("=")[0] == "--routing" for word in words)
        add_fields(parser, spec, chosen_routing)
        words, _ = _flags(parser, spec).read(parser, words)
    options = parser.parse_args(words)
    assert spec is not None, "the parser requires a name"
    if options.batch is not None and options.batch < 1:
        parser.error(f"--batch must be 1 or more, got {options.batch}")
    chosen = parser.instantiate(options)
    with torch.device("meta"):
        model = create_model(options.name, **{field.name: chosen[field.name] for field in dataclasses.fields(spec)})
    batch = options.batch or model.recipe.batch_size
    summary = summarize(model)
    if options.json:
        print(json.dumps(_as_json(model, summary, _memory(model, summary, batch), batch), indent=2))
    else:
        _show_layers(model, summary)
        _show_memory(model, summary, _memory(model, summary, batch), batch)


def _model_name(words: list[str]) -> str | None:
    """Return the word that is the model's name: it may stand anywhere among the flags."""
    known = [word for word in words if word in MODELS]
    if known:
        return known[0]
    pairs = zip(["", *words], words, strict=False)
    free = [w for before, w in pairs if not w.startswith("-") and (not before.startswith("--") or before == "--json")]
    return free[0] if free else None


def _flags(parser: Parser, spec: ModelSpec) -> Flags:
    """Return the flags of a model."""
    kinds = {f"--{field.name}": kind_of(spec, field.name) for field in dataclasses.fields(spec)}
    tuples = [flag for flag, kind in kinds.items() if typing.get_origin(kind) is tuple]
    switches = [flag for flag, kind in kinds.items() if kind is bool]
    return Flags(parser.flags, tuples, [*switches, "--json"], who="this model")


def _memory(model: Network, summary: Summary, batch: int) -> dict[str, TrainingMemory]:
    """Estimate what training takes, with votes stored and streamed where there are any."""
    ways: dict[str, Any] = {"stored": False, "streamed": True} if summary.votes else {"": None}
    with Console(stderr=True).status("working out the memory"):
        return {way: estimate_memory(model, batch, streamed) for way, streamed in ways.items()}


def _show_layers(model: Network, summary: Summary) -> None:
    entry = MODELS.get(model.name)
    paper = f"{entry.paper}, " if entry.paper else ""
    published = f" (the paper prints {entry.published})" if entry.published and model.spec == entry.spec else ""
    print(f"{summary.title}\n{paper}{model.n_parameters:,} parameters{published}\n")
    head, *rows, total = summary.cells()
    table = start_table(*head, right=head[3:])
    for row in rows:
        table.add_row(*row)
    table.add_section()
    table.add_row(*total)
    print_table(table)


def _show_memory(model: Network, summary: Summary, memory: dict[str, TrainingMemory], batch: int) -> None:
    print(f"Memory to train on a CPU with batches of {batch}, MiB:")
    columns = ("weights", model.recipe.optimizer.name, "tensors of a step", "holes, spare", "in all")
    table = start_table("", *columns, right=columns)
    for way, needs in memory.items():
        parts = (needs.weights, needs.optimizer, needs.step)
        sizes = (*parts, needs.total - sum(parts), needs.total)
        table.add_row(f"votes {way}" if way else "", *(f"{size / 2**20:,.1f}" for size in sizes))
    print_table(table)
    votes = next(iter(memory.values())).votes / 2**20
    if votes:
        names = streaming_layers(model, summary, batch)
        streams = f"it streams those of {', '.join(names)}" if names else "they are"
        print(f"The votes of a batch, were they stored, are {votes:,.1f} MiB. As the model is set, {streams}.")
        layers = [layer for layer in model.modules() if isinstance(layer, CapsuleLayer) and layer.streamed == "auto"]
        if any(layer.has_kernel() for layer in layers):
            print(
                f"By itself a layer streams votes from {KERNEL_BYTES / 2**20:g} MiB on ({STORED_BYTES / 2**20:g} MiB "
                f"for fewer than {KERNEL_LANES} images times places): from there on the compiled kernel is faster."
            )
        elif layers:
            print(
                f"By itself a layer streams votes from {STORED_BYTES / 2**20:g} MiB on; there is no compiled kernel "
                "here for these layers, with which streaming would pay from smaller ones on."
            )
    print(f"Trained by default with {_in_words(model.recipe)}.")


def _in_words(recipe: Recipe) -> str:
    """Say how a recipe trains."""
    loss, optimizer = recipe.loss, recipe.optimizer
    long = f"{recipe.epochs:,} epochs" if recipe.epochs else f"{recipe.steps:,} steps"
    parts = [
        f"the {loss.name.replace('_', '-')} loss",
        f"{optimizer.name} at {optimizer.lr:g}",
        str(recipe.lr_schedule),
    ]
    parts += [f"batches of {recipe.batch_size}", long, f"on {recipe.data}"]
    return ", ".join(parts + ([f"tested on {recipe.test_data}"] if recipe.test_data else []))


def _as_json(model: Network, summary: Summary, memory: dict[str, TrainingMemory], batch: int) -> dict[str, Any]:
    return {
        "name": model.name,
        "paper": MODELS.get(model.name).paper,
        "published": MODELS.get(model.name).published if model.spec == MODELS.get(model.name).spec else "",
        "fields": {field.name: _plain(getattr(model.spec, field.name)) for field in dataclasses.fields(model.spec)},
        "parameters": model.n_parameters,
        "multiply_adds": summary.multiply_adds,
        "layers": [dataclasses.asdict(row) for row in summary.rows],
        "batch": batch,
        "memory": {way or "all": dataclasses.asdict(needs) for way, needs in memory.items()},
        "recipe": {field.name: _plain(getattr(model.recipe, field.name)) for field in dataclasses.fields(model.recipe)},
    }


def _plain(value: Any) -> Any:
    """Return a value as JSON has it; what one chooses, such as a routing, with its kind and its fields."""
    if not dataclasses.is_dataclass(value):
        return value
    return {"kind": type(value).__name__} | {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
