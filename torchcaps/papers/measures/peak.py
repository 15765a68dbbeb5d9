"""The most memory that training takes, measured in a process of its own: what a process has once had, it keeps."""

import multiprocessing
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch

from torchcaps.bench.memory import reset_peak, resident_peak
from torchcaps.models import create_model
from torchcaps.reproduce.planner import training_step
from torchcaps.training.errors import RunError

__all__ = ["training_peak", "training_peaks"]


def training_peak(model: str, fields: Mapping[str, Any], batch: int, threads: int = 1) -> int:
    """Return the bytes that a network and two training steps add to a process that has taken steps with a small one."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    training_step(create_model("capsnet_small"), 2)()  # what torch loads and keeps in any case
    reset_peak()
    before = resident_peak()
    step = training_step(create_model(model, **fields), batch)
    for _ in range(2):  # an optimiser's own memory comes with the first
        step()
    return resident_peak() - before


def _start_undisturbed() -> None:
    """Start the server that processes are forked from so that a Ctrl-C, which is ours to answer, does not reach it."""
    from multiprocessing import forkserver

    if threading.current_thread() is not threading.main_thread():
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)


def training_peaks(
    cases: Mapping[str, tuple[str, Mapping[str, Any]]], batch: int, tick: Callable[[], object]
) -> dict[str, int]:
    """Return the same for several networks, (model, its fields) by name, each in a process of its own."""
    methods = multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    if "forkserver" in methods:
        context.set_forkserver_preload([__name__])  # torch is loaded once for all
        _start_undisturbed()
    found = {}
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        for name, (model, fields) in cases.items():
            try:
                found[name] = pool.submit(training_peak, model, fields, batch, torch.get_num_threads()).result()
            except BrokenProcessPool as error:
                raise RunError(
                    f"the process that measures the memory of {model} was killed: it may have wanted more than there is"
                ) from error
            tick()
    return found
