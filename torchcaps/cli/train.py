"""``torchcaps train``."""

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchcaps._core.registry import UntrustedCodeError, check_name
from torchcaps._core.serialize import is_resumable
from torchcaps._core.validation import FieldError
from torchcaps.cli.command_line import (
    TRUST_FLAG,
    CommandLine,
    append_working_directory,
    flag_of,
    search_working_directory,
    settings_flags,
)
from torchcaps.cli.options import add_trust_flag
from torchcaps.cli.parser import Parser, add_fields, annotation_of, field_help
from torchcaps.cli.runs import run_training
from torchcaps.data import list_pipelines
from torchcaps.data.registry import find_spec, is_image_folder
from torchcaps.models import list_models
from torchcaps.models.recipe import LossConfig, OptimizerConfig, Recipe
from torchcaps.models.registry import ModelEntry, find_model
from torchcaps.models.schedules import LRSchedule
from torchcaps.training.config import RunSpec
from torchcaps.training.run_dir import RunDirectory
from torchcaps.training.settings_file import RESOURCES, check_registered, limit_resources, may_download, read_settings

__all__ = ["train_command", "train_help"]

DEFAULT_MODEL, IMAGE_FOLDER_MODEL = "capsnet_small", "capsnet_images"
OPTIONS = ("data_options", "test_options")
OPTION_PREFIXES = {"data_options": "--data.", "test_options": "--test-data."}
DATA_FIELDS = ("data", "test_data", "augmentation")
ASCENT_FIELDS = ("ascents", "descents", "ascent_lr", "reuse_children")
RECIPE_FIELDS = ("batch_size", "epochs", "steps", "val_fraction", "eval_weights", *ASCENT_FIELDS)
RUN_FIELDS = [
    f.name for f in dataclasses.fields(RunSpec) if f.name not in ("model", "model_options", "recipe", *OPTIONS)
]
RESUME_FIELDS = ("epochs", "steps", *(name for name in RUN_FIELDS if is_resumable(RunSpec, name)))
COMMAND_LINE_ONLY = (TRUST_FLAG, "--resume", "--config")  # never read from a file
SIZE_FIELDS = ("image", "classes", "n_objects")  # of the model; they follow the data unless given
# Flags of the fields of the optimizer and of the loss.
NESTED_FLAGS = {
    ("optimizer", f.name): "--optimizer" if f.name == "name" else flag_of(f.name)
    for f in dataclasses.fields(OptimizerConfig)
} | {
    ("loss", f.name): "--loss" if f.name == "name" else f"--loss.{flag_of(f.name)[2:]}"
    for f in dataclasses.fields(LossConfig)
}
# A field of a model with one of these flags gets --model-FIELD.
RESERVED = {flag_of(name) for name in (*RUN_FIELDS, *DATA_FIELDS, *RECIPE_FIELDS, "lr_schedule", "config", "out")}
RESERVED |= {"--resume", "--model", TRUST_FLAG, *NESTED_FLAGS.values()}
DESCRIPTION = (
    "Train a model: by default a small CapsNet on the embedded digits, in about a minute. Settings that are not given "
    "are those of the model's recipe, which follows its paper. Ctrl-C saves a checkpoint and stops; --resume RUN "
    "continues bit-exactly. All settings can also be in a YAML file, --config FILE; each run writes one, config.yaml. "
    "Examples: torchcaps train; "
    "torchcaps train sabour2017_mnist --epochs 10 --val-fraction 0.1; "
    "torchcaps train tsai2020_cifar10 --routing em --routing.iterations 3 --lr 0.01 --lr-schedule one_cycle; "
    "torchcaps train ./my_images --max-minutes 30; torchcaps train --resume runs/capsnet_small-digits-1 --epochs 40"
)


