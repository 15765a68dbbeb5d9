"""Processes of a run: launch on one machine, collectives, stop signals.

``--devices N`` starts N worker processes on this machine with torch's elastic agent, without restarts. On several
machines, start the command with torchrun, for example in a Slurm job. All processes share every batch.

Exit codes of a worker, and of the command that launched it:

- 0: finished.
- 1: training failed (`RunError`): diverged, disk full, another process lost.
- 2: invalid input: flags, data, checkpoint.
- 128 + n: stopped by signal n. 130 (SIGINT) and 143 (SIGTERM) follow a saved checkpoint; 137 (SIGKILL) is typical of
  the kernel's out-of-memory killer.

If one process fails, the agent sends the others SIGTERM and, 30 s later, SIGKILL.
"""

import contextlib
import ctypes
import datetime
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor, nn

from torchcaps._core.machine import available_cores, search_path_variables
from torchcaps._core.optional import import_optional
from torchcaps.training.config import RunSpec
from torchcaps.training.errors import PeerLostError

__all__ = [
    "Engine",
    "StopSignal",
    "check_device",
    "exit_with_launcher",
    "find_device",
    "launch_workers",
    "num_processes",
    "process_rank",
    "report_to_launcher",
    "translate_peer_errors",
]

LAUNCHER_PID = "TORCHCAPS_LAUNCHER_PID"  # environment variable of workers that `launch_workers` started
COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=30)  # for a process that hangs; a dead one is noticed at once
STOP_TIMEOUT_S = 600  # for workers to finish a step and save, after a signal to the launcher; a second one ends them
PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>
_FINISHED: list["Engine"] = []  # see Engine.close


def num_processes() -> int:
    """Return the number of processes of this run (torchrun's ``WORLD_SIZE``)."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def process_rank() -> int:
    """Return the rank of this process among them."""
    return int(os.environ.get("RANK", "0")) if num_processes() > 1 else 0


class StopSignal:
    """Context manager that records the first SIGINT, SIGTERM or SIGHUP; a second one raises KeyboardInterrupt.

    Attributes:
        signal: number of the signal, 0 if none has arrived.
    """

    # SIGHUP: the terminal was closed. Windows does not have it.
    SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))

    def __init__(self) -> None:
        self.signal = 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers only there
            self._previous = {number: signal.signal(number, self._handle) for number in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.signal:
            raise KeyboardInterrupt
        self.signal = number


# Launch --------------------------------------------------------------------------------------------------------


def launch_workers(argv: list[str], count: int) -> int:
    """Run ``torchcaps ARGV`` in ``count`` processes on this machine; return the exit code.

    Signals are forwarded to the workers, which save a checkpoint and exit. If a worker fails, its error is printed
    once and the others are stopped.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    handled = (*StopSignal.SIGNALS, *([signal.SIGQUIT] if hasattr(signal, "SIGQUIT") else []))  # by the agent
    handlers = {number: signal.getsignal(number) for number in handled}
    variables = {LAUNCHER_PID: str(os.getpid()), **search_path_variables()}
    is_settable = hasattr(LaunchConfig, "shutdown_timeout")  # in newer versions of torch
    optional: dict[str, Any] = {"shutdown_timeout": STOP_TIMEOUT_S} if is_settable else {}
    try:
        with tempfile.TemporaryDirectory(prefix="torchcaps-") as error_files, _mute_logger("torch.distributed.elastic"):
            config = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=count,
                run_id=uuid.uuid4().hex,
                rdzv_backend="c10d",
                rdzv_endpoint="localhost:0",
                local_addr="127.0.0.1",
                max_restarts=0,
                logs_specs=DefaultLogsSpecs(log_dir=error_files),
                **optional,
            )
            with _environment(variables):
                elastic_launch(config, sys.executable)("-m", "torchcaps", *argv)
    except SignalException as error:
        return 128 + int(error.sigval)
    except ChildFailedError as error:
        message, code = _root_cause(error.failures, count)
        if message:
            print(f"torchcaps: {message}", file=sys.stderr, flush=True)
        return code
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return 0


def _root_cause(failures: Mapping[int, Any], count: int) -> tuple[str, int]:
    """Return the message and the exit code of the failure that caused the others.

    Args:
        failures: `torch.distributed.elastic.multiprocessing.ProcessFailure` by rank.
        count: number of processes.
    """
    ranks = sorted(failures, key=lambda rank: failures[rank].timestamp)
    reported = [rank for rank in ranks if isinstance(failures[rank].error_file_data.get("torchcaps"), str)]
    if reported:
        failure = failures[reported[0]]
        return failure.error_file_data["torchcaps"], failure.exitcode if failure.exitcode > 0 else 1
    # The others are consequences: processes that lost their peer exit with 1, and the agent sends SIGTERM to the rest.
    order = [lambda code: code < 0 and code != -signal.SIGTERM, lambda code: code > 0, lambda code: code < 0]
    rank = next(rank for is_cause in order for rank in ranks if is_cause(failures[rank].exitcode))
    code = failures[rank].exitcode
    if code > 128:  # stopped by a signal: rank 0 has printed how to resume
        return "", code
    reason = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
    message = f"process {rank} of {count} {reason}; the other processes were stopped"
    return message, 128 - code if code < 0 else code


