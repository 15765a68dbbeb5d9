"""Train a run, and the same again with a SIGKILL at random moments; say how it went, as JSON.

python -m tests.training.killed FOLDER KILLS

What takes time to load is loaded before the forks; with one thread, so that there are no others to lose in them.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import torch

from tests.training.own import CHOI, DATA
from torchcaps._core.optional import import_optional
from torchcaps.data import create_dataset
from torchcaps.training import RunSpec, resume, train

SPEC = RunSpec.of(
    "choi2019_mnist",
    model_options=CHOI,
    data=DATA,
    batch_size=16,
    epochs=20,
    val_fraction=0.1,
    checkpoint_interval_steps=2,
    eval_interval_epochs=5,
    num_threads=1,
    seed=3,
)


def forked(folder: Path) -> int:
    """Begin the run, or go on with it, in a process of its own."""
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    try:
        torch.set_num_threads(1)
        resume(folder) if (folder / "config.yaml").exists() else train(SPEC, folder)
        os._exit(0)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def main() -> None:
    where, kills = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    for module in ("lightning_fabric", "matplotlib.figure", "matplotlib.backends.backend_agg", "PIL.Image"):
        import_optional(module, "training")
    create_dataset("digits")
    start = time.monotonic()
    assert os.waitpid(forked(where / "whole"), 0)[1] == 0
    lasted = time.monotonic() - start
    for attempt in range(5):  # a machine that got faster may be done before it was killed so often
        killed, lives = kill(where / "killed", kills, 0.6**attempt * lasted)
        if killed == kills:
            break
        shutil.rmtree(where / "killed")
    print(json.dumps({"killed": killed, "lives": lives, "seconds": lasted}))


def kill(folder: Path, kills: int, lasted: float) -> tuple[int, int]:
    """Run to the end with so many kills; return how many there were, and how often it was begun."""
    chance = random.Random(0)
    for killed in range(kills):
        pid = forked(folder)
        # From before the first step to some way into the run, whatever the machine's speed.
        time.sleep(chance.uniform(0.05, 0.3) * lasted)
        if os.waitpid(pid, os.WNOHANG)[0]:
            return killed, killed + 1
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert os.waitpid(forked(folder), 0)[1] == 0
    return kills, kills + 1


if __name__ == "__main__":
    main()
