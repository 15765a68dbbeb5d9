"""Settings of runs at the four scales."""

import pytest

import torchcaps
from torchcaps.models.registry import MODELS
from torchcaps.models.schedules import OneCycle
from torchcaps.reproduce.scales import run_spec, scaled_dataset
from torchcaps.reproduce.schema import Run
from torchcaps.routing import Dynamic


@pytest.mark.parametrize("name", torchcaps.list_models())
def test_full_is_the_recipe_and_smoke_reads_no_files(name: str) -> None:
    full, smoke = run_spec(Run(name), "full"), run_spec(Run(name), "smoke")
    assert full.recipe == MODELS.get(name).recipe()
    assert full.model_options == {}
    assert smoke.recipe.steps == 2
    assert smoke.data_options.get("source", smoke.recipe.data) == "digits"
    assert smoke.recipe.test_data in ("", "affnist-style")


def test_cpu_applies_the_overrides_of_the_run_only() -> None:
    run = Run("sabour2017_mnist", {"routing": Dynamic(1)}, {"width": 64, "epochs": 4, "lr_schedule": OneCycle()})
    spec = run_spec(run, "cpu", seed=3, num_threads=1)
    assert spec.model_options == {"routing": Dynamic(1), "width": 64}
    assert (spec.recipe.epochs, spec.recipe.steps, spec.seed, spec.num_threads) == (4, None, 3, 1)
    assert spec.recipe.optimizer == run_spec(run, "full").recipe.optimizer


def test_long_applies_its_overrides_on_top_of_those_of_cpu() -> None:
    run = Run(
        "sabour2017_mnist", {}, {"width": 64, "epochs": 4, "max_train_images": 20_000}, {"max_train_images": None}
    )
    spec = run_spec(run, "long")
    assert (spec.model_options, spec.recipe.epochs, spec.max_train_images) == ({"width": 64}, 4, None)
    assert run_spec(run, "cpu").max_train_images == 20_000


@pytest.mark.parametrize(
    ("cpu", "long", "expected"),
    [({"epochs": 4}, {"steps": 100}, (None, 100)), ({"steps": 100}, {"epochs": 4}, (4, None))],
)
def test_long_replaces_epochs_by_steps_and_vice_versa(
    cpu: dict[str, int], long: dict[str, int], expected: tuple[int | None, int | None]
) -> None:
    recipe = run_spec(Run("sabour2017_mnist", {}, cpu, long), "long").recipe
    assert (recipe.epochs, recipe.steps) == expected


def test_replace_adds_overrides_to_a_copy() -> None:
    run = Run("sabour2017_mnist", {"routing": Dynamic(1)}, {"width": 64}, {"epochs": 9})
    changed = run.replace(cpu={"width": 32}, long={"batch_size": 64}, reconstruction=False)
    changes, long = {"routing": Dynamic(1), "reconstruction": False}, {"epochs": 9, "batch_size": 64}
    assert changed == Run("sabour2017_mnist", changes, {"width": 32}, long)
    assert (run.cpu, run.long) == ({"width": 64}, {"epochs": 9})


@pytest.mark.parametrize(
    ("name", "scale", "expected"),
    [
        ("affnist", "full", ("affnist", {})),
        ("affnist", "long", ("affnist-style", {})),
        ("affnist", "cpu", ("affnist-style", {})),
        ("affnist", "smoke", ("affnist-style", {"source": "digits"})),
        ("multimnist", "smoke", ("multimnist", {"source": "digits"})),
        ("cifar10", "smoke", ("digits", {})),
        ("cifar10", "cpu", ("cifar10", {})),
    ],
)
def test_data_sets_of_measurements_by_scale(name: str, scale: str, expected: tuple[str, dict[str, str]]) -> None:
    assert scaled_dataset(name, scale) == expected  # type: ignore[arg-type]
