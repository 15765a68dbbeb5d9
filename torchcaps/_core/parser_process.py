"""Parsing of untrusted files in child processes with limits of time and memory.

Libraries in C parse MATLAB and HDF5 files: one wrong byte can crash them, or make them allocate any amount of memory.
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

from torchcaps._core.machine import memory_limit
from torchcaps._core.optional import import_optional

__all__ = ["NUMERIC_KINDS", "ParserError", "as_tensor", "parse_arrays"]

SERVER = Path(__file__).with_name("parser_server.py")
NUMERIC_KINDS = "biuf"


class ParserError(Exception):
    """Reason why a file could not be parsed."""


def parse_arrays(
    script: Path, path: Path, variables: Sequence[str] | None = None, *, max_bytes: int, timeout_s: float
) -> dict[str, Tensor | None]:
    """Return the arrays of a file by name; ``None`` for those that are not numeric.

    Args:
        script: parser, see `torchcaps._core.parser_server`.
        path: the file.
        variables: names of the arrays, if the parser needs them.
        max_bytes: address space of the child process; at most the memory that this process may use.
        timeout_s: time after which it is ended.

    Raises:
        ParserError: if the file can't be parsed within the limits.
    """
    with _lock:
        names = None if variables is None else list(variables)
        return _get_process(script).read(path, names, min(max_bytes, memory_limit()), timeout_s)


def as_tensor(array: Any) -> Tensor | None:
    """Return an array as a tensor; ``None`` if torch does not have its type."""
    try:
        return None if array is None else torch.as_tensor(array)
    except (TypeError, ValueError, RuntimeError):
        return None


class _ParserProcess:
    """A process that parses files one after the other. It ends when its input is closed.

    Args:
        script: the parser.
    """

    def __init__(self, script: Path) -> None:
        self.owner, self.failed = os.getpid(), False
        path = os.pathsep.join(entry for entry in sys.path if entry)
        environment = {**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, "-P", str(SERVER), str(script)]  # -P: its directory is not a package directory
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a process group, which is killed together with its forks
        )

    def read(
        self, path: Path, variables: list[str] | None, max_bytes: int, timeout_s: float
    ) -> dict[str, Tensor | None]:
        """Return the arrays of a file."""
        expired = threading.Event()
        timer = threading.Timer(timeout_s, lambda: (expired.set(), self.kill()))
        timer.daemon = True
        timer.start()
        self.failed = True
        request = {"path": str(path.resolve()), "variables": variables, "max_bytes": max_bytes}
        try:
            self._send({**request, "max_seconds": math.ceil(timeout_s) + 1})
            header = json.loads(self._receive_line())
            if isinstance(header, str):
                self.failed = not hasattr(os, "fork")  # without forks, the memory of the process may be damaged
                raise ParserError(header)
            arrays = {name: self._receive_array(entry, max_bytes) for name, entry in header.items()}
        except EOFError:
            if expired.is_set():
                raise ParserError(f"parsing took more than {timeout_s:.0f} s") from None
            code = self.process.wait()
            reason = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise ParserError(f"the parser crashed: {reason}") from None
        finally:
            timer.cancel()
        self.failed = expired.is_set()
        return arrays

    def _send(self, request: dict[str, Any]) -> None:
        """Write a request to the process as a line of JSON; raise an EOFError if the process no longer reads."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise EOFError from None

    def _receive_line(self) -> bytes:
        """Return the next line that the process writes; raise an EOFError if its output ends before a newline."""
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
        numpy = import_optional("numpy", "reading arrays")
        code, shape, fortran_order = entry
        dtype = numpy.dtype(code)
        n_bytes = dtype.itemsize * math.prod(shape)
        if dtype.kind not in NUMERIC_KINDS or not 0 <= n_bytes <= max_bytes:
            raise ParserError(f"invalid array of {code} and shape {shape}")
        data = bytearray(n_bytes)
        view, n_read = memoryview(data), 0
        while n_read < n_bytes:
            count = self.process.stdout.readinto(view[n_read:])  # type: ignore[attr-defined]
            if not count:
                raise EOFError
            n_read += count
        array = numpy.frombuffer(data, dtype)
        return as_tensor(array.reshape(shape[::-1]).T if fortran_order else array.reshape(shape))

    def kill(self) -> None:
        """End the process and its forks."""
        if hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()

    def close(self) -> None:
        """End the process and close its streams."""
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):  # of a request that a dead process did not read
                stream.close()
        if self.owner == os.getpid() and self.process.poll() is None:
            self.kill()
            self.process.wait()


_lock = threading.Lock()
_processes: dict[Path, _ParserProcess] = {}


def _get_process(script: Path) -> _ParserProcess:
    """Return the process of a parser; start one if there is none or it has failed."""
    process = _processes.get(script)
    if process is not None and (process.failed or process.owner != os.getpid() or process.process.poll() is not None):
        process.close()
        process = None
    if process is None:
        process = _processes[script] = _ParserProcess(script)
    return process


@atexit.register
def _close_processes() -> None:
    for process in _processes.values():
        if process.owner == os.getpid():
            process.close()
