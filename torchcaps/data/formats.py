"""File formats: gzip, IDX, smallNORB's binary matrices and pickled arrays.

Every reader checks that a file has exactly the bytes that its header announces, and raises a `DataError` that names the
file.
"""

import gzip
import io
import math
import os
import pickle
import pickletools
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from torchcaps._core.files import reason_of
from torchcaps.data.storage import DataError

__all__ = ["check_file_labels", "read_bytes", "read_idx", "read_norb_matrix", "read_pickle"]

READ_CHUNK_BYTES = 1 << 20
MAX_GZIP_RATIO = 1032  # decompressed bytes per compressed byte, at most
MAX_ARRAY_BYTES = 4 << 30  # a gzipped file of 4 MB can have as many; smallNORB's images have 0.4 GiB
NORB_BYTE_MAGIC, NORB_INT_MAGIC = 0x1E3D4C55, 0x1E3D4C54


def read_bytes(path: Path) -> bytearray:
    """Return the content of a file, writable so that `torch.frombuffer` can share it."""
    try:
        return bytearray(path.read_bytes())
    except OSError as error:
        raise DataError(f"can't read {path}: {reason_of(error)}") from error


def check_file_labels(labels: Tensor, n_images: int, n_classes: int, path: Path) -> None:
    """Raise a DataError if the number of labels differs from that of images, or if a label is not a class index."""
    if len(labels) != n_images:
        raise DataError(f"{path} is corrupt: {n_images:,} images and {len(labels):,} labels")
    if n_images and not 0 <= int(labels.min()) <= int(labels.max()) < n_classes:
        invalid = int(labels.min()) if labels.min() < 0 else int(labels.max())
        raise DataError(f"{path} is corrupt: label {invalid}, expected 0 to {n_classes - 1}")


# Binary arrays with a header --------------------------------------------------------------------------------


