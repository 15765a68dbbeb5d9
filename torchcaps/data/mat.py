"""MATLAB files, read by scipy. A file that is not known to be intact is parsed in a child process with limits.

One wrong byte in a ``.mat`` file can crash scipy's parser, which is compiled code, or make it allocate any amount of
memory. A file with the published checksum is parsed in this process.
"""

import atexit
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchcaps._core.optional import import_optional
from torchcaps.data.mat_parser import NUMERIC_KINDS, load_arrays
from torchcaps.data.published import DataError, checksum_matches

__all__ = ["get_array", "read_mat"]

SCRIPT = Path(__file__).with_name("mat_parser.py")
MAX_MEMORY_BYTES = 1 << 30  # of the child; libraries take 0.5 GiB of address space
MAX_MEMORY_RATIO = 64  # further bytes per byte of the file: affNIST's compress to a tenth, and are copied twice
TIMEOUT_S = 120.0
MIN_BYTES_PER_S = 1e6  # further time for large files


def read_mat(path: Path, variables: Sequence[str], checksum: str = "") -> dict[str, Tensor | None]:
    """Return variables of a MATLAB file as tensors; fields of a structure have the names ``variable.field``.

    Args:
        path: the file.
        variables: names of the variables.
        checksum: published checksum, ``"md5:..."`` or ``"sha256:..."``, if there is one.

    Returns:
        The variables that the file contains; ``None`` for those that are not numeric arrays. See `get_array`.

    Raises:
        DataError: if the file can't be parsed within the limits of time and memory.
    """
    import_optional("scipy.io", f"reading {path.name}")
    try:
        if checksum and checksum_matches(path, checksum):
            return {name: _as_tensor(array) for name, array in load_arrays(str(path), list(variables)).items()}
        with _lock:
            return _get_child().read(path, list(variables))
    except Exception as error:  # scipy raises exceptions of many types for a corrupt file
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{path} is not a valid .mat file ({reason}): delete it and download it again") from error


def get_array(arrays: dict[str, Tensor | None], name: str, path: Path) -> Tensor:
    """Return an array of `read_mat`; raise a DataError if it is missing or not numeric."""
    if name not in arrays:
        raise DataError(f"{path} does not contain the variable {name!r}")
    array = arrays[name]
    if array is None:
        raise DataError(f"{path} is corrupt: {name.rpartition('.')[2]} is not a numeric array")
    return array


def _as_tensor(array: Any) -> Tensor | None:
    try:
        return None if array is None else torch.as_tensor(array)
    except (TypeError, ValueError, RuntimeError):  # a type that torch does not have
        return None


class _ParserError(Exception):
    """Reason why a file could not be parsed."""


class _Child:
    """A process that parses files one after the other. It ends when it crashes or its input is closed."""

    def __init__(self) -> None:
        self.owner, self.failed = os.getpid(), False
        path = os.pathsep.join(entry for entry in sys.path if entry)
        environment = {**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, "-P", str(SCRIPT)]  # -P: the script's directory is not a package directory
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )

    def read(self, path: Path, variables: list[str]) -> dict[str, Tensor | None]:
        """Return the arrays of a file. After an error this process is not used again: its memory may be damaged."""
        size = path.stat().st_size
        max_bytes, timeout = MAX_MEMORY_BYTES + MAX_MEMORY_RATIO * size, TIMEOUT_S + size / MIN_BYTES_PER_S
        expired = threading.Event()
        timer = threading.Timer(timeout, lambda: (expired.set(), self.process.kill()))
        timer.daemon = True
        timer.start()
        self.failed = True
        try:
            self._send({"path": str(path.resolve()), "variables": variables, "max_bytes": max_bytes})
            header = json.loads(self._receive_line())
            if isinstance(header, str):
                raise _ParserError(header)
            arrays = {name: self._receive_array(entry, max_bytes) for name, entry in header.items()}
        except EOFError:
            if expired.is_set():
                raise _ParserError(f"parsing took more than {timeout:.0f} s") from None
            code = self.process.wait()
            reason = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise _ParserError(f"the parser crashed: {reason}") from None
        finally:
            timer.cancel()
        self.failed = False
        return arrays

    def _send(self, request: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise EOFError from None

    def _receive_line(self) -> bytes:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        return line

    def _receive_array(self, entry: Any, max_bytes: int) -> Tensor | None:
        """Return the next array; ``entry`` has its type, shape and whether its order is Fortran's."""
        if entry is None:
            return None
        assert self.process.stdout is not None
        numpy = import_optional("numpy", "reading MATLAB files")
        code, shape, fortran_order = entry
        dtype = numpy.dtype(code)
        n_bytes = dtype.itemsize * math.prod(shape)
        if dtype.kind not in NUMERIC_KINDS or not 0 <= n_bytes <= max_bytes:
            raise _ParserError(f"invalid array of {code} and shape {shape}")
        data = bytearray(n_bytes)
        view, n_read = memoryview(data), 0
        while n_read < n_bytes:
            count = self.process.stdout.readinto(view[n_read:])  # type: ignore[attr-defined]
            if not count:
                raise EOFError
            n_read += count
        array = numpy.frombuffer(data, dtype)
        return _as_tensor(array.reshape(shape[::-1]).T if fortran_order else array.reshape(shape))

    def close(self) -> None:
        """End the process."""
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):  # of a request that a dead process did not read
                stream.close()
        if self.owner == os.getpid():
            self.process.kill()
            self.process.wait()


_lock = threading.Lock()
_child: _Child | None = None


def _get_child() -> _Child:
    """Return the parser of this process; start one if there is none or it has failed."""
    global _child
    if _child is not None and (_child.failed or _child.owner != os.getpid() or _child.process.poll() is not None):
        _child.close()
        _child = None
    if _child is None:
        _child = _Child()
    return _child


@atexit.register
def _close_child() -> None:
    if _child is not None and _child.owner == os.getpid():
        _child.close()