def train_command(arguments: list[str]) -> None:
    """Train a model, or resume a run."""
    line = CommandLine.split(arguments, _switches())
    for flag in ("--config", "--resume"):
        if sum(name == flag for name, _ in line.flags) > 1:
            raise ValueError(f"{flag} can be given once, got {arguments}")
    names = [line.get(flag) for flag in ("--data", "--test-data", "--routing", "--lr-schedule")]
    append_working_directory([*line.positionals, *names, *(v for n, v in line.flags if n.endswith(".class-path"))])
    trusted = TRUST_FLAG in line
    if trusted:
        search_working_directory()
    if "--config" in line:
        line = _merge_config(line, trusted)
    entry, folder = _model_and_folder(line)
    parser, flags = _make_parser(entry, line)
    options, given = parser.parse(line)
    if {"--epochs", "--steps"} <= given:
        parser.error(f"--epochs and --steps are mutually exclusive, got {options.epochs} and {options.steps}")
    if options.resume is not None:
        _resume(parser, options, given, arguments)
        return
    with _errors_by_flag(entry, flags, line):
        spec = _run_spec(entry, folder, parser.instantiate(options), given, flags)
    sizes = frozenset(name for name in SIZE_FIELDS if flags.get(name) in given)
    spec, notes = limit_resources(spec, [name for name in RESOURCES if flag_of(name) in line.sources])
    download = "--data-dir" not in line.sources or may_download(spec.data_dir)

    def run() -> Any:
        from torchcaps.training import train

        for note in notes:
            warnings.warn(note, stacklevel=1)
        return train(spec, options.out, sizes, download=download)

    run_training(arguments, spec.devices, run)


def train_help() -> str:
    """Return the help of ``torchcaps train``; ``train_help.txt`` is a copy that prints without loading torch."""
    return _make_parser(find_model(DEFAULT_MODEL), CommandLine([], []))[0].format_help()


def _switches() -> set[str]:
    """Return the boolean flags of runs and of all registered models."""
    specs = [RunSpec(), *(find_model(name).spec for name in list_models())]
    return {flag_of(f.name) for spec in specs for f in dataclasses.fields(spec) if annotation_of(spec, f.name) is bool}


def _merge_config(line: CommandLine, trusted: bool) -> CommandLine:
    """Return the settings of the file of ``--config``, overridden by the flags of the command line."""
    path = line.get("--config")
    if path is None:
        raise ValueError("--config needs a file: --config FILE.yaml")
    line = line.without("--config")
    overridden = line.names | ({"--epochs", "--steps"} if line.names & {"--epochs", "--steps"} else set())
    settings = _config_line(path, trusted)
    flags = [(n, v) for n, v in settings.flags if n not in overridden and n.partition(".")[0] not in overridden]
    sources = {name: source for name, source in settings.sources.items() if name not in line.names}
    return CommandLine(line.positionals or settings.positionals, flags + line.flags, sources)


def _config_line(path: str, trusted: bool) -> CommandLine:
    """Return the settings of a YAML file, such as the ``config.yaml`` of a run, as a command line.

    Args:
        path: the file.
        trusted: accept names that are not registered, whose import executes code.
    """
    values = {name: value for name, value in read_settings(path).items() if name != "note"}
    if not trusted:
        try:
            check_registered(values)
        except UntrustedCodeError as error:
            raise ValueError(f"{path}: {error}") from error
    model = values.pop("model", None)
    settings: list[tuple[str, str, Any]] = []  # key in the file, flag, value
    for name in ("model_options", *OPTIONS):
        options = values.pop(name, {})
        if not isinstance(options, dict):
            raise ValueError(f"{path}: {name} must be a mapping, such as '{name}: {{width: 32}}', got {options!r}")
        for key, value in options.items():
            flag = f"{OPTION_PREFIXES[name]}{key}" if name in OPTION_PREFIXES else _model_flag(str(key))
            settings.append((f"{name}.{key}", flag, value))
    for name, config in (("optimizer", OptimizerConfig), ("loss", LossConfig)):
        if isinstance(values.get(name), dict):
            known = [field.name for field in dataclasses.fields(config)]
            for key, value in values.pop(name).items():
                field = check_name(key, known, f"key of {name} in {path}")
                settings.append((f"{name}.{key}", NESTED_FLAGS[name, field], value))
    settings += [(str(key), f"--{key}", value) for key, value in values.items()]
    line = CommandLine([] if model is None else [str(model)], [])
    for key, owner, value in settings:
        for flag, text in settings_flags({owner[2:]: value}):
            if flag in COMMAND_LINE_ONLY or flag.endswith("help"):
                raise ValueError(f"{path}: {key} is a flag of the command line, not a setting")
            line.flags.append((flag, text))
            line.sources[flag] = path, key + flag[len(owner) :].replace("-", "_")
    return line


