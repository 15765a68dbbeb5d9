"""A directory of images with three classes, and the cache of decoded images in a temporary directory."""

from pathlib import Path
from typing import Any

import pytest

from tests.data.helpers import write_image
from torchcaps.data import ImageSet, create_dataset


def use_cache_in(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Place the cache below a directory; return the directory of its files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(directory / "cache"))
    return directory / "cache/torchcaps/folders"


def write_folder(root: Path) -> Path:
    """Write 10, 11 and 12 images of three classes."""
    for number, name in enumerate(("cat", "dog", "eel")):
        for n in range(10 + number):
            write_image(root / name / f"{n}.png", (20 + n, 30), seed=100 * number + n)
    return root


def load(root: Path, split: str = "train", **options: Any) -> ImageSet:
    """Open a directory of images."""
    dataset = create_dataset("folder", split, root, **options)
    assert isinstance(dataset, ImageSet)
    return dataset
