"""``torchcaps evaluate``."""

import json
import os
import sys
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import Progress

from torchcaps.cli.console import print_table, start_table
from torchcaps.cli.images import BELOW, add_data_flags, chosen_images
from torchcaps.cli.parser import Parser
from torchcaps.cli.runs import share
from torchcaps.cli.words import Flags
from torchcaps.training.evaluation import Measures
from torchcaps.training.inference import Trained, load_run, measure
from torchcaps.training.run import measures_json
from torchcaps.training.setup import some_of

__all__ = ["evaluate_command"]

DESCRIPTION = (
    "Test a run on its own test images or on others: accuracy with Wilson's 95 % interval, by class, and the loss. "
    "Several runs together are an ensemble, the mean of their scores, as the papers do. "
    "Examples: torchcaps evaluate runs/capsnet_small-digits-1; torchcaps evaluate runs/capsnet_small-digits-*; "
    "torchcaps evaluate runs/sabour2017_affnist-expanded-mnist-1 --data affnist-style"
)


def evaluate_command(words: list[str]) -> None:
    """Test runs."""
    sys.path.insert(0, os.getcwd())
    parser = Parser(prog="torchcaps evaluate", description=DESCRIPTION)
    parser.add_argument("runs", nargs="+", help="folders of runs")
    add_data_flags(parser, words)
    parser.add_argument(
        "--weights",
        type=Literal["last", "best", "ema"] | None,
        help="last, best or average (default: as the run's recipe says)",
    )
    parser.add_argument("--max-test-images", type=int | None, help="at most so many images, always the same ones")
    parser.add_argument("--num-threads", type=int | None, help="of the CPU")
    parser.add_argument("--json", action="store_true", help="for machines")
    flags = Flags(parser.flags, switches={"--json"}, below=BELOW, who="evaluate")
    words, _ = flags.read(parser, words)
    options = parser.parse_args(words)
    for name in ("num_threads", "max_test_images"):
        if options[name] is not None and options[name] < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more, got {options[name]}")
    if len({os.path.realpath(os.path.expanduser(run)) for run in options.runs}) < len(options.runs):
        parser.error("each run once: a run with itself is no ensemble")
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    runs = [load_run(path, options.weights) for path in options.runs]
    dataset = chosen_images(runs[0], options)
    results = _measured(runs, some_of(dataset, options.max_test_images))
    if options.json:
        print(json.dumps(_as_json(runs, dataset, results), indent=2))
    else:
        _show(runs, dataset, results)


def _measured(runs: list[Trained], dataset: Any) -> dict[str, Measures]:
    """Test each run, and where there are several all of them together."""
    groups = {str(run.path): [run] for run in runs}
    if len(runs) > 1:
        groups["together"] = runs
    console = Console(stderr=True)
    with Progress(console=console, disable=not sys.stderr.isatty(), transient=True) as bar:
        size = min(run.spec.recipe.batch_size for run in runs)
        task = bar.add_task("testing", total=sum(-(-len(dataset) // size) for _ in groups))
        return {name: measure(group, dataset, lambda: bar.advance(task)) for name, group in groups.items()}


def _show(runs: list[Trained], dataset: Any, results: dict[str, Measures]) -> None:
    for run in runs:
        if run.note:
            print(f"torchcaps: {run.note}", file=sys.stderr)
    print(f"{dataset.name}, {dataset.split}: {next(iter(results.values())).n:,} images\n")
    table = start_table("run", "weights", "right", "95 % interval", "wrong", "loss", right=("right", "wrong", "loss"))
    kinds = [run.weights for run in runs] + [""]
    for (name, found), kind in zip(results.items(), kinds, strict=False):
        low, high = found.interval
        between = f"{100 * low:.2f} to {100 * high:.2f} %"
        table.add_row(name, kind, share(found.accuracy), between, f"{found.n - found.n_right:,}", f"{found.loss:.4f}")
    print_table(table)
    found = list(results.values())[-1]
    table = start_table("class", "images", "found", "taken for", right=("images", "found"))
    order = range(len(found.seen))
    for number in order:
        taken = _taken_for(found, number, dataset.classes)
        part = share(found.found[number] / found.seen[number]) if found.seen[number] else ""
        table.add_row(dataset.classes[number], f"{found.seen[number]:,}", part, taken)
    print_table(table)


def _taken_for(found: Measures, number: int, classes: tuple[str, ...]) -> str:
    """Return what a class is most often mistaken for."""
    if not found.confusion:
        return ""
    others = [(count, other) for other, count in enumerate(found.confusion[number]) if other != number and count]
    return ", ".join(
        f"{classes[other]} ({count:,})" for count, other in sorted(others, key=lambda x: (-x[0], x[1]))[:3]
    )


def _as_json(runs: list[Trained], dataset: Any, results: dict[str, Measures]) -> dict[str, Any]:
    return {
        "data": dataset.name,
        "split": dataset.split,
        "classes": list(dataset.classes),
        "weights": {str(run.path): run.weights for run in runs},
        "results": {name: measures_json(found) for name, found in results.items()},
    }
