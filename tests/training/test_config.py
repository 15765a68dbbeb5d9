"""RunSpec: identity of a run, names of records, settings that may change on resume, and validation."""

import dataclasses
import json
from typing import Any

import pytest

from torchcaps._core.serialize import is_identity, is_resumable
from torchcaps.models.recipe import Recipe
from torchcaps.models.registry import MODELS
from torchcaps.models.schedules import OneCycle
from torchcaps.routing import EM, Dynamic
from torchcaps.training import RunSpec

# Settings that don't decide the result of a run, and those that may change on resume.
NOT_IDENTITY = {
    "seed", "data_dir", "num_threads", "num_workers", "devices", "device", "checkpoint_interval_minutes",
    "checkpoint_interval_steps", "note", "tensorboard", "eval_interval_epochs",
}  # fmt: skip
RESUMABLE = (NOT_IDENTITY - {"seed"}) | {
    "epochs", "steps", "max_minutes", "early_stopping_patience", "target_accuracy", "test_data", "test_options",
    "max_test_images", "eval_weights", "eval_interval_steps",
}  # fmt: skip
# A value of each setting that differs from the default of capsnet_digits.
CHANGES: dict[str, Any] = {
    "model_options": {"dim": 8},
    "data_options": {"train": 40},
    "test_options": {"source": "digits"},
    "data_dir": "/data",
    "max_minutes": 3.0,
    "max_grad_norm": 1.0,
    "micro_batches": 2,
    "precision": "64-true",
    "early_stopping_patience": 2,
    "target_accuracy": 0.5,
    "ema_decay": 0.9,
    "seed": 1,
    "deterministic": True,
    "num_threads": 2,
    "num_workers": 2,
    "device": "cpu",
    "devices": 2,
    "eval_interval_epochs": 2,
    "eval_interval_steps": 2,
    "max_train_images": 10,
    "max_test_images": 10,
    "checkpoint_interval_minutes": 1.0,
    "checkpoint_interval_steps": 3,
    "tensorboard": True,
    "loss": dataclasses.replace(RunSpec().recipe.loss, reduction="official"),
    "optimizer": dataclasses.replace(RunSpec().recipe.optimizer, momentum=0.5),
    "lr_schedule": OneCycle(warmup=0.1),
    "batch_size": 8,
    "epochs": 3,
    "steps": 5,
    "ascents": 1,
    "descents": 2,
    "ascent_lr": "constant",
    "reuse_children": True,
    "data": "mnist",
    "test_data": "mnist",
    "augmentation": "",
    "val_fraction": 0.25,
    "class_weights": "balanced",
    "eval_weights": "best",
    "note": "a note",
}


def fields() -> set[str]:
    names = {field.name for cls in (RunSpec, Recipe) for field in dataclasses.fields(cls)}
    return names - {"model", "recipe"}


def test_each_setting_is_covered_below() -> None:
    assert fields() == set(CHANGES)
    for field in dataclasses.fields(RunSpec):
        assert set(field.metadata) == {"identity", "resumable"}, field.name


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_flags_decide_identity_record_name_and_resume(name: str) -> None:
    base, changed = RunSpec(), RunSpec.of(**{name: CHANGES[name]})
    decides = name not in NOT_IDENTITY
    assert (changed.identity() != base.identity()) is decides
    assert (changed.identity_hash() != base.identity_hash()) is decides
    assert (changed.record_name() != base.record_name()) is decides
    conflicts = changed.resume_conflicts(base.to_plain())
    assert set(conflicts) == (set() if name in RESUMABLE else {name})
    for recorded, current in conflicts.values():
        assert (recorded, current) == (base.to_plain()[name], changed.to_plain()[name])


def test_settings_that_a_checkpoint_lacks_are_not_compared() -> None:
    recorded = {name: value for name, value in RunSpec().to_plain().items() if name != "seed"}
    assert RunSpec(seed=3).resume_conflicts(recorded) == {}


def test_fields_that_a_checkpoint_lacks_are_not_compared() -> None:
    """Fields of an optimizer, a loss or a routing may be added to torchcaps; options of a run are explicit."""
    spec = RunSpec.of("sabour2017_mnist", routing=Dynamic(2), width=8)
    recorded = spec.to_plain()
    del recorded["optimizer"]["eps"]
    del recorded["loss"]["margin_steps"]
    del recorded["model_options"]["routing"]["init_args"]["leak"]
    assert spec.resume_conflicts(recorded) == {}
    recorded["optimizer"]["lr"] = 7.0
    recorded["model_options"]["routing"]["init_args"]["iterations"] = 3
    assert set(spec.resume_conflicts(recorded)) == {"optimizer", "model_options"}
    for options in ({}, {"width": 8}, {**spec.to_plain()["model_options"], "types": 2}):
        assert set(spec.resume_conflicts({"model_options": options})) == {"model_options"}


