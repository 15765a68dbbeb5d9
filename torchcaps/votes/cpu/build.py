"""The kernel as a shared library: compiled once for a machine, when it is first needed, and kept."""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

__all__ = ["CompilerError", "library"]

SOURCE = Path(__file__).with_name("kernel.cpp")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fno-math-errno", "-fPIC", "-shared")
REALS = {torch.float32: "float", torch.float64: "double"}
FORGOTTEN = 24 * 3600  # seconds after which a compiler that failed is tried again
PATIENCE = 300  # seconds for a compiler
SWITCH = "TORCHCAPS_KERNEL"  # "0": never


class CompilerError(Exception):
    """The compiler could not make the kernel."""


@functools.cache
def library(dtype: torch.dtype = torch.float32) -> ctypes.CDLL | None:
    """Return the kernel compiled for this dtype, or ``None`` where there is no compiler that can make it."""
    if os.environ.get(SWITCH) == "0":
        return None
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or shutil.which("clang++")
    flags = (*FLAGS, f"-DREAL={REALS[dtype]}")
    name = f"passes-{REALS[dtype]}-{_key(compiler, flags)}.so"
    for folder in _folders():
        with contextlib.suppress(OSError):
            if time.time() - (_ours(folder) / f"{name}.failed").stat().st_mtime < FORGOTTEN:
                return None
        with contextlib.suppress(OSError):
            return ctypes.CDLL(str(_ours(folder) / name))
    if compiler is None:
        return None
    for folder in _folders():
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            return ctypes.CDLL(str(_compiled([compiler, *flags], _ours(folder) / name)))
        except CompilerError as error:
            print(
                f"torchcaps: the kernel can't be compiled, so a slower way is taken: {error}",
                file=sys.stderr,
                flush=True,
            )
            with contextlib.suppress(OSError):
                (folder / f"{name}.failed").touch()
            return None
        except OSError:  # a folder that can't be written: the next one
            continue
    return None


def _folders() -> Iterator[Path]:
    """Give where a library may be kept: the user's cache, or, where that can't be, a place for this user alone."""
    with contextlib.suppress(RuntimeError):  # nobody's home
        yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchcaps"
    with contextlib.suppress(OSError):  # no place for temporary files
        yield Path(tempfile.gettempdir()) / f"torchcaps-{os.getuid() if hasattr(os, 'getuid') else 'user'}"


def _ours(folder: Path) -> Path:
    """Return a folder that nobody else can have put a library into; raise an `OSError` otherwise."""
    about = folder.stat()
    if hasattr(os, "getuid") and (about.st_uid != os.getuid() or about.st_mode & 0o022):
        raise PermissionError(f"{folder} could be written by others")
    return folder


def _key(compiler: str | None, flags: tuple[str, ...]) -> str:
    """Name what the library depends on: source, flags, compiler and processor."""
    what = [SOURCE.read_text(), *flags, compiler or "", platform.machine(), _processor()]
    return hashlib.sha256("\0".join(what).encode()).hexdigest()[:16]


def _processor() -> str:
    """Say what this processor can do: a library for another one might not run here."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return platform.processor()


def _compiled(command: list[str], path: Path) -> Path:
    """Compile, whole or not at all; raise an `OSError` where the folder can't be written."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".making-") as own:
        print("torchcaps: compiling a kernel for this machine, once: some seconds", file=sys.stderr, flush=True)
        made = Path(own) / path.name
        words = [*command, "-o", str(made), str(SOURCE)]
        try:
            done = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=PATIENCE)
        except subprocess.TimeoutExpired as error:
            raise CompilerError(f"{command[0]} does not end") from error
        except OSError as error:
            raise CompilerError(f"{command[0]} can't be run: {error.strerror}") from error
        if done.returncode:
            reason = next((line for line in done.stderr.splitlines() if "error" in line), "it does not say why")
            raise CompilerError(f"{command[0]}: {reason}")
        with made.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(made, path)
    return path
