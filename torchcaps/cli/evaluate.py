"""``torchcaps evaluate``."""

import dataclasses
import json
import os
import sys
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import Progress

from torchcaps.cli.parser import Parser, described, kind_of
from torchcaps.cli.runs import share
from torchcaps.cli.tables import print_table, start_table
from torchcaps.cli.words import Flags
from torchcaps.data.registry import create_dataset, find_spec, is_folder
from torchcaps.training.loading import Trained, load_run, measure
from torchcaps.training.measure import Measures
from torchcaps.training.names import find_data
from torchcaps.training.run import measures_json
from torchcaps.training.setting import open_test, some_of

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
    parser.add_argument("--data", type=str | None, help="another data set, or a folder of images")
    parser.add_argument("--split", default="test", help="which part of it")
    parser.add_argument("--data-dir", type=str | None, help="the data folder (default: the run's, else TORCHCAPS_DATA)")
    parser.add_argument(
        "--weights",
        type=Literal["last", "best", "average"] | None,
        help="last, best or average (default: as the run's recipe says)",
    )
    parser.add_argument("--test-images", type=int | None, help="at most so many images, always the same ones")
    parser.add_argument("--threads", type=int | None, help="of the CPU")
    parser.add_argument("--json", action="store_true", help="for machines")
    data = next((w for b, w in zip(["", *words], words, strict=False) if b == "--data"), None)
    data = data or next((w.partition("=")[2] for w in words if w.startswith("--data=")), None)
    spec = None if data is None else find_spec("folder") if is_folder(data) else find_spec(find_data(data))
    for field in dataclasses.fields(spec) if spec is not None else ():
        text = described(type(spec), field.name)
        parser.add_argument(f"--data-options.{field.name}", type=kind_of(spec, field.name) | None, help=text)
    parser.shown = {"--data-options.": "--data."}
    flags = Flags(parser.flags, switches={"--json"}, below={"--data.": "--data-options."}, who="evaluate")
    words, _ = flags.read(parser, words)
    options = parser.parse_args(words)
    for name in ("threads", "test_images"):
        if options[name] is not None and options[name] < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more, got {options[name]}")
    if len({os.path.realpath(os.path.expanduser(run)) for run in options.runs}) < len(options.runs):
        parser.error("each run once: a run with itself is no ensemble")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    runs = [load_run(path, options.weights) for path in options.runs]
    dataset = _dataset(runs[0], options)
    results = _measured(runs, some_of(dataset, options.test_images))
    if options.json:
        print(json.dumps(_as_json(runs, dataset, results), indent=2))
    else:
        _show(runs, dataset, results)


def _dataset(run: Trained, options: Any) -> Any:
    spec = run.spec
    if options.data_dir is not None:
        spec = dataclasses.replace(spec, data_dir=options.data_dir)
    chosen = {k: v for k, v in dict(options.get("data_options") or {}).items() if v is not None}
    if options.data is None and options.split == "test":
        found = open_test(spec)
        if found is None:
            raise ValueError(f"{run.path} has no test images: give some by --data")
        return found
    name = options.data or spec.how.data
    used = chosen if options.data is not None else dict(spec.data_options)
    root = None if is_folder(name) else spec.data_dir
    return create_dataset(name if is_folder(name) else find_data(name), options.split, root, **used)


def _measured(runs: list[Trained], dataset: Any) -> dict[str, Measures]:
    """Test each run, and where there are several all of them together."""
    groups = {str(run.path): [run] for run in runs}
    if len(runs) > 1:
        groups["together"] = runs
    console = Console(stderr=True)
    with Progress(console=console, disable=not sys.stderr.isatty(), transient=True) as bar:
        size = min(run.spec.how.batch_size for run in runs)
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
