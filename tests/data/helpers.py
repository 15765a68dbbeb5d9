"""Helpers of the data tests."""

import hashlib
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from torchcaps._core.random import CounterRNG
from torchcaps.data import CIFAR10, DataError, create_dataset


def data_error(name: str, root: Path, split: str = "test", kind: type[DataError] = DataError, **options: Any) -> str:
    """Return the one-line message with which loading fails; check that the directory is unchanged."""
    before = sorted(str(path) for path in root.rglob("*"))
    with pytest.raises(kind) as error:
        create_dataset(name, split, root, download=False, **options)
    assert "\n" not in str(error.value)
    assert sorted(str(path) for path in root.rglob("*")) == before
    return str(error.value)


def publish(monkeypatch: pytest.MonkeyPatch, spec: type[CIFAR10], member: str, data: bytes) -> None:
    """Make the checksum of some bytes the published one of a member of CIFAR's binary archive."""
    checksum = f"md5:{hashlib.md5(data, usedforsecurity=False).hexdigest()}"
    for split, members in spec.members["binary"].items():
        if member in members:
            monkeypatch.setitem(spec.members["binary"], split, {**members, member: checksum})


def raise_disk_full(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


def write_image(path: Path, size: tuple[int, int] = (20, 30), mode: str = "RGB", seed: int = 0) -> Path:
    """Write an image of one random color, which resampling does not change."""
    path.parent.mkdir(parents=True, exist_ok=True)
    color = np.random.default_rng(seed).integers(0, 256, 3)
    Image.new("RGB", (size[1], size[0]), tuple(map(int, color))).convert(mode).save(path)
    return path


def write_png_header(path: Path, width: int, height: int) -> None:
    """Write a PNG that announces a size and has no content."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk + b"\0\0\0\0IDAT\x35\xaf\x06\x1e")


def make_rng(n_images: int, seed: int = 0) -> CounterRNG:
    """Return random numbers for images 0, 1, 2, ..."""
    return CounterRNG(seed, 0, torch.arange(n_images))


def assert_bit_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Fail with the number and position of the differing elements if two tensors are not equal."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