def report_to_launcher(error: Exception) -> bool:
    """Hand an error to `launch_workers`, which prints one message for all processes.

    Returns:
        Whether this process was started by `launch_workers`; if not, it has to print the message itself.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or LAUNCHER_PID not in os.environ:
        return False
    if not getattr(error, "secondary", False):
        message = str(error)
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": message, "timestamp": int(time.time()), "torchcaps": message}, file)
    return True


def exit_with_launcher() -> None:
    """Make the kernel kill this worker if its launcher dies without stopping it (SIGKILL). Linux only."""
    launcher = int(os.environ.get(LAUNCHER_PID, "0"))
    if not launcher:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it died before the call above
        os._exit(1)


# Engine --------------------------------------------------------------------------------------------------------


class Engine:
    """Lightning Fabric for one process of a run: device, precision, gradient averaging (DDP) and collectives.

    Args:
        spec: device, precision, threads and determinism of the run.

    Attributes:
        rank, world_size: rank of this process, number of processes.
        is_main: whether this is rank 0, which writes files and prints.
        device: device of model and batches.
    """

    def __init__(self, spec: RunSpec) -> None:
        fabric = import_optional("lightning_fabric", "training")
        self.world_size, self.rank = num_processes(), process_rank()
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if self.world_size > 1 else 1
        strategy: Any = "auto"
        if self.world_size > 1:
            # Convolutions with one channel: their gradients may have either of two equivalent strides.
            warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
            strategy = fabric.strategies.DDPStrategy(timeout=COLLECTIVE_TIMEOUT)
        check_device(spec.device)
        with _mute_fabric():
            self.fabric = fabric.Fabric(
                accelerator=spec.device,
                devices=local,
                num_nodes=self.world_size // local,
                strategy=strategy,
                precision=spec.precision,
            )
            self.fabric.launch()
        torch.set_num_threads(spec.num_threads or max(1, available_cores() // local))
        # Gradients through several EM iterations underflow to subnormal numbers (below 1e-38), on which a CPU is ten
        # times slower (a step with five iterations takes twice as long). Flushing them to zero changes no result.
        torch.set_flush_denormal(True)
        if spec.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
            torch.backends.cudnn.benchmark = False
        self.device: torch.device = self.fabric.device
        self.is_main = self.rank == 0

    def setup(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        """Return model and optimizer wrapped by Fabric."""
        with _mute_fabric():
            self._wrapped = self.fabric.setup(model, optimizer)
        return self._wrapped

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all processes, on the tensor's device."""
        if self.world_size == 1:
            return tensor
        with translate_peer_errors():
            total = tensor.detach().clone().to(self.device)
            torch.distributed.all_reduce(total)
        return total.to(tensor.device)

    def all_reduce_max(self, value: float) -> float:
        """Return the maximum of a number over all processes."""
        if self.world_size == 1:
            return value
        with translate_peer_errors():
            largest = torch.tensor(float(value), device=self.device)
            torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
        return float(largest)

    def broadcast(self, value: Any) -> Any:
        """Return the value of rank 0 on every process."""
        if self.world_size == 1:
            return value
        with translate_peer_errors():
            return self.fabric.broadcast(value)

    def broadcast_weights(self, model: nn.Module) -> None:
        """Copy the weights of rank 0 to every process."""
        if self.world_size > 1:
            with translate_peer_errors():
                for tensor in model.state_dict().values():
                    contiguous = tensor.contiguous()
                    torch.distributed.broadcast(contiguous, 0)
                    tensor.copy_(contiguous)

    def barrier(self) -> None:
        """Wait until all processes get here."""
        self.all_reduce_max(0)

    def precision_state(self) -> dict[str, Any]:
        """Return the state of the gradient scaler (half precision), for checkpoints."""
        return self.fabric.strategy.precision.state_dict()

    def load_precision_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `precision_state` returned."""
        self.fabric.strategy.precision.load_state_dict(state)

    def close(self) -> None:
        """Keep the process group alive until this process exits.

        Destroying it can deadlock: torch waits for a thread of the group while holding the interpreter lock, which
        that thread may need. The command exits with ``os._exit`` instead.
        """
        if self.world_size > 1:
            _FINISHED.append(self)


@contextlib.contextmanager
def translate_peer_errors() -> Iterator[None]:
    """Context manager that turns torch's errors about a lost connection into `PeerLostError`."""
    try:
        yield
    except RuntimeError as error:
        if num_processes() > 1 and _is_lost_connection(error):
            raise PeerLostError("another process of this run has exited, so this one can't continue") from error
        raise


def _is_lost_connection(error: RuntimeError) -> bool:
    """Return whether torch raised the error because another process is gone."""
    signs = ("connection closed by peer", "connection reset", "gloo", "nccl", "broken pipe", "timed out waiting")
    return any(sign in str(error).lower() for sign in signs)


def check_device(device: str, devices: int = 1) -> None:
    """Raise a ValueError if a device (``RunSpec.device``), or that number of GPUs, is not available on this machine."""
    if device in ("cuda", "mps") and not getattr(torch, device).is_available():
        raise ValueError(f"--device {device} is not available on this machine: use --device auto or cpu")
    if device == "cuda" and devices > torch.cuda.device_count():
        raise ValueError(f"--devices {devices} needs as many GPUs, and this machine has {torch.cuda.device_count()}")


def find_device(name: str) -> torch.device:
    """Return the device of a name; ``"auto"`` is CUDA or MPS if available, otherwise the CPU (see `check_device`)."""
    check_device(name)
    if name != "auto":
        return torch.device(name)
    return torch.device(next((kind for kind in ("cuda", "mps") if getattr(torch, kind).is_available()), "cpu"))


@contextlib.contextmanager
def _mute_fabric() -> Iterator[None]:
    """Context manager that hides Fabric's warnings: they recommend arguments that users of this package don't set."""
    loggers = [logging.getLogger(name) for name in ("lightning_fabric", "lightning_fabric.utilities.distributed")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Context manager that sets environment variables and restores them on exit."""
    original = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in original.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _mute_logger(name: str) -> Iterator[None]:
    """Context manager in which a logger and its children print nothing."""
    logger, handler = logging.getLogger(name), logging.NullHandler()
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.propagate = propagate
        logger.removeHandler(handler)
