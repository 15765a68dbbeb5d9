"""Properties of every registered data set. A new file in torchcaps/data/datasets is tested here without an edit.

Data sets are loaded if their files are in the data directory; those that are generated use the embedded digits.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data.helpers import write_image
from tests.data.writers import dsprites
from torchcaps.data import Dataset, DataSpec, Folder, Loader, create_dataset, list_datasets
from torchcaps.data.datasets.dsprites import FILE, DSprites
from torchcaps.data.inspect import check_availability, compute_statistics
from torchcaps.data.registry import DATASETS, find_spec


def is_loadable(name: str) -> bool:
    spec = DATASETS.get(name)
    return isinstance(spec, Folder) or bool(spec.made_from) or not check_availability(name).missing


@pytest.fixture(params=list_datasets())
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def spec(name: str) -> DataSpec:
    return DATASETS.get(name)


@pytest.fixture(scope="module", params=[name for name in list_datasets() if is_loadable(name)])
def datasets(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Dataset]:
    """The default splits of a data set."""
    spec = DATASETS.get(request.param)
    root: Path | None = None
    options: dict[str, Any] = {"source": "digits"} if spec.made_from else {}
    if isinstance(spec, DSprites):  # the official file has 3 GB of pixels; test_dsprites.py counts its splits
        root = tmp_path_factory.mktemp("sprites")
        dsprites(root / "dsprites" / FILE)
    if isinstance(spec, Folder):
        root, options = tmp_path_factory.mktemp("images"), {"cache": False}
        for index in range(24):
            write_image(root / "ab"[index % 2] / f"{index}.png", seed=index)
    return {
        split: create_dataset(request.param, split, root, download=False, **options) for split in spec.default_splits
    }


def test_spec_is_a_frozen_dataclass_with_defaults(name: str, spec: DataSpec) -> None:
    assert dataclasses.replace(spec) == spec
    assert hash(dataclasses.replace(spec)) == hash(spec)
    assert isinstance(type(spec)(), DataSpec)
    assert find_spec(name) == spec


def test_spec_is_described(spec: DataSpec) -> None:
    assert spec.title != ""
    assert (type(spec).__doc__ or "").strip() != ""
    assert set(spec.default_splits) <= set(spec.splits)
    assert {"train", "test"} <= set(spec.splits)
    if spec.made_from:
        assert spec.made_from in list_datasets()


def test_files_have_names_and_mirrors(spec: DataSpec) -> None:
    """A data set either has no files, or all of them can be downloaded."""
    for split in spec.splits:
        files = spec.files(split)
        assert bool(files) == bool(spec.subdirectories)
        assert files == () or files in spec.alternative_files(split)
        for file in files:
            mirrors = getattr(file, "archive", file).mirrors
            assert [mirror for mirror in mirrors if not mirror.startswith(("http://", "https://"))] == []
            assert len(mirrors) > 0


def test_shape_classes_and_size_agree_with_the_spec(
    request: pytest.FixtureRequest, datasets: dict[str, Dataset]
) -> None:
    spec = DATASETS.get(request.node.callspec.params["datasets"])
    is_complete = not isinstance(spec, DSprites)
    for split, dataset in datasets.items():
        assert dataset.split == split
        assert spec.image_shape in (None, dataset.shape)
        assert spec.n_classes in (None, dataset.n_classes)
        assert spec.n_images(split) in (None, len(dataset)) or not is_complete
        assert len(set(dataset.classes)) == dataset.n_classes


def sample_indices(dataset: Dataset) -> torch.Tensor:
    return torch.linspace(0, len(dataset) - 1, 9, dtype=torch.float64).long()


def test_batch_shapes_and_types(datasets: dict[str, Dataset]) -> None:
    for dataset in datasets.values():
        indices = sample_indices(dataset)
        batch = dataset.get_batch(indices)
        assert (batch.images.dtype, batch.images.shape) == (torch.uint8, (9, *dataset.shape))
        assert batch.targets.dtype == torch.uint8
        torch.testing.assert_close(batch.indices, indices, rtol=0, atol=0)
        if dataset.n_objects == 1:
            assert (batch.labels.dtype, batch.labels.shape) == (torch.int64, (9,))
            assert batch.targets.shape == batch.images.shape
        elif dataset.n_objects is None:
            assert batch.labels.shape == (9, dataset.n_classes)
            assert set(batch.labels.unique().tolist()) <= {0, 1}
            assert (batch.targets.shape[0], batch.targets.shape[2:]) == (9, dataset.shape)
        else:
            assert batch.labels.shape == (9, dataset.n_objects)
            assert batch.targets.shape == (9, dataset.n_objects, *dataset.shape)
        if dataset.n_objects is not None:
            assert 0 <= int(batch.labels.min()) <= int(batch.labels.max()) < dataset.n_classes


def test_image_depends_on_its_index_only(datasets: dict[str, Dataset]) -> None:
    for dataset in datasets.values():
        indices = sample_indices(dataset)
        together = dataset.get_batch(indices, epoch=3)
        backwards = dataset.get_batch(indices.flip(0), epoch=3)
        for n in (0, 4, 8):
            alone = dataset.get_batch(indices[n : n + 1], epoch=3)
            for key in ("images", "labels", "targets"):
                expected = getattr(together, key)[n]
                torch.testing.assert_close(getattr(alone, key)[0], expected, rtol=0, atol=0)
                torch.testing.assert_close(getattr(backwards, key)[8 - n], expected, rtol=0, atol=0)


def test_images_vary_and_all_classes_can_occur(datasets: dict[str, Dataset]) -> None:
    for dataset in datasets.values():
        statistics = compute_statistics(dataset, max_images=2000)
        assert [std for std in statistics.std if std <= 0] == []
        assert sum(count > 0 for count in statistics.class_counts) > 1


def test_item_is_in_0_to_1(datasets: dict[str, Dataset]) -> None:
    for dataset in datasets.values():
        image, *others = dataset[len(dataset) - 1]
        assert image.shape == dataset.shape
        assert 0 <= float(image.min()) <= float(image.max()) <= 1
        assert len(others) == (1 if dataset.n_objects == 1 else 2)


def test_subset_and_loader(datasets: dict[str, Dataset]) -> None:
    for split, dataset in datasets.items():
        indices = sample_indices(dataset).unique()
        subset = dataset.subset(indices)
        everything: Any = subset.get_batch(torch.arange(len(indices)))
        expected = dataset.get_batch(indices)
        torch.testing.assert_close(everything.images, expected.images, rtol=0, atol=0)
        loader = Loader(subset, 4)
        assert loader.train == (split == "train")
        batches = list(loader.epoch(0))
        assert [len(batch.images) for batch in batches] == [len(part) for part in indices.split(4)]
        assert batches[0].images.dtype == torch.float32
