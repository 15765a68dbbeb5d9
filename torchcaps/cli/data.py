"""``torchcaps data list | get | check | sample``."""

import dataclasses
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchcaps._core.registry import check_name
from torchcaps._core.validation import join_quoted
from torchcaps.cli.command_line import NO_VALUE, append_working_directory
from torchcaps.cli.console import escape_control, print_table, print_warning, start_table
from torchcaps.cli.parser import Parser, add_fields
from torchcaps.data import (
    DataError,
    DataSpec,
    Folder,
    LoadRequest,
    create_dataset,
    create_pipeline,
    list_datasets,
    list_pipelines,
)
from torchcaps.data.inspect import (
    FileStatus,
    check_availability,
    check_files,
    compute_statistics,
    draw_grid,
    try_load,
)
from torchcaps.data.registry import find_spec, is_image_folder
from torchcaps.data.storage import data_root

__all__ = ["data_command"]

HELP = """\
usage: torchcaps data COMMAND ...

  list            list the data sets and whether their files exist locally
  get NAME        download a data set
  check NAME      verify checksums and number of images, and print statistics
  sample NAME     draw a page of sample images

Options of a command: 'torchcaps data COMMAND --help'. Options of a data set: 'torchcaps data sample NAME --help'.
Files are stored in --data-dir; by default in the directory named by the environment variable TORCHCAPS_DATA, or else in
the user's cache directory.

examples:
  torchcaps data get mnist
  torchcaps data sample multimnist --source digits --out grid.png
  torchcaps data sample folder --data-dir ./my_images --out grid.png
"""
DATA_DIR_HELP = "Data directory (default: TORCHCAPS_DATA, or else the user's cache directory)."
SPLIT_HELP = "Split of the data set (default: all splits that are usually needed)."
MAX_CLASSES_SHOWN = 20
STATUS_TEXT = {
    FileStatus.OK: "ok",
    FileStatus.MISMATCH: "MISMATCH",
    FileStatus.MISSING: "MISSING",
    FileStatus.UNVERIFIED: "none published",
    FileStatus.ARCHIVED: "not extracted yet",
}


def data_command(arguments: list[str]) -> None:
    """Run a subcommand of ``torchcaps data``."""
    commands: dict[str, Callable[[list[str]], None]] = {
        "list": _list,
        "get": _get,
        "check": _check,
        "sample": _sample,
    }
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return
    with warnings.catch_warnings(action="always", category=UserWarning):
        warnings.showwarning = print_warning
        commands[check_name(arguments[0], commands, "command of 'torchcaps data'")](arguments[1:])


def _create_parser(
    command: str, description: str, arguments: list[str], example: str
) -> tuple[Parser, list[str], DataSpec | None]:
    """Create the parser of a command about one data set, whose options become flags.

    Returns:
        The parser; the arguments, in which the path of a directory of images is replaced by
        ``folder --data-dir PATH``; and the data set, or ``None`` if the arguments name none.
    """
    parser = Parser(prog=f"torchcaps data {command}", description=description, examples=[example])
    alternative = "" if command == "get" else ", or the path of a directory with one subdirectory of images per class"
    parser.add_argument("name", help=f"Name of the data set (see 'torchcaps data list'){alternative}.")
    parser.add_argument("--data-dir", default=None, help=DATA_DIR_HELP)
    pairs = zip(["", *arguments], arguments, strict=False)
    positions = [n for n, (previous, argument) in enumerate(pairs) if _is_positional(previous, argument)]
    if not positions:
        return parser, arguments, None
    position, name = positions[0], arguments[positions[0]]
    if is_image_folder(name):
        if any(argument.partition("=")[0] == "--data-dir" for argument in arguments):
            parser.error(f"the directory of images must be given once, got {name!r} and --data-dir")
        arguments = [*arguments[:position], "folder", "--data-dir", name, *arguments[position + 1 :]]
        name = "folder"
    append_working_directory([name])
    spec = find_spec(name)
    if dataclasses.fields(spec):
        add_fields(parser, spec)
    return parser, arguments, spec


def _is_positional(previous: str, argument: str) -> bool:
    """Return whether an argument is neither a flag nor the value of the flag before it."""
    is_value = previous.startswith("--") and "=" not in previous and previous not in NO_VALUE
    return not argument.startswith("-") and not is_value


