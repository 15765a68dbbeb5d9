"""Trainings that are killed (SIGKILL) at random moments and resumed, until they finish.

The final checkpoint must be bit-equal to that of an uninterrupted run with the same settings: weights, optimizer, EMA
weights and counters; so must the metrics, except for times. An evaluation is one kill.
"""

import csv
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.fuzz.harness import Case, Target
from tests.training.tiny import CHOI, DATA, MODEL
from torchcaps._core.optional import import_optional
from torchcaps.data import create_dataset
from torchcaps.training import RunSpec, resume, run, train
from torchcaps.training.checkpoint import read_checkpoint

__all__ = ["Kills"]

ROOT = Path(__file__).resolve().parents[2]
MAX_KILLS = 6  # per run; the next session is left alone
SESSION_TIMEOUT_S = 600.0
COMMON = {
    "data": DATA,
    "batch_size": 16,
    "epochs": 4,
    "val_fraction": 0.1,
    "checkpoint_interval_steps": 2,
    "num_threads": 1,
    "device": "cpu",
}
# Not specs: making one registers the model of the tests, which tests of every registered model would then include.
SETTINGS: dict[str, dict[str, Any]] = {
    "dropout and batch norm": {"model": "choi2019_mnist", "model_options": CHOI, "seed": 3},
    "EMA": {"seed": 1, "eval_weights": "ema", "ema_decay": 0.9},
    "data workers": {"seed": 2, "num_workers": 2},
    "micro-batches, clipping": {"seed": 4, "micro_batches": 2, "max_grad_norm": 0.1},
    "early stopping, best weights": {"early_stopping_patience": 3, "eval_weights": "best"},
    "EM routing": {"model_options": {"routing": "em"}, "seed": 5},
}
TWO_PROCESSES = "two processes"  # launched by the command line
KINDS = (*SETTINGS, TWO_PROCESSES)


class Kills(Target):
    """Killed trainings."""

    name, unit = "kills", "kills"
    good = ("bit-equal",)
    timeout_s = 3600.0  # several sessions, on a busy machine

    def prepare(self, work: Path) -> None:
        """Import everything before the forks, with one thread, so that a fork loses no other threads."""
        torch.set_num_threads(1)
        run.draw_run = lambda *_: []  # takes longer than the runs
        import_optional("lightning_fabric", "training")
        create_dataset("digits")
        (work / "complete").mkdir(exist_ok=True)
        self.seconds: dict[str, float] = {}

    def run(self, seed: int, index: int, work: Path) -> Case:
        """Kill and resume one run until it is finished; compare it with an uninterrupted one."""
        rng = np.random.default_rng([seed, index])
        kind = KINDS[index % len(KINDS)]
        complete, killed = work / "complete" / kind, work / self.input
        if kind not in self.seconds:
            shutil.rmtree(complete, ignore_errors=True)
            began = time.monotonic()
            status = _run_session(kind, complete, None, rng)
            self.seconds[kind] = time.monotonic() - began
            if status:
                return Case(index, kind, "failed", f"the uninterrupted run ended with {status}", 0)
        shutil.rmtree(killed, ignore_errors=True)
        n_kills, status = 0, 0
        for n_kills in range(MAX_KILLS + 1):
            # One of four kills comes early, since sessions spend most of their time in training.
            longest = self.seconds[kind] * (0.2 if rng.random() < 0.25 else 1.1)
            delay = rng.uniform(0, longest) if n_kills < MAX_KILLS else None
            status = _run_session(kind, killed, delay, rng)
            if status != -signal.SIGKILL:
                break
        if status:
            return Case(index, kind, "failed", f"a session after {n_kills} kills ended with {status}", n_kills)
        difference = find_difference(complete, killed)
        return Case(index, kind, "different" if difference else "bit-equal", difference, n_kills)


def find_difference(complete: Path, killed: Path) -> str:
    """Return the first difference between the results of two runs; an empty string if there is none."""
    for name in ("last", "best"):
        files = [path / "checkpoints" / f"{name}.safetensors" for path in (complete, killed)]
        if files[0].exists() != files[1].exists():
            return f"only one run has {name} weights"
        if not files[0].exists():
            continue
        (tensors, state), (other_tensors, other_state) = map(read_checkpoint, files)
        if tensors.keys() != other_tensors.keys():
            return f"{name} has other tensors"
        for key, tensor in tensors.items():
            if tensor.numpy().tobytes() != other_tensors[key].numpy().tobytes():
                return f"{name}: {key}"
        if _without_times(state["run"]) != _without_times(other_state["run"]):
            return f"{name}: state {state['run']}, {other_state['run']}"
    rows = [_metrics(path / "metrics.csv") for path in (complete, killed)]
    return "" if rows[0] == rows[1] else "metrics.csv"


def _without_times(state: Any) -> Any:
    """Return nested values without those that depend on the clock."""
    if isinstance(state, dict):
        return {key: _without_times(value) for key, value in state.items() if "seconds" not in key}
    return state


def _metrics(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return [{key: value for key, value in row.items() if key != "seconds"} for row in csv.DictReader(file)]


# Sessions ----------------------------------------------------------------------------------------------------------


def _run_session(kind: str, directory: Path, delay: float | None, rng: np.random.Generator) -> int:
    """Start or resume a run; kill it after a delay.

    Returns:
        The exit status: negative numbers are signals.
    """
    if kind == TWO_PROCESSES:
        return _run_command(directory, delay, rng)
    pid = os.fork()
    if not pid:
        _train(RunSpec.of(**{"model": MODEL, **COMMON, **SETTINGS[kind]}), directory)

    def poll() -> int | None:
        done, status = os.waitpid(pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if done else None

    return _wait(poll, delay, lambda: os.kill(pid, signal.SIGKILL))


def _train(spec: RunSpec, directory: Path) -> None:
    """Start or resume a run in a forked process, and end the process."""
    log = os.open(f"{directory}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        if (directory / "config.yaml").exists():
            resume(directory, figures=False, trust_remote_code=True)
        else:
            train(spec, directory, figures=False)
        os._exit(0)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def _run_command(directory: Path, delay: float | None, rng: np.random.Generator) -> int:
    """Start or resume a run with two processes; kill the launcher, or all processes."""
    if (directory / "config.yaml").exists():
        arguments = ["--resume", str(directory), "--trust-remote-code"]
    else:
        arguments = [MODEL, "--out", str(directory), "--devices", "2", "--seed", "6"]
        for name, value in COMMON.items():
            arguments += [f"--{name.replace('_', '-')}", str(value)]
    command = [sys.executable, "-m", "torchcaps", "train", *arguments]
    environment = {**os.environ, "TORCHCAPS_TEST_NO_FIGURES": "1", "OMP_NUM_THREADS": "1"}
    with open(f"{directory}.log", "a") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)
    whole_group = rng.random() < 0.5

    def kill() -> None:
        os.killpg(process.pid, signal.SIGKILL) if whole_group else process.kill()

    return _wait(process.poll, delay, kill)


def _wait(poll: Callable[[], int | None], delay: float | None, kill: Callable[[], None]) -> int:
    """Wait for a process; kill it after a delay. Return its exit status."""
    began, is_killed = time.monotonic(), False
    while (status := poll()) is None:
        elapsed = time.monotonic() - began
        if not is_killed and elapsed > (SESSION_TIMEOUT_S if delay is None else delay):
            kill()
            is_killed = True
        time.sleep(0.002)
    return -signal.SIGALRM if is_killed and delay is None else status
