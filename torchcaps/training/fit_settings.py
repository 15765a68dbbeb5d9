"""Settings of `torchcaps.fit`: keyword arguments under the names of the flags, as the settings of a run."""

import dataclasses
import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchcaps._core.registry import UntrustedCodeError, check_name
from torchcaps.models import MODELS, LossConfig, ModelSpec, Network, OptimizerConfig, Recipe, schedules
from torchcaps.models.registry import find_model
from torchcaps.models.schedules import LRSchedule
from torchcaps.training.config import RunSpec
from torchcaps.training.run_dir import RunDirectory
from torchcaps.training.settings_file import check_registered, read_settings

__all__ = ["recorded_settings", "settings_of_model"]

# Settings of `fit` that are not fields of a run.
OWN_SETTINGS = ("out", "resume", "figures", "quiet", "class_names", "trust_remote_code")
# Names that other libraries use, and the setting with the same meaning.
SYNONYMS = {
    "learning_rate": "lr",
    "max_epochs": "epochs",
    "num_epochs": "epochs",
    "n_epochs": "epochs",
    "max_steps": "steps",
    "batch": "batch_size",
    "gpu": "device",
    "accelerator": "device",
    "gpus": "devices",
    "workers": "num_workers",
    "num_classes": "classes",
    "n_classes": "classes",
    "validation_split": "val_fraction",
    "validation_data": "val",
    "val_split": "val_fraction",
    "patience": "early_stopping_patience",
    "scheduler": "lr_schedule",
    "optim": "optimizer",
    "gradient_clip_val": "max_grad_norm",
    "accumulate_grad_batches": "micro_batches",
    "verbose": "quiet",
    "output_dir": "out",
    "logdir": "out",
    "random_state": "seed",
}
SIZES = ("image", "classes", "n_objects")  # fields of the model that follow the data unless given


def settings_of_model(
    model: str | ModelSpec | Network, settings: Mapping[str, Any]
) -> tuple[RunSpec, Network | None, frozenset[str]]:
    """Return the settings of the run before the data is known, the network, and the model fields that are fixed."""
    network = model if isinstance(model, Network) else None
    if isinstance(model, str):
        name, options, recipe = model, {}, None
        find_model(name)
    elif isinstance(model, ModelSpec):
        name, options, recipe = *_named_spec(model, ""), model.default_recipe()
    elif isinstance(model, Network):
        name, options, recipe = *_named_spec(model.spec, model.name), model.recipe
    else:
        kind = model.__name__ + ", a class" if isinstance(model, type) else type(model).__name__
        raise TypeError(
            f"model must be the name of a model, a ModelSpec or a Network of torchcaps, got {kind}: a network of your "
            "own becomes one by subclassing torchcaps.models.ModelSpec"
        )
    model_fields = _field_names(type(find_model(name).spec))
    _check_settings(settings, model_fields if isinstance(model, str) else set())
    options = {**options, **{k: v for k, v in settings.items() if k in model_fields and k not in _recipe_names()}}
    run_fields = {k: v for k, v in settings.items() if k in _field_names(RunSpec) - {"model", "model_options"}}
    if run_fields.get("data_dir") is not None:
        run_fields["data_dir"] = str(Path(run_fields["data_dir"]).expanduser().resolve())
    spec = RunSpec(name, options, **({} if recipe is None else {"recipe": recipe}), **run_fields)
    spec = spec.replace_recipe(**_recipe_changes(spec.recipe, settings))
    fixed = frozenset(SIZES) if not isinstance(model, str) else frozenset(n for n in SIZES if n in settings)
    return spec, network, fixed


def _named_spec(spec: ModelSpec, name: str) -> tuple[str, dict[str, Any]]:
    """Return a spec as the name of a registered model of its class and the fields that differ from it."""
    entries = [entry for entry in MODELS.values() if type(entry.spec) is type(spec)]
    entries.sort(key=lambda entry: (entry.name != name, entry.spec != spec))
    entry = entries[0] if entries else find_model(f"{type(spec).__module__}.{type(spec).__qualname__}")
    fields = _field_names(type(spec))
    return entry.name, {f: getattr(spec, f) for f in fields if getattr(spec, f) != getattr(entry.spec, f)}


