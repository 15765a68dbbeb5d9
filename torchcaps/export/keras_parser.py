"""Child process that reads the arrays of a Keras .h5 file: ``python -I keras_parser.py FILE.h5 OUT.npz``.

HDF5 is parsed by a large C library, so an untrusted file is read in a process of its own, with limited memory. Only
arrays of floating-point numbers inside of the file are read; links to other files are not followed.
"""

import contextlib
import importlib
import sys

MAX_ELEMENTS = 2**28
MAX_ARRAYS = 1000
MAX_MEMORY_BYTES = 2**32


def main(source: str, target: str) -> None:
    """Write all arrays of a file to an .npz file."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    h5py, numpy = importlib.import_module("h5py"), importlib.import_module("numpy")  # optional dependencies
    arrays: dict[str, object] = {}
    total = 0

    def visit(group: object, prefix: str, depth: int) -> None:
        nonlocal total
        if depth > 20:
            raise SystemExit("groups are nested too deeply")
        for name in group:  # type: ignore[attr-defined]
            if not isinstance(group.get(name, getlink=True), h5py.HardLink):  # type: ignore[attr-defined]
                raise SystemExit(f"{prefix}{name} is a link, which is not followed")
            item = group[name]  # type: ignore[index]
            if isinstance(item, h5py.Group):
                visit(item, f"{prefix}{name}/", depth + 1)
            elif isinstance(item, h5py.Dataset) and item.dtype.kind == "f":
                if item.external or item.is_virtual:
                    raise SystemExit(f"{prefix}{name} is stored in another file")
                total += item.size
                if total > MAX_ELEMENTS or len(arrays) >= MAX_ARRAYS:
                    raise SystemExit("it is too large")
                arrays[prefix + name] = numpy.asarray(item[()], dtype=numpy.float32)

    with h5py.File(source, "r") as file:
        visit(file, "", 0)
    numpy.savez(target, **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
