"""Train a run, and the same run again with a SIGKILL at each of some points; print how often it was killed.

python -m tests.training.killed DIRECTORY

Modules are imported before the forks, with one thread, so that a fork loses no other threads.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.sampling import sample
from tests.training.tiny import CHOI, DATA
from torchcaps._core.optional import import_optional
from torchcaps.data import create_dataset
from torchcaps.training import RunSpec, resume, train
from torchcaps.training.logging import MetricsLog
from torchcaps.training.trainer import Trainer

SPEC = RunSpec.of(
    "choi2019_mnist",
    model_options=CHOI,
    data=DATA,
    batch_size=16,
    epochs=8,
    val_fraction=0.1,
    checkpoint_interval_steps=2,
    eval_interval_epochs=2,
    num_threads=1,
    seed=3,
)
# A function, and the call of it in one session before which the process is killed. In a session, the files are written
# in this order: metrics, configuration, then checkpoints, each with two renames (last to previous, new to last).
KILLS: list[tuple[Any, str, int]] = [
    *((os, "replace", call) for call in (1, 2, 3, 4, 5, 6)),
    *((os, "fsync", call) for call in (1, 4, 5, 6, 7, 8)),
    *((Trainer, "_train_step", call) for call in (1, 2, 4)),
    *((MetricsLog, "write", call) for call in (1, 2)),
    (Trainer, "evaluate", 1),
    (Trainer, "_update_best", 1),
    (Trainer, "save", 3),
]


def fork(directory: Path, kill: tuple[Any, str, int] | None = None) -> int:
    """Start or resume the run in a new process, with an optional kill; return its wait status."""
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        if kill is not None:
            kill_before(*kill)
        resume(directory, figures=False, trust_remote_code=True) if (directory / "config.yaml").exists() else train(
            SPEC, directory, figures=False
        )
        os._exit(0)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def kill_before(owner: Any, name: str, call: int) -> None:
    """Replace a function by one that kills this process at the given call."""
    function: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def count(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    setattr(owner, name, count)


def main() -> None:
    directory = Path(sys.argv[1])
    torch.set_num_threads(1)
    import_optional("lightning_fabric", "training")
    create_dataset("digits")
    assert fork(directory / "complete") == 0
    kills = sample(KILLS, 8)
    killed = [os.WTERMSIG(status) == signal.SIGKILL for status in (fork(directory / "killed", kill) for kill in kills)]
    assert fork(directory / "killed") == 0
    print(sum(killed), len(kills))


if __name__ == "__main__":
    main()
