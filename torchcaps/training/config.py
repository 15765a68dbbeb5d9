"""Configuration of a run: model, data, recipe, stopping criteria and devices, and the run's identity."""

import dataclasses
import hashlib
import json
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from torchcaps._core.registry import is_import_path
from torchcaps._core.serialize import from_plain, is_identity, is_resumable, is_subset, non_default, setting, to_plain
from torchcaps._core.validation import check_field_names, check_fields, check_range
from torchcaps.data.registry import is_image_folder
from torchcaps.models.recipe import Recipe
from torchcaps.models.registry import find_model
from torchcaps.models.spec import ModelSpec
from torchcaps.training.settings_file import check_registered

__all__ = ["Precision", "RunSpec"]

Precision = Literal["32-true", "bf16-mixed", "16-mixed", "bf16-true", "64-true"]


@dataclass(frozen=True)
class RunSpec:
    """Configuration of a training run. Its fields are the flags of ``torchcaps train`` and the keys of ``config.yaml``.

    Each field declares whether it is part of the run's *identity* (it decides the result, so a record with another
    value belongs to another run) and whether it is *resumable* (it may change when the run is resumed).

    Args:
        model: name of a registered model, or import path of a `torchcaps.models.ModelSpec`.
        model_options: fields of the model that differ from the registered ones.
        recipe: loss, optimizer, schedule and data (default: the model's recipe). `RunSpec.of` and
            `RunSpec.replace_recipe` replace single fields of it.
        data_options: fields of the training set's specification, such as ``{"source": "digits"}``.
        test_options: fields of the test set's specification; ignored if the recipe has no ``test_data``.
        data_dir: directory of downloaded data sets (default: the environment variable ``TORCHCAPS_DATA``, otherwise
            a cache directory). For ``data="folder"``, the directory of images.
        max_minutes: stop after this training time in minutes, summed over all sessions of the run (default: no
            limit). A schedule over the whole training follows the measured speed, so that it ends with the time.
        max_grad_norm: clip gradients to this global L2 norm (default: no clipping).
        micro_batches: number of micro-batches per optimizer step (gradient accumulation). The gradient equals that of
            the full batch, and a step needs less memory.
        precision: floating-point precision as named by Lightning. ``"bf16-mixed"`` computes in bfloat16 and keeps
            the weights in float32.
        early_stopping_patience: stop after this number of evaluations without a higher validation accuracy (default:
            no early stopping).
        target_accuracy: stop if the validation accuracy reaches this fraction, as Sabour 2017, section 5.2, does
            (default: no target).
        ema_decay: decay per step of the exponential moving average of the weights, from 0 to 1; used with
            ``eval_weights="ema"``.
        seed: seed of initial weights, order of images, augmentation and dropout.
        deterministic: reject non-deterministic operations (``torch.use_deterministic_algorithms``).
        num_threads: number of CPU threads per process (default: cores divided by processes).
        num_workers: number of processes that prepare batches in advance; 0 prepares them in the training process.
        device: device type; ``"auto"`` uses CUDA or MPS if available, otherwise the CPU.
        devices: number of processes on this machine (data-parallel); each takes an equal part of every batch.
        eval_interval_epochs: number of epochs between two evaluations on the validation set (on the test set if there
            is no validation set).
        eval_interval_steps: number of steps between two evaluations (default: one epoch, at most 10,000 steps).
        max_train_images: train on at most this number of images: a fixed random subset (default: all).
        max_test_images: test on at most this number of images: a fixed random subset (default: all; 10,000 of a test
            set with more than 500,000).
        checkpoint_interval_minutes: number of minutes between two checkpoints within an epoch; each epoch ends with a
            checkpoint.
        checkpoint_interval_steps: number of steps between two checkpoints within an epoch (default: by time only).
        tensorboard: also log the metrics for TensorBoard.

    >>> RunSpec.of("capsnet_small", epochs=2).recipe.epochs
    2
    """

    model: str = setting("capsnet_digits", identity=True, resumable=False)
    model_options: dict[str, Any] = setting(default_factory=dict, identity=True, resumable=False)
    recipe: Recipe = setting(cast("Recipe", None), identity=True, resumable=False)  # its fields have flags of their own
    data_options: dict[str, Any] = setting(default_factory=dict, identity=True, resumable=False)
    test_options: dict[str, Any] = setting(default_factory=dict, identity=True, resumable=True)
    data_dir: str | None = setting(None, identity=False, resumable=True)
    max_minutes: float | None = setting(None, identity=True, resumable=True)
    max_grad_norm: float | None = setting(None, identity=True, resumable=False)
    micro_batches: int = setting(1, identity=True, resumable=False)
    precision: Precision = setting("32-true", identity=True, resumable=False)
    early_stopping_patience: int | None = setting(None, identity=True, resumable=True)
    target_accuracy: float | None = setting(None, identity=True, resumable=True)
    ema_decay: float = setting(0.999, identity=True, resumable=False)
    seed: int = setting(0, identity=False, resumable=False)  # records of one identity differ in it
    deterministic: bool = setting(False, identity=True, resumable=False)
    num_threads: int | None = setting(None, identity=False, resumable=True)
    num_workers: int = setting(0, identity=False, resumable=True)
    device: Literal["auto", "cpu", "cuda", "mps"] = setting("auto", identity=False, resumable=True)
    devices: int = setting(1, identity=False, resumable=True)
    eval_interval_epochs: int = setting(1, identity=False, resumable=True)
    eval_interval_steps: int | None = setting(None, identity=True, resumable=True)
    max_train_images: int | None = setting(None, identity=True, resumable=False)
    max_test_images: int | None = setting(None, identity=True, resumable=True)
    checkpoint_interval_minutes: float = setting(5.0, identity=False, resumable=True)
    checkpoint_interval_steps: int | None = setting(None, identity=False, resumable=True)
    tensorboard: bool = setting(False, identity=False, resumable=True)

    def __post_init__(self) -> None:
        entry = find_model(self.model)
        check_field_names(type(entry.spec), self.model_options, self.model)
        if self.recipe is None:
            object.__setattr__(self, "recipe", entry.recipe(self.model_spec()))
        check_fields(self)
        for name in ("model_options", "data_options", "test_options"):
            if not isinstance(getattr(self, name), dict):
                raise TypeError(f"RunSpec: {name} must be a mapping of fields, got {getattr(self, name)!r}")
        for name in ("micro_batches", "devices", "num_threads", "early_stopping_patience"):
            check_range(self, name, 1)
        for name in ("eval_interval_epochs", "eval_interval_steps", "checkpoint_interval_steps"):
            check_range(self, name, 1)
        for name in ("max_train_images", "max_test_images"):
            check_range(self, name, 1)
        for name in ("max_minutes", "max_grad_norm", "checkpoint_interval_minutes"):
            check_range(self, name, 0, strict=True)
        check_range(self, "num_workers", 0)
        check_range(self, "target_accuracy", 0, 1, strict=True)
        check_range(self, "seed", -(2**63), 2**63 - 1)
        check_range(self, "ema_decay", 0, 1)

    @classmethod
    def of(cls, model: str = "capsnet_digits", **changes: Any) -> "RunSpec":
        """Return a run of a model with some fields replaced: fields of the run, of the recipe, or of the model.

        A name that several of them have means the run's field, then the recipe's; ``model_options={name: value}``
        means the model's.
        """
        run_fields, recipe_fields = _field_names(cls), _field_names(Recipe)
        model_fields = _field_names(type(find_model(model).spec)) - run_fields - recipe_fields
        for name in changes:
            if name not in run_fields | recipe_fields | model_fields:
                raise ValueError(f"{name!r} is not a field of RunSpec, Recipe or the model {model}")
        options = {**changes.get("model_options", {}), **{k: v for k, v in changes.items() if k in model_fields}}
        run_changes = {k: v for k, v in changes.items() if k in run_fields and k != "model_options"}
        spec = cls(model, options, **run_changes)
        return spec.replace_recipe(**{k: v for k, v in changes.items() if k in recipe_fields})

    def replace_recipe(self, **changes: Any) -> "RunSpec":
        """Return the run with some fields of its recipe replaced; ``epochs`` resets ``steps``, and vice versa."""
        if "epochs" in changes and "steps" not in changes:
            changes["steps"] = None
        if "steps" in changes and "epochs" not in changes:
            changes["epochs"] = None
        return dataclasses.replace(self, recipe=dataclasses.replace(self.recipe, **changes)) if changes else self

    def model_spec(self) -> ModelSpec:
        """Return the specification of the model: the registered one with `model_options`."""
        return dataclasses.replace(find_model(self.model).spec, **self.model_options)

    @property
    def names_own_code(self) -> bool:
        """Whether the run names code that is not part of torchcaps, so that loading it needs ``trust_remote_code``."""
        values = self.to_plain()
        data = [name for name in (self.recipe.data, self.recipe.test_data) if not is_image_folder(name)]
        names = [name for name in (self.model, *data) if is_import_path(name)]
        return any(not name.startswith("torchcaps.") for name in [*names, *_class_paths(values)])

    def to_plain(self) -> dict[str, Any]:
        """Return all settings as JSON values in one mapping; the fields of the recipe are on the top level."""
        settings = {f.name: to_plain(getattr(self, f.name)) for f in dataclasses.fields(self) if f.name != "recipe"}
        return {**settings, **to_plain(self.recipe)}

    @classmethod
    def from_plain(cls, values: Mapping[str, Any], trust_remote_code: bool = False) -> "RunSpec":
        """Return the run that `to_plain` has written.

        Args:
            values: the settings.
            trust_remote_code: import models, data sets, routings and schedules that are not registered. By default,
                they raise `torchcaps._core.registry.UntrustedCodeError`.
        """
        if not trust_remote_code:
            check_registered(values)
        for name in ("model", "data", "test_data", "augmentation", "note", "data_dir"):
            if not isinstance(values.get(name, ""), str | None):
                raise TypeError(f"{name} must be a string, got {values[name]!r}")
        recipe_fields = _field_names(Recipe)
        settings = {name: value for name, value in values.items() if name not in recipe_fields}
        check_field_names(cls, settings, "RunSpec")
        spec = find_model(settings.get("model", cls.model)).spec
        hints = typing.get_type_hints(type(spec))
        options = settings.pop("model_options", {})
        if not isinstance(options, dict):
            raise TypeError(f"model_options must be a mapping of fields, got {options!r}")
        check_field_names(type(spec), options, settings.get("model"))
        options = {name: from_plain(hints[name], value, trust_remote_code) for name, value in options.items()}
        recipe_values = {name: value for name, value in values.items() if name in recipe_fields}
        recipe = from_plain(Recipe, recipe_values, trust_remote_code)
        return cls(**settings, model_options=options, recipe=recipe)

    def identity(self) -> dict[str, Any]:
        """Return every setting that decides the result, defaults included, as JSON values.

        Two runs with equal identities differ at most in seed, device and logging. Fields of the model are under
        ``"model_spec"``, all of them except those that follow the data or the memory (``image``, ``classes``,
        ``streamed``).
        """
        model = self.model_spec()
        fields = {f.name: to_plain(getattr(model, f.name)) for f in dataclasses.fields(model)}
        fields = {name: value for name, value in fields.items() if is_identity(type(model), name)}
        settings = {name: value for name, value in self.to_plain().items() if is_identity(_owner(name), name)}
        del settings["model_options"]
        return {**settings, "model_spec": fields}

    def identity_hash(self) -> str:
        """Return 8 hexadecimal digits that change with any value of `identity`, a changed default included."""
        return _short_hash(self.identity())

    def record_name(self) -> str:
        """Return the model's name with 8 hexadecimal digits for the identity.

        The hash omits settings at their default, so that a new field renames no record. A changed default is
        therefore not visible in the name; compare `identity` for that.
        """
        model = type(self.model_spec())
        options = {k: non_default(v) for k, v in self.model_options.items() if is_identity(model, k)}
        changed = {**non_default(self), **non_default(self.recipe), "model_options": options}
        unnamed = {"model", "recipe"} | ({"model_options"} if not options else set())
        changed = {k: v for k, v in changed.items() if k not in unnamed and is_identity(_owner(k), k)}
        return f"{self.model}-{_short_hash(changed)}"

    def resume_conflicts(self, recorded: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Return the settings that differ from recorded ones although they can't change on resume.

        Args:
            recorded: `to_plain` of the run as written in a checkpoint. Settings that it lacks were added to torchcaps
                later and are not compared, including fields of an optimizer, a loss or a routing.

        Returns:
            For each differing setting the recorded and the current value.
        """
        current = {name: value for name, value in self.to_plain().items() if not is_resumable(_owner(name), name)}
        return {k: (recorded[k], v) for k, v in current.items() if k in recorded and not _is_same(k, recorded[k], v)}


def _field_names(cls: type) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


def _class_paths(values: Any) -> Iterator[str]:
    """Yield the values of all keys ``class_path`` in nested settings."""
    items = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, value in items:
        if key == "class_path":
            yield value
        yield from _class_paths(value)


def _is_same(name: str, recorded: Any, current: Any) -> bool:
    """Return whether a recorded setting equals the current one; options must have equal keys."""
    if name.endswith("_options") and isinstance(recorded, dict):
        return recorded.keys() == current.keys() and all(is_subset(recorded[key], current[key]) for key in current)
    return is_subset(recorded, current)


def _owner(name: str) -> type:
    """Return the class that declares a setting: `Recipe` or `RunSpec`."""
    return Recipe if name in _field_names(Recipe) else RunSpec


def _short_hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]
