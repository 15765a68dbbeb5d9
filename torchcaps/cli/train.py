"""``torchcaps train``."""

import dataclasses
import os
import re
import sys
import typing
from pathlib import Path
from typing import Any

from torchcaps.cli.parser import Parser, add_fields, described, kind_of
from torchcaps.cli.runs import run_safely
from torchcaps.cli.words import Flags, flag_words, free_words
from torchcaps.data import list_pipelines
from torchcaps.data.registry import find_spec, is_image_folder
from torchcaps.models.recipe import LossConfig, OptimizerConfig, Recipe
from torchcaps.models.registry import MODELS, ModelEntry, find_model
from torchcaps.models.schedules import LRSchedule
from torchcaps.training.config import RunSpec
from torchcaps.training.run_dir import RunFolder

__all__ = ["train_command", "train_help"]

DEFAULT, FOR_FOLDERS = "capsnet_small", "capsnet_images"
RECIPE = ("batch_size", "epochs", "steps", "val_fraction", "eval_weights", "ascents", "augmentation")
RUN = [f.name for f in dataclasses.fields(RunSpec) if f.name not in ("model", "model_options", "recipe")]
BOUNDS = {"--resume", "--epochs", "--steps", "--max-minutes", "--early-stopping-patience", "--target-accuracy"}
BOUNDS |= {"--help", "--num-threads", "--num-workers", "--devices"}
BELOW = {"--data.": "--data-options.", "--test-data.": "--test-data-options."}
SHORT = {"--optimizer": "--optimizer.name", "--loss": "--loss.name"}
DESCRIPTION = (
    "Train a model: by default a small CapsNet on real digits, in about a minute. All that is not said is as the "
    "model's paper has it. Ctrl-C saves and stops; --resume RUN goes on, exactly. Everything can stand in a YAML file "
    "as well, --config FILE, and each run writes one. Examples: torchcaps train; "
    "torchcaps train sabour2017_mnist --epochs 10 --val-fraction 0.1; "
    "torchcaps train tsai2020_cifar10 --routing em --routing.iterations 3 --optimizer.lr 0.01 --lr-schedule OneCycle; "
    "torchcaps train ./my_images --max-minutes 30; torchcaps train --resume runs/capsnet_small-digits-1 --epochs 40"
)


def train_command(words: list[str]) -> None:
    """Train a model, or go on with a run."""
    sys.path.insert(0, os.getcwd())  # a user's own routing, model or data set by import path
    words = _with_config(words)
    parser, flags, entry, folder = _parser(words)
    written, given = flags.read(parser, words)
    options = parser.parse_args(written)
    if options.resume is not None:
        _check_resume(parser, given, options)
    chosen = parser.instantiate(options)
    if (options.epochs is not None) and (options.steps is not None):
        parser.error(f"give --epochs or --steps, not both, got {options.epochs} and {options.steps}")
    if options.resume is not None:
        devices = options.devices if "--devices" in given else RunFolder.existing(options.resume).read_config().devices
        run_safely(words, devices, lambda: _resumed(options, given))
        return
    if set(options.what) - {entry.name, folder}:
        parser.error(f"what is meant by {' '.join(options.what)}? Put the model before the flags")
    spec = _spec(entry, folder, chosen, given, options)
    sizes = frozenset(name for name in ("image", "classes", "n_objects") if f"--{name}" in given)

    def run() -> Any:
        from torchcaps.training import train

        return train(spec, options.out, sizes)

    run_safely(words, spec.devices, run)


def train_help() -> str:
    """Return what ``torchcaps train --help`` says: ``train_help.txt`` has it too, so that nobody waits for torch."""
    return _parser([])[0].format_help()


def _with_config(words: list[str]) -> list[str]:
    """Put the flags of a YAML file before those that were given, which so have the last word."""
    for flag in ("--config", "--resume"):
        if sum(word == flag or word.startswith(f"{flag}=") for word in words) > 1:
            raise ValueError(f"one {flag} at a time: several can't be put together")
    if "--config" in words:
        place = words.index("--config")
        if place + 1 == len(words):
            raise ValueError("--config needs a file: --config FILE.yaml")
        path, rest = words[place + 1], words[:place] + words[place + 2 :]
    else:
        paths = [word.partition("=")[2] for word in words if word.startswith("--config=")]
        if not paths:
            return words
        path, rest = paths[0], [word for word in words if not word.startswith("--config=")]
    named, own = free_words(rest, _switches()), {_plain(word) for word in rest if word.startswith("--")}
    if own & {"epochs", "steps"}:  # of the two, what was given counts
        own |= {"epochs", "steps"}
    kept = [word for word in flag_words(path) if (_plain(word) not in own if word.startswith("--") else not named)]
    return kept + rest


