"""Description of the machine and of the current command, for records."""

import datetime
import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from torchcaps._core.version import __version__

__all__ = ["available_cores", "describe_machine", "record_header"]


def available_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def describe_machine(processes: int = 1, device: str = "cpu") -> dict[str, Any]:
    """Return the processor, its vector instructions, core and thread counts and library versions.

    Durations depend on them, and the last digits of results.
    """
    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        cpu = names[0] if names else cpu
    return {
        "cpu": cpu,
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "processes": processes,
        "device": device,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchcaps": __version__,
    }


def record_header() -> dict[str, str]:
    """Return the command line of this process and the present time (UTC), as records store them."""
    return {
        "command": shlex.join(["torchcaps", *sys.argv[1:]]),
        "finished": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
