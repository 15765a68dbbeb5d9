"""``torchcaps list`` and ``torchcaps show``."""

import dataclasses
import fnmatch
import json
from typing import Any

import torch
from rich.console import Console

from torchcaps._core.machine import native_bfloat16
from torchcaps._core.serialize import to_plain
from torchcaps.cli.command_line import CommandLine, append_working_directory, flag_of
from torchcaps.cli.console import print_table, print_text, start_table, terminal_width
from torchcaps.cli.parser import Parser, add_fields, annotation_of
from torchcaps.models import Network, Recipe, create_model, list_models
from torchcaps.models.registry import find_model
from torchcaps.models.spec import CapsuleSpec
from torchcaps.nn.layers import CapsuleLayer
from torchcaps.profiling.memory import TrainingMemory, estimate_memory
from torchcaps.profiling.summary import ModelSummary, layer_paths, short_repr, summarize
from torchcaps.votes.dispatch import describe_auto, kernel_is_fast

__all__ = ["list_command", "show_command"]

FULL_WIDTH = 128  # columns of the table with all columns


# list ------------------------------------------------------------------------------------------------------


def list_command(arguments: list[str]) -> None:
    """Print a table of the models."""
    parser = Parser(
        "torchcaps list",
        "List the models with paper, data set, number of parameters (and as published) and routing.",
        examples=["torchcaps list tsai2020 --json"],
    )
    text = "list models with this text, or matching wildcards such as 'tsai2020_*', in name, paper or data set"
    text += " (default: all)"
    parser.add_argument("pattern", nargs="?", default="", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options, _ = parser.parse(arguments)
    pattern = options.pattern.lower()
    rows = [_model_row(name) for name in list_models()]
    wildcards = pattern if any(character in pattern for character in "*?[") else f"*{pattern}*"
    keys = ("name", "paper", "data")
    rows = [row for row in rows if any(fnmatch.fnmatchcase(row[key].lower(), wildcards) for key in keys)]
    if not rows:
        parser.error(f"no model has {options.pattern!r} in its name, paper or data set; 'torchcaps list' shows all")
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    width = terminal_width()
    is_narrow = width is not None and width < FULL_WIDTH
    columns = ["model", "parameters"] if is_narrow else ["model", "paper", "data", "parameters", "published"]
    table = start_table(*columns, "routing", right=("parameters", "published"))
    table.columns[-1].no_wrap, table.columns[-1].overflow = True, "ellipsis"
    for row in rows:
        cells = {**row, "model": row["name"], "parameters": f"{row['parameters']:,}"}
        table.add_row(*(cells[column] for column in columns), row["routing"])
    print_table(table)
    if is_narrow:
        print_text(f"Paper, data set and published counts need a terminal of {FULL_WIDTH} columns, or --json.")


def _model_row(name: str) -> dict[str, Any]:
    """Return the row of a model in ``torchcaps list``."""
    entry = find_model(name)
    with torch.device("meta"):
        model = create_model(name)
    routing = entry.spec.effective_routing if isinstance(entry.spec, CapsuleSpec) else None
    return {
        "name": name,
        "paper": entry.paper,
        "data": model.recipe.data,
        "parameters": model.n_parameters,
        "published": entry.published,
        "routing": "" if routing is None else short_repr(routing),
    }


# show ------------------------------------------------------------------------------------------------------


def show_command(arguments: list[str]) -> None:
    """Print the layers of a model and the memory of a training step."""
    line = CommandLine.split(arguments, _switches())
    parser = Parser(
        "torchcaps show",
        "Print the layers of a model with output shapes, parameters and multiply-adds, and the memory that training "
        "needs on a CPU. Nothing is trained. Each field of the model is a flag: 'torchcaps show MODEL --help'.",
        examples=["torchcaps show tsai2020_cifar10 --image 3x64x64 --classes 196 --routing em --batch-size 32"],
    )
    parser.add_argument("name", help="name of a model (see 'torchcaps list') or import path of a ModelSpec")
    parser.add_argument("--batch-size", type=int | None, help="number of images per batch (default: as in the recipe)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    if line.positionals:
        append_working_directory([line.positionals[0], line.get("--routing")])
        parser.prog = f"torchcaps show {line.positionals[0]}"
        add_fields(parser, find_model(line.positionals[0]).spec, "model_options", line)
    options, _ = parser.parse(line)
    if options.batch_size is not None and options.batch_size < 1:
        parser.error(f"--batch-size must be at least 1, got {options.batch_size}")
    chosen = parser.instantiate(options)
    with torch.device("meta"):
        model = create_model(options.name, **dict(chosen.model_options))
    batch_size = options.batch_size or model.recipe.batch_size
    summary = summarize(model)
    memory = _estimate_memory(model, summary, batch_size)
    if options.json:
        print(json.dumps(_to_json(model, summary, memory, batch_size), indent=2))
    else:
        _print_layers(model, summary)
        _print_memory(model, summary, memory, batch_size)


def _switches() -> set[str]:
    """Return the boolean flags of all registered models."""
    specs = [find_model(name).spec for name in list_models()]
    return {flag_of(f.name) for spec in specs for f in dataclasses.fields(spec) if annotation_of(spec, f.name) is bool}


def _estimate_memory(model: Network, summary: ModelSummary, batch_size: int) -> dict[str, TrainingMemory]:
    """Return the estimated memory of a training step, for stored and for streamed votes if the model has votes."""
    modes: dict[str, Any] = {"stored": False, "streamed": True} if summary.votes else {"all": None}
    with Console(stderr=True).status("estimating memory"):
        return {mode: estimate_memory(model, batch_size, streamed) for mode, streamed in modes.items()}


def _print_layers(model: Network, summary: ModelSummary) -> None:
    """Print the layer table of a model."""
    entry = find_model(model.name)
    paper = f"{entry.paper}, " if entry.paper else ""
    published = f" (published: {entry.published})" if entry.published and model.spec == entry.spec else ""
    print_text(summary.title, "  ")
    print_text(f"{paper}{model.n_parameters:,} parameters{published}")
    print()
    head, *rows, total = summary.cells()
    table = start_table(*head, right=head[3:])
    for row in rows:
        table.add_row(*row)
    table.add_section()
    table.add_row(*total)
    print_table(table)


def _print_memory(model: Network, summary: ModelSummary, memory: dict[str, TrainingMemory], batch_size: int) -> None:
    """Print the estimated training memory, and the path of each capsule layer."""
    print_text(f"Memory to train on a CPU with batches of {batch_size}, MiB:")
    columns = ("weights", f"{model.recipe.optimizer.name} state", "tensors of a step", "overhead", "total")
    table = start_table("", *columns, right=columns)
    for mode, needs in memory.items():
        parts = (needs.weights, needs.optimizer, needs.step)
        sizes = (*parts, needs.total - sum(parts), needs.total)
        table.add_row("" if mode == "all" else f"votes {mode}", *(f"{size / 2**20:,.1f}" for size in sizes))
    print_table(table)
    votes = next(iter(memory.values())).votes / 2**20
    if votes:
        paths = layer_paths(model, summary, batch_size)
        print_text(f"Stored votes of a batch take {votes:,.1f} MiB. As configured:")
        for name, path in paths.items():
            print_text(f"  {name}: {path.value}", "    ")
        layers = [layer for layer in model.modules() if isinstance(layer, CapsuleLayer) and layer.streamed == "auto"]
        if layers:
            print_text(describe_auto(any(kernel_is_fast(layer.weight) for layer in layers)))
    if advice := precision_advice(summary):
        print_text(advice)
    print_text(f"Default recipe: {_recipe_text(model.recipe)}.")


def precision_advice(summary: ModelSummary, features: str | None = None) -> str | None:
    """Return a recommendation of bfloat16, or ``None`` if it would not be faster.

    The routing stays in float32, so that the layers without votes must be at least half of the arithmetic.

    Args:
        summary: the model.
        features: see `torchcaps._core.machine.native_bfloat16`.
    """
    native = native_bfloat16(features)
    outside = sum(row.multiply_adds for row in summary.rows if not row.votes)
    if native is None or 2 * outside < summary.multiply_adds:
        return None
    return (
        f"This processor multiplies bfloat16 natively ({native}) and {outside / summary.multiply_adds:.0%} of the "
        "multiply-adds are outside of capsule layers: train with --precision bf16-mixed."
    )


def _recipe_text(recipe: Recipe) -> str:
    """Return a recipe in one line."""
    optimizer = recipe.optimizer
    parts = [
        f"{recipe.loss.name.replace('_', '-')} loss",
        f"{optimizer.name} with lr {optimizer.lr:g}",
        str(recipe.lr_schedule),
        f"batch size {recipe.batch_size}",
        f"{recipe.epochs:,} epochs" if recipe.epochs else f"{recipe.steps:,} steps",
        f"on {recipe.data}",
    ]
    return ", ".join(parts + ([f"tested on {recipe.test_data}"] if recipe.test_data else []))


def _to_json(
    model: Network, summary: ModelSummary, memory: dict[str, TrainingMemory], batch_size: int
) -> dict[str, Any]:
    """Return the content of ``--json``."""
    entry = find_model(model.name)
    return {
        "name": model.name,
        "paper": entry.paper,
        "published": entry.published if model.spec == entry.spec else "",
        "fields": to_plain(model.spec),
        "parameters": model.n_parameters,
        "multiply_adds": summary.multiply_adds,
        "layers": [dataclasses.asdict(row) for row in summary.rows],
        "batch_size": batch_size,
        "memory": {mode: dataclasses.asdict(needs) for mode, needs in memory.items()},
        "recipe": to_plain(model.recipe),
    }
