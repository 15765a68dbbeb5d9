"""Script that parses files of arrays for `torchcaps._core.parser_process`: ``python -P parser_server.py PARSER.py``.

``PARSER.py`` defines a function ``PARSE(path, variables)`` and ``MODULES``, which are imported once. Each line of the
input is a JSON object with ``path``, ``variables``, ``max_bytes`` and ``max_seconds``. For each of them the script
writes a line of JSON, which maps names to type, shape and order of the arrays, or is a string with an error; then the
bytes of the arrays. Each file is parsed in a fork of this process with limits of memory and time, so that a crash does
not end it. It imports neither torch nor torchcaps, so that it starts quickly.
"""

import contextlib
import importlib
import json
import os
import runpy
import signal
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

Load = Callable[[str, "list[str] | None"], dict[str, Any]]


def limit_process(max_bytes: int, max_seconds: int) -> None:
    """Limit address space and CPU time, if the system supports it, and write no core files."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for kind, value in ((resource.RLIMIT_CPU, max_seconds), (resource.RLIMIT_AS, max_bytes)):
            _, hard = resource.getrlimit(kind)
            limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (limit, hard))


def answer(load: Load, request: dict[str, Any], out: BinaryIO, started: Callable[[], object]) -> None:
    """Parse a file and write its arrays; ``started`` is called before anything is written."""
    header: Any
    arrays: dict[str, Any] = {}
    try:
        limit_process(request["max_bytes"], request["max_seconds"])
        arrays = load(request["path"], request["variables"])
        header = {
            name: None if array is None else (array.dtype.str, array.shape, bool(array.flags.f_contiguous))
            for name, array in arrays.items()
        }
    except MemoryError:
        header = f"it needs more than {request['max_bytes'] >> 20:,} MiB of memory"
    except Exception as error:  # libraries raise exceptions of many types for a corrupt file
        header = " ".join(str(error).split()) or type(error).__name__
    line = json.dumps(header).encode() + b"\n"
    started()
    out.write(line)
    for array in arrays.values() if isinstance(header, dict) else ():
        if array is not None and array.size:
            out.write(memoryview(array.ravel(order="F" if array.flags.f_contiguous else "C")).cast("B"))
    out.flush()


def answer_in_fork(load: Load, request: dict[str, Any], out: BinaryIO) -> None:
    """Parse a file in a forked process. A crash is reported as an error; one while writing ends this process."""
    receiver, sender = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(receiver)
            answer(load, request, out, lambda: os.write(sender, b"1"))
            os._exit(0)
        finally:
            os._exit(1)
    os.close(sender)
    has_started = bool(os.read(receiver, 1))
    os.close(receiver)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if has_started and code:
        raise SystemExit(1)
    if not has_started:
        reason = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        out.write(json.dumps(f"the parser crashed: {reason}").encode() + b"\n")
        out.flush()


def main(script: str) -> None:
    """Parse files until the end of the input."""
    parser = runpy.run_path(script)
    for name in parser["MODULES"]:  # before the memory is limited
        importlib.import_module(name)
    out = sys.stdout.buffer
    for line in sys.stdin:
        if hasattr(os, "fork"):
            answer_in_fork(parser["PARSE"], json.loads(line), out)
        else:
            answer(parser["PARSE"], json.loads(line), out, lambda: None)


if __name__ == "__main__":
    main(sys.argv[1])
