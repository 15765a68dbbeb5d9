"""``torchcaps data list | get | check | sample``."""

import dataclasses
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchcaps._core.registry import check_name
from torchcaps._core.validation import join_quoted
from torchcaps.cli.console import print_table, start_table
from torchcaps.cli.parser import Parser, add_fields
from torchcaps.data import (
    DataError,
    DataSpec,
    Folder,
    Request,
    create_dataset,
    create_pipeline,
    list_datasets,
    list_pipelines,
)
from torchcaps.data.inspect import draw_grid
from torchcaps.data.registry import find_spec, is_folder
from torchcaps.data.report import check_files, measure, presence, whole_problem
from torchcaps.data.storage import data_root

__all__ = ["data_command"]

HELP = """\
usage: torchcaps data COMMAND ...

  list            the data sets, and which of them are here
  get NAME        fetch one
  check NAME      hold its files against their checksums, and look at its images
  sample NAME     draw a page of it

'torchcaps data COMMAND --help' says more, 'torchcaps data sample NAME --help' what can be changed in a data set. Files
lie in --data-dir, else in the folder that TORCHCAPS_DATA names, else in your cache folder. For example:

  torchcaps data get mnist
  torchcaps data sample multimnist --source digits --out grid.png
  torchcaps data sample folder --data-dir ./my_images --out grid.png
"""


