"""The engine under the loop: Lightning Fabric, for precision, devices and processes."""

import contextlib
import datetime
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torchcaps._core.optional import import_optional
from torchcaps.training.config import RunSpec
from torchcaps.training.errors import RunError

__all__ = ["Engine", "n_processes", "process_rank", "together"]

ENDED: list["Engine"] = []  # see Engine.close
PATIENCE = datetime.timedelta(minutes=30)  # for a process that lives but does not answer; a dead one is noticed at once


def n_processes() -> int:
    """Return how many processes were started together, by torchrun or by ``--devices``."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def process_rank() -> int:
    """Return which of them this is."""
    return int(os.environ.get("RANK", "0")) if n_processes() > 1 else 0


class Engine:
    """One process of a run.

    Attributes:
        rank, world: which of how many processes this is.
        device: where it computes.
        first: whether it is the one that writes and speaks.
    """

    def __init__(self, spec: RunSpec) -> None:
        fabric = import_optional("lightning_fabric", "training")
        self.world, self.rank = n_processes(), process_rank()
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if self.world > 1 else 1
        strategy: Any = "auto"
        if self.world > 1:
            # Of a convolution of one channel, whose gradient may have either of two layouts: nothing to be mended.
            warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
            strategy = fabric.strategies.DDPStrategy(timeout=PATIENCE)
        threads = spec.num_threads or max(1, _n_cores() // local)
        with _quietly(), _available(spec.device):
            self.fabric = fabric.Fabric(
                accelerator=spec.device,
                devices=local,
                num_nodes=self.world // local,
                strategy=strategy,
                precision=spec.precision,
            )
            self.fabric.launch()
        torch.set_num_threads(threads)
        # Gradients through several iterations of EM underflow to numbers below 1e-38, on which a CPU takes ten times as
        # long (a step with five iterations: twice); taken as zero they change nothing.
        torch.set_flush_denormal(True)
        if spec.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
            torch.backends.cudnn.benchmark = False
        self.device: torch.device = self.fabric.device
        self.first = self.rank == 0
        self.threads = threads

    def setup(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        """Return the model and the optimiser as the engine wants them."""
        with _quietly():
            self._set_up = self.fabric.setup(model, optimizer)
        return self._set_up

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all processes, where it was."""
        if self.world == 1:
            return tensor
        with together():
            total = tensor.detach().clone().to(self.device)
            torch.distributed.all_reduce(total)
        return total.to(tensor.device)

    def most(self, number: float) -> float:
        """Return the largest of the processes' numbers."""
        if self.world == 1:
            return number
        with together():
            value = torch.tensor(float(number), device=self.device)
            torch.distributed.all_reduce(value, torch.distributed.ReduceOp.MAX)
        return float(value)

    def told(self, value: Any) -> Any:
        """Return what the first process has."""
        if self.world == 1:
            return value
        with together():
            return self.fabric.broadcast(value)

    def share(self, model: nn.Module) -> None:
        """Give all processes the weights of the first."""
        if self.world > 1:
            with together():
                for tensor in model.state_dict().values():
                    sent = tensor.contiguous()
                    torch.distributed.broadcast(sent, 0)
                    tensor.copy_(sent)

    def wait(self) -> None:
        """Wait for the others."""
        self.most(0)

    def close(self) -> None:
        """Leave the others be: all of them have come to the end.

        The group of processes is kept until this one ends, which the command does without tidying up. Torch would wait
        for a thread of the group while it holds the interpreter's lock, which that thread may wait for.
        """
        if self.world > 1:
            ENDED.append(self)


def _lost_peer(error: BaseException) -> bool:
    """Return whether an error is that another process is gone."""
    words = ("connection closed by peer", "connection reset", "gloo", "nccl", "broken pipe", "timed out waiting")
    distributed = isinstance(error, RuntimeError | ConnectionError)
    return distributed and any(word in str(error).lower() for word in words)


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Say so where another process is gone, which an exchange with it shows."""
    try:
        yield
    except RuntimeError as error:
        if n_processes() > 1 and _lost_peer(error):
            raise RunError("another process of this run has ended, so this one can't go on") from error
        raise


@contextlib.contextmanager
def _available(accelerator: str) -> Iterator[None]:
    """Say so where there is no such device."""
    try:
        yield
    except Exception as error:  # the engine has several kinds
        if accelerator in ("cuda", "mps") and not getattr(torch, accelerator).is_available():
            raise ValueError(f"--device {accelerator}: there is none here that torch could use") from error
        raise


def _n_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Keep the engine's advice to itself: it is about settings that are ours."""
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
