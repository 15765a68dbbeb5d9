"""Script that parses MATLAB files for `torchcaps.data.mat`: damaged files can crash scipy or exhaust the memory.

Each line of its input is a JSON object with ``path``, ``variables`` and ``max_bytes``. For each of them it writes a
line of JSON, which maps names to type, shape and order of the arrays, or is a string with an error; then the bytes of
the arrays. It imports neither torch nor torchcaps, so that it starts quickly.
"""

import contextlib
import importlib
import json
import sys
from typing import Any

__all__ = ["load_arrays"]

NUMERIC_KINDS = "biuf"


def load_arrays(path: str, variables: list[str]) -> dict[str, Any]:
    """Return the numeric arrays of some variables of a MATLAB file; those of a structure as ``variable.field``.

    Values that are not numeric arrays are ``None``. Variables that the file does not contain are missing.
    """
    np, scipy_io = importlib.import_module("numpy"), importlib.import_module("scipy.io")
    content = scipy_io.loadmat(path, struct_as_record=False, squeeze_me=True, variable_names=variables)
    values = {}
    for name in variables:
        if name in content:
            values[name] = content[name]
            for field in getattr(content[name], "_fieldnames", ()):
                values[f"{name}.{field}"] = getattr(content[name], field)
    arrays: dict[str, Any] = {}
    for name, value in values.items():
        is_numeric = isinstance(value, int | float | np.generic | np.ndarray)
        array = np.asarray(value if is_numeric else None)
        if array.dtype.kind in NUMERIC_KINDS:
            arrays[name] = array.astype(array.dtype.newbyteorder("="), copy=False)
        else:
            arrays[name] = None
    return arrays


def _limit_memory(max_bytes: int) -> None:
    """Limit the address space, if the system supports it; an earlier limit of this process is replaced."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (max_bytes, hard))


def main() -> None:
    """Parse files until the end of the input."""
    importlib.import_module("scipy.io")  # before the memory is limited
    out = sys.stdout.buffer
    for line in sys.stdin:
        request = json.loads(line)
        header: Any
        arrays: dict[str, Any] = {}
        try:
            _limit_memory(request["max_bytes"])
            arrays = load_arrays(request["path"], request["variables"])
            header = {
                name: None if array is None else (array.dtype.str, array.shape, bool(array.flags.f_contiguous))
                for name, array in arrays.items()
            }
        except MemoryError:
            header = f"it needs more than {request['max_bytes'] >> 20:,} MiB of memory"
        except Exception as error:  # scipy raises exceptions of many types for a corrupt file
            header = " ".join(str(error).split()) or type(error).__name__
        out.write(json.dumps(header).encode() + b"\n")
        for array in arrays.values() if isinstance(header, dict) else ():
            if array is not None and array.size:
                out.write(memoryview(array.ravel(order="F" if array.flags.f_contiguous else "C")).cast("B"))
        out.flush()


if __name__ == "__main__":
    main()
