"""Objects of a run, built from its settings: data splits, preprocessing, network and loaders."""

import dataclasses
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from torchcaps._core.random import permute_indices
from torchcaps.data import DataError, Dataset, Folder, Loader, Pipeline, create_dataset, create_pipeline
from torchcaps.data.own import DataLoaderBatches, DataLoaderImages
from torchcaps.data.registry import find_spec, is_image_folder
from torchcaps.models import Network, create_model
from torchcaps.training.config import RunSpec

__all__ = [
    "RunData",
    "adapt_to_data",
    "build_loader",
    "build_network",
    "check_n_objects",
    "folder_options",
    "is_other_folder",
    "limit_images",
    "open_data",
    "open_folder",
    "open_test_set",
    "prepare_data",
    "training_labels",
]

LARGE_TEST_SET, TEST_SUBSET = 500_000, 10_000  # test sets with more images are limited by default


@dataclass(frozen=True)
class RunData:
    """Data of a run.

    Args:
        train: training set.
        val: validation set, for early stopping and the best checkpoint; ``None`` if there is none.
        test: test set, which no choice depends on; ``None`` if there is none.
        pipeline: preprocessing and augmentation.
    """

    train: Dataset
    val: Dataset | None
    test: Dataset | None
    pipeline: Pipeline

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the network's input images, ``(channels, height, width)``."""
        return self.pipeline.output_shape(self.train.shape)


class Worker(Protocol):
    """Rank and device of a process in a distributed run, and the number of processes."""

    @property
    def rank(self) -> int:
        """Index of the process."""
        ...

    @property
    def world_size(self) -> int:
        """Number of processes."""
        ...

    @property
    def device(self) -> torch.device:
        """Device of the process."""
        ...


def open_data(spec: RunSpec, download: bool = True) -> RunData:
    """Open the data of a run: limit and split the training set, fit the pipeline to it, and open the test set.

    Args:
        spec: settings of the run.
        download: download missing files.
    """
    recipe = spec.recipe
    train = _open_split(recipe.data, "train", spec.data_dir, spec.data_options, download)
    val = None
    if not recipe.val_fraction and "val" in _splits(recipe.data, spec):
        val = _open_split(recipe.data, "val", spec.data_dir, spec.data_options, download)
    test = open_test_set(spec, download, folder_options(spec, train.shape, train.classes))
    return prepare_data(spec, train, val, test)


def prepare_data(spec: RunSpec, train: Dataset, val: Dataset | None, test: Dataset | None) -> RunData:
    """Return the data of a run from its data sets: limit and split the training set, and fit the pipeline to it.

    Args:
        spec: settings of the run.
        train: training set.
        val: validation set; ``None`` splits it from the training set, if the recipe has a ``val_fraction``.
        test: test set.
    """
    recipe = spec.recipe
    if spec.max_train_images is not None:
        train = limit_images(train, spec.max_train_images)
    if val is None and recipe.val_fraction:
        train, val = _split(train, recipe.val_fraction, spec.seed)
    pipeline = create_pipeline(recipe.augmentation)
    try:
        pipeline.output_shape(train.shape)
    except ValueError as error:
        raise ValueError(
            f"augmentation {recipe.augmentation!r} does not fit the images of {recipe.data}: {error}; choose another "
            "with --augmentation, or none with --augmentation ''"
        ) from error
    if not pipeline.is_fitted:
        pipeline = pipeline.fit(train)
    return RunData(train, val, test, pipeline)


def open_test_set(spec: RunSpec, download: bool = True, options: Mapping[str, Any] | None = None) -> Dataset | None:
    """Return the test set of a run: its ``test_data``, otherwise the test split of its training data, if any.

    Args:
        spec: settings of the run.
        download: download missing files.
        options: options of a directory of images in ``test_data``, see `folder_options`.
    """
    recipe = spec.recipe
    if recipe.test_data and is_other_folder(recipe.test_data, recipe.data):
        dataset = open_folder(recipe.test_data, None, {**(options or {}), **spec.test_options})
    elif recipe.test_data:
        dataset = _open_split(recipe.test_data, "test", spec.data_dir, spec.test_options, download)
    elif "test" in _splits(recipe.data, spec):
        dataset = _open_split(recipe.data, "test", spec.data_dir, spec.data_options, download)
    else:
        return None
    return limit_images(dataset, spec.max_test_images)


def folder_options(spec: RunSpec, shape: tuple[int, int, int], classes: tuple[str, ...]) -> dict[str, Any]:
    """Return the options with which `Folder` reads other images in the format of a run's.

    Args:
        spec: settings of the run.
        shape: channels, height and width of the run's images, before its pipeline.
        classes: names of its classes.
    """
    channels, height, width = shape
    size = {"size": height} if height == width else {}
    fit = {"fit": spec.data_options["fit"]} if "fit" in spec.data_options else {}
    return {**size, **fit, "channels": "gray" if channels == 1 else "color", "classes": classes}


def is_other_folder(name: Any, data: str) -> bool:
    """Return whether a data set is a directory of images other than that of the training data."""
    if not is_image_folder(name):
        return False
    path, other = (os.path.realpath(os.path.expanduser(value)) for value in (name, data))
    return path != other


def open_folder(path: str | os.PathLike[str], split: str | None, options: Mapping[str, Any]) -> Dataset:
    """Return a directory of images that a network is evaluated on.

    Args:
        path: the directory.
        split: split of the images; ``None`` for the test images if it has split directories, otherwise all.
        options: options of `Folder`.
    """
    split = split or ("test" if Folder.has_split_directories(Path(path).expanduser()) else "all")
    return create_dataset(os.fspath(path), split, None, **options)


