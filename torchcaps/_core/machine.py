"""Description of the machine and of the current command, for records."""

import contextlib
import datetime
import os
import platform
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from torchcaps._core.version import __version__

__all__ = [
    "available_cores",
    "describe_machine",
    "memory_limit",
    "native_bfloat16",
    "processor_features",
    "record_header",
    "search_path_variables",
]

BFLOAT16_FEATURES = {
    "amx_bf16": "AMX",
    "avx512_bf16": "AVX512_BF16",
    "bf16": "BF16",
}  # in /proc/cpuinfo; the last on ARM
UNKNOWN_MEMORY = 2**34  # assumed if the system does not tell
CGROUP_MEMBERSHIP = Path("/proc/self/cgroup")
CGROUP_ROOT = Path("/sys/fs/cgroup")


def available_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def search_path_variables() -> dict[str, str]:
    """Return environment variables with which a Python process imports what this process imports.

    By default, ``python -m`` and ``python -c`` search the current directory before installed packages.
    """
    return {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}


def memory_limit() -> int:
    """Return the memory in bytes that this process may use: of the machine, or less if a cgroup limits it.

    Containers and batch systems limit memory by control groups (cgroups, versions 1 and 2). A system that does not tell
    its memory is assumed to have 16 GiB.
    """
    try:
        n_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        n_bytes = UNKNOWN_MEMORY
    return min([n_bytes, *_cgroup_limits()])


def _cgroup_limits() -> Iterator[int]:
    """Yield the memory limits of the control groups of this process and of all groups that contain them."""
    try:
        lines = CGROUP_MEMBERSHIP.read_text().splitlines()
    except (OSError, ValueError):  # only Linux has control groups
        return
    for line in lines:  # "0::/user.slice" in version 2, "4:memory:/docker/ID" in version 1
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        mount = CGROUP_ROOT / "memory" if controllers else CGROUP_ROOT
        group = mount / path.lstrip("/")
        # In a container, the path may be that of the host: the groups that don't exist are skipped.
        for directory in (group, *group.parents):
            if not directory.is_relative_to(mount):
                break
            with contextlib.suppress(OSError, ValueError):  # ValueError: "max" is no limit
                yield int((directory / name).read_text())


def processor_features() -> str:
    """Return the names of the processor's instruction sets, separated by spaces, as far as the system tells them."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return platform.processor()


def native_bfloat16(features: str | None = None) -> str | None:
    """Return the instruction set that multiplies bfloat16, or ``None`` if the processor has none.

    Without one, bfloat16 is emulated and slower than float32.

    Args:
        features: instruction sets as in ``/proc/cpuinfo``; default: this processor's.

    >>> native_bfloat16("fma avx2"), native_bfloat16("fma avx512f avx512_bf16"), native_bfloat16("amx_tile amx_bf16")
    (None, 'AVX512_BF16', 'AMX')
    """
    names = set((processor_features() if features is None else features).split())
    return next((title for name, title in BFLOAT16_FEATURES.items() if name in names), None)


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
