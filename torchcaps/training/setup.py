"""All that a run needs, made from what was chosen: the data, the network that fits it, and checks that it does."""

import dataclasses
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchcaps._core.random import permute_indices
from torchcaps.data import DataError, Dataset, Folder, Loader, Pipeline, create_dataset, create_pipeline
from torchcaps.data.registry import find_spec, is_image_folder
from torchcaps.models import Network, create_model
from torchcaps.models.registry import find_model
from torchcaps.training.config import RunSpec

__all__ = [
    "Images",
    "check_objects",
    "fitted",
    "make_loader",
    "make_network",
    "open_images",
    "open_test",
    "some_of",
]

MANY, SOME = 500_000, 10_000  # images that are more than anybody waits for, and how many of them are tested with


@dataclass(frozen=True)
class Images:
    """The images of a run.

    Args:
        train: what is learnt from.
        held_out: what a checkpoint is chosen by, or ``None``.
        test: what nothing is chosen by, or ``None`` where there is none.
        pipeline: how they are prepared.
    """

    train: Dataset
    held_out: Dataset | None
    test: Dataset | None
    pipeline: Pipeline

    @property
    def shape(self) -> tuple[int, int, int]:
        """What the network sees."""
        return self.pipeline.output_shape(self.train.shape)


def open_images(spec: RunSpec) -> Images:
    """Open the data of a run, and hold out what a checkpoint is chosen by."""
    recipe = spec.recipe
    train = _open(recipe.data, "train", spec.data_dir, spec.data_options)
    if spec.max_train_images is not None:
        train = some_of(train, spec.max_train_images)
    own = _own_splits(recipe.data, spec)
    held_out = None
    if recipe.val_fraction:
        train, held_out = _split(train, recipe.val_fraction, spec.seed)
    elif "val" in own:
        held_out = _open(recipe.data, "val", spec.data_dir, spec.data_options)
    pipeline = create_pipeline(recipe.augmentation)
    try:
        pipeline.output_shape(train.shape)
    except ValueError as error:
        raise ValueError(
            f"the augmentation {recipe.augmentation!r} does not fit {recipe.data}: {error}; give another by "
            "--augmentation (or none: --augmentation '')"
        ) from error
    if not pipeline.fitted:
        pipeline = pipeline.fit(train)
    return Images(train, held_out, open_test(spec), pipeline)


def open_test(spec: RunSpec) -> Dataset | None:
    """Open the test images of a run: those of its test set, or of the set that it is trained on."""
    recipe = spec.recipe
    if recipe.test_data:
        return some_of(_open(recipe.test_data, "test", spec.data_dir, spec.test_options), spec.max_test_images)
    if "test" not in _own_splits(recipe.data, spec):
        return None
    return some_of(_open(recipe.data, "test", spec.data_dir, spec.data_options), spec.max_test_images)


def some_of(dataset: Dataset, most: int | None) -> Dataset:
    """Return a data set, or so many of its images: always the same ones, spread over all of it."""
    most = most if most is not None else SOME if len(dataset) > MANY else len(dataset)
    if len(dataset) <= most:
        return dataset
    places = permute_indices(torch.arange(most), len(dataset), seed=0, epoch=-1)
    return dataset.subset(places.sort().values)


def _open(name: str, split: str, data_dir: str | None, options: dict[str, Any]) -> Dataset:
    if not name:
        raise ValueError("which data set? This model's recipe names none: give --data")
    if name == "folder" and data_dir is None:
        raise ValueError("which images? Give their folder: torchcaps train ./my_images (a sub-folder for each class)")
    folder = is_image_folder(name)
    dataset = create_dataset(name, split, None if folder else data_dir, **options)
    if not len(dataset):
        raise DataError(f"{dataset.name}, split {split!r}, is empty: there are no images to work with")
    return dataset


def _own_splits(name: str, spec: RunSpec) -> tuple[str, ...]:
    """Return the parts that a data set has."""
    root = name if is_image_folder(name) else spec.data_dir if name == "folder" else None
    if root is not None:
        with warnings.catch_warnings(action="ignore"):
            return Folder(**spec.data_options).find_splits(Path(root).expanduser())
    return tuple(split for split in find_spec(name).splits if split != "val")


def _split(dataset: Dataset, share: float, seed: int) -> tuple[Dataset, Dataset]:
    """Hold out a share of the images, at random, but always the same ones for a seed."""
    count = round(share * len(dataset))
    if not 0 < count < len(dataset):
        raise ValueError(f"--val-fraction {share:g} holds out {count} of {len(dataset):,} images: give another share")
    order = permute_indices(torch.arange(len(dataset)), len(dataset), seed, epoch=-1)
    chosen, rest = order[:count].sort().values, order[count:].sort().values
    return dataset.subset(rest, split="train"), dataset.subset(chosen, split="validation")


def fitted(spec: RunSpec, images: Images, chosen: frozenset[str] = frozenset()) -> RunSpec:
    """Return the run with its model's sizes taken from the data, where the user has not chosen them.

    Args:
        spec: the run.
        images: its data.
        chosen: fields of the model that the user has chosen: where one does not fit, this is said.
    """
    known = {field.name for field in dataclasses.fields(find_model(spec.model).spec)}
    data: dict[str, Any] = {"image": images.shape, "classes": images.train.n_classes}
    if "n_objects" in known and images.train.n_objects is not None:
        data["n_objects"] = images.train.n_objects
    current = {name: getattr(_spec_of(spec), name) for name in data}
    words = {"image": "images of {}", "classes": "{} classes", "n_objects": "{} objects in an image"}
    for name, value in data.items():
        if name in chosen and current[name] != value:
            shown = ["x".join(map(str, v)) if isinstance(v, tuple) else str(v) for v in (current[name], value)]
            mine, theirs = (words[name].format(v) for v in shown)
            flag = f"--{name} {shown[1]}"
            raise ValueError(
                f"the model is for {mine}, and {images.train.name} has {theirs}: leave --{name} out, or {flag}"
            )
    changes = {name: value for name, value in data.items() if current[name] != value}
    return dataclasses.replace(spec, model_options={**spec.model_options, **changes}) if changes else spec


def _spec_of(spec: RunSpec) -> Any:
    return dataclasses.replace(find_model(spec.model).spec, **spec.model_options)


def make_network(spec: RunSpec) -> Network:
    """Build the network of a run, its weights drawn from the run's seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        return create_model(spec.model, recipe=spec.recipe, **spec.model_options)


def check_objects(model: Network, images: Images) -> None:
    """Refuse data with more or fewer objects in an image than the model is for."""
    theirs = images.train.n_objects
    if model.n_objects != theirs:
        words = {None: "any number of objects", 1: "one object"}
        mine, found = (words.get(n, f"{n} objects") for n in (model.n_objects, theirs))
        raise ValueError(
            f"{model.name} is for {mine} in an image, and {images.train.name} has {found}: "
            "'torchcaps list' shows the models and their data"
        )


def make_loader(dataset: Dataset, spec: RunSpec, pipeline: Pipeline, train: bool, place: Any = None) -> Loader:
    """Make the loader of a data set: for the whole, or for one process of several."""
    rank, world, device = (place.rank, place.world_size, place.device) if place is not None else (0, 1, "cpu")
    size = min(spec.recipe.batch_size, len(dataset)) if train else spec.recipe.batch_size
    return Loader(
        dataset,
        max(size, world),
        pipeline=pipeline,
        train=train,
        seed=spec.seed,
        num_workers=spec.num_workers,
        device=device,
        rank=rank,
        world_size=world,
    )
