"""MATLAB files, read by scipy. A file that is not known to be intact is parsed in a child process with limits.

One wrong byte in a ``.mat`` file can crash scipy's parser, which is compiled code, or make it allocate any amount of
memory. A file with the published checksum is parsed in this process.
"""

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from torchcaps._core.optional import import_optional
from torchcaps._core.parser_process import as_tensor, parse_arrays
from torchcaps.data.mat_parser import load_mat_arrays
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
            return {name: as_tensor(array) for name, array in load_mat_arrays(str(path), list(variables)).items()}
        size = path.stat().st_size
        max_bytes, timeout_s = MAX_MEMORY_BYTES + MAX_MEMORY_RATIO * size, TIMEOUT_S + size / MIN_BYTES_PER_S
        return parse_arrays(SCRIPT, path, variables, max_bytes=max_bytes, timeout_s=timeout_s)
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
