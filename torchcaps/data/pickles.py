"""Pickles of arrays, read without running anything that they contain."""

import io
import math
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchcaps.data.errors import DataError

__all__ = ["read_pickle"]


class _Dtype:
    """Stands for ``numpy.dtype``: remembers which one."""

    def __init__(self, code: Any = "", *_: Any) -> None:
        self.code = code.decode() if isinstance(code, bytes) else code

    def __setstate__(self, state: Any) -> None:
        """Byte order and the like: a byte has none."""


class _Array:
    """Stands for ``numpy.ndarray``: remembers shape, type and bytes, which are turned into a tensor at the end."""

    def __setstate__(self, state: Any) -> None:
        _, self.shape, self.dtype, self.columns_first, self.data = state

    def tensor(self) -> Tensor:
        """Return the array; only bytes are known."""
        if self.dtype.code not in ("u1", "|u1") or self.columns_first or not isinstance(self.data, bytes):
            raise DataError(f"an array of {self.dtype.code!r}, where bytes were expected")
        if len(self.data) != math.prod(self.shape):
            raise DataError(f"an array of {self.shape} with {len(self.data):,} bytes")
        return torch.frombuffer(bytearray(self.data), dtype=torch.uint8).view(*self.shape)


def _reconstruct(*_: Any) -> _Array:
    return _Array()


def _encode(text: str, encoding: str = "latin1") -> bytes:
    """What Python 3 writes into old pickles for bytes."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"text in {encoding}")
    return text.encode("latin1")


_KNOWN = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _encode,
}


class _Reader(pickle.Unpickler):
    """Knows five names, each of which is one of the stand-ins above; all other names are refused."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a name."""
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not needed for images")
        return _KNOWN[module, name]


def read_pickle(path: Path) -> dict[str, Any]:
    """Return a pickled dictionary, arrays of bytes as tensors. Nothing in it is run: no name but those of plain arrays
    is looked up, and even for these there are stand-ins.
    """
    try:
        content = _Reader(io.BytesIO(path.read_bytes()), encoding="bytes").load()
        if not isinstance(content, dict):
            raise DataError(f"it holds a {type(content).__name__}")
        readable = {key.decode() if isinstance(key, bytes) else key: value for key, value in content.items()}
        return {key: v.tensor() if isinstance(v, _Array) else v for key, v in readable.items()}
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror or error}") from error
    except Exception as error:  # a broken pickle can raise anything
        raise DataError(f"{path} is no pickle of images ({error}): nothing in it was run") from error