def _plain(word: str) -> str:
    """Return the name of a flag, however it is written."""
    return word.partition("=")[0].removeprefix("--").replace("-", "_")


def _parser(words: list[str]) -> tuple[Parser, Flags, ModelEntry, str | None]:
    """Make the parser for the model that the words name; return also the folder of images that they name."""
    free = free_words(words, _switches())
    folder = next((word for word in free if is_image_folder(word)), None)
    names = [word for word in free if word != folder]
    if len(names) > 1:
        raise ValueError(f"one model at a time, got {names[0]!r} and {names[1]!r}")
    if names and (os.sep in names[0] or names[0].startswith((".", "~"))):
        raise ValueError(f"{names[0]} is no folder, and no model has that name")
    entry = find_model(names[0] if names else FOR_FOLDERS if folder or _data(words) == "folder" else DEFAULT)
    parser = Parser(prog="torchcaps train", usage="torchcaps train [MODEL | FOLDER] [FLAGS]", description=DESCRIPTION)
    parser.shown = {longer: start for start, longer in BELOW.items()}
    parser.add_argument(
        "what", nargs="*", help="a model, as 'torchcaps list' has it, or an import path; a folder of images"
    )
    renamed = _add_flags(parser, entry, words)
    fields = dataclasses.fields(entry.spec)
    tuples = {
        f"--{renamed.get(f.name, f.name)}" for f in fields if typing.get_origin(kind_of(entry.spec, f.name)) is tuple
    }
    return parser, Flags(parser.flags, tuples, _switches(), SHORT, BELOW, entry.name), entry, folder


def _switches() -> set[str]:
    """Return the flags that may stand alone, those of all models."""
    specs = [entry.spec for entry in MODELS.values()]
    fields = {field.name for spec in specs for field in dataclasses.fields(spec) if kind_of(spec, field.name) is bool}
    return {"--deterministic", "--tensorboard", *(f"--{name}" for name in fields)}


def _data(words: list[str]) -> str:
    """Return what stands behind ``--data``."""
    for before, word in zip(["", *words], words, strict=False):
        if before == "--data":
            return word
        if word.startswith("--data="):
            return word.partition("=")[2]
    return ""


def _add_flags(parser: Parser, entry: ModelEntry, words: list[str]) -> dict[str, str]:
    """Add all flags; return which fields of the model have another name here, since the run has one like it."""
    recipe = entry.recipe(entry.spec)
    known = ", ".join(list_pipelines())
    group = parser.add_argument_group("what, and where")
    group.add_argument(
        "--data", type=str | None, help=_now("a data set, a folder of images, or an import path", recipe.data)
    )
    group.add_argument(
        "--test-data", type=str | None, help=_now("what is tested on, where it is another", recipe.test_data)
    )
    help_text = f"how images are prepared, one of {known}; '' for nothing"
    group.add_argument("--augmentation", type=str | None, help=_now(help_text, recipe.augmentation))
    group.add_argument("--out", type=str | None, help="the run's folder (default: a new one below runs/)")
    group.add_argument("--resume", type=str | None, help="go on with the run in this folder, exactly where it stopped")
    group.add_argument("--config", type=str | None, help="a YAML file of flags, such as the config.yaml of a run")
    group = parser.add_argument_group("how")
    for name in RECIPE:
        if name != "augmentation":
            text = _now(described(Recipe, name), getattr(recipe, name))
            group.add_argument(_flag(name), type=kind_of(recipe, name) | None, help=text)
    for cls, name, current in ((OptimizerConfig, "optimizer", recipe.optimizer), (LossConfig, "loss", recipe.loss)):
        for field in dataclasses.fields(cls):
            text = _now(described(cls, field.name), getattr(current, field.name))
            group.add_argument(f"--{name}.{field.name}", type=kind_of(current, field.name) | None, help=text)
    schedule = None if _chose(words, "--lr-schedule") else recipe.lr_schedule
    names = "Constant, Exponential, Milestones, TimeDecay, Inverse, OneCycle"
    text = _now(f"of the learning rate, one of {names}; its fields are --lr-schedule.FIELD", recipe.lr_schedule)
    group.add_argument("--lr-schedule", type=LRSchedule, default=schedule, help=text)
    usual = RunSpec(entry.name)
    group = parser.add_argument_group("the run")
    for name in RUN:
        if name not in ("data_options", "test_options"):
            group.add_argument(
                _flag(name), type=kind_of(usual, name), default=getattr(usual, name), help=described(RunSpec, name)
            )
    for flag, name in (("--data", _data(words) or recipe.data), ("--test-data", recipe.test_data)):
        data = None if not name else find_spec("folder") if is_image_folder(name) else find_spec(name)
        for field in dataclasses.fields(data) if data is not None else ():
            text = described(type(data), field.name)
            group.add_argument(f"{flag}-options.{field.name}", type=kind_of(data, field.name) | None, help=text)
    taken = {action.dest for action in parser._actions}
    renamed = {f.name: f"model_{f.name}" for f in dataclasses.fields(entry.spec) if f.name in taken}
    add_fields(parser, entry.spec, _chose(words, "--routing"), renamed)
    return renamed


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _chose(words: list[str], flag: str) -> bool:
    return any(word.partition("=")[0] == flag for word in words)


