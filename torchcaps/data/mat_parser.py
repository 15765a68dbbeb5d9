"""Parser of MATLAB files, which runs in a process without torch; see `torchcaps._core.parser_server`."""

import importlib
from typing import Any

__all__ = ["MODULES", "PARSE", "load_mat_arrays"]

MODULES = ("numpy", "scipy.io")
NUMERIC_KINDS = "biuf"


def load_mat_arrays(path: str, variables: list[str]) -> dict[str, Any]:
    """Return the numeric arrays of some variables of a MATLAB file; those of a structure as ``variable.field``.

    Values that are not numeric arrays are ``None``. Variables that the file does not contain are missing.
    """
    np, scipy_io = map(importlib.import_module, MODULES)
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


PARSE = load_mat_arrays
