"""The scales: what becomes of a run."""

import json

import pytest

import torchcaps
from torchcaps.models.registry import MODELS
from torchcaps.models.schedules import OneCycle
from torchcaps.reproduce.scales import run_spec
from torchcaps.reproduce.schema import Run
from torchcaps.routing import Dynamic


@pytest.mark.parametrize("name", torchcaps.list_models())
def test_full_is_the_papers_own_setting_and_smoke_needs_no_file(name: str) -> None:
    full, smoke = run_spec(Run(name), "full"), run_spec(Run(name), "smoke")
    assert full.recipe == MODELS.get(name).recipe()
    assert not full.model_options
    assert smoke.recipe.steps == 2
    source = smoke.data_options.get("source", smoke.recipe.data)
    assert source == "digits"
    assert smoke.recipe.test_data in ("", "affnist-style")


def test_cpu_changes_what_the_paper_says_and_nothing_else() -> None:
    run = Run("sabour2017_mnist", {"routing": Dynamic(1)}, {"width": 64, "epochs": 4, "lr_schedule": OneCycle()})
    spec = run_spec(run, "cpu", seed=3, num_threads=1)
    assert spec.model_options == {"routing": Dynamic(1), "width": 64}
    assert (spec.recipe.epochs, spec.recipe.steps, spec.seed, spec.num_threads) == (4, None, 3, 1)
    assert spec.recipe.optimizer == run_spec(run, "full").recipe.optimizer
    assert run.but(cpu={"width": 32}, reconstruction=False).cpu["width"] == 32
    assert run.cpu["width"] == 64


def test_what_decides_a_run_is_told_whole() -> None:
    """Defaults of the model are in it, what only says where it is computed is not."""
    spec = run_spec(Run("sabour2017_mnist", {"routing": Dynamic(1)}), "full", seed=3, num_threads=1)
    told = spec.identity()
    assert told == run_spec(Run("sabour2017_mnist", {"routing": Dynamic(1)}), "full", seed=4, num_threads=2).identity()
    assert told["model_spec"]["width"] == 256
    routing = told["model_spec"]["routing"]
    assert (routing["class_path"], routing["init_args"]["iterations"]) == ("torchcaps.routing.Dynamic", 1)
    assert told["batch_size"] == 128
    assert not told.keys() & {"seed", "num_threads", "data_dir", "model_options"}
    assert json.loads(json.dumps(told)) == told
