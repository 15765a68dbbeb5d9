"""The three scales: what becomes of a run in seconds, in an afternoon on two cores, and as the paper did it."""

import dataclasses
from typing import Any, Literal

from torchcaps.data.registry import find_spec
from torchcaps.models.registry import find_model
from torchcaps.reproduce.schema import Run
from torchcaps.training import RunSpec

__all__ = ["SCALES", "SEEDS", "Scale", "run_spec"]

Scale = Literal["smoke", "cpu", "full"]
SCALES: tuple[Scale, ...] = ("smoke", "cpu", "full")
SEEDS = {"smoke": 1, "cpu": 2, "full": 3}  # by default


def run_spec(run: Run, scale: Scale, seed: int = 0, **own: Any) -> RunSpec:
    """Return a run at a scale.

    Args:
        run: the run.
        scale: ``"smoke"``: the narrowest net, two steps on the embedded digits, whatever the paper's data set is;
            ``"cpu"``: what the paper's file says; ``"full"``: the paper's setting.
        seed: of everything.
        own: fields of the run that decide where it is computed: threads, the data folder.
    """
    changes = dict(run.changes)
    if scale == "cpu":
        changes |= run.cpu
    spec = RunSpec.of(run.model, seed=seed, **changes, **own)
    return _smoke(spec) if scale == "smoke" else spec


def _smoke(spec: RunSpec) -> RunSpec:
    """Return a run that ends in a moment: no number of it means anything, but all of its parts have worked."""
    recipe = spec.recipe
    fields = {**spec.model_options, **find_model(spec.model).spec.smoke_changes()}
    made = bool(find_spec(recipe.data).made_from)
    grey = made or recipe.data in ("mnist", "fashion-mnist")
    test = "affnist-style" if recipe.test_data.startswith("affnist") else recipe.test_data
    changes: dict[str, Any] = {
        "data": recipe.data if made else "digits",
        "augmentation": recipe.augmentation if grey else "",
        "test_data": test,
        "batch_size": 16,
        "steps": 2,
        "val_fraction": 0.25 if recipe.val_fraction else 0.0,
    }
    return dataclasses.replace(
        spec,
        model_options=fields,
        data_options={**spec.data_options, "source": "digits"} if made else {},
        test_options={"source": "digits"} if test and find_spec(test).made_from else {},
        max_train_images=64,
        max_test_images=32,
        eval_interval_steps=2,
    ).replace_recipe(**changes)