def data_command(words: list[str]) -> None:
    """Run one of the commands about data."""
    commands: dict[str, Callable[[list[str]], None]] = {
        "list": _list,
        "get": _get,
        "check": _check,
        "sample": _sample,
    }
    if not words or words[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return
    with warnings.catch_warnings(action="always", category=UserWarning):
        warnings.showwarning = lambda message, *_: print(f"torchcaps: {message}", file=sys.stderr)
        commands[check_name(words[0], commands, "the command of 'torchcaps data'")](words[1:])


def _parser(prog: str, description: str, words: list[str]) -> tuple[Parser, list[str], DataSpec | None]:
    """Start the parser of a command about one data set, whose options are flags; a path stands for a folder."""
    parser = Parser(prog=f"torchcaps data {prog}", description=description)
    parser.add_argument(
        "name", help="as 'torchcaps data list' has it" + ("" if prog == "get" else ", or a folder of images")
    )
    parser.add_argument("--data-dir", default=None, help="the data folder (default: TORCHCAPS_DATA, else your cache)")
    free = [n for n, (before, w) in enumerate(zip(["", *words], words, strict=False)) if _free(before, w)]
    if not free:
        return parser, words, None
    place, name = free[0], words[free[0]]
    if is_folder(name):
        if any(word.partition("=")[0] == "--data-dir" for word in words):
            parser.error(f"give the folder of images once, as the name or as --data-dir, got {name!r} and --data-dir")
        words = [*words[:place], "folder", "--data-dir", name, *words[place + 1 :]]
        name = "folder"
    spec = find_spec(name)
    if dataclasses.fields(spec):
        add_fields(parser, spec)
    return parser, words, spec


def _free(before: str, word: str) -> bool:
    """Return whether a word is no flag, and no flag's value."""
    return not word.startswith("-") and (not before.startswith("--") or "=" in before or before in ("--json",))


def _options(parser: Parser, words: list[str], spec: DataSpec | None) -> tuple[Any, dict[str, Any]]:
    """Return all flags, and those of them that are options of the data set."""
    flags = parser.parse_args(words)
    assert spec is not None, "the parser requires a name"
    return flags, {field.name: flags[field.name] for field in dataclasses.fields(spec)}


def _chosen(parser: Parser, flags: Any, options: dict[str, Any]) -> DataSpec:
    """Return the data set with its options, after its split was seen to be one."""
    spec = find_spec(flags.name, **options)
    if flags.split is not None and flags.split not in spec.splits:
        parser.error(f"--split must be {join_quoted(spec.splits)}, got {flags.split!r}")
    return spec


# list ------------------------------------------------------------------------------------------------------


def _list(words: list[str]) -> None:
    parser = Parser(
        prog="torchcaps data list",
        description="The data sets, and which of them are here. Example: torchcaps data list --json",
    )
    parser.add_argument("--data-dir", default=None, help="the data folder (default: TORCHCAPS_DATA, else your cache)")
    parser.add_argument("--json", action="store_true", help="for machines")
    flags = parser.parse_args(words)
    rows = [_listed(name, flags.data_dir) for name in list_datasets()]
    if flags.json:
        print(json.dumps(rows, indent=2))
        return
    table = start_table("data set", "image", "classes", "here", "what it is", right=("classes",))
    for row in rows:
        table.add_row(row["name"], row["image"], str(row["classes"] or ""), row["here"], row["what"])
    print_table(table)
    print(f"Data folder: {data_root(flags.data_dir)}")


def _listed(name: str, root: str | None) -> dict[str, Any]:
    spec, found = find_spec(name), presence(name, root)
    image = "x".join(map(str, spec.image)) if spec.image else ""
    if name == "folder":
        here = "yours"
    elif not found.missing:
        here = "yes" if found.home is not None else "embedded"
    else:
        size = f", {found.bytes / 1e6:,.0f} MB to get" if found.bytes else ", to get"
        here = (f"{join_quoted(found.splits, 'and')} only" if found.splits else "no").replace("'", "") + size
    usual = type(spec)()
    changed = [f.name for f in dataclasses.fields(spec) if getattr(spec, f.name) != getattr(usual, f.name)]
    what = spec.title + "".join(f", {field} {getattr(spec, field)}" for field in changed)
    return {"name": name, "image": image, "classes": spec.n_classes, "here": here, "what": what}


# get -------------------------------------------------------------------------------------------------------


def _get(words: list[str]) -> None:
    description = (
        "Fetch the files of a data set. Each is held against its published checksum (those of affNIST, which has none, "
        "against the archive's own) and lands whole or not at all; what is there already is not fetched again. "
        "Example: torchcaps data get mnist --data-dir ./data"
    )
    parser, words, spec = _parser("get", description, words)
    parser.add_argument("--split", default=None, help="this part only (default: all that are usually wanted)")
    flags, options = _options(parser, words, spec)
    spec = _chosen(parser, flags, options)
    if flags.name == "folder":
        parser.error("these are your own images: there is nothing to get")
    source = spec.made_from or flags.name
    wanted = find_spec(source) if spec.made_from else spec
    if not wanted.folders:
        print(f"{flags.name}: comes with the package, there is nothing to get.")
        return
    place = wanted.place(Request(source, root=flags.data_dir))
    splits = [flags.split] if flags.split else wanted.fetched
    paths = [place.path(part) for split in splits for part in wanted.chosen(split, place)]
    print(f"{flags.name}: all files are in {' and '.join(sorted({str(path.parent) for path in paths}))}.")


# check -----------------------------------------------------------------------------------------------------


def _check(words: list[str]) -> None:
    description = (
        "Hold the files of a data set against their published checksums, read it, and count its images. Nothing is "
        "fetched; an archive that lies there is unpacked. Fails where anything is missing or wrong. "
        "Example: torchcaps data check mnist"
    )
    parser, words, spec = _parser("check", description, words)
    parser.add_argument("--split", default=None, help="this part only (default: all that are usually wanted)")
    parser.add_argument("--json", action="store_true", help="for machines")
    flags, options = _options(parser, words, spec)
    spec = _chosen(parser, flags, options)
    splits = [flags.split] if flags.split else list(spec.fetched)
    root = Path(flags.data_dir or "").expanduser()
    if isinstance(spec, Folder) and flags.split is None and flags.data_dir and root.is_dir():
        splits = list(spec.splits_of(root))
    found, problems = {}, []
    for split in splits:
        found[split], wrong = _checked(flags.name, split, flags.data_dir, options)
        problems += wrong
    if flags.json:
        print(json.dumps(found, indent=2))
    else:
        for split, content in found.items():
            _show_check(split, content)
    problems = list(dict.fromkeys(problems))
    if problems:
        more = f" (and {len(problems) - 1} more such problem{'s' if len(problems) > 2 else ''})" if problems[1:] else ""
        raise DataError(f"{problems[0]}{more}")


def _checked(name: str, split: str, root: str | None, options: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Check one part; return what was found, and what was wrong."""
    files = [] if name == "folder" else list(check_files(name, split, root, **options))
    wrong_files = [file.path for file in files if file.state == "wrong"]
    problems = [f"{name}: {path} has another checksum than the published one" for path in wrong_files]
    dataset, wrong = whole_problem(name, split, root, **options)
    problems += [wrong] if wrong else []
    content: dict[str, Any] = {
        "files": [{"name": f.name, "path": str(f.path) if f.path else None, "state": f.state} for f in files]
    }
    if dataset is not None:
        content["images"] = dataclasses.asdict(measure(dataset))
        content["classes"] = list(dataset.classes)
    return content, problems


def _show_check(split: str, content: dict[str, Any]) -> None:
    print(f"{split}:")
    if content["files"]:
        words = {
            "right": "right",
            "wrong": "WRONG",
            "missing": "MISSING",
            "unknown": "there, no checksum published",
            "packed": "in its archive",
        }
        table = start_table("file", "checksum", "where")
        for file in content["files"]:
            table.add_row(file["name"], words[file["state"]], file["path"] or "")
        print_table(table)
    if "images" in content:
        numbers = content["images"]
        looked = "" if numbers["looked_at"] == numbers["length"] else f" (of {numbers['looked_at']:,} at random)"
        mean, deviation = (", ".join(f"{x:.4f}" for x in numbers[key]) for key in ("mean", "deviation"))
        print(f"{numbers['length']:,} images, mean {mean}, deviation {deviation}{looked}")
        counts = [f"{name} {n:,}" for name, n in zip(content["classes"], numbers["histogram"], strict=True)]
        print(f"{'; '.join(counts[:20])}{f'; and {len(counts) - 20} classes more' if len(counts) > 20 else ''}\n")


# sample ----------------------------------------------------------------------------------------------------


def _sample(words: list[str]) -> None:
    description = (
        "Draw a page of a data set: a row of images for each class; overlapping digits each in a colour of its own; "
        "with --augmentation each image beside what the network would see of it. "
        "Example: torchcaps data sample digits --augmentation sabour2017.mnist --out grid.png"
    )
    parser, words, spec = _parser("sample", description, words)
    parser.add_argument("--out", default="grid.png", help="where the picture goes: .png, .svg or .pdf")
    parser.add_argument("--split", default="train", help="which part of the data set")
    known = ", ".join(list_pipelines())
    parser.add_argument("--augmentation", default=None, help=f"how images are prepared, one of {known}")
    parser.add_argument("--page", type=int, default=0, help="another number, other images")
    flags, options = _options(parser, words, spec)
    if flags.page < 0:
        parser.error(f"--page must be 0 or more, got {flags.page}")
    pipeline = None if flags.augmentation is None else create_pipeline(flags.augmentation)
    dataset = create_dataset(flags.name, flags.split, flags.data_dir, **options)
    train = flags.split == "train"
    if pipeline is not None:
        pipeline.shape(dataset.shape, train)  # says where a step doesn't fit
        if not pipeline.fitted:
            whole = dataset if train else create_dataset(flags.name, "train", flags.data_dir, **options)
            pipeline = pipeline.fit(whole)
    draw_grid(dataset, Path(flags.out), pipeline, flags.augmentation or "", flags.page, train)
    print(f"{flags.out}: {dataset!r}"[:-1].replace("<", ""))
