"""Files read to the last byte and no further, gzipped or not, with an error that names the file."""

import gzip
import io
import math
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from torchcaps.data.errors import DataError

__all__ = ["check_labels", "opened", "rest_as_bytes", "starting_bytes", "whole_file"]

PIECE = 1 << 20
GZIP_RATIO = 1032  # a byte of a gzipped file stands for at most so many


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file; what is gzipped is unpacked while it is read, whatever the file is called."""
    try:
        with path.open("rb") as file:
            gzipped = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            if not gzipped:
                yield file
                return
            with gzip.open(file) as unpacked:
                yield io.BufferedReader(unpacked, PIECE)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is broken ({error}): delete it, and fetch it again") from error
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror or error}") from error


def starting_bytes(file: IO[bytes], count: int, path: Path) -> bytes:
    """Return the next bytes of a file's header."""
    data = file.read(count)
    if len(data) < count:
        raise DataError(f"{path} is too short: it ends inside its header")
    return data


def rest_as_bytes(file: IO[bytes], shape: Sequence[int], path: Path) -> Tensor:
    """Return the rest of a file as bytes of a shape; raise where there is more or less of it."""
    wanted = math.prod(shape)
    if wanted > GZIP_RATIO * os.path.getsize(path):
        raise DataError(f"{path} is too short: its header speaks of {'x'.join(map(str, shape))} bytes")
    data = bytearray(wanted)
    view, filled = memoryview(data), 0
    # in pieces: gzip unpacks all that it is asked for into memory of its own first
    while filled < wanted and (count := file.readinto(view[filled : filled + PIECE])):  # type: ignore[attr-defined]
        filled += count
    if filled < wanted:
        raise DataError(f"{path} is too short: {filled:,} bytes after its header, it should have {wanted:,}")
    if file.read(1):
        raise DataError(f"{path} is too long: more than the {wanted:,} bytes that its header speaks of")
    return torch.frombuffer(data, dtype=torch.uint8).view(*shape) if wanted else torch.empty(*shape, dtype=torch.uint8)


def whole_file(path: Path) -> bytearray:
    """Return all bytes of a file."""
    try:
        return bytearray(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror or error}") from error


def check_labels(labels: Tensor, n_images: int, n_classes: int, path: Path) -> None:
    """Raise where there are more or fewer labels than images, or where one is no class."""
    if len(labels) != n_images:
        raise DataError(f"{path} has {n_images:,} images and {len(labels):,} labels: it is broken")
    if n_images and not 0 <= int(labels.min()) <= int(labels.max()) < n_classes:
        wrong = int(labels.min()) if labels.min() < 0 else int(labels.max())
        raise DataError(f"{path} has a label {wrong}, and the classes are 0 to {n_classes - 1}: it is broken")