def _recipe_names() -> set[str]:
    """Return the settings that change the recipe: its fields, and those of the optimiser."""
    return (_field_names(Recipe) | _field_names(OptimizerConfig)) - {"name", "data", "test_data"}


def _check_settings(settings: Mapping[str, Any], model_fields: set[str]) -> None:
    """Raise if a setting does not exist; suggest one with the same meaning or a similar name."""
    known = (_field_names(RunSpec) - {"model", "model_options", "recipe"}) | _recipe_names() | model_fields
    known |= set(OWN_SETTINGS)
    for name in settings:
        if name in known:
            continue
        if SYNONYMS.get(name) in known | {"val"}:
            raise ValueError(f"unknown setting {name!r}: did you mean {SYNONYMS[name]!r}?")
        check_name(name, known, "setting")


def _recipe_changes(recipe: Recipe, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changed fields of a recipe; names of optimisers, losses and schedules become their objects."""
    changes = {name: value for name, value in settings.items() if name in _field_names(Recipe)}
    optimizer = {k: v for k, v in settings.items() if k in _field_names(OptimizerConfig) - {"name"}}
    chosen = changes.pop("optimizer", None)
    if isinstance(chosen, OptimizerConfig):
        changes["optimizer"] = dataclasses.replace(chosen, **optimizer)
    elif chosen is not None or optimizer:
        named = {} if chosen is None else {"name": chosen.lower() if isinstance(chosen, str) else chosen}
        changes["optimizer"] = recipe.optimizer.replace(**named, **optimizer)
    if "loss" in changes and not isinstance(changes["loss"], LossConfig):
        changes["loss"] = dataclasses.replace(recipe.loss, name=changes["loss"])
    if isinstance(changes.get("lr_schedule"), str):
        changes["lr_schedule"] = _schedule(changes["lr_schedule"])
    return changes


def _schedule(name: str) -> LRSchedule:
    """Return the schedule of a name, ``"one_cycle"`` for `OneCycle`, with its default fields."""
    classes = inspect.getmembers(schedules, lambda c: isinstance(c, type) and issubclass(c, LRSchedule))
    by_name = {re.sub(r"(?<=[a-z])(?=[A-Z])", "_", c).lower(): cls for c, cls in classes if cls is not LRSchedule}
    return by_name[check_name(name.lower(), by_name, "lr_schedule")]()


def _field_names(cls: type) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


def recorded_settings(settings: Mapping[str, Any], own: Mapping[str, str]) -> tuple[RunSpec, dict[str, Any]]:
    """Return the settings of a run that `torchcaps.fit` resumes, and those that decide about its data.

    Args:
        settings: keyword arguments of `torchcaps.fit`; besides ``resume`` and how to report, only its length.
        own: model and data sets that the caller has passed, as in ``config.yaml``; they need no ``trust_remote_code``.
    """
    allowed = ("resume", "epochs", "steps", "figures", "quiet", "class_names", "trust_remote_code")
    other = [name for name in settings if name not in allowed]
    if other:
        raise ValueError(f"{other[0]!r} can't be changed on resume, which accepts {', '.join(allowed[1:])}")
    directory = RunDirectory.open(settings["resume"])
    if not settings.get("trust_remote_code"):
        values = read_settings(directory.config)
        try:
            check_registered({key: value for key, value in values.items() if own.get(key) != value})
        except UntrustedCodeError as error:
            raise ValueError(f"{directory.config}: {error}") from error
    spec = directory.read_config(trust_remote_code=True)
    recorded = {name: getattr(spec.recipe, name) for name in ("augmentation", "val_fraction")}
    return spec, {**settings, **recorded}
