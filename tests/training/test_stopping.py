"""Stop criteria and intervals: time limits with an injected clock, early stopping, target accuracy."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.training.helpers import (
    StepClock,
    last_checkpoint,
    small_spec,
)
from torchcaps.models.schedules import OneCycle, TimeDecay
from torchcaps.training import StopReason, resume, train
from torchcaps.training.logging import read_metrics
from torchcaps.training.trainer import Trainer


@pytest.fixture
def step_clock(monkeypatch: pytest.MonkeyPatch) -> StepClock:
    """A clock that advances by 1/8 s per training step."""
    clock = StepClock(0.125)
    train_step = Trainer._train_step

    def advance(self: Trainer, batch: Any) -> None:
        train_step(self, batch)
        clock.advance()

    monkeypatch.setattr(Trainer, "_train_step", advance)
    return clock


def test_max_minutes_plans_schedule(tmp_path: Path, step_clock: StepClock) -> None:
    """At 8 steps per second, 48 steps fit into 6 seconds; the schedule ends with them: the lr then is zero."""
    spec = small_spec(epochs=10_000, max_minutes=0.1, lr_schedule=OneCycle(last=0.0))
    result = train(spec, tmp_path / "run", clock=step_clock)
    assert result.stop_reason is StopReason.MAX_MINUTES
    assert result.steps == 6 * 8
    assert result.seconds == result.steps / 8
    assert last_checkpoint(result).state["run"]["planned_steps"] == result.steps
    assert read_metrics(result.path / "metrics.csv")[-1]["lr"] == pytest.approx(0, abs=1e-12)


def test_schedule_follows_a_speed_that_changes(tmp_path: Path, step_clock: StepClock) -> None:
    """The machine becomes four times slower after 40 of 192 steps: the schedule still ends with the time."""
    planned: list[int] = []
    spec = small_spec(epochs=10_000, max_minutes=0.4, lr_schedule=OneCycle(last=0.0))
    train_step = Trainer._train_step

    def slow_down(self: Trainer, batch: Any) -> None:
        train_step(self, batch)
        planned.append(self.state.planned_steps)
        if self.state.step == 40:
            step_clock.seconds_per_step = 0.5

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_train_step", slow_down)
        result = train(spec, tmp_path / "run", clock=step_clock)
    assert result.steps == 40 + 2 * 19  # 5 s and 19 s
    assert (planned[10], planned[-1]) == (192, result.steps)
    assert planned[60] < 100
    rows = read_metrics(result.path / "metrics.csv")
    assert rows[-1]["lr"] == pytest.approx(0, abs=1e-12)
    assert rows[-2]["lr"] > 0


def test_lines_show_the_epochs_that_will_be_done_and_an_eta(
    tmp_path: Path, step_clock: StepClock, capsys: pytest.CaptureFixture[str]
) -> None:
    train(small_spec(epochs=10_000, max_minutes=0.1, lr_schedule=OneCycle()), tmp_path / "run", clock=step_clock)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch")]
    assert "/9.6 " in lines[1]  # 48 steps of 5 per epoch
    assert "ETA 0:00:05" in lines[1]
    assert not any("10000" in line for line in lines)


def test_max_minutes_stops_run_without_plan(tmp_path: Path, step_clock: StepClock) -> None:
    result = train(
        small_spec(epochs=10_000, max_minutes=0.05, lr_schedule=TimeDecay(0.0)), tmp_path / "run", clock=step_clock
    )
    assert result.stop_reason is StopReason.MAX_MINUTES
    assert result.steps == 3 * 8


def test_resume_with_more_minutes_plans_again(tmp_path: Path, step_clock: StepClock) -> None:
    """Time counts over all sessions of a run."""
    spec = small_spec(epochs=10_000, max_minutes=0.05, lr_schedule=OneCycle())
    first = train(spec, tmp_path / "run", clock=step_clock)
    longer = resume(first.path, lambda spec: dataclasses.replace(spec, max_minutes=0.1), clock=step_clock)
    assert (first.steps, longer.steps) == (3 * 8, 6 * 8)
    assert longer.seconds == longer.steps / 8
    assert first.stop_reason is longer.stop_reason is StopReason.MAX_MINUTES


def test_checkpoint_interval_minutes(tmp_path: Path, step_clock: StepClock, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[int] = []
    save = Trainer.save

    def record(self: Trainer) -> None:
        saved.append(self.state.step)
        save(self)

    monkeypatch.setattr(Trainer, "save", record)
    train(
        small_spec(epochs=1, batch_size=7, checkpoint_interval_minutes=0.375 / 60), tmp_path / "run", clock=step_clock
    )
    assert saved == [3, 6, 9, 10]  # every third step, and the end of the epoch


def test_early_stopping(tmp_path: Path) -> None:
    result = train(small_spec(epochs=50, val_fraction=0.3, early_stopping_patience=1, seed=1), tmp_path / "run")
    assert result.stop_reason is StopReason.EARLY_STOPPING
    assert result.epochs < 50
    for _ in range(2):  # resuming does not train longer
        again = resume(result.path)
        assert (again.steps, again.stop_reason) == (result.steps, result.stop_reason)
    longer = resume(
        result.path, lambda spec: dataclasses.replace(spec, early_stopping_patience=100).replace_recipe(epochs=8)
    )
    assert longer.steps > result.steps
    assert longer.stop_reason is StopReason.MAX_EPOCHS


def test_target_accuracy_stops_at_first_evaluation_that_reaches_it(tmp_path: Path) -> None:
    spec = small_spec(epochs=50, val_fraction=0.3, target_accuracy=0.09, eval_interval_steps=1, seed=1)
    result = train(spec, tmp_path / "run")
    assert result.stop_reason is StopReason.TARGET_ACCURACY
    *before, last = read_metrics(result.path / "metrics.csv")
    assert last["val_accuracy"] >= 0.09 > max((row["val_accuracy"] for row in before), default=0.0)
    assert result.steps == last["step"]
    assert resume(result.path).steps == result.steps
    change = {"target_accuracy": 0.9, "early_stopping_patience": 3}
    assert resume(result.path, lambda spec: dataclasses.replace(spec, **change)).steps > result.steps
