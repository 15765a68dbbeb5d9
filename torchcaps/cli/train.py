"""``torchcaps train``."""

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchcaps._core.registry import check_name, is_import_path
from torchcaps._core.validation import FieldError
from torchcaps.cli.command_line import (
    TRUST_FLAG,
    CommandLine,
    append_working_directory,
    flag_of,
    search_working_directory,
    settings_flags,
)
from torchcaps.cli.parser import Parser
from torchcaps.cli.runs import OutputMode, run_training
from torchcaps.cli.train_parser import (
    DATA_FIELDS,
    DEFAULT_MODEL,
    IMAGE_FOLDER_MODEL,
    NESTED_FLAGS,
    OPTION_PREFIXES,
    OPTIONS,
    RECIPE_FIELDS,
    RESUME_FIELDS,
    RUN_FIELDS,
    find_switches,
    make_train_parser,
    model_flag,
)
from torchcaps.data import Folder
from torchcaps.data.registry import DATASETS, is_image_folder
from torchcaps.models.recipe import LossConfig, OptimizerConfig, Recipe
from torchcaps.models.registry import ModelEntry, find_model
from torchcaps.training.config import RunSpec
from torchcaps.training.errors import CheckpointError
from torchcaps.training.run_dir import RunDirectory
from torchcaps.training.settings_file import RESOURCES, check_registered, limit_resources, may_download, read_settings

__all__ = ["train_command"]

# Never read from a file.
COMMAND_LINE_ONLY = (TRUST_FLAG, "--resume", "--config", "--out", "--compare", "--quiet", "--json")
SIZE_FIELDS = ("image", "classes", "n_objects")  # of the model; they follow the data unless given


def train_command(arguments: list[str]) -> None:
    """Train a model, or resume a run."""
    line = CommandLine.split(arguments, find_switches())
    for flag in ("--config", "--resume"):
        if sum(name == flag for name, _ in line.flags) > 1:
            raise ValueError(f"{flag} can be given once, got {arguments}")
    names = [line.get(flag) for flag in ("--model", "--data", "--test-data", "--routing", "--lr-schedule")]
    append_working_directory([*line.positionals, *names, *(v for n, v in line.flags if n.endswith(".class-path"))])
    trusted = TRUST_FLAG in line
    if trusted:
        search_working_directory()
    config = line.get("--config")
    if "--config" in line:
        line = _merge_config(line, trusted)
    entry, folder = _model_and_folder(line)
    parser, flags = make_train_parser(entry, line, folder)
    options, given = parser.parse(line)
    if {"--epochs", "--steps"} <= given:
        parser.error(f"--epochs and --steps are mutually exclusive, got {options.epochs} and {options.steps}")
    output = OutputMode(options.quiet, options.json)
    if options.resume is not None:
        _resume(parser, options, given, arguments, output)
        return
    with _errors_by_flag(entry, flags, line):
        spec = _run_spec(entry, folder, parser.instantiate(options), given, flags)
    sizes = frozenset(name for name in SIZE_FIELDS if flags.get(name) in given)
    spec, notes = limit_resources(spec, [name for name in RESOURCES if flag_of(name) in line.sources])
    download = "--data-dir" not in line.sources or may_download(spec.data_dir)
    limited = config is not None and not trusted

    def run(console: Any) -> Any:
        """Train the run; raise its `CheckpointError` as a ValueError that names the file of ``--config``."""
        from torchcaps.training import train

        for note in notes:
            warnings.warn(note, stacklevel=1)
        try:
            return train(spec, options.out, sizes, console, download=download, limited=limited)
        except CheckpointError as error:
            raise ValueError(f"{config}: {error}") from error

    run_training(arguments, spec, run, output, options.compare)


def _merge_config(line: CommandLine, trusted: bool) -> CommandLine:
    """Return the settings of the file of ``--config``, overridden by the flags of the command line."""
    path = line.get("--config")
    if path is None:
        raise ValueError("--config needs a file: --config FILE.yaml")
    line = line.without("--config")
    overridden = line.names | ({"--epochs", "--steps"} if line.names & {"--epochs", "--steps"} else set())
    settings = _config_line(path, trusted)
    folders = [argument for argument in line.positionals if is_image_folder(argument)]
    if folders:  # the directory on the command line replaces the data of the file
        overridden |= {"--data"}
    names_model = "--model" in line or len(line.positionals) > len(folders)
    flags = [(n, v) for n, v in settings.flags if n not in overridden and n.partition(".")[0] not in overridden]
    sources = {name: source for name, source in settings.sources.items() if name not in line.names}
    positionals = line.positionals + ([] if names_model else settings.positionals)
    return CommandLine(positionals, flags + line.flags, sources)


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
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    model = values.pop("model", None)
    settings: list[tuple[str, str, Any]] = []  # key in the file, flag, value
    for name in ("model_options", *OPTIONS):
        options = values.pop(name, {})
        if not isinstance(options, dict):
            raise ValueError(f"{path}: {name} must be a mapping, such as '{name}: {{width: 32}}', got {options!r}")
        for key, value in options.items():
            flag = f"{OPTION_PREFIXES[name]}{key}" if name in OPTION_PREFIXES else model_flag(str(key))
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


