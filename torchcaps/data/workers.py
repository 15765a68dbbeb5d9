"""Data workers: processes that are not forked from a process with threads, inherit no files, and end with their parent.

A training process has threads (OpenMP, autograd, its process group). A worker that is forked from it can deadlock, and
it inherits every open file. On Linux, a server process without threads forks the workers instead. It is started with
the first `Loader` that needs it and ends with the process that started it.
"""

import contextlib
import io
import json
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing.context import BaseContext
from types import FunctionType
from typing import Any

from torch import Tensor

from torchcaps._core.machine import search_path_variables
from torchcaps.data.base import Dataset

if sys.platform == "linux":
    from multiprocessing import forkserver, popen_forkserver, reduction, spawn, util
    from multiprocessing.context import ForkServerContext, ForkServerProcess, set_spawning_popen

__all__ = ["prepare_worker", "start_worker_server", "worker_context"]

SHARED_MEMORY = "/dev/shm"
SHARED_FRACTION = 0.25  # of the free shared memory for a data set; the rest is for batches
MAX_TENSORS = 100  # one file descriptor each; multiprocessing sends at most 256 to a process
SERVER_VARIABLE = "TORCHCAPS_DATA_WORKER_SERVER"  # set in the server: its original environment, as JSON
BLOCKED_SIGNALS = {getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)}


def worker_context(batches: object, dataset: Dataset) -> BaseContext | None:
    """Return the multiprocessing context for the workers of a loader.

    Args:
        batches: the object that is sent to each worker.
        dataset: its data set. Its tensors are moved to shared memory, so that they are not copied to each worker.

    Returns:
        ``None``, the default of the platform, if ``batches`` can't be sent: it can't be pickled, is defined in the main
        script (which would have to be imported, and so run, in each worker), or does not fit into shared memory.
    """
    if sys.platform != "linux" or not _can_be_sent(batches) or not _share_tensors(dataset):
        return None
    return _WorkerContext()


def start_worker_server() -> None:
    """Start the server that forks the workers, if it does not run yet. It imports torch while this process goes on."""
    if sys.platform == "linux":
        _get_server().ensure_running()


def prepare_worker(_worker: int) -> None:
    """Move a worker to its own process group, and end it as soon as its parent has ended, however it ended.

    Ctrl-C and the elastic agent signal a whole group. Only the training process must get that signal: it saves a
    checkpoint after the current step, which needs the data workers.
    """
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED_SIGNALS - {signal.SIGINT})
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """Wait until the parent process has ended, then exit; return at once if there is no parent process."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


class _Probe(pickle.Pickler):
    """Pickler without output that raises if an object is defined in the main script. Tensors are not pickled."""

    def __init__(self) -> None:
        super().__init__(_NullFile(), pickle.HIGHEST_PROTOCOL)
        self.n_tensors = 0

    def persistent_id(self, obj: Any) -> str | None:
        """Return an ID for a tensor, otherwise ``None``; raise if a class or function is from the main script."""
        if isinstance(obj, Tensor):
            self.n_tensors += 1
            return "tensor"
        if isinstance(obj, type | FunctionType) and obj.__module__ == "__main__":
            raise pickle.PicklingError(f"{obj!r} is defined in the main script")
        return None


class _NullFile(io.RawIOBase):
    def write(self, data: Any, /) -> int:
        return len(data)


def _can_be_sent(obj: object) -> bool:
    """Return whether an object can be pickled and unpickled without the main script."""
    probe = _Probe()
    try:
        probe.dump(obj)
    except Exception:  # a user's class may raise anything
        return False
    return probe.n_tensors <= MAX_TENSORS


def _share_tensors(dataset: Dataset) -> bool:
    """Replace the tensors of a data set by copies in shared memory; return whether they fit.

    torch would move a tensor's storage when it is pickled, which leaves NumPy arrays that use the same memory dangling.
    """
    holders = list(_tensor_holders(dataset, set()))
    tensors = {id(tensor): tensor for holder, key in holders if not (tensor := holder[key]).is_shared()}
    if not tensors:
        return True
    try:
        stats = os.statvfs(SHARED_MEMORY)
        if sum(t.nbytes for t in tensors.values()) > SHARED_FRACTION * stats.f_bavail * stats.f_frsize:
            return False
        shared = {key: tensor.clone().share_memory_() for key, tensor in tensors.items()}
    except (OSError, RuntimeError):
        return False
    for holder, key in holders:
        holder[key] = shared.get(id(holder[key]), holder[key])
    return True


def _tensor_holders(obj: Dataset, visited: set[int]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield each dict and key of a data set, and of data sets that it refers to, whose value is a tensor."""
    visited.add(id(obj))
    for holder in (vars(obj), *(value for value in vars(obj).values() if isinstance(value, dict))):
        for key, value in holder.items():
            if isinstance(value, Tensor) and value.device.type == "cpu":
                yield holder, key
            elif isinstance(value, Dataset) and id(value) not in visited:
                yield from _tensor_holders(value, visited)


