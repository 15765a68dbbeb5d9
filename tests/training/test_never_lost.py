"""Nothing is lost: kills, signals, broken files, full disks, two runs in one folder."""

import dataclasses
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torchcaps.training.display import Display

from tests.training.own import CHOI
from tests.training.test_loop import last, same, small, weights
from torchcaps.models.schedules import OneCycle
from torchcaps.training import RunError, RunInterrupted, resume, train
from torchcaps.training.checkpoint import read_checkpoint
from torchcaps.training.inference import load_run
from torchcaps.training.logging import read_metrics
from torchcaps.training.run_dir import RunFolder
from torchcaps.training.trainer import Training

ROOT = Path(__file__).resolve().parents[2]


def test_a_run_killed_twenty_times_ends_as_one_that_never_was(tmp_path: Path) -> None:
    """SIGKILL at random moments, in the middle of epochs and of writing; dropout, batch norm and augmentation on."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.training.killed", str(tmp_path), "20"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["killed"] >= 20
    whole, killed = (read_checkpoint(tmp_path / name / "checkpoints/last.safetensors") for name in ("whole", "killed"))
    assert len(whole.tensors) > 50  # weights, running statistics, what the optimiser keeps
    assert same(whole.tensors, killed.tensors)
    rows, others = (read_metrics(tmp_path / name / "metrics.csv") for name in ("whole", "killed"))
    assert len(rows) == 20
    for row, other in zip(rows, others, strict=True):
        assert {**row, "seconds": 0} == {**other, "seconds": 0}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_wish_to_stop_saves_and_says_how_to_go_on(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = small("choi2019_mnist", model_options=CHOI, val_fraction=0.2, epochs=3)
    before = signal.getsignal(signal.SIGINT)
    whole = train(spec, tmp_path / "whole")

    def interrupted(self: Display, step: int, *_: Any) -> None:
        if step == 6:
            signal.raise_signal(number)

    with monkeypatch.context() as patch:
        patch.setattr(Display, "step", interrupted)
        with pytest.raises(RunInterrupted, match=r"stopped at step 6, .*torchcaps train --resume .*run") as stop:
            train(spec, tmp_path / "run")
    assert stop.value.signal == number
    result = resume(tmp_path / "run")
    assert same(last(result).tensors, last(whole).tensors)
    assert result.tests == whole.tests
    assert signal.getsignal(signal.SIGINT) is before


def test_a_wish_to_stop_during_a_look_does_not_wait_for_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of an epoch and inside one, with the weights and with their average: the look is repeated."""
    for name, spec, stopped in (
        ("plain", small(epochs=2, val_fraction=0.5), r"step 3, epoch 1\.00"),
        ("average", small(epochs=2, val_fraction=0.5, eval_weights="ema"), r"step 3, epoch 1\.00"),
        ("inside", small(epochs=2, val_fraction=0.5, eval_interval_steps=2), r"step 2, epoch 0\.67"),
    ):
        whole = train(spec, tmp_path / f"{name}-whole")
        with monkeypatch.context() as patch:
            patch.setattr(Display, "tick", lambda _: signal.raise_signal(signal.SIGTERM))
            with pytest.raises(RunInterrupted, match=f"stopped at {stopped}"):
                train(spec, tmp_path / name)
        result = resume(tmp_path / name)
        assert same(last(result).tensors, last(whole).tensors), name
        assert rows_of(result.folder) == rows_of(whole.folder), name


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [{**row, "seconds": 0} for row in read_metrics(folder / "metrics.csv")]


def test_a_kill_between_a_row_and_its_checkpoint_forgets_neither_the_best_nor_the_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = small(epochs=4, val_fraction=0.3, checkpoint_interval_steps=1)
    whole = train(spec, tmp_path / "whole")
    plain = Training._save

    def killed(self: Training) -> None:
        if self.state.number == 0:  # the checkpoint at the end of an epoch, after its row
            raise KeyboardInterrupt
        plain(self)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "_save", killed)
        with pytest.raises(KeyboardInterrupt):
            train(spec, tmp_path / "run")
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                resume(tmp_path / "run")
    result = resume(tmp_path / "run")
    assert rows_of(result.folder) == rows_of(whole.folder)
    assert last(result).state["run"]["best"] == last(whole).state["run"]["best"]
    best = (read_checkpoint(folder / "checkpoints/best.safetensors") for folder in (result.folder, whole.folder))
    assert same(*(checkpoint.part("model") for checkpoint in best))


def test_a_run_that_stopped_early_stays_so(tmp_path: Path) -> None:
    result = train(small(epochs=50, val_fraction=0.3, early_stopping_patience=1, seed=1), tmp_path / "run")
    assert result.epochs < 50
    for _ in range(2):
        again = resume(result.folder)
        assert again.steps == result.steps
        assert again.ended == result.ended
    assert (
        resume(result.folder, lambda spec: dataclasses.replace(spec, early_stopping_patience=100)).steps > result.steps
    )


def test_a_run_that_has_learnt_enough_stops(tmp_path: Path) -> None:
    """At the first look at the images held out that is good enough, and so when it goes on from there."""
    result = train(
        small(epochs=50, val_fraction=0.3, target_accuracy=0.09, eval_interval_steps=1, seed=1), tmp_path / "run"
    )
    assert result.ended == "9 % of the images held out are right"
    *before, enough = rows_of(result.folder)
    assert enough["validation_accuracy"] >= 0.09 > max((row["validation_accuracy"] for row in before), default=0.0)
    assert result.steps == enough["step"], "not a step longer than the look that told it"
    assert resume(result.folder).steps == result.steps
    assert (
        resume(
            result.folder, lambda spec: dataclasses.replace(spec, target_accuracy=0.9, early_stopping_patience=3)
        ).steps
        > result.steps
    )


