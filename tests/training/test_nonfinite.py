"""Divergence: a non-finite value ends the run, its source is named, and good checkpoints stay."""

from pathlib import Path
from typing import Any

import pytest

from tests.training.helpers import (
    small_spec,
)
from torchcaps.models import OptimizerConfig
from torchcaps.models.schedules import TimeDecay
from torchcaps.routing import EM, Quadratic
from torchcaps.training import DivergenceError, train
from torchcaps.training.checkpoint import read_checkpoint
from torchcaps.training.trainer import Trainer


def test_nonfinite_activation_names_layer_and_keeps_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_step = Trainer._train_step

    def spoil(self: Trainer, batch: Any) -> None:
        if self.state.step == 3:
            self.network.front.conv1.register_forward_hook(lambda m, i, o: o / 0)
        train_step(self, batch)

    monkeypatch.setattr(Trainer, "_train_step", spoil)
    with pytest.raises(DivergenceError, match=r"step 4: .* the layer front\.conv1\. .*last\.safetensors"):
        train(small_spec(checkpoint_interval_steps=2), tmp_path / "run")
    checkpoint = read_checkpoint(tmp_path / "run/checkpoints/last.safetensors")
    assert checkpoint.state["run"]["step"] == 2
    nonfinite = [name for name, tensor in checkpoint.section("model").items() if not bool(tensor.isfinite().all())]
    assert nonfinite == []


def test_nonfinite_gradient_names_parameter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_step = Trainer._train_step

    def spoil(self: Trainer, batch: Any) -> None:
        if self.state.step == 2:
            self.network.decoder.layers[0].weight.register_hook(lambda g: g * float("nan"))
        train_step(self, batch)

    monkeypatch.setattr(Trainer, "_train_step", spoil)
    with pytest.raises(DivergenceError, match=r"step 3: .* the gradient of decoder\.layers\.0\.weight"):
        train(small_spec(), tmp_path / "run")


def test_nonfinite_weights_never_replace_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clip_gradients = Trainer._clip_gradients

    def spoil(self: Trainer) -> float:
        if self.state.step == 3:
            self.network.front.conv1.weight.data.fill_(float("nan"))
        return clip_gradients(self)

    monkeypatch.setattr(Trainer, "_clip_gradients", spoil)
    with pytest.raises(DivergenceError, match=r"step 4: .* the weights front\.conv1\.weight\. .*last\.safetensors"):
        train(small_spec(checkpoint_interval_steps=1), tmp_path / "run")
    assert read_checkpoint(tmp_path / "run/checkpoints/last.safetensors").state["run"]["step"] == 3


def test_too_high_learning_rate_diverges_and_names_flag(tmp_path: Path) -> None:
    spec = small_spec(optimizer=OptimizerConfig("sgd", 1e38), steps=20, lr_schedule=TimeDecay(0.0))
    with pytest.raises(DivergenceError, match=r"--lr\b"):
        train(spec, tmp_path / "run")


def test_votes_above_the_limit_of_the_routing_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_step = Trainer._train_step

    def enlarge(self: Trainer, batch: Any) -> None:
        if self.state.step == 2:
            self.network.capsules.layers["digit"].weight.data.mul_(1e20)
        train_step(self, batch)

    monkeypatch.setattr(Trainer, "_train_step", enlarge)
    with pytest.raises(DivergenceError, match=r"step 3: capsules or weight .*votes of EM.* --lr"):
        train(small_spec(routing=EM(2)), tmp_path / "run")


def test_diverging_routing_coefficients_end_the_run(tmp_path: Path) -> None:
    with pytest.raises(DivergenceError, match=r"step 1: .*Quadratic"):
        train(small_spec(routing=Quadratic(lr=1e6), steps=3), tmp_path / "run")
