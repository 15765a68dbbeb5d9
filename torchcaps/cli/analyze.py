"""``torchcaps analyze``: run a registered analysis on one or several run directories, as a table, JSON and a figure."""

import dataclasses
import difflib
import functools
import json
import os
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from torchcaps._core.optional import import_optional
from torchcaps._core.plotting import FIGURE_SUFFIXES
from torchcaps._core.serialize import to_json
from torchcaps._core.validation import FieldError
from torchcaps.analysis import ANALYSES, Analysis, AnalysisReport, Subject, Summary, run_analysis
from torchcaps.cli.command_line import CommandLine, flag_of
from torchcaps.cli.console import escape_control, print_table, print_text, start_table
from torchcaps.cli.options import (
    add_data_flags,
    add_device_flag,
    add_run_flags,
    check_positive,
    load_runs,
    open_dataset,
    output_path,
    set_num_threads,
)
from torchcaps.cli.parser import Parser, field_help
from torchcaps.data import Dataset
from torchcaps.training.inference import TrainedRun
from torchcaps.training.setup import limit_images

__all__ = ["analyze_command"]

DESCRIPTION = (
    "Run an analysis of a trained network: a table and a figure. The name of the analysis comes last; those marked * "
    "compare several runs. 'torchcaps analyze NAME --help' shows the options of one analysis."
)
EXAMPLES = (
    "torchcaps analyze runs/capsnet_digits-digits-1 perturbation --out figure.png",
    "torchcaps analyze runs/mine-1 runs/mine-2 affine",
    "torchcaps analyze runs/mine-1 attack --method pgd --eps 16 --source runs/mine-2",
)
BATCH_SIZE = 100  # images per forward pass


class _AnalyzeParser(Parser):
    """A parser whose help ends with the list of analyses, unless one of them is named."""

    analysis: Analysis | None = None

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        """Return the help text."""
        text = super().format_help(*args, **kwargs).rstrip("\n") + "\n"
        if self.analysis is not None:
            return text
        lines = []
        for name in ANALYSES:
            analysis = ANALYSES.get(name)
            mark = "*" if analysis.compares_models else ""
            options = ", ".join(map(flag_of, analysis.flags))
            lines.append(f"  {name + mark:<15} {analysis.description}" + (f" ({options})" if options else ""))
        return text + "\nanalyses:\n" + "\n".join(lines) + "\n"


def analyze_command(words: list[str]) -> None:
    """Run an analysis of one or several runs."""
    switches = {flag for name in ANALYSES for flag in _switches(ANALYSES.get(name))}
    line = CommandLine.split(words, switches)
    analysis = ANALYSES.get(line.positionals[-1]) if line.positionals and line.positionals[-1] in ANALYSES else None
    parser = _make_parser(analysis, line)
    if analysis is not None:
        _check_flags(parser, analysis, line)
    if len(line.positionals) == 1 and "--help" not in line and "-h" not in line:
        missing = "the name of the analysis is" if analysis is None else "the run directory is"
        parser.error(f"{missing} missing: torchcaps analyze RUN {'NAME' if analysis is None else analysis.name}")
    arguments, _ = parser.parse(line)
    if analysis is None:
        _reject_name(parser, arguments)
    _check_arguments(parser, analysis, arguments)
    out = _figure_path(parser, arguments)
    set_num_threads(arguments)
    runs = load_runs(arguments.runs, arguments, arguments.weights)
    if out is not None:
        import_optional("matplotlib.figure", "drawing")  # fail before the analysis runs, not after it
    dataset = open_dataset(runs[0], arguments)
    n_images = arguments.max_images or analysis.n_images
    dataset = dataset if n_images is None else limit_images(dataset, min(len(dataset), n_images))
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bar:
        subjects = [_subject(name, run, dataset, arguments, bar) for name, run in _run_names(runs).items()]
        try:
            report = run_analysis(analysis.name, subjects, **_options(analysis, dataset, arguments))
        except FieldError as error:
            parser.error(f"{flag_of(error.field)} {error.problem}")
    files = [] if out is None else report.draw(out)
    if arguments.json:
        print(json.dumps(_report_as_json(report, runs, dataset, files), indent=2))
    else:
        _print_report(report, runs, dataset, files)


# Flags --------------------------------------------------------------------------------------------------------------


