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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from torchcaps._core.machine import search_path_variables
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


class PhaseTimer:
    """CPU time that training spends in forward pass, loss, backward pass and optimizer step, by hooks of torch.

    Args:
        network, loss, optimizer: the modules and the optimizer of the run. The backward pass lasts from the gradient of
            the loss to that of the last parameter.
    """

    def __init__(self, network: nn.Module, loss: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.seconds = 0.0
        self._start = 0.0
        self._handles = [
            network.register_forward_pre_hook(self._begin),
            network.register_forward_hook(self._end),
            loss.register_forward_pre_hook(self._begin),
            loss.register_forward_hook(self._end_loss),
            register_multi_grad_hook([p for p in network.parameters() if p.requires_grad], self._end),
            optimizer.register_step_pre_hook(self._begin),
            optimizer.register_step_post_hook(self._end),
        ]

    def _begin(self, *_: Any) -> None:
        """Start the clock, as a hook before a part of the step."""
        self._start = time.process_time()

    def _end(self, *_: Any) -> None:
        """Add the CPU time since `_begin`, as a hook after a part of the step."""
        self.seconds += time.process_time() - self._start

    def _end_loss(self, module: nn.Module, inputs: tuple[Any, ...], value: Tensor) -> None:
        """Stop the clock after the loss; its gradient hook starts it for the backward pass."""
        self._end()
        value.register_hook(self._begin)

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


class _StepTimes(ConsoleLogger):
    """Logger that records the CPU time after each step: in total, and in the phases that `PhaseTimer` measures."""

    def __init__(self) -> None:
        super().__init__(enabled=False)
        self.phases: PhaseTimer | None = None
        self.times: list[tuple[float, float]] = []
        self.last_wall = 0.0

    def on_step(self, *args: Any, **kwargs: Any) -> None:
        assert self.phases is not None
        self.times.append((time.process_time(), self.phases.seconds))
        self.last_wall = time.perf_counter()


def measure_loop(name: str, n_steps: int) -> dict[str, Any]:
    """Train for some steps and return the record row of the loop's overhead."""
    spec = RunSpec.of(name, data="digits", num_threads=1, val_fraction=0.0, steps=n_steps)
    images = dataclasses.replace(open_data(spec), test=None)  # no evaluation
    console = _StepTimes()
    with tempfile.TemporaryDirectory() as parent, RunDirectory.create(Path(parent) / "run", "run") as directory:
        trainer = Trainer(spec, directory, Engine(spec), images, build_network(spec), console)
        console.phases = PhaseTimer(trainer.network, trainer.loss, trainer.optimizer.optimizer)
        try:
            trainer.train()
        finally:
            console.phases.close()
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
        environment = {**os.environ, **search_path_variables(), "OMP_NUM_THREADS": str(threads)}
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
