"""Flags of ``torchcaps train``: those of the run, of the recipe, of the data set and of the model."""

import dataclasses
from typing import Literal

from torchcaps._core.serialize import is_resumable
from torchcaps.cli.command_line import TRUST_FLAG, CommandLine, flag_of
from torchcaps.cli.options import ON_ERROR_HELP, OnError, add_trust_flag
from torchcaps.cli.parser import Parser, add_fields, annotation_of, field_help
from torchcaps.cli.values import class_choices
from torchcaps.data import list_pipelines
from torchcaps.data.registry import find_spec, is_image_folder
from torchcaps.models import list_models
from torchcaps.models.recipe import LossConfig, OptimizerConfig, Recipe
from torchcaps.models.registry import ModelEntry, find_model
from torchcaps.models.schedules import LRSchedule
from torchcaps.training.config import RunSpec

__all__ = [
    "DATA_FIELDS",
    "DEFAULT_MODEL",
    "IMAGE_FOLDER_MODEL",
    "NESTED_FLAGS",
    "OPTIONS",
    "OPTION_PREFIXES",
    "RECIPE_FIELDS",
    "RESUME_FIELDS",
    "RUN_FIELDS",
    "find_switches",
    "make_train_parser",
    "model_flag",
    "train_help",
]

DEFAULT_MODEL, IMAGE_FOLDER_MODEL = "capsnet_digits", "capsnet_images"
OPTIONS = ("data_options", "test_options")
OPTION_PREFIXES = {"data_options": "--data.", "test_options": "--test-data."}
DATA_FIELDS = ("data", "test_data", "augmentation")
ASCENT_FIELDS = ("ascents", "descents", "ascent_lr", "reuse_children")
RECIPE_FIELDS = ("batch_size", "epochs", "steps", "val_fraction", "eval_weights", "class_weights", *ASCENT_FIELDS)
RUN_FIELDS = [
    f.name for f in dataclasses.fields(RunSpec) if f.name not in ("model", "model_options", "recipe", *OPTIONS)
]
RESUME_FIELDS = ("epochs", "steps", *(name for name in RUN_FIELDS if is_resumable(RunSpec, name)))
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
RESERVED |= {"--resume", "--model", "--image-size", "--on-error", "--compare", "--quiet", "--json", TRUST_FLAG}
RESERVED |= set(NESTED_FLAGS.values())
COMMON_FLAGS = (
    "--model",
    "--data",
    "--out",
    "--epochs",
    "--max-minutes",
    "--batch-size",
    "--lr",
    "--routing",
    "--image-size",
    "--device",
    "--seed",
    "--resume",
)
DESCRIPTION = (
    "Train a model: by default a small capsule network on the embedded digits, in some minutes. Settings that are "
    "not given are those of the model's recipe, which follows its paper. Ctrl-C saves a checkpoint and stops; "
    "--resume RUN continues bit-exactly. All settings can also be in a YAML file, --config FILE; each run writes one, "
    "config.yaml."
)
EXAMPLES = (
    "torchcaps train",
    "torchcaps train ./my_images --max-minutes 30",
    "torchcaps train ./my_images --image-size 96 --compare cnn",
    "torchcaps train sabour2017_mnist --epochs 10 --val-fraction 0.1",
    "torchcaps train --model tsai2020_cifar10 --routing em --routing.iterations 3 --lr 0.01 --lr-schedule one_cycle",
    "torchcaps train --optimizer adamw --weight-decay 0.01 --lr-schedule cosine --lr-schedule.warmup 0.1",
    "torchcaps train --resume runs/capsnet_digits-digits-1 --epochs 80",
)


def train_help() -> str:
    """Return the help of ``torchcaps train``; ``train_help.txt`` is a copy that prints without loading torch."""
    return make_train_parser(find_model(DEFAULT_MODEL), CommandLine([], []))[0].format_help_of(complete=False)


def find_switches() -> set[str]:
    """Return the boolean flags of runs and of all registered models."""
    specs = [RunSpec(), *(find_model(name).spec for name in list_models())]
    return {flag_of(f.name) for spec in specs for f in dataclasses.fields(spec) if annotation_of(spec, f.name) is bool}