def _make_parser(analysis: Analysis | None, line: CommandLine) -> _AnalyzeParser:
    """Return the parser with the flags of all analyses and, if one is named, its own."""
    parser = _AnalyzeParser(prog="torchcaps analyze", description=DESCRIPTION, examples=EXAMPLES)
    parser.analysis = analysis
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directories")
    parser.add_argument("analysis", metavar="NAME", help="name of the analysis; torchcaps analyze --help lists them")
    parser.add_argument(
        "--out", type=str | None, help="file of the figure, .png, .svg or .pdf (default: RUN/figures/NAME.png)"
    )
    default = "the whole data set" if analysis is None or analysis.n_images is None else f"{analysis.n_images:,}"
    default = "depends on the analysis" if analysis is None else default
    text = f"use at most this number of images: a fixed random subset (default: {default})"
    parser.add_argument("--max-images", type=int | None, help=text)
    add_run_flags(parser)
    add_device_flag(parser, "cpu")
    add_data_flags(parser, line)
    if analysis is not None:
        group = parser.add_argument_group(f"options of {analysis.name}: {analysis.description}")
        for field in dataclasses.fields(analysis.options):
            kind = str | None if _is_run(analysis, field.name) else _option_type(analysis, field.name)
            text = field_help(analysis.options, field.name)
            group.add_argument(flag_of(field.name), type=kind, default=field.default, help=text)
    return parser


def _option_type(analysis: Analysis, option: str) -> Any:
    """Return the type of an option of an analysis."""
    return typing.get_type_hints(analysis.options)[option]


def _is_run(analysis: Analysis, option: str) -> bool:
    """Return whether an option is another network, given by its run directory."""
    return Subject in (kind := _option_type(analysis, option), *typing.get_args(kind))


def _switches(analysis: Analysis) -> list[str]:
    """Return the flags of an analysis that need no value."""
    return [flag_of(option) for option in analysis.flags if _option_type(analysis, option) is bool]


def _check_flags(parser: Parser, analysis: Analysis, line: CommandLine) -> None:
    """Reject flags that are options of other analyses only."""
    for flag in sorted(line.names):
        option = flag.removeprefix("--").replace("-", "_")
        if option not in analysis.flags:
            owners = [name for name in ANALYSES if option in ANALYSES.get(name).flags]
            if owners:
                parser.error(f"{flag_of(option)} is an option of {', '.join(owners)}, not of {analysis.name}")


def _reject_name(parser: Parser, arguments: Any) -> typing.NoReturn:
    """Exit with an error for an unknown analysis, or one whose name is in the wrong position."""
    if arguments.runs[0] in ANALYSES:
        parser.error(f"the name of the analysis comes last: torchcaps analyze RUN {arguments.runs[0]}")
    close = difflib.get_close_matches(arguments.analysis, ANALYSES, n=2, cutoff=0.5)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    known = ", ".join(ANALYSES)
    parser.error(f"the last argument must be an analysis, one of {known}, got {arguments.analysis!r}{hint}")


def _check_arguments(parser: Parser, analysis: Analysis, arguments: Any) -> None:
    """Reject values that do not fit the analysis."""
    if len(arguments.runs) > 1 and not analysis.compares_models:
        several = ", ".join(name for name in ANALYSES if ANALYSES.get(name).compares_models)
        parser.error(
            f"{analysis.name} takes one run, got {len(arguments.runs)}; analyses that compare several runs: {several}"
        )
    if len({os.path.realpath(os.path.expanduser(run)) for run in arguments.runs}) < len(arguments.runs):
        parser.error(f"each run can be given once, got {', '.join(arguments.runs)}")
    check_positive(parser, arguments, "num_threads", "max_images")
    if arguments.max_images is not None and analysis.n_images is None:
        parser.error(f"--max-images does not apply to {analysis.name}, which generates its images: see its options")


def _figure_path(parser: Parser, arguments: Any) -> Path | None:
    """Return the file of the figure; ``None`` if none is drawn."""
    if arguments.out is None:
        directory = Path(arguments.runs[0]).expanduser()
        return None if arguments.json else output_path(directory, f"figures/{arguments.analysis}.png")
    out = Path(arguments.out).expanduser()
    if out.suffix.lower() not in FIGURE_SUFFIXES:
        parser.error(f"--out must end in {', '.join(FIGURE_SUFFIXES)}, got {arguments.out!r}")
    return out


