"""Settings of runs at the three scales."""

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


def test_replace_adds_overrides_to_a_copy() -> None:
    run = Run("sabour2017_mnist", {"routing": Dynamic(1)}, {"width": 64})
    changed = run.replace(cpu={"width": 32}, reconstruction=False)
    assert changed == Run("sabour2017_mnist", {"routing": Dynamic(1), "reconstruction": False}, {"width": 32})
    assert run.cpu == {"width": 64}


@pytest.mark.parametrize(
    ("name", "scale", "expected"),
    [
        ("affnist", "full", ("affnist", {})),
        ("affnist", "cpu", ("affnist-style", {})),
        ("affnist", "smoke", ("affnist-style", {"source": "digits"})),
        ("multimnist", "smoke", ("multimnist", {"source": "digits"})),
        ("cifar10", "smoke", ("digits", {})),
        ("cifar10", "cpu", ("cifar10", {})),
    ],
)
def test_data_sets_of_measurements_by_scale(name: str, scale: str, expected: tuple[str, dict[str, str]]) -> None:
    assert scaled_dataset(name, scale) == expected  # type: ignore[arg-type]
