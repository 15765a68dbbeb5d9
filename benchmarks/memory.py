"""The peak memory of one forward and backward pass, in a process of its own: `python -m benchmarks.memory CASE WAY`."""

import resource
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def peak_bytes(case: str, way: str) -> int:
    """Return the bytes that a pass adds to a process that has the layer and its children."""
    command = [sys.executable, "-m", "benchmarks.memory", case, way]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if run.returncode:
        raise RuntimeError(f"measuring the memory of {case}, {way}, failed:\n{run.stderr}")
    return int(run.stdout)


def resident_peak() -> int:
    """Return the most memory this process has had, in bytes.

    Linux keeps it in /proc for the program that runs now; getrusage's figure also counts what the process had
    before it became this program, which is its parent's size.
    """
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return 1024 * int(line.split()[1])
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    from benchmarks.cases import CASES

    case, way = sys.argv[1:]
    layer, children = CASES[case].build(way == "streamed")
    before = resident_peak()
    layer(children).pose.sum().backward()
    print(resident_peak() - before)


if __name__ == "__main__":
    main()