def model_flag(field: str) -> str:
    """Return the flag of a model's field."""
    return f"--model-{flag_of(field)[2:]}" if flag_of(field) in RESERVED else flag_of(field)


def make_train_parser(entry: ModelEntry, line: CommandLine, folder: str | None = None) -> tuple[Parser, dict[str, str]]:
    """Return the parser for a model, and the flags of the model's fields.

    Args:
        entry: the model.
        line: the command line, which may name the data set and the routing.
        folder: the directory of images, if a positional argument names one.
    """
    recipe, run = entry.recipe(entry.spec), RunSpec(entry.name)
    usage = "torchcaps train [MODEL] [DIRECTORY] [FLAGS]"
    parser = Parser("torchcaps train", DESCRIPTION, usage=usage, examples=EXAMPLES, common=COMMON_FLAGS)
    parser.add_argument(
        "model_or_directory",
        nargs="*",
        help="name of a model (see 'torchcaps list') or import path of a ModelSpec; directory of images with one "
        f"subdirectory per class (default: {DEFAULT_MODEL}, for a directory {IMAGE_FOLDER_MODEL})",
    )
    group = parser.add_argument_group("model, data and output")
    text = "name of the model, instead of the first argument (see 'torchcaps list')"
    group.add_argument("--model", type=str | None, help=text)
    texts = {
        "data": "training set: name (see 'torchcaps data list'), directory of images, or import path",
        "test_data": "test set, if it is not the test split of the training set",
        "augmentation": f"preprocessing pipeline, one of {', '.join(list_pipelines())}; '' for none",
    }
    for name in DATA_FIELDS:
        group.add_argument(flag_of(name), type=str, default=getattr(recipe, name), help=texts[name])
    for field, flag, name in (
        ("data_options", "--data", folder or line.get("--data") or recipe.data),
        ("test_options", "--test-data", line.get("--test-data") or recipe.test_data),
    ):
        data = None if not name else find_spec("folder" if is_image_folder(name) else name)
        for f in dataclasses.fields(data) if data is not None else ():
            annotation = annotation_of(data, f.name)
            text = f"{field_help(type(data), f.name)} (default: {getattr(data, f.name)})"
            dest = f"{field}.{f.name}"
            group.add_argument(f"{flag}.{flag_of(f.name)[2:]}", dest=dest, type=annotation | None, help=text)
    text = "height and width to which a directory of images is resized (default: the original size if all images have "
    text += "the same, of at most 96 pixels; otherwise their median shorter side, at most 64)"
    group.add_argument("--image-size", type=int | None, help=text)
    group.add_argument("--on-error", type=OnError | None, help=ON_ERROR_HELP)
    text = "after training, also train this baseline on the same data for the same time, and print both: 'cnn', a "
    text += "convolutional network of three blocks"
    group.add_argument("--compare", type=Literal["cnn"] | None, help=text)
    group.add_argument("--out", type=str | None, help="directory of the run (default: a new one in runs/)")
    group.add_argument("--resume", type=str | None, help="directory of a run to resume from its last checkpoint")
    group.add_argument("--config", type=str | None, help="YAML file of settings, such as the config.yaml of a run")
    group.add_argument("--quiet", action="store_true", help="print no progress, only warnings and results (also -q)")
    text = "print the results as JSON; progress is printed on standard error"
    group.add_argument("--json", action="store_true", help=text)
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
        f"{field_help(Recipe, 'lr_schedule')}: {', '.join(class_choices(LRSchedule))}, or an import path; "
        "--lr-schedule.FIELD sets its fields"
    )
    group.add_argument("--lr-schedule", type=LRSchedule, default=schedule, help=text)
    group = parser.add_argument_group("run")
    for name in RUN_FIELDS:
        text = field_help(RunSpec, name)
        group.add_argument(flag_of(name), type=annotation_of(run, name), default=getattr(run, name), help=text)
    renamed = {f.name: model_flag(f.name) for f in dataclasses.fields(entry.spec)}
    return parser, add_fields(parser, entry.spec, "model_options", line, renamed)
