"""Compile the CPU kernel at first use and cache the shared library per machine.

The name of a cached library ends with the SHA-256 of its content, which is verified before it is loaded: loading a
truncated library would end the process (SIGBUS), and a damaged one could compute anything. One atomic rename stores
library and checksum.
"""

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

from torchcaps._core.files import staging_directory, sync_file
from torchcaps._core.machine import processor_features

__all__ = ["CompilerError", "has_kernel", "load_library"]

SOURCE = Path(__file__).with_name("kernel.cpp")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fno-math-errno", "-fPIC", "-shared")
C_TYPES = {torch.float32: "float", torch.float64: "double"}
RETRY_AFTER_S = 24 * 3600  # time after which a failed compilation is tried again
COMPILE_TIMEOUT_S = 300
DISABLE_VARIABLE = "TORCHCAPS_KERNEL"  # environment variable; "0" disables the kernel


class CompilerError(Exception):
    """The compiler failed to build the kernel."""


def has_kernel(dtype: torch.dtype) -> bool:
    """Return whether a kernel for this dtype is available; compile it if necessary."""
    return dtype in C_TYPES and load_library(dtype) is not None


@functools.cache
def load_library(dtype: torch.dtype = torch.float32) -> ctypes.CDLL | None:
    """Return the kernel compiled for this dtype, or ``None`` if it is disabled or no compiler can build it."""
    if os.environ.get(DISABLE_VARIABLE) == "0":
        return None
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or shutil.which("clang++")
    flags = (*FLAGS, f"-DREAL={C_TYPES[dtype]}")
    name = f"passes-{C_TYPES[dtype]}-{_cache_key(compiler, flags)}"
    for directory in _cache_directories():
        with contextlib.suppress(OSError):
            if time.time() - (_check_private(directory) / f"{name}.failed").stat().st_mtime < RETRY_AFTER_S:
                return None
        with contextlib.suppress(OSError):
            for path in sorted(_check_private(directory).glob(f"{name}-*.so")):
                if _is_intact(path):
                    return ctypes.CDLL(str(path))
    if compiler is None:
        _print_missing_compiler()
        return None
    for directory in _cache_directories():
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            return ctypes.CDLL(str(_compile([compiler, *flags], _check_private(directory), name)))
        except CompilerError as error:
            print(
                f"torchcaps: the CPU kernel could not be compiled, falling back to slower torch code: {error}",
                file=sys.stderr,
                flush=True,
            )
            with contextlib.suppress(OSError):
                (directory / f"{name}.failed").touch()
            return None
        except OSError:  # not writable: try the next directory
            continue
    return None


@functools.cache
def _print_missing_compiler() -> None:
    """Print, once per process, how capsule layers become faster."""
    print(
        "torchcaps: no C++ compiler (c++, g++ or clang++) was found to build the CPU kernel, falling back to slower "
        f"torch code: install one, or set {DISABLE_VARIABLE}=0 to hide this note",
        file=sys.stderr,
        flush=True,
    )


def _cache_directories() -> Iterator[Path]:
    """Yield candidate directories for the library: the user's cache, then a per-user temporary directory."""
    with contextlib.suppress(RuntimeError):  # no home directory
        yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchcaps"
    with contextlib.suppress(OSError):  # no temporary directory
        yield Path(tempfile.gettempdir()) / f"torchcaps-{os.getuid() if hasattr(os, 'getuid') else 'user'}"


def _check_private(directory: Path) -> Path:
    """Return the directory; raise an `OSError` if another user could have written a library into it."""
    status = directory.stat()
    if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o022):
        raise PermissionError(f"{directory} is writable by other users")
    return directory


def _cache_key(compiler: str | None, flags: tuple[str, ...]) -> str:
    """Return a hash of everything that the library depends on: source, flags, compiler and processor.

    A library compiled for another processor might not run on this one.
    """
    parts = [SOURCE.read_text(), *flags, compiler or "", platform.machine(), processor_features()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _is_intact(path: Path) -> bool:
    """Return whether a cached library has the SHA-256 in its name; otherwise delete it and print that."""
    if path.stem.rpartition("-")[2] == _sha256(path):
        return True
    print(f"torchcaps: deleting {path}: its content does not match its checksum", file=sys.stderr, flush=True)
    path.unlink()
    return False


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _compile(command: list[str], directory: Path, name: str) -> Path:
    """Compile atomically; raise a `CompilerError` on failure and an `OSError` if the directory is not writable.

    Returns:
        The library, ``name`` followed by its SHA-256.
    """
    with staging_directory(directory) as staging:
        print("torchcaps: compiling a CPU kernel (once per machine, takes some seconds)", file=sys.stderr, flush=True)
        output = staging / f"{name}.so"
        arguments = [*command, "-o", str(output), str(SOURCE)]
        try:
            done = subprocess.run(
                arguments, capture_output=True, text=True, errors="replace", timeout=COMPILE_TIMEOUT_S
            )
        except subprocess.TimeoutExpired as error:
            raise CompilerError(f"{command[0]} did not finish within {COMPILE_TIMEOUT_S} s") from error
        except OSError as error:
            raise CompilerError(f"{command[0]} can't be run: {error.strerror}") from error
        if done.returncode:
            reason = next((line for line in done.stderr.splitlines() if "error" in line), "no error message")
            raise CompilerError(f"{command[0]}: {reason}")
        sync_file(output)
        path = directory / f"{name}-{_sha256(output)}.so"
        os.replace(output, path)
    return path
