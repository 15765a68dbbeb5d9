"""``torchcaps train --config``: the same run as by flags, overrides, and errors that name file and key."""

from pathlib import Path

import pytest
import yaml

from tests.cli.commands import run_command, usage_error
from tests.training.tiny import DATA, MODEL
from torchcaps.models.schedules import Exponential
from torchcaps.routing import EM, Dynamic
from torchcaps.training import RunSpec, load_run
from torchcaps.training.logging import read_metrics

TINY = ["--data", DATA, "--batch-size", "16", "--num-threads", "1"]

pytestmark = pytest.mark.usefixtures("here")


def spec_of(directory: str) -> RunSpec:
    return load_run(directory).spec


def test_flags_and_configuration_files_give_the_same_run(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--steps 2 --routing em --routing.iterations 3 --optimizer sgd --lr 0.5 --loss margin --width 5 --seed 4 "
    flags += "--lr-schedule exponential --lr-schedule.period 7 --max-grad-norm 2 --augmentation= --data.train 40 "
    flags += "--hidden 6,7 --loss.reconstruction_weight 0.25"
    run_command(capsys, "train", MODEL, *TINY, *flags.split(), "--out", "flags")
    spec = spec_of("flags")
    assert spec.model_options["routing"] == EM(3)
    assert spec.model_options["hidden"] == (6, 7)
    assert (spec.model_options["width"], spec.seed, spec.max_grad_norm) == (5, 4, 2)
    assert spec.recipe.lr_schedule == Exponential(period=7)
    assert (spec.recipe.optimizer.name, spec.recipe.optimizer.lr) == ("sgd", 0.5)
    assert (spec.recipe.loss.name, spec.recipe.loss.reconstruction_weight) == ("margin", 0.25)
    assert spec.recipe.augmentation == ""
    assert spec.data_options == {"train": 40}
    # The config.yaml of a run gives the same run; flags override it.
    run_command(capsys, "train", "--config", "flags/config.yaml", "--out", "again")
    assert spec_of("again") == spec
    rows, others = (read_metrics(Path(name, "metrics.csv")) for name in ("flags", "again"))
    assert [{**row, "seconds": 0} for row in rows] == [{**row, "seconds": 0} for row in others]
    overrides = ["--epochs", "1", "--seed=5", "--routing", "dynamic", "--lr", "0.25"]
    run_command(capsys, "train", "--config=flags/config.yaml", "--out", "other", *overrides)
    other = spec_of("other")
    assert (other.seed, other.recipe.epochs, other.recipe.steps) == (5, 1, None)
    assert other.model_options["routing"] == Dynamic()
    assert (other.recipe.optimizer.name, other.recipe.optimizer.lr) == ("sgd", 0.25)
    # A file can contain any subset of the settings.
    settings = {"model": MODEL, "data": DATA, "epochs": 1, "routing": "dynamic", "num_threads": 1}
    settings |= {"optimizer": {"lr": 0.25}, "loss": {"reduction": "official"}}
    Path("mine.yaml").write_text(yaml.safe_dump(settings))
    run_command(capsys, "train", "--config", "mine.yaml", "--out", "mine")
    assert spec_of("mine").recipe.optimizer.lr == 0.25
    assert spec_of("mine").recipe.loss.reduction == "official"
    assert spec_of("mine").model_options["routing"] == Dynamic()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("model_options: 3", "model_options"),
        ("data_options: [1]", "data_options"),
        ("test_options: x", "test_options"),
        ("- 1", "mapping"),
        ("3", "mapping"),
        ("a: [", "YAML"),
    ],
)
def test_invalid_configuration_files(text: str, named: str) -> None:
    Path("odd.yaml").write_text(text)
    message = usage_error("train", "--config", "odd.yaml")
    assert "odd.yaml" in message
    assert named in message


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("epohcs: 3", ["epohcs", "epochs"]),
        ("model_options: {widht: 3}", ["unknown key model_options.widht", "model_options.width"]),
        ("data: digits\nval-fracton: 0.1", ["unknown key val-fracton", "val_fraction"]),
        ("data: multimnist\ndata_options: {sorce: digits}", ["data_options.sorce", "data_options.source"]),
        ("model: capsnet_small\nrouting: {iteration: 3}", ["unknown key routing.iteration", "routing.iterations"]),
        ("routing: {iteration: 3}", ["unknown key routing.iteration", "routing of this run has no settings"]),
        ("optimizer: {lrr: 3}", ["'lrr'", "optimizer", "'lr'"]),
        ("loss: {margin_step: 3}", ["'margin_step'", "loss", "'margin_steps'"]),
        ("epochs: many", ["odd.yaml: epochs must be int", "'many'"]),
        ("epochs: 0", ["odd.yaml: epochs must be at least 1", "0"]),
        ("optimizer: {momentum: -1}", ["odd.yaml: optimizer.momentum", "at least 0"]),
        ("loss: {margin_steps: 0}", ["odd.yaml: loss.margin_steps", "at least 1"]),
    ],
)
def test_errors_name_file_and_key_of_a_setting(text: str, parts: list[str]) -> None:
    Path("odd.yaml").write_text(text)
    message = usage_error("train", "--config", "odd.yaml")
    assert [part for part in ("odd.yaml", *parts) if part not in message] == [], message
    assert "--config" not in message.partition("(see")[0]


def test_flags_that_override_a_file_are_reported_as_flags() -> None:
    Path("odd.yaml").write_text("epochs: 3")
    assert "--epochs must be at least 1" in usage_error("train", "--config", "odd.yaml", "--epochs", "0")
