"""Ascent on routing coefficients during training: Yang 2021, Algorithm 1."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.tolerances import assert_different
from tests.training.helpers import (
    last_weights,
    saved_spec,
    small_spec,
)
from torchcaps.models.schedules import Exponential
from torchcaps.nn import DenseCapsules
from torchcaps.routing import Quadratic
from torchcaps.training import train
from torchcaps.training.run import _check_settings
from torchcaps.training.setup import build_network
from torchcaps.training.trainer import Trainer


def test_quadratic_routing_ascends_on_its_coefficients(tmp_path: Path) -> None:
    result = train(small_spec(routing="quadratic", steps=3), tmp_path / "run")
    start = build_network(saved_spec(result)).state_dict()
    (name,) = [name for name in start if name.endswith("coefficient")]
    assert_different(last_weights(result)[name], start[name])
    fixed = train(small_spec(routing="quadratic", steps=3, ascents=0), tmp_path / "fixed")
    torch.testing.assert_close(last_weights(fixed)[name], start[name], rtol=0, atol=0)


def record_ascents(monkeypatch: pytest.MonkeyPatch, folder: Path, **changes: Any) -> tuple[list[int], list[float], int]:
    """Train with quadratic-program routing; return step and learning-rate factor of each ascent, and the number of
    forward passes of the first layer.
    """
    steps: list[int] = []
    factors: list[float] = []
    passes = 0
    ascend = Quadratic.ascend
    trainer: list[Trainer] = []
    initialise = Trainer.__init__

    def initialise_and_hook(self: Trainer, *arguments: Any, **named: Any) -> None:
        initialise(self, *arguments, **named)
        trainer.append(self)

        def count(*_: Any) -> None:
            nonlocal passes
            passes += self.network.training

        next(self.network.children()).register_forward_pre_hook(count)

    def record(module: Any, batch: Any, labels: Any, n_images: Any, reduce: Any, lr_factor: float) -> Any:
        steps.append(trainer[0].state.step)
        factors.append(lr_factor)
        return ascend(module, batch, labels, n_images, reduce, lr_factor)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "__init__", initialise_and_hook)
        patch.setattr(Quadratic, "ascend", staticmethod(record))
        train(small_spec(routing="quadratic", steps=4, lr_schedule=Exponential(0.5, 1), **changes), folder)
    return steps, factors, passes


def test_ascents_follow_the_schedule_unless_constant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    steps, factors, passes = record_ascents(monkeypatch, tmp_path / "default")
    assert (steps, factors, passes) == ([0, 1, 2, 3], [1, 0.5, 0.25, 0.125], 8)
    _, factors, _ = record_ascents(monkeypatch, tmp_path / "constant", ascent_lr="constant")
    assert factors == [1, 1, 1, 1]


def test_several_descents_per_ascent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    steps, factors, passes = record_ascents(monkeypatch, tmp_path / "run", descents=2, ascents=3)
    assert (steps, factors, passes) == ([1, 1, 1, 3, 3, 3], [0.5] * 3 + [0.125] * 3, 4 + 6)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_reused_children_need_no_second_forward_pass(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, micro_batches: int
) -> None:
    changes = {"reuse_children": True, "micro_batches": micro_batches}
    steps, _, passes = record_ascents(monkeypatch, tmp_path / "run", **changes)
    assert (steps, passes) == ([0, 1, 2, 3], 4 * micro_batches)


def test_reused_children_need_a_single_quadratic_layer() -> None:
    """The gradient of a layer below needs the graph of a forward pass."""
    layers: Any = nn.Sequential(*(DenseCapsules(3, 4, 3, 4, routing=Quadratic()) for _ in range(2)))
    data: Any = None  # not reached
    with pytest.raises(ValueError, match=r"--reuse-children.*2"):
        _check_settings(small_spec(ascents=1, reuse_children=True), layers, data)