def limit_images(dataset: Dataset, max_images: int | None) -> Dataset:
    """Return a data set, or a fixed random subset of ``max_images`` if it is larger.

    ``None`` means no limit for up to 500,000 images, and 10,000 for more.
    """
    if max_images is None:
        max_images = TEST_SUBSET if len(dataset) > LARGE_TEST_SET else len(dataset)
    if len(dataset) <= max_images:
        return dataset
    indices = permute_indices(torch.arange(max_images), len(dataset), seed=0, epoch=-1)
    return dataset.subset(indices.sort().values)


def _open_split(name: str, split: str, data_dir: str | None, options: dict[str, Any], download: bool) -> Dataset:
    """Return a split of a data set; raise an error that states the flag to use if there is none."""
    if not name:
        raise ValueError(
            "no data set is named, by the model's recipe or because the run was trained by torchcaps.fit on data of "
            "your own: choose one with --data (see 'torchcaps data list')"
        )
    if name == "folder" and data_dir is None:
        raise ValueError(
            "data 'folder' needs a directory of images with one subdirectory per class: torchcaps train ./my_images"
        )
    root = None if is_image_folder(name) else data_dir
    dataset = create_dataset(name, split, root, download=download, **options)
    if not len(dataset):
        raise DataError(f"split {split!r} of {dataset.name} contains no images")
    return dataset


def _splits(name: str, spec: RunSpec) -> tuple[str, ...]:
    """Return the splits of a data set; ``"val"`` only if a directory of images has it."""
    root = name if is_image_folder(name) else spec.data_dir if name == "folder" else None
    if root is not None:
        with warnings.catch_warnings(action="ignore"):
            return Folder(**spec.data_options).find_splits(Path(root).expanduser())
    return tuple(split for split in find_spec(name).splits if split != "val")


def _split(dataset: Dataset, fraction: float, seed: int) -> tuple[Dataset, Dataset]:
    """Split a data set at random into training and validation set; the split depends on the seed only."""
    count = round(fraction * len(dataset))
    if not 0 < count < len(dataset):
        raise ValueError(
            f"--val-fraction {fraction:g} gives a validation set of {count} of {len(dataset):,} images: choose a "
            "fraction that leaves images in both sets"
        )
    order = permute_indices(torch.arange(len(dataset)), len(dataset), seed, epoch=-1)
    val, train = order[:count].sort().values, order[count:].sort().values
    return dataset.subset(train, split="train"), dataset.subset(val, split="validation")


def adapt_to_data(spec: RunSpec, data: RunData, fixed: frozenset[str] = frozenset()) -> RunSpec:
    """Return the run with image size, classes and number of objects of its model taken from the data.

    Args:
        spec: settings of the run.
        data: its data.
        fixed: model fields that are not changed; a ValueError is raised if they don't match the data.
    """
    model = spec.model_spec()
    sizes: dict[str, Any] = {"image": data.shape, "classes": data.train.n_classes}
    if "n_objects" in {f.name for f in dataclasses.fields(model)} and data.train.n_objects is not None:
        sizes["n_objects"] = data.train.n_objects
    changes = {name: value for name, value in sizes.items() if getattr(model, name) != value}
    for name in (name for name in changes if name in fixed):
        current, needed = (_size_text(value) for value in (getattr(model, name), sizes[name]))
        flag = f"--{name.replace('_', '-')}"
        raise ValueError(
            f"{flag} {current} does not match {data.train.name}, which has {name} {needed}: omit {flag}, or set it to "
            f"{needed}"
        )
    return dataclasses.replace(spec, model_options={**spec.model_options, **changes}) if changes else spec


def _size_text(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def build_network(spec: RunSpec) -> Network:
    """Build the network of a run; its initial weights depend on the run's seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        return create_model(spec.model, recipe=spec.recipe, **spec.model_options)


def check_n_objects(model: Network, data: RunData) -> None:
    """Raise a ValueError if the number of objects per image of model and data differ."""
    if model.n_objects != data.train.n_objects:
        texts = {None: "any number of objects", 1: "one object"}
        expected, got = (texts.get(n, f"{n} objects") for n in (model.n_objects, data.train.n_objects))
        raise ValueError(
            f"{model.name} expects {expected} per image, {data.train.name} has {got}: choose another model or data set "
            "(see 'torchcaps list')"
        )


def training_labels(data: RunData) -> Tensor:
    """Return the class indices of the training images, ``[N]``; raise a ValueError if they have none."""
    labels = getattr(data.train, "labels", None)
    if labels is None or labels.dim() != 1 or data.train.n_objects != 1:
        raise ValueError(
            f"--class-weights balanced needs one label per image, which {data.train.name} does not have: leave it out"
        )
    return labels


def build_loader(
    dataset: Dataset, spec: RunSpec, pipeline: Pipeline, train: bool, worker: Worker | None = None
) -> Loader | DataLoaderBatches:
    """Return the loader of a data set; for the images of a DataLoader its own batches.

    Args:
        dataset: the data set.
        spec: settings of the run.
        pipeline: preprocessing and augmentation.
        train: shuffle and augment.
        worker: the process, if several share each batch; default: one process on the CPU.
    """
    rank, world_size, device = (0, 1, "cpu") if worker is None else (worker.rank, worker.world_size, worker.device)
    if isinstance(dataset, DataLoaderImages):
        if world_size > 1:
            raise ValueError(f"a DataLoader can be used by one process only, got {world_size}: pass its data set")
        return DataLoaderBatches(dataset, pipeline, train, spec.seed, device)
    batch_size = min(spec.recipe.batch_size, len(dataset)) if train else spec.recipe.batch_size
    return Loader(
        dataset,
        max(batch_size, world_size),
        pipeline=pipeline,
        train=train,
        seed=spec.seed,
        num_workers=spec.num_workers,
        device=device,
        rank=rank,
        world_size=world_size,
    )