def test_a_changed_default_changes_the_identity_but_not_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    base = RunSpec("chen2019_lenet")
    before = base.identity(), base.identity_hash(), base.record_name()
    entry = MODELS.get("chen2019_lenet")
    spec = dataclasses.replace(entry.spec, channels=51)  # type: ignore[call-arg]
    monkeypatch.setitem(MODELS._entries, "chen2019_lenet", dataclasses.replace(entry, spec=spec))
    assert base.identity() == {**before[0], "model_spec": {**before[0]["model_spec"], "channels": 51}}
    assert base.identity_hash() != before[1]
    assert base.record_name() == before[2]


def test_a_new_field_renames_no_record() -> None:
    """The hash omits values at their default, in nested dataclasses too."""

    @dataclasses.dataclass(frozen=True)
    class Longer(RunSpec):
        new: int = 0

    assert Longer("sabour2017_mnist", {"routing": EM(2)}).record_name() == (
        RunSpec("sabour2017_mnist", {"routing": EM(2)}).record_name()
    )
    explicit = dataclasses.replace(EM(2), iterations=2)
    names = {RunSpec("sabour2017_mnist", {"routing": routing}).record_name() for routing in (EM(2), explicit, EM(3))}
    assert len(names) == 2


def test_identity_is_json_and_has_the_fields_of_the_model() -> None:
    identity = RunSpec("sabour2017_mnist", {"routing": Dynamic(1)}).identity()
    assert json.loads(json.dumps(identity)) == identity
    assert identity["model_spec"]["width"] == 256
    routing = identity["model_spec"]["routing"]
    assert (routing["class_path"], routing["init_args"]["iterations"]) == ("torchcaps.routing.Dynamic", 1)
    assert identity["batch_size"] == 128
    assert not identity.keys() & (NOT_IDENTITY | {"model_options"})


@pytest.mark.parametrize("change", [{"image": (1, 32, 32)}, {"classes": 5}, {"streamed": True}], ids=str)
def test_fields_that_follow_data_or_memory_are_not_part_of_the_identity(change: dict[str, Any]) -> None:
    base, changed = RunSpec(), RunSpec(model_options=change)
    assert changed.identity() == base.identity()
    assert changed.record_name() == base.record_name()
    assert set(changed.resume_conflicts(base.to_plain())) == {"model_options"}


def test_flags_of_the_model_are_inherited_by_classes_that_declare_the_field_again() -> None:
    for entry in MODELS.values():
        cls = type(entry.spec)
        assert not is_identity(cls, "image"), cls
        assert not is_identity(cls, "classes"), cls
        assert is_identity(cls, "preset"), cls
        assert not is_resumable(cls, "preset"), cls


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_plain_values_give_the_run_back(name: str) -> None:
    spec = RunSpec.of(**{name: CHANGES[name]})
    assert RunSpec.from_plain(json.loads(json.dumps(spec.to_plain()))) == spec


def test_of_replaces_fields_of_run_recipe_and_model() -> None:
    spec = RunSpec.of(
        "tsai2020_cifar10", batch_size=7, num_threads=1, width=32, model_options={"schedule": "sequential"}
    )
    assert (spec.recipe.batch_size, spec.num_threads) == (7, 1)
    assert spec.model_options == {"width": 32, "schedule": "sequential"}
    assert spec.model_spec() == dataclasses.replace(MODELS.get("tsai2020_cifar10").spec, **spec.model_options)
    with pytest.raises(ValueError, match="'no_such_field'"):
        RunSpec.of(no_such_field=1)


def test_epochs_and_steps_replace_each_other() -> None:
    spec = RunSpec.of(steps=7)
    assert (spec.recipe.epochs, spec.recipe.steps) == (None, 7)
    spec = spec.replace_recipe(epochs=2)
    assert (spec.recipe.epochs, spec.recipe.steps) == (2, None)
    assert spec.replace_recipe() is spec


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_minutes", 0), ("max_grad_norm", -1), ("micro_batches", 0), ("early_stopping_patience", 0),
        ("target_accuracy", 1.5), ("target_accuracy", 0), ("ema_decay", 1.1), ("num_threads", 0), ("num_workers", -1),
        ("devices", 0), ("eval_interval_epochs", 0), ("eval_interval_steps", 0), ("max_train_images", 0),
        ("max_test_images", 0), ("checkpoint_interval_minutes", 0), ("checkpoint_interval_steps", 0), ("seed", 2**63),
        ("precision", "8-true"), ("device", "tpu"), ("model_options", {"no_such_field": 1}),
    ],
)  # fmt: skip
def test_invalid_values_are_rejected_by_name(name: str, value: object) -> None:
    with pytest.raises(ValueError, match="no_such_field" if isinstance(value, dict) else rf"{name}.*{value}"):
        RunSpec(**{name: value})  # type: ignore[arg-type]
