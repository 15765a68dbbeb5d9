"""Several processes on this machine: started, watched, and ended together."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from types import FrameType

from torchcaps.training.signals import Request

__all__ = ["follow_parent", "supervise"]

PARENT = "TORCHCAPS_PARENT"  # the process that watches, whose end is that of all

GRACE = 15.0  # seconds for the others to end by themselves, once one has


def supervise(words: list[str], count: int) -> int:
    """Run ``torchcaps`` with these words in so many processes; return the code to end with.

    They find each other as torchrun's would. Signals are passed on; where one process dies, the others are given some
    seconds to notice and are then ended.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "TORCHELASTIC_RUN_ID": "torchcaps",
        PARENT: str(os.getpid()),
    }
    command = [sys.executable, "-m", "torchcaps", *words]
    processes: list[subprocess.Popen[bytes]] = []
    asked: list[int] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        asked.append(number)
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in Request.HEARD}
    try:
        for rank in range(count):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            # A group of its own, so that Ctrl-C reaches it once, from here.
            processes.append(subprocess.Popen(command, env={**os.environ, **shared, **own}, start_new_session=True))
        return _watch(processes, asked)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
        for number, handler in before.items():
            signal.signal(number, handler)


def follow_parent() -> None:
    """End this process, in the background, when the one that started it has: nobody would end it otherwise."""
    parent = int(os.environ.get(PARENT, "0"))
    if not parent:
        return

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        print(
            "torchcaps: the process that started this one has ended, so this one ends too", file=sys.stderr, flush=True
        )
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _watch(processes: list[subprocess.Popen[bytes]], asked: list[int]) -> int:
    """Wait for all; where one has failed, for the rest only a while."""
    deadline = None
    while any(process.poll() is None for process in processes):
        failed = [p for p in processes if p.poll() not in (None, 0)]
        if failed and deadline is None:
            deadline = time.monotonic() + GRACE
            if not asked and failed[0].returncode < 0:
                rank = processes.index(failed[0])
                name = signal.Signals(-failed[0].returncode).name
                print(
                    f"torchcaps: process {rank} of {len(processes)} was ended by {name}; ending the others",
                    file=sys.stderr,
                    flush=True,
                )
        if deadline is not None and time.monotonic() > deadline:
            for process in processes:
                if process.poll() is None:
                    process.kill()
        time.sleep(0.1)
    codes = [process.returncode for process in processes]
    wrong = [code for code in codes if code]
    if not wrong:
        return 0
    return max((code for code in wrong if code > 0), default=128 - wrong[0])