def _model_flag(field: str) -> str:
    """Return the flag of a model's field."""
    return f"--model-{flag_of(field)[2:]}" if flag_of(field) in RESERVED else flag_of(field)


def _model_and_folder(line: CommandLine) -> tuple[ModelEntry, str | None]:
    """Return the model and the directory of images that the positional arguments name."""
    folder = next((argument for argument in line.positionals if is_image_folder(argument)), None)
    names = [argument for argument in line.positionals if argument != folder]
    if len(names) > 1:
        raise ValueError(f"expected one model, got {names[0]!r} and {names[1]!r}")
    if names and (os.sep in names[0] or names[0].startswith((".", "~"))):
        raise ValueError(f"{names[0]} is neither an existing directory nor the name of a model (see 'torchcaps list')")
    use_folder = folder is not None or line.get("--data") == "folder"
    return find_model(names[0] if names else IMAGE_FOLDER_MODEL if use_folder else DEFAULT_MODEL), folder


def _make_parser(entry: ModelEntry, line: CommandLine) -> tuple[Parser, dict[str, str]]:
    """Return the parser for a model, and the flags of the model's fields."""
    recipe, run = entry.recipe(entry.spec), RunSpec(entry.name)
    parser = Parser("torchcaps train", DESCRIPTION, usage="torchcaps train [MODEL | DIRECTORY] [FLAGS]")
    parser.add_argument(
        "model_or_directory",
        nargs="*",
        help="name of a model (see 'torchcaps list') or import path of a ModelSpec; directory of images with one "
        f"subdirectory per class (default: {DEFAULT_MODEL}, for a directory {IMAGE_FOLDER_MODEL})",
    )
    group = parser.add_argument_group("data and output")
    texts = {
        "data": "training set: name (see 'torchcaps data list'), directory of images, or import path",
        "test_data": "test set, if it is not the test split of the training set",
        "augmentation": f"preprocessing pipeline, one of {', '.join(list_pipelines())}; '' for none",
    }
    for name in DATA_FIELDS:
        group.add_argument(flag_of(name), type=str, default=getattr(recipe, name), help=texts[name])
    for field, flag, name in (
        ("data_options", "--data", line.get("--data") or recipe.data),
        ("test_options", "--test-data", line.get("--test-data") or recipe.test_data),
    ):
        data = None if not name else find_spec("folder" if is_image_folder(name) else name)
        for f in dataclasses.fields(data) if data is not None else ():
            annotation = annotation_of(data, f.name)
            text = f"{field_help(type(data), f.name)} (default: {getattr(data, f.name)})"
            dest = f"{field}.{f.name}"
            group.add_argument(f"{flag}.{flag_of(f.name)[2:]}", dest=dest, type=annotation | None, help=text)
    group.add_argument("--out", type=str | None, help="directory of the run (default: a new one in runs/)")
    group.add_argument("--resume", type=str | None, help="directory of a run to resume from its last checkpoint")
    group.add_argument("--config", type=str | None, help="YAML file of settings, such as the config.yaml of a run")
    add_trust_flag(group)
    group = parser.add_argument_group(f"recipe (defaults are those of {entry.name})")
    for name in RECIPE_FIELDS:
        text = field_help(Recipe, name)
        group.add_argument(flag_of(name), type=annotation_of(recipe, name), default=getattr(recipe, name), help=text)
    for (owner, name), flag in NESTED_FLAGS.items():
        config = getattr(recipe, owner)
        text, default = field_help(type(config), name), getattr(config, name)
        group.add_argument(
            flag, dest=f"{owner}_config.{name}", type=annotation_of(config, name), default=default, help=text
        )
    schedule = None if "--lr-schedule" in line else recipe.lr_schedule
    text = (
        f"{field_help(Recipe, 'lr_schedule')}: constant, exponential, milestones, time_decay, inverse, one_cycle, or "
        "an import path; --lr-schedule.FIELD sets its fields"
    )
    group.add_argument("--lr-schedule", type=LRSchedule, default=schedule, help=text)
    group = parser.add_argument_group("run")
    for name in RUN_FIELDS:
        text = field_help(RunSpec, name)
        group.add_argument(flag_of(name), type=annotation_of(run, name), default=getattr(run, name), help=text)
    renamed = {f.name: _model_flag(f.name) for f in dataclasses.fields(entry.spec)}
    return parser, add_fields(parser, entry.spec, "model_options", line, renamed)


