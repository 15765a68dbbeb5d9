"""Make .venv/ from the locks; do nothing, in a moment, when it is already what they say.

Called by the Makefile with the interpreter that the environment is to have; needs nothing but Python.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "torchcaps-setup"
LOCKS = ROOT / "requirements"
FROM_LOCK = ("--require-hashes", "--no-deps", "-r")


def fingerprint() -> str:
    """What the environment depends on: the locks, the project's metadata, this script, the interpreter."""
    digest = hashlib.sha256(f"{sys.version} {sys.executable} {ROOT}".encode())
    for path in (*sorted(LOCKS.glob("*.lock")), ROOT / "pyproject.toml", Path(__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def run(*command: object, env: dict[str, str] | None = None) -> bool:
    return subprocess.run([str(part) for part in command], env=env, cwd=ROOT).returncode == 0


def pip_setting(name: str) -> str | None:
    """Read a setting of pip's, from its environment variable or its configuration files."""
    value = os.environ.get("PIP_" + name.upper().replace("-", "_"))
    if value:
        return value
    command = [str(PYTHON), "-m", "pip", "config", "get", f"global.{name}"]
    result = subprocess.run(command, capture_output=True, text=True)
    return result.stdout.strip() or None if result.returncode == 0 else None


def uv_environment() -> dict[str, str]:
    """Tell uv to look where pip looks: it reads none of pip's settings by itself."""
    environment = dict(os.environ)
    for variable, setting in {"UV_FIND_LINKS": "find-links", "UV_DEFAULT_INDEX": "index-url"}.items():
        value = pip_setting(setting)
        if value and variable not in environment:
            environment[variable] = " ".join(value.split())
    return environment


def uv_install(lock: str, quiet: bool = False) -> bool:
    """Install one lock with its hashes by uv, the fast way."""
    command = [PYTHON, "-m", "uv", "pip", "install", "--python", PYTHON, *FROM_LOCK, LOCKS / lock]
    command.append("--compile-bytecode")  # as pip does: or every command would compile torch again where it can't write
    return run(*command, "--quiet", *(["--quiet"] if quiet else []), env=uv_environment())


def install(lock: str) -> None:
    """Install one lock with its hashes: by uv, or by pip where uv can't."""
    if uv_install(lock):
        return
    print(f"setup: uv could not install requirements/{lock}; trying pip", flush=True)
    if not run(PYTHON, "-m", "pip", "install", *FROM_LOCK, LOCKS / lock):
        sys.exit(f"setup: requirements/{lock} could not be installed: see pip's message above, then try again")


def main() -> None:
    wanted = fingerprint()
    if STAMP.exists() and STAMP.read_text() == wanted:
        return
    start = time.monotonic()
    print(f"setup: making {VENV} (a minute or two the first time)", flush=True)
    if VENV.exists():
        shutil.rmtree(VENV)
    if not run(sys.executable, "-m", "venv", VENV):
        sys.exit("setup: the venv module failed: on Debian or Ubuntu, install python3-venv")
    if not run(PYTHON, "-m", "pip", "install", "--quiet", "--require-hashes", "-r", LOCKS / "uv.lock"):
        sys.exit("setup: uv could not be installed: is the package index within reach?")
    install("dev.lock")
    if not uv_install("torch-cpu.lock", quiet=True):
        print("setup: no CPU build of torch at hand; taking the package index's", flush=True)
        install("torch.lock")
    project = ("install", "--quiet", "--no-deps", "--no-build-isolation", "--editable", ROOT)
    if not run(PYTHON, "-m", "pip", *project):
        sys.exit("setup: the project itself could not be installed: see pip's message above")
    partial = STAMP.with_suffix(".part")
    partial.write_text(wanted)
    partial.replace(STAMP)
    print(f"setup: done in {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
