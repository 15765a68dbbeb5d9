"""Several processes: results of one, one message and exit code for all, and no orphans."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from tests.sampling import sample
from tests.tolerances import SAME, relative_rms
from tests.training.tiny import NO_FIGURES_VARIABLE, SIGNAL_VARIABLE
from torchcaps.cli import main
from torchcaps.training import DivergenceError
from torchcaps.training.checkpoint import read_checkpoint
from torchcaps.training.distributed import LAUNCHER_PID, _root_cause, report_to_launcher
from torchcaps.training.errors import PeerLostError
from torchcaps.training.logging import read_metrics

ROOT = Path(__file__).resolve().parents[2]
TORCHCAPS = [sys.executable, "-m", "torchcaps"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", "torchcaps"]
# Quadratic routing reduces gradients of its own over the processes. The last batch of an epoch has one of the 71
# images, so that the second process has none.
FLAGS = [
    *("train", "tests.training.tiny.Narrow", "--data", "tests.training.tiny.FewDigits", "--data.train=71"),
    *("--batch-size", "14", "--steps", "24", "--routing", "quadratic", "--val-fraction", "0", "--num-threads", "1"),
    *("--max-test-images", "29", "--eval-interval-epochs", "2", "--checkpoint-interval-steps", "4"),
]
TIMEOUT_S = 800  # for a command; a hanging process fails the test


def run(command: list[str], *arguments: str, test_signal: str = "") -> "subprocess.CompletedProcess[str]":
    """Run a command. It returns when all of its processes have exited, since they share its output pipes."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", NO_FIGURES_VARIABLE: "1"}
    if test_signal:
        environment[SIGNAL_VARIABLE] = test_signal
    return subprocess.run(
        [*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run in one process."""
    path = tmp_path_factory.mktemp("one") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchcaps.training.run.draw_run", lambda *_: [])
        main([*FLAGS, "--out", str(path)])
    return path


def saved_state(path: Path) -> dict[str, Any]:
    """Return the state of a run in its last checkpoint."""
    return read_checkpoint(path / "checkpoints/last.safetensors").state["run"]


def assert_same_run(path: Path, expected: Path) -> None:
    """Compare weights, metrics and results with those of one process: sums have another order."""
    actual, one = (read_checkpoint(p / "checkpoints/last.safetensors") for p in (path, expected))
    assert actual.state["run"]["step"] == one.state["run"]["step"] == 24
    weights, expected_weights = (
        torch.cat([t.flatten() for _, t in sorted(c.section("model").items()) if t.is_floating_point()])
        for c in (actual, one)
    )
    assert relative_rms(weights, expected_weights) < SAME[torch.float32]
    (name,) = [name for name in one.section("model") if name.endswith("coefficient")]
    assert relative_rms(actual.section("model")[name], one.section("model")[name]) < SAME[torch.float32]
    for row, expected_row in zip(
        read_metrics(path / "metrics.csv"), read_metrics(expected / "metrics.csv"), strict=True
    ):
        for column in ("epoch", "step", "train_accuracy", "test_accuracy"):
            assert row[column] == expected_row[column], column
        assert row["train_loss"] == pytest.approx(expected_row["train_loss"], abs=1e-5)
    test, expected_test = (json.loads((p / "results.json").read_text())["test"]["last"] for p in (path, expected))
    assert {**test, "loss": 0} == {**expected_test, "loss": 0}  # counts, confusion matrix, correctness of each image


def check_killed_launcher(path: Path, start: list[str]) -> None:
    killed = run(TORCHCAPS, *start, test_signal="0 6 SIGKILL parent")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert saved_state(path)["step"] == 6  # the end of the first epoch


def check_lost_worker(path: Path, start: list[str]) -> None:
    lost = run(TORCHCAPS, *start, test_signal="1 14 SIGKILL self")
    assert lost.returncode == 128 + signal.SIGKILL, lost.stderr
    (message,) = lost.stderr.splitlines()  # one for all processes
    assert "process 1 of 2" in message
    assert "SIGKILL" in message
    assert lost.stdout.count(f"{path}") == 1  # only one process prints
    assert saved_state(path)["step"] == 12


def check_stopped_launcher(path: Path, start: list[str]) -> None:
    """Data workers, which are in the group of processes that the agent signals, do not end before the checkpoint."""
    stopped = run(TORCHCAPS, *start, "--num-workers", "1", test_signal="0 18 SIGTERM parent")
    assert stopped.returncode == 128 + signal.SIGTERM, stopped.stderr
    assert stopped.stderr.count("torchcaps train --resume") == 1
    assert saved_state(path)["stop_reason"] == "interrupted"
    assert f"step {saved_state(path)['step']}" in stopped.stderr


STOPS = [check_killed_launcher, check_lost_worker, check_stopped_launcher]


@pytest.mark.timeout(1_200)  # twelve processes import torch, which takes long on a busy machine
def test_a_run_of_two_processes_survives_signals(tmp_path: Path, one_process: Path) -> None:
    """One run is stopped and resumed, in three ways with `--all-cases`; its result is that of one process.

    A command returns only if all of its processes have exited, so that no worker survives a killed launcher.
    """
    path = tmp_path / "run"
    resume = ["train", "--resume", str(path), "--trust-remote-code"]
    start = [*FLAGS, "--devices", "2", "--out", str(path)]
    for check in sample(STOPS, 1, seed=1):
        check(path, start)
        start = resume
    resumed = run(TORCHRUN, *resume)
    assert resumed.returncode == 0, resumed.stderr
    assert_same_run(path, one_process)


# Exit codes and messages, without processes --------------------------------------------------------------------


def failure(rank: int, exitcode: int, directory: Path, message: str = "", timestamp: int = 1) -> ProcessFailure:
    path = directory / f"{rank}.json"
    if message:
        path.write_text(json.dumps({"message": message, "torchcaps": message, "timestamp": timestamp}))
    result = ProcessFailure(local_rank=rank, pid=1000 + rank, exitcode=exitcode, error_file=str(path))
    result.timestamp = timestamp
    return result


@pytest.mark.parametrize(
    ("codes", "messages", "expected", "code"),
    [
        ({0: 2, 1: 2}, {0: "bad flag", 1: "bad flag"}, "bad flag", 2),
        ({0: -15, 1: 2}, {1: "bad flag"}, "bad flag", 2),  # stopped by the agent before it reported
        ({0: 1, 1: 1}, {1: "disk full"}, "disk full", 1),  # rank 0 has lost its peer
        ({0: 1, 1: -9}, {}, "process 1 of 2 was killed by SIGKILL", 137),
        ({0: -15, 1: -9}, {}, "process 1 of 2 was killed by SIGKILL", 137),
        ({0: -9, 1: 1}, {1: "disk full"}, "disk full", 1),  # rank 0 hung and was killed by the agent
        ({0: -15}, {}, "process 0 of 2 was killed by SIGTERM", 143),
        ({0: 143, 1: 143}, {}, "", 143),  # saved and stopped; rank 0 has printed it
        ({0: 1, 1: -15}, {}, "process 0 of 2 failed with exit code 1", 1),  # SIGTERM came from the agent
        ({1: 1}, {}, "process 1 of 2 failed with exit code 1", 1),  # an unexpected exception, with traceback
    ],
)
def test_root_cause(codes: dict[int, int], messages: dict[int, str], expected: str, code: int, tmp_path: Path) -> None:
    failures = {rank: failure(rank, exitcode, tmp_path, messages.get(rank, "")) for rank, exitcode in codes.items()}
    message, exit_code = _root_cause(failures, 2)
    assert message.startswith(expected)
    assert bool(message) == bool(expected)
    assert exit_code == code


def test_root_cause_is_the_first_report(tmp_path: Path) -> None:
    failures = {0: failure(0, 1, tmp_path, "second", 9), 1: failure(1, 1, tmp_path, "first", 8)}
    assert _root_cause(failures, 2) == ("first", 1)


@pytest.mark.parametrize(
    ("error", "reported"),
    [
        (ValueError("bad flag"), True),
        (DivergenceError("layer conv1"), True),
        (DivergenceError("another process", secondary=True), False),
        (PeerLostError("gone"), False),
    ],
)
def test_only_causes_are_reported_to_the_launcher(
    error: Exception, reported: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path: Any = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    assert report_to_launcher(error) is False  # torchrun: the process prints its own message
    assert not path.exists()
    monkeypatch.setenv(LAUNCHER_PID, "1")
    assert report_to_launcher(error) is True
    assert path.exists() == reported
    if reported:
        assert ProcessFailure(0, 1, 1, str(path)).error_file_data["torchcaps"] == str(error)
