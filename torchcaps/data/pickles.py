"""Pickles of arrays, read without running anything that they contain."""

import io
import math
import pickle
import pickletools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchcaps.data.errors import DataError

__all__ = ["read_pickle"]


class _Dtype:
    """Stands for ``numpy.dtype``: remembers which one."""

    __slots__ = ("code",)

    def __init__(self, code: Any = "", *_: Any) -> None:
        self.code = code.decode() if isinstance(code, bytes) else code

    def __setstate__(self, state: Any) -> None:
        """Byte order and the like: a byte has none."""


class _Array:
    """Stands for ``numpy.ndarray``: remembers shape, type and bytes, which are turned into a tensor at the end."""

    __slots__ = ("columns_first", "data", "dtype", "shape")

    def __setstate__(self, state: Any) -> None:
        _, self.shape, self.dtype, self.columns_first, self.data = state

    def tensor(self) -> Tensor:
        """Return the array; only bytes are known."""
        if self.dtype.code not in ("u1", "|u1") or not isinstance(self.data, bytes):
            raise DataError(f"an array of {self.dtype.code!r}, where bytes were expected")
        if len(self.data) != math.prod(self.shape):
            raise DataError(f"an array of {self.shape} with {len(self.data):,} bytes")
        values = torch.frombuffer(bytearray(self.data), dtype=torch.uint8)
        if self.columns_first:
            return values.view(*self.shape[::-1]).permute(*reversed(range(len(self.shape)))).contiguous()
        return values.view(*self.shape)


class _Function:
    """Stands for a function. Unlike a real one it has nothing that a pickle could set."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("it tries to change a function")


class _Reconstruct(_Function):
    """Stands for numpy's ``_reconstruct``."""

    __slots__ = ()

    def __call__(self, *_: Any) -> _Array:
        return _Array()


class _Encode(_Function):
    """Stands for ``_codecs.encode``, which Python 3 writes into old pickles for bytes."""

    __slots__ = ()

    def __call__(self, text: str, encoding: str) -> bytes:
        if encoding != "latin1":
            raise pickle.UnpicklingError(f"text in {encoding}")
        return text.encode("latin1")


_KNOWN = {
    ("numpy.core.multiarray", "_reconstruct"): _Reconstruct(),
    ("numpy._core.multiarray", "_reconstruct"): _Reconstruct(),
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _Encode(),
}


# What dictionaries, lists, numbers, strings and arrays are written with; nothing else is needed.
_OPCODES = """
PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE INT LONG FLOAT BININT BININT1 BININT2 LONG1 BINFLOAT STRING BINSTRING
SHORT_BINSTRING BINBYTES SHORT_BINBYTES BINBYTES8 UNICODE BINUNICODE SHORT_BINUNICODE GLOBAL STACK_GLOBAL
REDUCE BUILD EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST LIST APPEND APPENDS EMPTY_DICT DICT SETITEM
SETITEMS BINGET LONG_BINGET BINPUT LONG_BINPUT MEMOIZE GET PUT
"""
_MOST_TUPLES = 1000  # a few for each array; a million inside one another would exhaust Python's stack


def _refuse_odd(data: bytes) -> None:
    """Raise where a pickle does more than write down values, before any of it is read."""
    known, n_tuples = set(_OPCODES.split()), 0
    for number, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        if opcode.name not in known:
            raise pickle.UnpicklingError(f"it has the opcode {opcode.name}, which is not needed for images")
        if opcode.name.endswith("PUT") and int(argument or 0) > number + 1:  # memory is taken for all that come before
            raise pickle.UnpicklingError(f"it remembers a value as number {argument}, which so few can't need")
        n_tuples += "TUPLE" in opcode.name
    if n_tuples > _MOST_TUPLES:
        raise pickle.UnpicklingError(f"it has {n_tuples:,} tuples, which are not needed for images")


class _Reader(pickle.Unpickler):
    """Knows five names, each of which is one of the stand-ins above; all other names are refused."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a name."""
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not needed for images")
        return _KNOWN[module, name]


def read_pickle(path: Path) -> dict[str, Any]:
    """Return a pickled dictionary, arrays of bytes as tensors. Nothing in it is run: no name but those of plain arrays
    is looked up, and even for these there are stand-ins. Protocols 0 to 4 are known; the official files have 2.
    """
    try:
        data = path.read_bytes()
        _refuse_odd(data)
        content = _Reader(io.BytesIO(data), encoding="bytes").load()
        if not isinstance(content, dict):
            raise DataError(f"it holds a {type(content).__name__}")
        readable = {key.decode() if isinstance(key, bytes) else key: value for key, value in content.items()}
        return {key: v.tensor() if isinstance(v, _Array) else v for key, v in readable.items()}
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror or error}") from error
    except Exception as error:  # a broken pickle can raise anything
        raise DataError(f"{path} is no pickle of images ({error}): nothing in it was run") from error
