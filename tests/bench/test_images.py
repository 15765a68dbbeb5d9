"""Benchmark on photographs: the files it writes, and a tiny run of both models."""

from pathlib import Path

import pytest
import torch
from PIL import Image

from torchcaps.bench import images
from torchcaps.bench.images import CLASSES, ImageCase, measure_images, write_photographs
from torchcaps.data import ImageSet


def few_photographs(name: str, split: str) -> ImageSet:
    """Six images of each CIFAR-10 class in use, and of one other."""
    classes = ("bird", *CLASSES)
    pixels = torch.randint(256, (36, 3, 32, 32), generator=torch.Generator().manual_seed(len(split)), dtype=torch.uint8)
    return ImageSet(name, split, pixels, torch.arange(36) % 6, classes)


def test_photographs_are_the_first_of_each_class(tmp_path: Path) -> None:
    dataset = few_photographs("cifar10", "train")
    write_photographs(dataset, tmp_path / "train", 32, 4)
    assert sorted(path.name for path in (tmp_path / "train").iterdir()) == sorted(CLASSES)
    files = sorted((tmp_path / "train/cat").iterdir())
    assert [file.name for file in files] == ["00003.png", "00009.png", "00015.png", "00021.png"]
    with Image.open(files[1]) as image:
        pixels = torch.tensor(list(image.tobytes()), dtype=torch.uint8).view(32, 32, 3).permute(2, 0, 1)
    assert torch.equal(pixels, dataset.images[9])
    write_photographs(dataset, tmp_path / "large", 64, 1)
    with Image.open(tmp_path / "large/ship/00005.png") as image:
        assert image.size == (64, 64)


def test_both_models_train_for_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    create = images.create_dataset
    monkeypatch.setattr(
        images,
        "create_dataset",
        lambda name, split, **options: (
            few_photographs(name, split) if name == "cifar10" else create(name, split, **options)
        ),
    )
    rows = list(measure_images("tiny", ImageCase(32, 0.2, 6, 6), seeds=[0]))
    assert [row["model"] for row in rows] == ["capsnet_images", "cnn_images"]
    for row in rows:
        assert row["n_test"] == 30
        assert row["epochs"] > 0
        assert 0 <= row["accuracy"] <= 1
