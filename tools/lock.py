"""Write requirements/*.lock anew: exact versions with hashes, nothing younger than two weeks.

Four files, because the build of torch decides what else must be installed:

* ``uv.lock``         the installer itself;
* ``dev.lock``        everything that the project needs but torch;
* ``torch-cpu.lock``  torch's CPU build, which is not on the package index: taken where pip's ``find-links`` has it;
* ``torch.lock``      torch from the package index otherwise, with the CUDA packages that its Linux build needs.

Run it by ``make lock``.
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

# The hashes of the CPU wheels, which no resolver can look up: one for each wheel that is known to be around.
CPU_WHEELS = {
    "2.13.0+cpu": (
        "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",  # cp311, manylinux_2_28_x86_64
    ),
}
TORCH = re.compile(r"^(torch==|nvidia-|cuda-|triton==)")
HEADER = "# Written by tools/lock.py (make lock). Do not edit.\n"


def compile_lock(*arguments: str, requirements: str = "") -> list[str]:
    """Resolve with uv; return one string for each requirement, hashes included."""
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
    """Name the CPU build of the torch that was resolved, with the hashes of its wheels."""
    (torch,) = (r for r in requirements if r.startswith("torch=="))
    version = torch.split()[0].removeprefix("torch==") + "+cpu"
    if version not in CPU_WHEELS:
        sys.exit(f"lock: no CPU wheel is known for torch {version}: add its hash to CPU_WHEELS in tools/lock.py")
    return f"torch=={version}" + "".join(f" \\\n    --hash=sha256:{h}" for h in CPU_WHEELS[version])


def write(name: str, requirements: list[str]) -> None:
    (LOCKS / name).write_text(HEADER + "\n".join(requirements) + "\n")
    print(f"requirements/{name}: {len(requirements)} packages")


def main() -> None:
    requirements = compile_lock(
        "pyproject.toml", "--all-extras", "--group", "dev", "-c", "requirements/constraints.txt"
    )
    write("dev.lock", [r for r in requirements if not TORCH.match(r)])
    write("torch.lock", [r for r in requirements if TORCH.match(r)])
    write("torch-cpu.lock", [cpu_requirement(requirements)])
    write("uv.lock", compile_lock("-", requirements="uv"))


if __name__ == "__main__":
    main()