def _parse(parser: Parser, arguments: list[str], spec: DataSpec | None) -> tuple[Any, dict[str, Any]]:
    """Parse the arguments; return all flags, and those that are options of the data set."""
    flags, _ = parser.parse(arguments)
    assert spec is not None, "the parser requires a name"
    return flags, {field.name: flags[field.name] for field in dataclasses.fields(spec)}


def _find_checked_spec(parser: Parser, flags: Any, options: dict[str, Any]) -> DataSpec:
    """Return the data set with its options; exit with an error if it does not have the split."""
    spec = find_spec(flags.name, **options)
    if flags.split is not None and flags.split not in spec.splits:
        parser.error(f"--split must be {join_quoted(spec.splits)}, got {flags.split!r}")
    return spec


# list -------------------------------------------------------------------------------------------------------


def _list(arguments: list[str]) -> None:
    """Run ``torchcaps data list``."""
    parser = Parser(
        prog="torchcaps data list",
        description="List the data sets and whether their files exist locally.",
        examples=["torchcaps data list --json"],
    )
    parser.add_argument("--data-dir", default=None, help=DATA_DIR_HELP)
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    flags, _ = parser.parse(arguments)
    rows = [_summarize(name, flags.data_dir) for name in list_datasets()]
    if flags.json:
        print(json.dumps(rows, indent=2))
        return
    table = start_table("data set", "image", "classes", "available", "description", right=("classes",))
    for row in rows:
        table.add_row(row["name"], row["image"], str(row["classes"] or ""), row["available"], row["description"])
    print_table(table)
    print(f"Data directory: {data_root(flags.data_dir)}")


def _summarize(name: str, root: str | None) -> dict[str, Any]:
    """Return one row of ``torchcaps data list``."""
    spec, availability = find_spec(name), check_availability(name, root)
    if isinstance(spec, Folder):
        available = "your images"
    elif not availability.missing:
        available = "yes" if availability.directory is not None else "embedded"
    else:
        size = f" ({availability.download_bytes / 1e6:,.0f} MB to download)" if availability.download_bytes else ""
        available = (f"{' and '.join(availability.splits)} only" if availability.splits else "no") + size
    default = type(spec)()
    changed = [f.name for f in dataclasses.fields(spec) if getattr(spec, f.name) != getattr(default, f.name)]
    return {
        "name": name,
        "image": "x".join(map(str, spec.image_shape)) if spec.image_shape else "",
        "classes": spec.n_classes,
        "available": available,
        "description": spec.title + "".join(f", {field} {getattr(spec, field)}" for field in changed),
    }


# get --------------------------------------------------------------------------------------------------------


def _get(arguments: list[str]) -> None:
    """Run ``torchcaps data get``."""
    description = (
        "Download the files of a data set. Each file is verified by its published checksum (affNIST, which has none, "
        "by the CRCs of its archives) and written atomically. Existing files are not downloaded again."
    )
    example = "torchcaps data get mnist --data-dir ./data"
    parser, arguments, spec = _create_parser("get", description, arguments, example)
    parser.add_argument("--split", default=None, help=SPLIT_HELP)
    flags, options = _parse(parser, arguments, spec)
    spec = _find_checked_spec(parser, flags, options)
    if isinstance(spec, Folder):
        parser.error("'folder' reads your own images: there is nothing to download")
    source = spec.made_from or flags.name
    source_spec = find_spec(source) if spec.made_from else spec
    if not source_spec.subdirectories:
        print(f"{flags.name}: embedded, there is nothing to download.")
        return
    directory = source_spec.data_directory(LoadRequest(source, root=flags.data_dir))
    splits = [flags.split] if flags.split else source_spec.default_splits
    paths = [directory.fetch(file) for split in splits for file in source_spec.select_files(split, directory)]
    print(f"{flags.name}: all files are in {' and '.join(sorted({str(path.parent) for path in paths}))}.")


# check ------------------------------------------------------------------------------------------------------


