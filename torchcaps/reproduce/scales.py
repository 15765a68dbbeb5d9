"""The three scales: what becomes of a run in seconds, in an afternoon on two cores, and as the paper did it."""

import dataclasses
from typing import Any, Literal

from torchcaps.data.registry import find_spec
from torchcaps.models import (
    Chen2019,
    Chen2019Dynamic,
    Chen2019Multi,
    ChenCNN,
    ChenFlatCNN,
    Choi2019,
    FlatCNN,
    Hinton2018,
    LeNet,
    PooledCNN,
    ResNet18,
    Sabour2017,
    Tsai2020,
    Tsai2020Diverse,
    Tsai2020Dynamic,
    Tsai2020EM,
    TsaiCNN,
    TsaiDiverseCNN,
    Yang2021,
)
from torchcaps.reproduce.schema import Run
from torchcaps.training import RunSpec
from torchcaps.training.names import find_model

__all__ = ["NARROW", "SCALES", "SEEDS", "Scale", "run_spec"]

Scale = Literal["smoke", "cpu", "full"]
SCALES: tuple[Scale, ...] = ("smoke", "cpu", "full")
SEEDS = {"smoke": 1, "cpu": 2, "full": 3}  # by default

# Every architecture at a width that a test can afford.
NARROW: dict[type, dict[str, Any]] = {
    Sabour2017: {"width": 16, "types": 4, "hidden": (32,)},
    Choi2019: {"width": 8, "types": 4, "primary_dim": 8, "dim": 8, "hidden": (32,)},
    Hinton2018: {"width": 16, "primary_types": 4, "types": 4},
    Tsai2020: {"width": 16, "types": 4, "stages": ((16, 1),), "blocks": 1},
    Tsai2020Dynamic: {"width": 16, "types": 4, "stages": ((16, 1),), "blocks": 1},
    Tsai2020EM: {"width": 16, "types": 4, "stages": ((16, 1),), "blocks": 1},
    Tsai2020Diverse: {"width": 16, "types": 4, "dim": 16},
    Chen2019: {"width": 16, "types": 4, "hidden": (32,)},
    Chen2019Multi: {"width": 16, "types": 4},
    Chen2019Dynamic: {"width": 16, "types": 4, "hidden": (32,)},
    Yang2021: {"width": 16, "types": 4, "hidden": (32,)},
    FlatCNN: {"width": 8, "features": (24, 16)},
    ChenFlatCNN: {"width": 8, "features": (24, 16)},
    PooledCNN: {"width": 8, "features": 32},
    LeNet: {"width": 4, "features": 32},
    TsaiCNN: {"width": 16},
    ResNet18: {"width": 4},
    TsaiDiverseCNN: {"width": 16, "features": 32},
    ChenCNN: {"width": 8, "channels": 16, "features": 32},
}


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
    kind = type(find_model(spec.model).spec)
    fields = {**spec.model_options, **NARROW.get(kind, {})}
    if kind is Tsai2020 and "dim" in {f.name for f in dataclasses.fields(kind)}:
        fields["dim"] = 16
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
