"""Interrupted runs: kills, signals, full disks and shared directories lose nothing, and resume is bit-exact."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.sampling import sample
from tests.training.helpers import (
    assert_bit_equal,
    last_checkpoint,
    last_weights,
    metrics_without_time,
    small_spec,
)
from tests.training.killed import KILLS
from tests.training.tiny import CHOI
from torchcaps.training import RunError, RunInterrupted, resume, train
from torchcaps.training.checkpoint import read_checkpoint
from torchcaps.training.errors import RunInUseError
from torchcaps.training.inference import load_run
from torchcaps.training.logging import ConsoleLogger, read_metrics
from torchcaps.training.run_dir import RunDirectory
from torchcaps.training.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]


def test_run_killed_again_and_again_is_bit_equal(tmp_path: Path) -> None:
    """SIGKILL at eight points, twenty with `--all-cases`, in epochs, evaluations and writes.

    The run has dropout, batch norm and augmentation.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.training.killed", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    expected = str(len(sample(KILLS, 8)))
    assert run.stdout.split() == [expected, expected], run.stderr  # all kills took place
    complete, killed = (
        read_checkpoint(tmp_path / name / "checkpoints/last.safetensors") for name in ("complete", "killed")
    )
    assert len(complete.tensors) > 50  # weights, running statistics, optimizer state
    assert_bit_equal(killed.tensors, complete.tensors)
    assert len(metrics_without_time(tmp_path / "complete")) == 8
    assert metrics_without_time(tmp_path / "killed") == metrics_without_time(tmp_path / "complete")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_saves_a_checkpoint(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = small_spec("choi2019_mnist", model_options=CHOI, val_fraction=0.2, epochs=3)
    handler = signal.getsignal(signal.SIGINT)
    complete = train(spec, tmp_path / "complete")

    def interrupt(self: ConsoleLogger, step: int, *_: Any) -> None:
        if step == 6:
            signal.raise_signal(number)

    with monkeypatch.context() as patch:
        patch.setattr(ConsoleLogger, "on_step", interrupt)
        with pytest.raises(RunInterrupted, match=r"step 6\b.*torchcaps train --resume .*run") as error:
            train(spec, tmp_path / "run")
    assert error.value.signal == number
    saved = read_checkpoint(tmp_path / "run/checkpoints/last.safetensors").state["run"]
    assert (saved["step"], saved["stop_reason"]) == (6, "interrupted")
    result = resume(tmp_path / "run")
    assert_bit_equal(last_checkpoint(result).tensors, last_checkpoint(complete).tensors)
    assert result.test_results == complete.test_results
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize(
    ("changes", "position"),
    [
        ({}, (3, 3)),
        ({"eval_weights": "ema"}, (3, 3)),
        ({"eval_interval_steps": 2}, (2, 2)),
    ],
    ids=["end of epoch", "ema", "inside epoch"],
)
def test_signal_interrupts_evaluation_and_resume_repeats_it(
    changes: dict[str, Any], position: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = small_spec(epochs=2, val_fraction=0.5, **changes)
    complete = train(spec, tmp_path / "complete")
    with monkeypatch.context() as patch:
        patch.setattr(ConsoleLogger, "on_eval_batch", lambda _: signal.raise_signal(signal.SIGTERM))
        with pytest.raises(RunInterrupted):
            train(spec, tmp_path / "run")
    saved = read_checkpoint(tmp_path / "run/checkpoints/last.safetensors").state["run"]
    assert (saved["step"], saved["batch"]) == position
    result = resume(tmp_path / "run")
    assert_bit_equal(last_checkpoint(result).tensors, last_checkpoint(complete).tensors)
    assert metrics_without_time(result.path) == metrics_without_time(complete.path)


def test_signal_during_final_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate = Trainer.evaluate

    def interrupt(self: Trainer, loader: Any) -> Any:
        if self.state.stop_reason is not None and loader.dataset.split == "test":
            signal.raise_signal(signal.SIGTERM)
        return evaluate(self, loader)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "evaluate", interrupt)
        with pytest.raises(RunInterrupted, match=r"torchcaps train --resume .*run") as error:
            train(small_spec(val_fraction=0.2), tmp_path / "run")
    assert error.value.signal == signal.SIGTERM
    assert not (tmp_path / "run/results.json").exists()
    assert set(resume(tmp_path / "run").test_results) == {"last", "best"}


def test_second_signal_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt_twice(*_: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(ConsoleLogger, "on_step", interrupt_twice)
    with pytest.raises(KeyboardInterrupt):
        train(small_spec(), tmp_path / "run")


def test_kill_between_metrics_row_and_checkpoint_loses_neither(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = small_spec(epochs=4, val_fraction=0.3, checkpoint_interval_steps=1)
    complete = train(spec, tmp_path / "complete")
    save = Trainer.save

    def stop(self: Trainer) -> None:
        if self.state.batch == 0:  # the checkpoint at the end of an epoch, after its row
            raise KeyboardInterrupt
        save(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "save", stop)
        with pytest.raises(KeyboardInterrupt):
            train(spec, tmp_path / "run")
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                resume(tmp_path / "run")
    result = resume(tmp_path / "run")
    assert metrics_without_time(result.path) == metrics_without_time(complete.path)
    assert last_checkpoint(result).state["run"]["best"] == last_checkpoint(complete).state["run"]["best"]
    best, expected = (read_checkpoint(r.path / "checkpoints/best.safetensors") for r in (result, complete))
    assert_bit_equal(best.section("model"), expected.section("model"))


def test_finished_run_can_be_trained_longer(tmp_path: Path) -> None:
    spec = small_spec(epochs=2, checkpoint_interval_steps=3)
    train(spec, tmp_path / "run")
    assert resume(tmp_path / "run").steps == 10
    assert [row["step"] for row in read_metrics(tmp_path / "run/metrics.csv")] == [5, 10]
    longer = resume(tmp_path / "run", lambda spec: spec.replace_recipe(epochs=4))
    assert longer.steps == 20
    complete = train(spec.replace_recipe(epochs=4), tmp_path / "complete")
    assert_bit_equal(last_weights(longer), last_weights(complete))
    with pytest.raises(ValueError, match=r"\b20\b.*\b5\b"):
        resume(tmp_path / "run", lambda spec: spec.replace_recipe(epochs=1))


def test_damaged_metrics_rows_are_skipped(tmp_path: Path) -> None:
    run = train(small_spec(epochs=1), tmp_path / "run")
    with (run.path / "metrics.csv").open("ab") as file:
        file.write(b"\xff\xfe\x00bad\n")
    again = resume(run.path, lambda spec: spec.replace_recipe(epochs=2))
    assert [row["step"] for row in read_metrics(again.path / "metrics.csv")] == [5, 10]


@pytest.fixture
def limit_file_size() -> Any:
    """A function that sets the largest size of a written file, as on a full disk; -1 for no limit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_full_disk_keeps_last_checkpoint(tmp_path: Path, limit_file_size: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = small_spec(epochs=3, checkpoint_interval_steps=2)
    complete = train(spec, tmp_path / "complete")
    train_step = Trainer._train_step

    def fill(self: Trainer, batch: Any) -> None:
        train_step(self, batch)
        if self.state.step == 7:
            limit_file_size(20_000)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_train_step", fill)
        with pytest.raises(RunError, match=r"last\.safetensors can't be written: File too large.*--resume"):
            train(spec, tmp_path / "run")
    limit_file_size(-1)
    directory = RunDirectory(tmp_path / "run")
    assert read_checkpoint(directory.last).state["run"]["step"] == 6
    assert sorted(path.name for path in directory.last.parent.iterdir()) == ["last.safetensors", "previous.safetensors"]
    assert_bit_equal(last_checkpoint(resume(directory.path)).tensors, last_checkpoint(complete).tensors)


def test_unusable_directory_is_reported_before_data_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("torchcaps.training.run.open_data", None)
    with pytest.raises(ValueError, match=r"file/run.*Not a directory"):
        train(small_spec(), tmp_path / "file/run")


def test_run_directory_belongs_to_one_run(tmp_path: Path) -> None:
    train(small_spec(), tmp_path / "run")
    with pytest.raises(RunInUseError, match="--resume"):
        train(small_spec(), tmp_path / "run")
    with RunDirectory(tmp_path / "run") as directory:
        directory.lock()
        with pytest.raises(RunInUseError, match=str(os.getpid())):
            resume(tmp_path / "run")
    resume(tmp_path / "run")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/letter.txt").write_text("mine")
    with pytest.raises(ValueError, match="full"):
        train(small_spec(), tmp_path / "full")
    assert os.listdir(tmp_path / "full") == ["letter.txt"]
    for path in (tmp_path / "nowhere", tmp_path / "full", tmp_path / "full/letter.txt"):
        with pytest.raises(ValueError, match=path.name):
            RunDirectory.open(path)


def test_invalid_config_is_reported(tmp_path: Path) -> None:
    run = train(small_spec(), tmp_path / "run")
    config = run.path / "config.yaml"
    for text in ("[1, 2", "words", "model: nothing\n", "steps: [1]\n", "colour: blue\n"):
        config.write_text(text)
        with pytest.raises(ValueError, match=r"config\.yaml"):
            load_run(run.path)
