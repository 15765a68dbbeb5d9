"""``torchcaps evaluate``."""

import json
import os
import sys
from typing import Any

from rich.console import Console
from rich.progress import Progress

from torchcaps.cli.command_line import CommandLine
from torchcaps.cli.console import escape_control, percent, print_table, print_text, start_table
from torchcaps.cli.options import (
    add_data_flags,
    add_device_flag,
    add_run_flags,
    check_positive,
    load_runs,
    names_own_data,
    open_dataset,
    set_num_threads,
)
from torchcaps.cli.parser import Parser
from torchcaps.data import Dataset
from torchcaps.training.evaluation import Evaluation
from torchcaps.training.inference import TrainedRun, evaluate_runs
from torchcaps.training.setup import limit_images

__all__ = ["evaluate_command", "make_evaluate_parser"]

MAX_CONFUSIONS_SHOWN = 3  # most frequent incorrect predictions per class
DESCRIPTION = (
    "Evaluate a run on its test set or on another data set: accuracy with Wilson's 95 % interval, accuracy per class, "
    "and loss. Several runs are also evaluated as an ensemble, by the mean of their scores, as in the papers."
)
EXAMPLES = (
    "torchcaps evaluate runs/capsnet_digits-digits-1",
    "torchcaps evaluate runs/capsnet_digits-digits-*",
    "torchcaps evaluate runs/my_images-1 --data ./new_images",
    "torchcaps evaluate model.onnx --data digits",
    "torchcaps evaluate runs/sabour2017_affnist-expanded-mnist-1 --data affnist-style",
)


def evaluate_command(arguments: list[str]) -> None:
    """Evaluate runs."""
    line = CommandLine.split(arguments)
    parser = make_evaluate_parser(line)
    options, _ = parser.parse(line)
    check_positive(parser, options, "num_threads", "max_images")
    if len({os.path.realpath(os.path.expanduser(run)) for run in options.runs}) < len(options.runs):
        parser.error(f"each run of an ensemble must be a different directory, got {', '.join(options.runs)}")
    set_num_threads(options)
    runs = load_runs(options.runs, options, options.weights)
    dataset = open_dataset(runs[0], options)
    if options.split in ("train", "all") and names_own_data(runs[0], options.data):
        text = f"the split {dataset.split!r} contains images that the run was trained on"
        print(f"torchcaps: {text}", file=sys.stderr)
    results = _evaluate(runs, limit_images(dataset, options.max_images))
    if options.json:
        print(json.dumps(_to_json(runs, dataset, results), indent=2))
    else:
        _print_results(runs, dataset, results)


def make_evaluate_parser(line: CommandLine) -> Parser:
    """Return the parser of ``torchcaps evaluate``, with the fields of the data set that the command line names."""
    parser = Parser("torchcaps evaluate", DESCRIPTION, examples=EXAMPLES)
    parser.add_argument("runs", nargs="+", help="run directories, or ONNX files written by torchcaps export")
    add_data_flags(parser, line)
    text = "evaluate on at most this number of images: a fixed random subset (default: all)"
    parser.add_argument("--max-images", type=int | None, help=text)
    add_run_flags(parser)
    add_device_flag(parser)
    return parser


def _evaluate(runs: list[TrainedRun], dataset: Dataset) -> dict[str, Evaluation]:
    """Return the evaluation of each run and, for several runs, of their ensemble."""
    groups = {str(run.path): [run] for run in runs}
    if len(runs) > 1:
        groups["ensemble"] = runs
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bar:
        batch_size = min(run.batch_size for run in runs)
        task = bar.add_task("evaluating", total=len(groups) * -(-len(dataset) // batch_size))
        return {name: evaluate_runs(group, dataset, lambda: bar.advance(task)) for name, group in groups.items()}


def _print_results(runs: list[TrainedRun], dataset: Dataset, results: dict[str, Evaluation]) -> None:
    """Print accuracy and loss of each run and ensemble, then the accuracy by class of the last of them."""
    for run in runs:
        if run.note:
            print(f"torchcaps: {escape_control(run.note)}", file=sys.stderr)
    print(f"{escape_control(dataset.name)}, {dataset.split}: {next(iter(results.values())).n:,} images\n")
    headings = ["run", "weights", "accuracy", "95 % interval", "incorrect", "loss"]
    is_unbalanced = next(iter(results.values())).is_unbalanced
    if is_unbalanced:
        headings.insert(3, "balanced")
    table = start_table(*headings, right=("accuracy", "balanced", "incorrect", "loss"))
    weights = [run.weights for run in runs] + [""]
    for (name, evaluation), kind in zip(results.items(), weights, strict=False):
        low, high = evaluation.interval
        interval = f"{100 * low:.2f} to {100 * high:.2f} %"
        incorrect = f"{evaluation.n - evaluation.n_correct:,}"
        balanced = [percent(evaluation.balanced_accuracy)] if is_unbalanced else []
        accuracies = [percent(evaluation.accuracy), *balanced]
        table.add_row(name, kind, *accuracies, interval, incorrect, _loss_text(runs, evaluation))
    print_table(table)
    if is_unbalanced:
        print_text("balanced: mean of the accuracies per class, since some classes have more images than others.")
        print()
    evaluation = list(results.values())[-1]
    table = start_table("class", "images", "accuracy", "often predicted as", right=("images", "accuracy"))
    for index, (count, correct) in enumerate(zip(evaluation.class_counts, evaluation.class_correct, strict=True)):
        accuracy = percent(correct / count) if count else ""
        table.add_row(
            dataset.classes[index], f"{count:,}", accuracy, _confused_with(evaluation, index, dataset.classes)
        )
    print_table(table)


def _loss_text(runs: list[TrainedRun], evaluation: Evaluation) -> str:
    """Return the loss; empty if it is not known, because a model is in an ONNX file."""
    return "" if any(run.weights == "onnx" for run in runs) else f"{evaluation.loss:.4f}"


def _confused_with(evaluation: Evaluation, index: int, classes: tuple[str, ...]) -> str:
    """Return the most frequent incorrect predictions for images of a class, with their counts."""
    if not evaluation.confusion:
        return ""
    others = [(count, other) for other, count in enumerate(evaluation.confusion[index]) if other != index and count]
    others.sort(key=lambda pair: (-pair[0], pair[1]))
    return ", ".join(f"{classes[other]} ({count:,})" for count, other in others[:MAX_CONFUSIONS_SHOWN])


def _to_json(runs: list[TrainedRun], dataset: Dataset, results: dict[str, Evaluation]) -> dict[str, Any]:
    """Return the content of ``--json``."""
    return {
        "data": dataset.name,
        "split": dataset.split,
        "classes": list(dataset.classes),
        "weights": {str(run.path): run.weights for run in runs},
        "results": {name: evaluation.to_json() for name, evaluation in results.items()},
    }
