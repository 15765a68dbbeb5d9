"""Regenerate requirements/*.lock: exact versions with hashes, no release younger than two weeks (``make lock``).

The build of torch determines what else must be installed, hence six files:

* ``uv.lock``         the installer itself;
* ``train.lock``      the extra ``train`` without torch, and the build back end: what ``make demo`` installs;
* ``dev.lock``        all extras and the tools of development and site, without torch; versions as in ``train.lock``;
* ``torch-cpu.lock``  torch's CPU build, which is not on the package index: taken from pip's ``find-links``;
* ``triton.lock``     Triton, for the tests of the GPU kernels beside the CPU build, in the version that torch requires;
* ``torch.lock``      torch from the package index otherwise, with the CUDA packages that its Linux build needs.
"""

import datetime
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "requirements"
MINIMUM_AGE = datetime.timedelta(days=14)  # time for a malicious release to be noticed and withdrawn

# SHA-256 of the CPU wheels, which a resolver cannot look up because they are not on the package index.
CPU_WHEELS = {
    "2.13.0+cpu": (
        "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",  # cp311, manylinux_2_28_x86_64
    ),
}
TORCH = re.compile(r"^(torch==|nvidia-|cuda-|triton==)")
HEADER = "# Written by tools/lock.py (make lock). Do not edit.\n"


def compile_lock(*arguments: str, requirements: str = "") -> list[str]:
    """Resolve with uv; return one string per requirement, including its hashes."""
    newest = datetime.datetime.now(datetime.UTC) - MINIMUM_AGE
    environment = {k: v for k, v in os.environ.items() if not k.startswith("UV_")}
    command = [sys.executable, "-m", "uv", "pip", "compile", "--universal", "--generate-hashes", "--quiet"]
    command += ["--no-annotate", "--no-header", "--python-version", "3.11"]
    command += ["--exclude-newer", newest.strftime("%Y-%m-%d"), *arguments]
    result = subprocess.run(command, input=requirements, capture_output=True, text=True, cwd=ROOT, env=environment)
    if result.returncode:
        sys.exit(f"lock: uv could not resolve the requirements:\n{result.stderr}")
    return re.split(r"\n(?=\S)", result.stdout.strip())


def cpu_requirement(requirements: list[str]) -> str:
    """Return the requirement of the CPU build of the resolved torch version, with the hashes of its wheels."""
    (torch,) = (r for r in requirements if r.startswith("torch=="))
    version = torch.split()[0].removeprefix("torch==") + "+cpu"
    if version not in CPU_WHEELS:
        sys.exit(f"lock: no CPU wheel is known for torch {version}: add its hash to CPU_WHEELS in tools/lock.py")
    return f"torch=={version}" + "".join(f" \\\n    --hash=sha256:{h}" for h in CPU_WHEELS[version])


def write_lock(name: str, requirements: list[str]) -> None:
    """Write one lock file."""
    (LOCKS / name).write_text(HEADER + "\n".join(requirements) + "\n")
    print(f"requirements/{name}: {len(requirements)} packages")


def main() -> None:
    constraints = ("-c", "requirements/constraints.txt")
    requirements = compile_lock("pyproject.toml", "--all-extras", "--group", "dev", "--group", "docs", *constraints)
    write_lock("dev.lock", [r for r in requirements if not TORCH.match(r)])
    write_lock("torch.lock", [r for r in requirements if TORCH.match(r)])
    write_lock("torch-cpu.lock", [cpu_requirement(requirements)])
    write_lock("triton.lock", [r for r in requirements if r.startswith("triton==")])
    write_train_lock()
    write_lock("uv.lock", compile_lock("-", requirements="uv"))


def write_train_lock() -> None:
    """Write the part of dev.lock that the extra ``train`` needs, and the back end of the editable install."""
    constraints = ("-c", "requirements/constraints.txt", "-c", "requirements/dev.lock")
    build = "hatchling\neditables\n"
    requirements = compile_lock("pyproject.toml", "-", "--extra", "train", *constraints, requirements=build)
    write_lock("train.lock", [r for r in requirements if not TORCH.match(r)])


if __name__ == "__main__":
    main()
