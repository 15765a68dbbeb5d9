"""Writers of small files in the official formats, independent of the package, from the formats' descriptions."""

import gzip
import io
import struct
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from scipy.io import savemat


def random_bytes(*shape: int, seed: int = 0, high: int = 256) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, high, shape, dtype=np.uint8)


def put(path: Path, data: bytes, compressed: bool = False) -> Path:
    """Write a file, gzipped if ``compressed``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data, mtime=0) if compressed else data)
    return path


def idx(array: np.ndarray) -> bytes:
    """IDX (yann.lecun.com/exdb/mnist): 0, 0, type 8, axes; sizes as big-endian 32-bit numbers; the bytes."""
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def cifar_binary(images: np.ndarray, *labels: np.ndarray) -> bytes:
    """cs.toronto.edu/~kriz/cifar.html: label bytes, then 1,024 red, 1,024 green and 1,024 blue, row by row."""
    columns = [np.asarray(label, np.uint8)[:, None] for label in labels]
    return np.concatenate([*columns, images.reshape(len(images), 3072)], axis=1).tobytes()


class Python2Pickle:
    """Protocol 2 as Python 2's cPickle and numpy wrote the official files: strings are bytes, arrays are rebuilt by
    ``numpy.core.multiarray._reconstruct`` and given their state.
    """

    def __init__(self) -> None:
        self.out = io.BytesIO()
        self.out.write(b"\x80\x02")

    def string(self, text: bytes) -> None:
        short = len(text) < 256
        self.out.write(b"U" + bytes([len(text)]) if short else b"T" + struct.pack("<i", len(text)))
        self.out.write(text)

    def integer(self, number: int) -> None:
        self.out.write(b"K" + bytes([number]) if number < 256 else b"J" + struct.pack("<i", number))

    def array(self, array: np.ndarray, dtype: bytes = b"u1") -> None:
        write = self.out.write
        write(b"cnumpy.core.multiarray\n_reconstruct\n" + b"cnumpy\nndarray\n")
        self.integer(0)
        write(b"\x85")  # (0,)
        self.string(b"b")
        write(b"\x87R")  # _reconstruct(ndarray, (0,), 'b')
        write(b"(")
        self.integer(1)
        for size in array.shape:
            self.integer(size)
        write(b"\x86" if array.ndim == 2 else b"\x85")
        write(b"cnumpy\ndtype\n")
        self.string(dtype)
        self.integer(0)
        self.integer(1)
        write(b"\x87R(")
        self.integer(3)
        self.string(b"|")
        write(b"NNN" + b"J\xff\xff\xff\xff" * 2)
        self.integer(0)
        write(b"tb" + b"\x89")  # the dtype's state; not in Fortran's order
        self.string(array.tobytes())
        write(b"tb")

    def dictionary(self, content: Mapping[bytes, object]) -> bytes:
        self.out.write(b"}(")
        for key, value in content.items():
            self.string(key)
            if isinstance(value, np.ndarray):
                self.array(value)
            elif isinstance(value, bytes):
                self.string(value)
            else:
                assert isinstance(value, list)
                self.out.write(b"](")
                for item in value:
                    self.string(item) if isinstance(item, bytes) else self.integer(item)
                self.out.write(b"e")
        self.out.write(b"u.")
        return self.out.getvalue()


def norb(array: np.ndarray) -> bytes:
    """cs.nyu.edu/~ylclab/data/norb-v1.0-small: magic, axes, sizes (three at least), values, all little-endian."""
    magic = {"uint8": 0x1E3D4C55, "int32": 0x1E3D4C54}[str(array.dtype)]
    sizes = [*array.shape, *[1] * (3 - array.ndim)]
    return (
        struct.pack(f"<II{len(sizes)}I", magic, array.ndim, *sizes)
        + array.astype(array.dtype.newbyteorder("<")).tobytes()
    )


def write_mat(path: Path, **variables: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    savemat(path, variables)
    return path


def write_tar_gz(path: Path, members: Mapping[str, bytes], link: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as file:
        for name, data in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            file.addfile(entry, io.BytesIO(data))
        if link:
            entry = tarfile.TarInfo(link)
            entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/passwd"
            file.addfile(entry)
    return path


def write_zip(path: Path, members: Mapping[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in members.items():
            file.writestr(name, data)
    return path


class Unpicklable:
    """An object whose pickle fails the test if it is loaded."""

    def __reduce__(self) -> tuple[object, ...]:
        return (exec, ("raise AssertionError('a pickle was loaded')",))


def dsprites(path: Path, scales: int = 6, orientations: int = 14, side: int = 4, **changes: np.ndarray) -> Path:
    """Write dSprites (github.com/google-deepmind/dsprites-dataset): all combinations of its factors.

    The images are not shapes: the first pixels of each one are the bits of its index, the others are 0.
    """
    sizes = (1, 3, scales, orientations, side, side)
    classes = np.stack(np.meshgrid(*map(np.arange, sizes), indexing="ij"), -1).reshape(-1, 6)
    spans = [(1, 1), (1, 3), (0.5, 1), (0, 2 * np.pi), (0, 1), (0, 1)]
    columns = [np.linspace(*span, size)[classes[:, n]] for n, (span, size) in enumerate(zip(spans, sizes, strict=True))]
    images = np.zeros((len(classes), 64, 64), dtype=np.uint8)
    images[:, 0, :16] = np.arange(len(classes))[:, None] >> np.arange(16) & 1
    arrays = {"imgs": images, "latents_classes": classes, "latents_values": np.stack(columns, -1)} | changes
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, allow_pickle=True, metadata=np.array(Unpicklable(), dtype=object), **arrays)
    return path
