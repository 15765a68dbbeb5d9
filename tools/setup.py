"""Create .venv/ from the lock files; return at once if it is already up to date.

    python tools/setup.py [dev | train]

``train`` installs the extra ``train`` only (enough for ``make demo``), ``dev`` (the default) all extras and the
development tools. Run by the Makefile with the interpreter that the environment is to use; needs only Python.
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
PROFILES = ("train", "dev")  # each contains the ones before it
LOCKS = ROOT / "requirements"
FROM_LOCK = ("--require-hashes", "--no-deps", "-r")


def fingerprint(profile: str) -> str:
    """Return a hash of everything that the environment depends on: locks, metadata, this script, interpreter."""
    digest = hashlib.sha256(f"{sys.version} {sys.executable} {ROOT}".encode())
    for path in (*sorted(LOCKS.glob("*.lock")), ROOT / "pyproject.toml", Path(__file__)):
        digest.update(path.read_bytes())
    return f"{profile} {digest.hexdigest()}"


def is_current(profile: str) -> bool:
    """Return whether the environment has this profile, or a larger one, in its present version."""
    stamp = STAMP.read_text() if STAMP.exists() else ""
    return stamp in {fingerprint(larger) for larger in PROFILES[PROFILES.index(profile) :]}


def run(*command: object, env: dict[str, str] | None = None) -> bool:
    """Run a command in the repository; return whether it succeeded."""
    return subprocess.run([str(part) for part in command], env=env, cwd=ROOT).returncode == 0


def pip_setting(name: str) -> str | None:
    """Return a setting of pip from its environment variable or configuration files."""
    value = os.environ.get("PIP_" + name.upper().replace("-", "_"))
    if value:
        return value
    command = [str(PYTHON), "-m", "pip", "config", "get", f"global.{name}"]
    result = subprocess.run(command, capture_output=True, text=True)
    return result.stdout.strip() or None if result.returncode == 0 else None


def uv_environment() -> dict[str, str]:
    """Return the environment with pip's index and find-links settings for uv, which does not read them itself."""
    environment = dict(os.environ)
    for variable, setting in {"UV_FIND_LINKS": "find-links", "UV_DEFAULT_INDEX": "index-url"}.items():
        value = pip_setting(setting)
        if value and variable not in environment:
            environment[variable] = " ".join(value.split())
    return environment


def uv_install(lock: str, quiet: bool = False) -> bool:
    """Install one lock file with its hashes by uv; return whether it succeeded."""
    command = [PYTHON, "-m", "uv", "pip", "install", "--python", PYTHON, *FROM_LOCK, LOCKS / lock]
    # As pip does; otherwise every command compiles torch again if site-packages is read-only.
    command.append("--compile-bytecode")
    return run(*command, "--quiet", *(["--quiet"] if quiet else []), env=uv_environment())


def install(lock: str) -> None:
    """Install one lock file with its hashes by uv, or by pip if uv fails."""
    if uv_install(lock):
        return
    print(f"setup: uv could not install requirements/{lock}; trying pip", flush=True)
    if not run(PYTHON, "-m", "pip", "install", *FROM_LOCK, LOCKS / lock):
        sys.exit(f"setup: requirements/{lock} could not be installed: see pip's message above, then try again")


def main(profile: str = "dev") -> None:
    if profile not in PROFILES:
        sys.exit(f"setup: the profile must be one of {', '.join(PROFILES)}, got {profile!r}")
    if is_current(profile):
        return
    start = time.monotonic()
    print(f"setup: creating {VENV} (a minute or two the first time)", flush=True)
    if VENV.exists():
        shutil.rmtree(VENV)
    if not run(sys.executable, "-m", "venv", VENV):
        sys.exit("setup: the venv module failed: on Debian or Ubuntu, install python3-venv")
    if not run(PYTHON, "-m", "pip", "install", "--quiet", "--require-hashes", "-r", LOCKS / "uv.lock"):
        sys.exit("setup: uv could not be installed: check that the package index is reachable")
    install(f"{profile}.lock")
    if not uv_install("torch-cpu.lock", quiet=True):
        print("setup: no CPU build of torch available; installing the package index's", flush=True)
        install("torch.lock")
    elif profile == "dev":
        install("triton.lock")
    project = ("install", "--quiet", "--no-deps", "--no-build-isolation", "--editable", ROOT)
    if not run(PYTHON, "-m", "pip", *project):
        sys.exit("setup: the project itself could not be installed: see pip's message above")
    partial = STAMP.with_suffix(".part")
    partial.write_text(fingerprint(profile))
    partial.replace(STAMP)
    print(f"setup: done in {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
