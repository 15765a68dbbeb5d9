"""Cost of training besides its arithmetic: overhead of the loop, scaling over processes, and start-up time.

The overhead of the loop is measured inside a run, on one thread, in CPU time: everything in a step except forward pass,
loss, backward pass and optimizer step, plus the wall time of the checkpoint and the metrics row at the end of an epoch,
divided by the steps of the epoch. Evaluations, which are forward passes, are not included. Several processes share the
batch of one; each has one thread.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from torchcaps.bench.timing import num_threads
from torchcaps.training import RunSpec
from torchcaps.training.distributed import Engine
from torchcaps.training.logging import ConsoleLogger
from torchcaps.training.run_dir import RunDirectory
from torchcaps.training.setup import build_network, open_data
from torchcaps.training.trainer import Trainer

__all__ = ["measure_loop", "measure_processes", "measure_startup", "measure_training"]

LOOP_STEPS = {"sabour2017_mnist": 7, "capsnet_small": 31}  # the first step is not counted
PROCESS_STEPS = {"sabour2017_mnist": (2, 10), "capsnet_small": (10, 110)}  # two run lengths; the difference is timed
STARTUP_REPEAT = 5


class Stopwatch:
    """Accumulates the CPU time of functions."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with its time added to ``seconds`` at each call."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.process_time() - start

        return timed


class _StepTimes(ConsoleLogger):
    """Logger that records the CPU time after each step: in total, and in the parts that a stopwatch measures."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        super().__init__(enabled=False)
        self._stopwatch = stopwatch
        self.times: list[tuple[float, float]] = []
        self.last_wall = 0.0

    def on_step(self, *args: Any, **kwargs: Any) -> None:
        self.times.append((time.process_time(), self._stopwatch.seconds))
        self.last_wall = time.perf_counter()


def measure_loop(name: str, n_steps: int) -> dict[str, Any]:
    """Train for some steps and return the record row of the loop's overhead."""
    spec = RunSpec.of(name, data="digits", num_threads=1, val_fraction=0.0, steps=n_steps)
    images = dataclasses.replace(open_data(spec), test=None)  # no evaluation
    stopwatch = Stopwatch()
    console = _StepTimes(stopwatch)
    with tempfile.TemporaryDirectory() as parent, RunDirectory.create(Path(parent) / "run", "run") as directory:
        trainer = Trainer(spec, directory, Engine(spec), images, build_network(spec), console)
        trainer.network.forward = stopwatch.wrap(trainer.network.forward)  # type: ignore[method-assign]
        trainer.loss.forward = stopwatch.wrap(trainer.loss.forward)
        trainer.optimizer.optimizer.step = stopwatch.wrap(trainer.optimizer.optimizer.step)
        backward = torch.Tensor.backward
        torch.Tensor.backward = stopwatch.wrap(backward)  # type: ignore[method-assign]
        try:
            trainer.train()
        finally:
            torch.Tensor.backward = backward  # type: ignore[method-assign]
            if trainer.metrics is not None:
                trainer.metrics.close()
        epoch_end = (time.perf_counter() - console.last_wall) / trainer.batches_per_epoch
    (start, arithmetic_start), (end, arithmetic_end) = console.times[0], console.times[-1]
    n_timed = len(console.times) - 1
    arithmetic = (arithmetic_end - arithmetic_start) / n_timed
    overhead = (end - start) / n_timed - arithmetic + epoch_end
    return {
        "kind": "loop",
        "model": name,
        "batch_size": spec.recipe.batch_size,
        "step_seconds": arithmetic,
        "overhead_seconds": overhead,
        "overhead_fraction": overhead / arithmetic,
    }


def _run_seconds(name: str, steps: int, processes: int, threads: int) -> float:
    """Return the wall time that a run of ``torchcaps train`` trained for."""
    with tempfile.TemporaryDirectory() as parent:
        flags = {"data": "digits", "steps": steps, "val-fraction": 0, "max-test-images": 100}
        flags |= {"num-threads": threads, "devices": processes, "out": f"{parent}/run"}
        command = [sys.executable, "-m", "torchcaps", "train", name]
        command += [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        return float(json.loads((Path(parent) / "run/results.json").read_text())["seconds"])


def measure_processes(name: str, repeat: int) -> list[dict[str, Any]]:
    """Time one process with one thread, one with two threads, and two processes, on the same batches, interleaved."""
    few, many = PROCESS_STEPS[name]
    seconds = {(1, 1): float("inf"), (1, 2): float("inf"), (2, 1): float("inf")}  # by (processes, threads)
    for _ in range(repeat):
        for processes, threads in seconds:
            run = _run_seconds(name, many, processes, threads) - _run_seconds(name, few, processes, threads)
            seconds[processes, threads] = min(seconds[processes, threads], run / (many - few))
    batch_size = RunSpec(name).recipe.batch_size
    return [
        {
            "kind": "processes",
            "model": name,
            "processes": processes,
            "threads": threads,
            "step_seconds": per_step,
            "images_per_second": batch_size / per_step,
            "efficiency": seconds[1, 1] / per_step / (processes * threads),
        }
        for (processes, threads), per_step in seconds.items()
    ]


def measure_startup(arguments: list[str], repeat: int = STARTUP_REPEAT) -> dict[str, Any]:
    """Return the record row of the wall time of a ``torchcaps`` command, such as ``--help``."""
    command = [str(Path(sys.executable).parent / "torchcaps"), *arguments]
    shortest = float("inf")
    for _ in range(repeat):
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        shortest = min(shortest, time.perf_counter() - start)
    return {"kind": "startup", "command": " ".join(["torchcaps", *arguments]), "seconds": shortest}


def measure_training(repeat: int = 2) -> Iterator[dict[str, Any]]:
    """Yield the record rows: start-up time, overhead of the loop, scaling over processes."""
    for arguments in (["--help"], ["train", "--help"]):
        yield measure_startup(arguments)
    with num_threads(1):
        for name, n_steps in LOOP_STEPS.items():
            yield measure_loop(name, n_steps)
    for name in PROCESS_STEPS:
        yield from measure_processes(name, repeat)