def _run_spec(entry: ModelEntry, folder: str | None, options: Any, given: set[str], flags: dict[str, str]) -> RunSpec:
    """Return the run that the flags describe; everything else is as in the model's recipe."""
    owners = given | {flag.partition(".")[0] for flag in given}
    model_options = {name: options.model_options[name] for name, flag in flags.items() if flag in owners}
    run = {name: options[name] for name in RUN_FIELDS if flag_of(name) in given}
    if run.get("data_dir") is not None:  # the run may be used from another working directory
        run["data_dir"] = _absolute(run["data_dir"])
    for name in OPTIONS:
        values = dict(options.get(name) or {})
        run[name] = {key: value for key, value in values.items() if value is not None}
    changes = {name: options[name] for name in (*DATA_FIELDS, *RECIPE_FIELDS) if flag_of(name) in given}
    if folder is not None:
        if "data" in changes:
            raise ValueError(f"the training images are given twice: directory {folder} and --data {changes['data']}")
        changes["data"] = folder
    for name in ("data", "test_data"):
        if is_image_folder(changes.get(name)):
            changes[name] = _absolute(changes[name])
    if "--lr-schedule" in owners:
        changes["lr_schedule"] = options.lr_schedule
    spec = RunSpec(entry.name, model_options, **run)
    for name in ("optimizer", "loss"):
        fields = {
            field: options[f"{name}_config"][field]
            for (o, field), flag in NESTED_FLAGS.items()
            if o == name and flag in given
        }
        if fields:
            changes[name] = dataclasses.replace(getattr(spec.recipe, name), **fields)
    return spec.replace_recipe(**changes)


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().resolve())


@contextlib.contextmanager
def _errors_by_flag(entry: ModelEntry, flags: dict[str, str], line: CommandLine) -> Iterator[None]:
    """Report an invalid field by its flag, or by file and key if it was read from a file of settings."""
    owners = {"optimizer": OptimizerConfig.__name__, "loss": LossConfig.__name__}
    by_field = {(owners[owner], field): flag for (owner, field), flag in NESTED_FLAGS.items()}
    by_field |= {(type(entry.spec).__name__, field): flag for field, flag in flags.items()}
    try:
        yield
    except FieldError as error:
        flag = by_field.get((error.owner, error.field))
        if flag is None and error.owner in (RunSpec.__name__, Recipe.__name__):
            flag = flag_of(error.field)
        raise ValueError(f"{line.describe(flag)} {error.problem}" if flag else str(error)) from error


def _resume(parser: Parser, options: Any, given: set[str], arguments: list[str]) -> None:
    """Resume a run with the settings that may change on resume."""
    allowed = [flag_of(name) for name in RESUME_FIELDS]
    other = [*sorted(given - {"--resume", "--help", TRUST_FLAG, *allowed}), *options.model_or_directory]
    if other:
        parser.error(f"{other[0]} can't be changed on --resume, which accepts {', '.join(allowed)}")
    changes = {name: options[name] for name in RESUME_FIELDS if flag_of(name) in given}
    if changes.get("data_dir") is not None:
        changes["data_dir"] = _absolute(changes["data_dir"])
    length = {name: changes.pop(name) for name in ("epochs", "steps") if name in changes}

    def change(spec: RunSpec) -> RunSpec:
        with _errors_by_flag(find_model(spec.model), {}, CommandLine([], [])):
            return dataclasses.replace(spec.replace_recipe(**length), **changes)

    def run() -> Any:
        from torchcaps.training import resume

        trust, own = options.trust_remote_code, "data_dir" in changes
        return resume(options.resume, change, trust_remote_code=trust, own_data_dir=own)

    recorded, _ = limit_resources(RunDirectory.open(options.resume).read_config(options.trust_remote_code))
    run_training(arguments, changes.get("devices") or recorded.devices, run)