def test_more_minutes_are_used(tmp_path: Path) -> None:
    """Also where a schedule was laid out for fewer."""
    first = train(small(epochs=10_000, max_minutes=0.02, lr_schedule=OneCycle()), tmp_path / "run")
    longer = resume(first.folder, lambda spec: dataclasses.replace(spec, max_minutes=0.05))
    assert longer.steps > first.steps + 20
    assert longer.seconds > 1.3 * first.seconds
    assert first.ended == longer.ended == "its time is up"


def test_weights_that_are_no_numbers_never_take_the_place_of_good_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Training._clipped

    def spoil(self: Training) -> float:
        if self.state.step == 3:
            self.network.front.conv1.weight.data.fill_(float("nan"))
        return plain(self)

    monkeypatch.setattr(Training, "_clipped", spoil)
    with pytest.raises(RunError, match=r"step 4: .* in the weights front.conv1.weight, when .* last good checkpoint"):
        train(small(checkpoint_interval_steps=1), tmp_path / "run")
    kept = read_checkpoint(tmp_path / "run/checkpoints/last.safetensors")
    assert kept.state["run"]["step"] == 3


def test_asked_twice_it_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(*_: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Display, "step", twice)
    with pytest.raises(KeyboardInterrupt):
        train(small(), tmp_path / "run")


def test_a_wish_to_stop_during_the_last_test_says_how_to_have_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Training.tested

    def interrupted(self: Training, loader: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return plain(self, loader)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "tested", interrupted)
        with pytest.raises(
            RunInterrupted, match=r"the report is not written yet\. .*torchcaps train --resume .*run"
        ) as stop:
            train(small(), tmp_path / "run")
    assert stop.value.signal == signal.SIGTERM
    assert resume(tmp_path / "run").tests


def test_a_metrics_file_with_broken_bytes_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    run = train(small(epochs=1), tmp_path / "run")
    with (run.folder / "metrics.csv").open("ab") as file:
        file.write(b"\xff\xfe\x00bad\n")
    again = resume(run.folder, lambda spec: spec.replace_recipe(epochs=2))
    assert len(read_metrics(again.folder / "metrics.csv")) == 2


@pytest.fixture
def small_files() -> Any:
    """Files of more than 20,000 bytes can't be written for a while, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))  # noqa: E731
    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_ends_the_run_with_its_last_state_intact(
    tmp_path: Path, small_files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = small(epochs=3, checkpoint_interval_steps=2)
    whole = train(spec, tmp_path / "whole")
    plain = Training._step

    def fills(self: Training, batch: Any) -> None:
        plain(self, batch)
        if self.state.step == 7:
            small_files(20_000)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "_step", fills)
        with pytest.raises(RunError, match=r"last.safetensors can't be written: File too large"):
            train(spec, tmp_path / "run")
    small_files(-1)
    folder = RunFolder(tmp_path / "run")
    assert read_checkpoint(folder.last).state["run"]["step"] == 6
    assert sorted(path.name for path in folder.last.parent.iterdir()) == ["last.safetensors", "previous.safetensors"]
    assert same(last(resume(folder.path)).tensors, last(whole).tensors)


def test_a_folder_that_cannot_be_made_is_said_before_anything_is_trained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"the run's folder can't be made in .*: Not a directory"):
        train(small(), tmp_path / "file/run")


def test_two_runs_in_one_folder_do_not_mix(tmp_path: Path) -> None:
    train(small(), tmp_path / "run")
    with pytest.raises(ValueError, match="holds a run already: go on with it by --resume"):
        train(small(), tmp_path / "run")
    with RunFolder(tmp_path / "run") as busy:
        busy.hold()
        with pytest.raises(ValueError, match=f"is in use: process {os.getpid()} trains there"):
            resume(tmp_path / "run")
    resume(tmp_path / "run")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/letter.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not empty"):
        train(small(), tmp_path / "full")
    assert os.listdir(tmp_path / "full") == ["letter.txt"]
    for path in (tmp_path / "nowhere", tmp_path / "full", tmp_path / "full/letter.txt"):
        with pytest.raises(ValueError, match="is no run"):
            RunFolder.existing(path)


def test_a_configuration_that_is_none_is_said(tmp_path: Path) -> None:
    run = train(small(), tmp_path / "run")
    config = run.folder / "config.yaml"
    for text in ("[1, 2", "words", "model: nothing\n", "steps: [1]\n", "colour: blue\n"):
        config.write_text(text)
        with pytest.raises(ValueError, match="is no configuration of a run"):
            load_run(run.folder)


def test_a_run_that_is_over_may_go_on_longer(tmp_path: Path) -> None:
    spec = small(epochs=2, checkpoint_interval_steps=3)
    train(spec, tmp_path / "run")
    again = resume(tmp_path / "run")
    assert again.steps == 10
    assert [row["step"] for row in read_metrics(tmp_path / "run/metrics.csv")] == [5, 10]
    longer = resume(tmp_path / "run", lambda spec: spec.replace_recipe(epochs=4))
    assert longer.steps == 20
    assert same(weights(longer), weights(train(spec.replace_recipe(epochs=4), tmp_path / "whole")))