# The server -----------------------------------------------------------------------------------------------------

if sys.platform == "linux":

    class _WorkerServer(forkserver.ForkServer):
        """A fork server of our own: the one of multiprocessing imports the main script and is signalled by Ctrl-C."""

        def __init__(self) -> None:
            super().__init__()
            self.owner = os.getpid()
            self.set_forkserver_preload([__name__])

        def ensure_running(self) -> None:
            """Start the server, if it does not run.

            It starts with signals blocked, since it is in this process's group until `_enter_server`. Libraries that
            start threads on import are limited to one, and its path is that of this process.
            """
            pid: int | None = self._forkserver_pid  # type: ignore[attr-defined]
            if pid is not None and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return
            changes = {
                **search_path_variables(),
                # after a kill, the tracker of multiprocessing removes semaphores; no warning about it
                "PYTHONWARNINGS": ",".join(
                    filter(None, (os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker:UserWarning"))
                ),
                **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
            }
            original = {name: os.environ.get(name) for name in (*changes, SERVER_VARIABLE)}
            previous = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)
            os.environ.update(changes, **{SERVER_VARIABLE: json.dumps(original)})
            try:
                super().ensure_running()
            finally:
                _restore_environment(original)
                signal.pthread_sigmask(signal.SIG_SETMASK, previous)

    def _close(*fds: int) -> None:
        for fd in fds:
            os.close(fd)

    class _WorkerPopen(popen_forkserver.Popen):
        """A process that is forked by the server. The main script is not imported in it."""

        def _launch(self, process_obj: Any) -> None:
            """Start the process: let the server fork it, and send it the pickled process object."""
            preparation = spawn.get_preparation_data(process_obj._name)
            preparation = {key: value for key, value in preparation.items() if not key.startswith("init_main")}
            buffer = io.BytesIO()
            set_spawning_popen(self)
            try:
                reduction.dump(preparation, buffer)
                reduction.dump(process_obj, buffer)
            finally:
                set_spawning_popen(None)
            self.sentinel, data = _get_server().connect_to_new_process(self._fds)  # type: ignore[attr-defined]
            parent = os.dup(data)  # kept open as long as this process lives: see _exit_with_parent
            self.finalizer = util.Finalize(self, _close, (parent, self.sentinel))
            with open(data, "wb") as file:
                file.write(buffer.getbuffer())
            self.pid = forkserver.read_signed(self.sentinel)

    class _WorkerProcess(ForkServerProcess):
        @staticmethod
        def _Popen(process_obj: Any) -> Any:
            return _WorkerPopen(process_obj)

    class _WorkerContext(ForkServerContext):
        Process = _WorkerProcess

    _server: _WorkerServer | None = None

    def _get_server() -> _WorkerServer:
        """Return the server of this process; a forked process does not use that of its parent."""
        global _server
        if _server is None or _server.owner != os.getpid():
            _server = _WorkerServer()
        return _server


def _restore_environment(values: dict[str, str | None]) -> None:
    """Set environment variables to these values; remove those whose value is ``None``."""
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _enter_server() -> None:
    """Leave the process group of the training process, see `prepare_worker`; runs when the server imports this."""
    os.setpgid(0, 0)
    _restore_environment(json.loads(os.environ[SERVER_VARIABLE]))


if SERVER_VARIABLE in os.environ:
    with contextlib.suppress(OSError):
        _enter_server()