@contextmanager
def _open_maybe_gzipped(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading; decompress it if it starts as a gzip file, whatever its name."""
    try:
        with path.open("rb") as file:
            gzipped = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            if not gzipped:
                yield file
                return
            with gzip.open(file) as decompressed:
                yield io.BufferedReader(decompressed, READ_CHUNK_BYTES)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is corrupt ({error}): delete it and download it again") from error
    except OSError as error:
        raise DataError(f"can't read {path}: {reason_of(error)}") from error


def _read_header(file: IO[bytes], n_bytes: int, path: Path) -> bytes:
    """Return the next bytes of a file's header."""
    data = file.read(n_bytes)
    if len(data) < n_bytes:
        raise DataError(f"{path} is truncated: it ends inside its header")
    return data


def _read_payload(file: IO[bytes], shape: Sequence[int], path: Path) -> Tensor:
    """Return the rest of a file as a uint8 tensor; raise a DataError if it has more or fewer bytes than the shape."""
    expected = math.prod(shape)
    if expected > MAX_GZIP_RATIO * os.path.getsize(path):
        raise DataError(f"{path} is truncated: its header announces {'x'.join(map(str, shape))} bytes")
    if expected > MAX_ARRAY_BYTES:
        raise DataError(f"{path} is too large: {expected:,} bytes, at most {MAX_ARRAY_BYTES:,} are allowed")
    data = bytearray(expected)
    view, n_read = memoryview(data), 0
    # In chunks, since gzip decompresses everything it is asked for into a buffer of its own first.
    while n_read < expected and (count := file.readinto(view[n_read : n_read + READ_CHUNK_BYTES])):  # type: ignore[attr-defined]
        n_read += count
    if n_read < expected:
        raise DataError(f"{path} is truncated: {n_read:,} bytes after its header, expected {expected:,}")
    if file.read(1):
        raise DataError(f"{path} is too long: more than the {expected:,} bytes that its header announces")
    if not expected:
        return torch.empty(*shape, dtype=torch.uint8)
    return torch.frombuffer(data, dtype=torch.uint8).view(*shape)


def read_idx(path: Path, n_axes: int) -> Tensor:
    """Read an IDX file of bytes, gzipped or not: magic (0, 0, type, axes), big-endian sizes, values.

    Args:
        path: the file.
        n_axes: expected number of axes, 3 for images and 1 for labels.
    """
    with _open_maybe_gzipped(path) as file:
        zeros, kind, axes = struct.unpack(">HBB", _read_header(file, 4, path))
        if zeros or kind != 8 or axes != n_axes:
            content = "images" if n_axes == 3 else "labels"
            magic = (zeros << 16) + (kind << 8) + axes
            raise DataError(f"{path} is not an IDX file of {content}: magic number {magic}, expected {0x800 + n_axes}")
        shape = struct.unpack(f">{axes}I", _read_header(file, 4 * axes, path))
        return _read_payload(file, shape, path)


def read_norb_matrix(path: Path) -> Tensor:
    """Read a matrix file of smallNORB, gzipped or not: magic, number of axes, sizes (at least three), values.

    All numbers are little-endian. The files are called ``.mat`` but are not MATLAB files. Returns uint8 or int64.
    """
    with _open_maybe_gzipped(path) as file:
        magic, n_axes = struct.unpack("<II", _read_header(file, 8, path))
        if magic not in (NORB_BYTE_MAGIC, NORB_INT_MAGIC) or not 1 <= n_axes <= 4:
            known = f"{NORB_BYTE_MAGIC:#x} (bytes) or {NORB_INT_MAGIC:#x} (integers) and 1 to 4 axes"
            raise DataError(
                f"{path} is not a smallNORB matrix: magic number {magic:#x} and {n_axes} axes, expected {known}"
            )
        n_sizes = max(3, n_axes)
        sizes = struct.unpack(f"<{n_sizes}I", _read_header(file, 4 * n_sizes, path))[:n_axes]
        if magic == NORB_BYTE_MAGIC:
            return _read_payload(file, sizes, path)
        data = _read_payload(file, (math.prod(sizes), 4), path).long()
        values = data[:, 0] | data[:, 1] << 8 | data[:, 2] << 16 | data[:, 3] << 24
        return torch.where(values >= 1 << 31, values - (1 << 32), values).view(sizes)


# Pickles ----------------------------------------------------------------------------------------------------


class _DtypeStub:
    """Replacement for ``numpy.dtype`` that stores the type code."""

    __slots__ = ("code",)

    def __init__(self, code: Any = "", *_: Any) -> None:
        self.code = code.decode() if isinstance(code, bytes) else code

    def __setstate__(self, state: Any) -> None:
        """Ignore byte order and the like, which bytes do not have."""


class _ArrayStub:
    """Replacement for ``numpy.ndarray`` that stores shape, type and bytes until `to_tensor` is called."""

    __slots__ = ("data", "dtype", "fortran_order", "shape")

    def __setstate__(self, state: Any) -> None:
        _, self.shape, self.dtype, self.fortran_order, self.data = state

    def to_tensor(self) -> Tensor:
        """Return the array as a tensor; only uint8 is supported."""
        if self.dtype.code not in ("u1", "|u1") or not isinstance(self.data, bytes):
            raise DataError(f"array of type {self.dtype.code!r}, expected uint8")
        if len(self.data) != math.prod(self.shape):
            raise DataError(f"array of shape {self.shape} with {len(self.data):,} bytes")
        values = torch.frombuffer(bytearray(self.data), dtype=torch.uint8)
        if self.fortran_order:
            return values.view(*self.shape[::-1]).permute(*reversed(range(len(self.shape)))).contiguous()
        return values.view(*self.shape)


class _FunctionStub:
    """Replacement for a function, without attributes that a pickle could set."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("it sets the state of a function")


class _ReconstructStub(_FunctionStub):
    """Replacement for numpy's ``_reconstruct``."""

    __slots__ = ()

    def __call__(self, *_: Any) -> _ArrayStub:
        return _ArrayStub()


class _EncodeStub(_FunctionStub):
    """Replacement for ``_codecs.encode``, by which Python 3 writes bytes into pickles of protocols 0 to 2."""

    __slots__ = ()

    def __call__(self, text: str, encoding: str) -> bytes:
        if encoding != "latin1":
            raise pickle.UnpicklingError(f"encoding {encoding}, expected latin1")
        return text.encode("latin1")


_STUBS = {
    ("numpy.core.multiarray", "_reconstruct"): _ReconstructStub(),
    ("numpy._core.multiarray", "_reconstruct"): _ReconstructStub(),
    ("numpy", "ndarray"): _ArrayStub,
    ("numpy", "dtype"): _DtypeStub,
    ("_codecs", "encode"): _EncodeStub(),
}

# The opcodes that write dictionaries, lists, tuples, numbers, strings and arrays.
_OPCODES = """
PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE INT LONG FLOAT BININT BININT1 BININT2 LONG1 BINFLOAT STRING BINSTRING
SHORT_BINSTRING BINBYTES SHORT_BINBYTES BINBYTES8 UNICODE BINUNICODE SHORT_BINUNICODE GLOBAL STACK_GLOBAL
REDUCE BUILD EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST LIST APPEND APPENDS EMPTY_DICT DICT SETITEM
SETITEMS BINGET LONG_BINGET BINPUT LONG_BINPUT MEMOIZE GET PUT
"""
_MAX_TUPLES = 1000  # an array needs a few; a million nested ones would overflow Python's stack


def _check_opcodes(data: bytes) -> None:
    """Raise an UnpicklingError if a pickle uses opcodes that arrays of images do not need, before unpickling it."""
    allowed, n_tuples = set(_OPCODES.split()), 0
    for position, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        if opcode.name not in allowed:
            raise pickle.UnpicklingError(f"opcode {opcode.name} is not allowed")
        if opcode.name.endswith("PUT") and int(argument or 0) > position + 1:  # the memo is allocated up to the index
            raise pickle.UnpicklingError(f"memo index {argument} exceeds the number of opcodes")
        n_tuples += "TUPLE" in opcode.name
    if n_tuples > _MAX_TUPLES:
        raise pickle.UnpicklingError(f"{n_tuples:,} tuples, at most {_MAX_TUPLES:,} are allowed")


class _RestrictedUnpickler(pickle.Unpickler):
    """Unpickler that resolves only the names in `_STUBS`."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the stub of a name."""
        if (module, name) not in _STUBS:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed")
        return _STUBS[module, name]


def read_pickle(path: Path) -> dict[str, Any]:
    """Read a pickled dictionary without executing code from it; uint8 arrays become tensors.

    Only the names that numpy arrays need are resolved, and each of them to a stub. Protocols 0 to 4 are supported; the
    official CIFAR files have protocol 2.
    """
    try:
        data = path.read_bytes()
        _check_opcodes(data)
        content = _RestrictedUnpickler(io.BytesIO(data), encoding="bytes").load()
        if not isinstance(content, dict):
            raise DataError(f"expected a dictionary, got {type(content).__name__}")
        decoded = {key.decode() if isinstance(key, bytes) else key: value for key, value in content.items()}
        return {key: value.to_tensor() if isinstance(value, _ArrayStub) else value for key, value in decoded.items()}
    except OSError as error:
        raise DataError(f"can't read {path}: {reason_of(error)}") from error
    except Exception as error:  # a corrupt pickle raises exceptions of many types
        raise DataError(f"{path} is not a pickle of images ({error}): no code in it was executed") from error
