"""Parser of Keras .h5 files, which runs in a process without torch; see `torchcaps._core.parser_server`.

HDF5 is parsed by a large C library. Only arrays of floating-point numbers inside of the file are read; links to other
files are not followed.
"""

import importlib
from typing import Any

__all__ = ["MODULES", "PARSE", "load_h5_arrays"]

MODULES = ("numpy", "h5py")
MAX_ELEMENTS = 2**28
MAX_ARRAYS = 1000
MAX_DEPTH = 20


def load_h5_arrays(path: str, variables: object = None) -> dict[str, Any]:
    """Return all arrays of a file in float32 by their paths in it."""
    numpy, h5py = map(importlib.import_module, MODULES)
    arrays: dict[str, Any] = {}
    n_elements = n_items = 0

    def visit(group: Any, prefix: str, depth: int) -> None:
        """Store the floating-point arrays of a group and its subgroups by path; raise for links and above limits."""
        nonlocal n_elements, n_items
        if depth > MAX_DEPTH:
            raise ValueError("groups are nested too deeply")
        for name in group:
            n_items += 1
            if not isinstance(group.get(name, getlink=True), h5py.HardLink):
                raise ValueError(f"{prefix}{name} is a link, which is not followed")
            item = group[name]
            if isinstance(item, h5py.Group):
                visit(item, f"{prefix}{name}/", depth + 1)
            elif isinstance(item, h5py.Dataset) and item.dtype.kind == "f":
                if item.external or item.is_virtual:
                    raise ValueError(f"{prefix}{name} is stored in another file")
                n_elements += item.size
                arrays[prefix + name] = None if n_elements > MAX_ELEMENTS else numpy.asarray(item[()], numpy.float32)
            if n_elements > MAX_ELEMENTS or n_items > MAX_ARRAYS:
                raise ValueError("it is too large")

    with h5py.File(path, "r") as file:
        visit(file, "", 0)
    return arrays


PARSE = load_h5_arrays
