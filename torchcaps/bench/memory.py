"""The peak memory of a training step, in a process of its own: ``python -m torchcaps.bench.memory MODEL BATCH WAY``."""

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["MEMORY_CASES", "measure_memory"]

# Model, batch, ways, and what is asked: at most this share of the usual way, at most so many bytes in all.
MEMORY_CASES: tuple[dict[str, Any], ...] = (
    {"model": "tsai2020_cifar10", "batch": 16, "ways": ("ours", "usual"), "share": 1 / 8},
    {"model": "tsai2020_cifar100", "batch": 128, "ways": ("ours",), "most_bytes": 6 * 2**30},
)


def measure_memory(case: dict[str, Any]) -> dict[str, Any]:
    """Return what a training step takes: above the model, and the whole process."""
    row: dict[str, Any] = {key: value for key, value in case.items() if key != "ways"}
    for way in case["ways"]:
        command = [sys.executable, "-m", "torchcaps.bench.memory", case["model"], str(case["batch"]), way]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode:
            raise RuntimeError(f"measuring the memory of {case['model']}, {way}, failed: {run.stderr.strip()[-500:]}")
        above, whole = map(int, run.stdout.split())
        row[way] = {"above_bytes": above, "process_bytes": whole}
    return row


def resident_peak() -> int:
    """Return the most memory that this process has had, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return 1024 * int(line.split()[1])
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def reset_peak() -> None:
    """Let the most memory that this process has had begin again at what it has now, where the system can (Linux)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def main() -> None:
    """Take two training steps, and print what they took."""
    from torchcaps.bench.cases import model_work

    name, batch, way = sys.argv[1:]
    work = model_work(name, int(batch), train=True)(way == "usual")
    before = resident_peak()
    for _ in range(2):
        work.run()
    print(resident_peak() - before, resident_peak())


if __name__ == "__main__":
    main()