def _model_and_folder(line: CommandLine) -> tuple[ModelEntry, str | None]:
    """Return the model and the directory of images that the positional arguments and ``--model`` name."""
    folder = next((argument for argument in line.positionals if is_image_folder(argument)), None)
    others = [argument for argument in line.positionals if argument != folder and is_image_folder(argument)]
    if others:
        raise ValueError(
            f"expected one directory of images, with one subdirectory per class, got {folder!r} and {others[0]!r}"
        )
    names = [argument for argument in line.positionals if argument != folder]
    names += [name for flag, name in line.flags if flag == "--model" and name is not None]
    if len(names) > 1:
        raise ValueError(f"expected one model, got {names[0]!r} and {names[1]!r}")
    if names and (os.sep in names[0] or names[0].startswith((".", "~"))):
        raise ValueError(f"{names[0]} is neither an existing directory nor the name of a model (see 'torchcaps list')")
    use_folder = folder is not None or line.get("--data") == "folder" or is_image_folder(line.get("--data"))
    if "--model" not in line and names:
        return _find_positional(names[0]), folder
    return find_model(names[0] if names else IMAGE_FOLDER_MODEL if use_folder else DEFAULT_MODEL), folder


def _find_positional(name: str) -> ModelEntry:
    """Return the model that a positional argument names; the error says that it is not a directory or is a data set."""
    try:
        return find_model(name)
    except ValueError as error:
        if is_import_path(name):
            raise
        hint = f"is a data set: --data {name}" if name in DATASETS else "is not an existing directory either"
        raise ValueError(f"{error} ({name!r} {hint})") from error


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
    _set_folder_options(run["data_options"], options, changes.get("data", entry.recipe(entry.spec).data))
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
            config = getattr(spec.recipe, name)
            is_optimizer = isinstance(config, OptimizerConfig)
            changes[name] = config.replace(**fields) if is_optimizer else dataclasses.replace(config, **fields)
    return spec.replace_recipe(**changes)


def _set_folder_options(data_options: dict[str, Any], options: Any, data: str) -> None:
    """Add ``--image-size`` and ``--on-error`` to the options of a directory of images; raise for other data sets."""
    values = {"image-size": ("size", options.image_size), "on-error": ("on_error", options.on_error)}
    for flag, (field, value) in values.items():
        if value is None:
            continue
        if not (data == "folder" or is_image_folder(data)):
            raise ValueError(f"--{flag} applies to directories of images, and the data set is {data!r}: leave it out")
        if data_options.setdefault(field, value) != value:
            raise ValueError(f"--{flag} and --data.{flag_of(field)[2:]} contradict each other: give one of them")
    if data == "folder" or is_image_folder(data):
        Folder(**data_options)  # raises if a field is invalid


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().resolve())


@contextlib.contextmanager
def _errors_by_flag(entry: ModelEntry, flags: dict[str, str], line: CommandLine) -> Iterator[None]:
    """Report an invalid field by its flag, or by file and key if it was read from a file of settings."""
    owners = {"optimizer": OptimizerConfig.__name__, "loss": LossConfig.__name__}
    by_field = {(owners[owner], field): flag for (owner, field), flag in NESTED_FLAGS.items()}
    by_field |= {(type(entry.spec).__name__, field): flag for field, flag in flags.items()}
    by_field |= {(Folder.__name__, "size"): "--image-size" if "--image-size" in line else "--data.size"}
    try:
        yield
    except FieldError as error:
        flag = by_field.get((error.owner, error.field))
        if flag is None and error.owner in (RunSpec.__name__, Recipe.__name__):
            flag = flag_of(error.field)
        if flag is None:  # of a routing, schedule or data set: --lr-schedule.warmup
            nested = [name for name, _ in line.flags if name.partition(".")[2] == flag_of(error.field)[2:]]
            flag = nested[0] if len(nested) == 1 else None
        raise ValueError(f"{line.describe(flag)} {error.problem}" if flag else str(error)) from error


def _resume(parser: Parser, options: Any, given: set[str], arguments: list[str], output: OutputMode) -> None:
    """Resume a run with the settings that may change on resume."""
    allowed = [flag_of(name) for name in RESUME_FIELDS]
    other = [
        *sorted(given - {"--resume", "--help", "--quiet", "--json", TRUST_FLAG, *allowed}),
        *options.model_or_directory,
    ]
    if other:
        parser.error(f"{other[0]} can't be changed on --resume, which accepts {', '.join(allowed)}")
    changes = {name: options[name] for name in RESUME_FIELDS if flag_of(name) in given}
    if changes.get("data_dir") is not None:
        changes["data_dir"] = _absolute(changes["data_dir"])
    length = {name: changes.pop(name) for name in ("epochs", "steps") if name in changes}

    def change(spec: RunSpec) -> RunSpec:
        with _errors_by_flag(find_model(spec.model), {}, CommandLine([], [])):
            return dataclasses.replace(spec.replace_recipe(**length), **changes)

    def run(console: Any) -> Any:
        """Resume the run with the changed settings."""
        from torchcaps.training import resume

        trust, own = options.trust_remote_code, "data_dir" in changes
        return resume(options.resume, change, console, trust_remote_code=trust, own_data_dir=own)

    recorded, _ = limit_resources(RunDirectory.open(options.resume).read_config(options.trust_remote_code))
    run_training(arguments, change(recorded), run, output)