def _options(analysis: Analysis, dataset: Dataset, arguments: Any) -> dict[str, Any]:
    """Return the options of the analysis; a run directory becomes a subject."""
    values = {}
    for option in analysis.flags:
        value = arguments[option]
        if value is not None and _is_run(analysis, option):
            (run,) = load_runs([value], arguments)
            value = Subject(str(run.path), run.model, run.loader(dataset), batch_size=_batch_size(run))
        values[option] = value
    return values


# Runs ---------------------------------------------------------------------------------------------------------------


def _run_names(runs: list[TrainedRun]) -> dict[str, TrainedRun]:
    """Return runs by the names of their directories, or by their paths if two have the same name."""
    names = [run.path.resolve().name for run in runs]
    unique = len(set(names)) == len(names)
    return {name if unique else str(run.path): run for name, run in zip(names, runs, strict=True)}


def _batch_size(run: TrainedRun) -> int:
    """Return the number of images per forward pass, limited if the settings of the run ask for much memory."""
    return BATCH_SIZE if run.max_batch_size is None else min(BATCH_SIZE, run.max_batch_size)


def _subject(name: str, run: TrainedRun, dataset: Dataset, arguments: Any, bar: Progress) -> Subject:
    """Return a run as the subject of an analysis: model, images, training set and progress bar."""

    def open_training_set(max_images: int | None) -> Dataset:
        images = limit_images(open_dataset(run, arguments, "train"), max_images)
        run.loader(images)  # raises if they do not fit the network
        return images

    def track(n_steps: int | None) -> Callable[[], None]:
        return functools.partial(bar.advance, bar.add_task(name, total=n_steps))

    return Subject(name, run.model, run.loader(dataset), open_training_set, _batch_size(run), track)


# Output -------------------------------------------------------------------------------------------------------------


def _print_report(report: AnalysisReport, runs: list[TrainedRun], dataset: Dataset, files: list[Path]) -> None:
    """Print notes, table and files of an analysis."""
    for run in runs:
        if run.note:
            print(f"torchcaps: {escape_control(run.note)}", file=sys.stderr)
    summary = report.summary
    n_images = _n_images(summary, dataset)
    count = "1 image" if n_images == 1 else f"{n_images:,} images"
    data = summary.data or f"{dataset.name}, {dataset.split}"
    print_text(escape_control(f"{', '.join(str(run.path) for run in runs)}: {summary.title}; {data}: {count}"))
    print()
    headings = [column.heading for column in summary.columns.values()]
    table = start_table(summary.row_heading, *headings, right=tuple(headings))
    for name, row in summary.rows.items():
        table.add_row(name, *(_format(row.get(key), column.format) for key, column in summary.columns.items()))
    print_table(table)
    for note in summary.notes:
        print_text(escape_control(note))
    print("\n".join(f"written: {path}" for path in files))


def _n_images(summary: Summary, dataset: Dataset) -> int:
    return len(dataset) if summary.n_images is None else summary.n_images


def _format(value: Any, spec: str) -> str:
    """Return a cell of the table; see `torchcaps.analysis.Column`."""
    if value is None:
        return ""
    if spec == "percent":
        return f"{100 * value:.2f} %"
    if spec == "interval":
        return f"{100 * value[0]:.2f} to {100 * value[1]:.2f} %"
    return str(value) if spec == "text" else format(value, spec)


def _report_as_json(
    report: AnalysisReport, runs: list[TrainedRun], dataset: Dataset, files: list[Path]
) -> dict[str, Any]:
    """Return the content of ``--json``."""
    summary = report.summary
    options = {name: getattr(report.options, name) for name in report.analysis.flags}
    names = [subject.name for subject in report.subjects]
    return to_json(
        {
            "analysis": report.analysis.name,
            "runs": {name: {"path": run.path, "weights": run.weights} for name, run in zip(names, runs, strict=True)},
            "data": dataset.name,
            "split": dataset.split,
            "images": _n_images(summary, dataset),
            "options": {name: value.name if isinstance(value, Subject) else value for name, value in options.items()},
            "rows": summary.rows,
            **summary.details,
            "notes": summary.notes,
            "figures": files,
        }
    )
