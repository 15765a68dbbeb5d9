"""The four scales of a reproduction and the settings of a run at each of them.

``smoke`` runs everything in seconds on embedded digits, ``cpu`` in hours on two cores with narrower networks, fewer
images and fewer epochs, ``long`` in hours per table with all images and longer training but still narrower networks,
``full`` in the paper's own setting.
"""

import dataclasses
from typing import Any, Literal

from torchcaps.data.registry import find_spec
from torchcaps.models.registry import find_model
from torchcaps.models.schedules import OneCycle
from torchcaps.reproduce.half_length import half_length_spec
from torchcaps.reproduce.schema import Run
from torchcaps.training import RunSpec

__all__ = [
    "CPU_CIFAR",
    "CPU_DIGITS",
    "DEFAULT_SEEDS",
    "LONG_CIFAR",
    "LONG_DIGITS",
    "NARROW_CAPSNET",
    "NARROW_CNN",
    "SCALES",
    "Scale",
    "run_spec",
    "scaled_dataset",
]

Scale = Literal["smoke", "cpu", "long", "full"]
SCALES: tuple[Scale, ...] = ("smoke", "cpu", "long", "full")
DEFAULT_SEEDS = {"smoke": 1, "cpu": 2, "long": 2, "full": 3}  # number of seeds

# Overrides at the scale cpu that several papers share, so that their rows are comparable. The learning rate follows
# `OneCycle` up to the paper's own and down again: a decay over hundreds of thousands of steps would not have begun.
CPU_DIGITS: dict[str, Any] = {"max_train_images": 20_000, "epochs": 4, "lr_schedule": OneCycle()}
CPU_CIFAR: dict[str, Any] = {
    "max_train_images": 10_000,
    "epochs": 5,
    "lr_schedule": OneCycle(),
    "max_test_images": 5_000,
}
# Overrides at the scale long, on top of those of cpu: all images. 10 epochs of MNIST take 12 to 16 minutes with
# `NARROW_CAPSNET` on one thread (0.15 to 0.2 s per step of 128 images), so that two cores finish a table in hours.
LONG_DIGITS: dict[str, Any] = {"max_train_images": None, "epochs": 10, "max_test_images": None}
LONG_CIFAR: dict[str, Any] = {"max_train_images": None, "epochs": 10, "max_test_images": None}
NARROW_CAPSNET: dict[str, Any] = {"width": 64, "types": 8}  # a quarter of the channels and of the capsule types
NARROW_CNN: dict[str, Any] = {"width": 32}  # an eighth of the channels


def run_spec(run: Run, scale: Scale, seed: int = 0, **settings: Any) -> RunSpec:
    """Return the specification of a run at a scale.

    Args:
        run: the run; a half-length companion has half the length at any scale.
        scale: ``"smoke"``: the narrowest network and two steps on the embedded digits, whatever the paper's data set;
            ``"cpu"``: with the overrides ``run.cpu``; ``"long"``: with ``run.cpu`` and, on top, ``run.long``, of which
            ``steps`` replaces ``epochs`` and vice versa; ``"full"``: the paper's setting.
        seed: seed of the run.
        settings: fields of the run that do not change its result: threads, data directory.
    """
    changes = dict(run.changes)
    if scale in ("cpu", "long"):
        changes |= run.cpu
    if scale == "long":
        for name, other in (("steps", "epochs"), ("epochs", "steps")):
            if name in run.long:
                changes.pop(other, None)
        changes |= run.long
    spec = RunSpec.of(run.model, seed=seed, **changes, **settings)
    spec = _smoke(spec) if scale == "smoke" else spec
    return half_length_spec(spec) if run.half_length else spec


def _smoke(spec: RunSpec) -> RunSpec:
    """Return the specification of a run that takes a moment and exercises every part; its numbers are meaningless."""
    recipe = spec.recipe
    options = {**spec.model_options, **find_model(spec.model).spec.smoke_changes()}
    synthesized = bool(find_spec(recipe.data).made_from)
    grey = synthesized or recipe.data in ("mnist", "fashion-mnist")
    test = "affnist-style" if recipe.test_data.startswith("affnist") else recipe.test_data
    changes: dict[str, Any] = {
        "data": recipe.data if synthesized else "digits",
        "augmentation": recipe.augmentation if grey else "",
        "test_data": test,
        "batch_size": 16,
        "steps": 2,
        "val_fraction": 0.25 if recipe.val_fraction else 0.0,
    }
    return dataclasses.replace(
        spec,
        model_options=options,
        data_options={**spec.data_options, "source": "digits"} if synthesized else {},
        test_options={"source": "digits"} if test and find_spec(test).made_from else {},
        max_train_images=64,
        max_test_images=32,
        eval_interval_steps=2,
    ).replace_recipe(**changes)


def scaled_dataset(name: str, scale: Scale) -> tuple[str, dict[str, Any]]:
    """Return the data set that a measurement reads at a scale instead of ``name``, and its options.

    The official affNIST files are read at the scale ``full`` only; at ``smoke`` every image comes from the embedded
    digits.
    """
    if scale != "full" and name == "affnist":
        name = "affnist-style"
    if scale != "smoke":
        return name, {}
    return (name, {"source": "digits"}) if find_spec(name).made_from else ("digits", {})