def _now(text: str, value: Any) -> str:
    """Return a flag's help with what the model's recipe has."""
    return f"{text} (the recipe's: {value})".replace("%", "%%") if value not in (None, "") else text


def _spec(entry: ModelEntry, folder: str | None, chosen: Any, given: set[str], options: Any) -> RunSpec:
    """Make the run out of flags: what was not given is as the recipe has it."""
    taken = {*RUN, *RECIPE, "lr_schedule"}
    names = {f.name: f"model_{f.name}" if f.name in taken else f.name for f in dataclasses.fields(entry.spec)}
    fields = {
        name: chosen[flag] for name, flag in names.items() if any(g.partition(".")[0] == f"--{flag}" for g in given)
    }
    recipe = entry.recipe(dataclasses.replace(entry.spec, **fields))
    changes = {name: options[name] for name in RECIPE if options[name] is not None}
    for name in ("data", "test_data"):
        value = options[name]
        if value is not None:
            changes[name] = str(Path(value).expanduser().resolve()) if is_image_folder(value) else value
    if folder is not None:
        if "data" in changes:
            raise ValueError(f"give the images once, got the folder {folder} and --data {changes['data']}")
        changes["data"] = str(Path(folder).expanduser().resolve())
    for name in ("optimizer", "loss"):
        parts = {f.name: options[name][f.name] for f in dataclasses.fields(getattr(recipe, name))}
        parts = {key: value for key, value in parts.items() if value is not None}
        try:
            changes |= {name: dataclasses.replace(getattr(recipe, name), **parts)} if parts else {}
        except ValueError as error:
            raise ValueError(_by_flag(str(error), f"{name}.")) from error
    if any(flag.partition(".")[0] == "--lr-schedule" for flag in given):
        changes["lr_schedule"] = chosen.lr_schedule
    own = {name: options[name] for name in RUN if name not in ("data_options", "test_options")}
    if own["data_dir"] is not None:  # the run may be used from elsewhere
        own["data_dir"] = str(Path(own["data_dir"]).expanduser().resolve())
    for name in ("data_options", "test_options"):
        found = options.get("data_options" if name == "data_options" else "test_data_options") or {}
        own[name] = {key: value for key, value in dict(found).items() if value is not None}
    try:
        return RunSpec(entry.name, fields, recipe, **own).replace_recipe(**changes)
    except ValueError as error:  # the flag is what the user knows
        raise ValueError(_by_flag(str(error))) from error


def _by_flag(message: str, prefix: str = "") -> str:
    """Return a message about a field as one about its flag, which is what the user knows."""
    return re.sub(r"^(?:\w+): (\w+)", lambda found: f"--{prefix}{found[1] if prefix else _flag(found[1])[2:]}", message)


def _check_resume(parser: Parser, given: set[str], options: Any) -> None:
    other = sorted(given - BOUNDS)
    if other or options.what:
        named = other[0] if other else options.what[0]
        parser.error(
            f"{named} can't change a run that goes on: --resume takes --epochs, --steps, --max-minutes, "
            "--early-stopping-patience, --target-accuracy, --num-threads, --num-workers and --devices only"
        )


def _resumed(options: Any, given: set[str]) -> Any:
    from torchcaps.training import resume

    def change(spec: RunSpec) -> RunSpec:
        bounds = {name: options[name] for name in ("epochs", "steps") if options[name] is not None}
        names = ("max_minutes", "early_stopping_patience", "target_accuracy", "num_threads", "num_workers", "devices")
        own = {name: options[name] for name in names if _flag(name) in given}
        return dataclasses.replace(spec.replace_recipe(**bounds), **own)

    return resume(options.resume, change)