def _check(arguments: list[str]) -> None:
    """Run ``torchcaps data check``; raise a DataError for missing or damaged files."""
    description = (
        "Verify the files of a data set by their published checksums, load it, count its images and print statistics. "
        "No download; existing archives are extracted. The exit code is not 0 if files are missing or corrupt."
    )
    parser, arguments, spec = _create_parser("check", description, arguments, "torchcaps data check mnist")
    parser.add_argument("--split", default=None, help=SPLIT_HELP)
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    flags, options = _parse(parser, arguments, spec)
    spec = _find_checked_spec(parser, flags, options)
    splits = [flags.split] if flags.split else list(spec.default_splits)
    root = Path(flags.data_dir or "").expanduser()
    if isinstance(spec, Folder) and flags.split is None and flags.data_dir and root.is_dir():
        splits = list(spec.find_splits(root))
    reports, problems = {}, []
    for split in splits:
        reports[split], problems_of_split = _check_split(flags.name, split, flags.data_dir, options)
        problems += problems_of_split
    if flags.json:
        print(json.dumps(reports, indent=2))
    else:
        for split, report in reports.items():
            _print_report(split, report)
    problems = list(dict.fromkeys(problems))
    if problems:
        others = f" ({len(problems)} problems in total)" if len(problems) > 1 else ""
        raise DataError(f"{problems[0]}{others}")


def _check_split(name: str, split: str, root: str | None, options: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Check one split; return a report and a list of problems."""
    files = list(check_files(name, split, root, **options))
    mismatches = [file.path for file in files if file.status is FileStatus.MISMATCH]
    problems = [f"{name}: {path} does not have the published checksum" for path in mismatches]
    dataset, problem = try_load(name, split, root, **options)
    problems += [problem] if problem else []
    report: dict[str, Any] = {
        "files": [{"name": f.name, "path": str(f.path) if f.path else None, "status": f.status.value} for f in files]
    }
    if dataset is not None:
        report["statistics"] = dataclasses.asdict(compute_statistics(dataset))
        report["classes"] = list(dataset.classes)
    return report, problems


def _print_report(split: str, report: dict[str, Any]) -> None:
    """Print the report of a split: a table of files, and statistics of the images."""
    print(f"{split}:")
    if report["files"]:
        table = start_table("file", "checksum", "path")
        for file in report["files"]:
            table.add_row(file["name"], STATUS_TEXT[FileStatus(file["status"])], file["path"] or "")
        print_table(table)
    if "statistics" in report:
        statistics = report["statistics"]
        n_images, n_sampled = statistics["n_images"], statistics["n_sampled"]
        sample = "" if n_sampled == n_images else f" (random sample of {n_sampled:,})"
        mean, std = (", ".join(f"{x:.4f}" for x in statistics[key]) for key in ("mean", "std"))
        print(f"{n_images:,} images, mean {mean}, standard deviation {std}{sample}")
        names = map(escape_control, report["classes"])
        counts = [f"{name} {n:,}" for name, n in zip(names, statistics["class_counts"], strict=True)]
        more = f"; ... ({len(counts)} classes)" if len(counts) > MAX_CLASSES_SHOWN else ""
        print(f"images per class: {'; '.join(counts[:MAX_CLASSES_SHOWN])}{more}\n")


# sample -----------------------------------------------------------------------------------------------------


def _sample(arguments: list[str]) -> None:
    """Run ``torchcaps data sample``."""
    description = (
        "Draw a page of sample images: one row per class; overlapping digits in different colors; with --augmentation, "
        "each image next to its augmented versions."
    )
    example = "torchcaps data sample digits --augmentation sabour2017.mnist --out grid.png"
    parser, arguments, spec = _create_parser("sample", description, arguments, example)
    parser.add_argument("--out", default="grid.png", help="Figure file: .png, .svg or .pdf.")
    parser.add_argument("--split", default="train", help="Split of the data set.")
    pipelines = ", ".join(list_pipelines())
    parser.add_argument("--augmentation", default=None, help=f"Augmentation pipeline, one of {pipelines}.")
    parser.add_argument("--page", type=int, default=0, help="Page number; each page has other images.")
    flags, options = _parse(parser, arguments, spec)
    if flags.page < 0:
        parser.error(f"--page must be at least 0, got {flags.page}")
    _find_checked_spec(parser, flags, options)
    pipeline = None if flags.augmentation is None else create_pipeline(flags.augmentation)
    dataset = create_dataset(flags.name, flags.split, flags.data_dir, **options)
    train = flags.split == "train"
    if pipeline is not None:
        pipeline.output_shape(dataset.shape, train)  # raises if a transform can't be applied
        if not pipeline.is_fitted:
            training_set = dataset if train else create_dataset(flags.name, "train", flags.data_dir, **options)
            pipeline = pipeline.fit(training_set)
    draw_grid(dataset, Path(flags.out), pipeline, flags.augmentation or "", flags.page, train)
    print(escape_control(f"{flags.out}: {dataset!r}".replace("<", "").rstrip(">")))
