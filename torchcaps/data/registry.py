"""The data sets by name."""

import dataclasses
import os
import warnings
from typing import Any

from torchcaps._core.registry import check_name
from torchcaps._core.validation import check_field_names, join_quoted
from torchcaps.data.base import Dataset
from torchcaps.data.spec import DataSpec, Request

__all__ = ["REGISTRY", "create_dataset", "find_spec", "is_folder", "list_datasets", "register"]

REGISTRY: dict[str, DataSpec] = {}


def register(name: str, spec: DataSpec) -> None:
    """Give a data set a name."""
    if not isinstance(spec, DataSpec):
        raise TypeError(f"spec must be a data set's choice such as MultiMNIST(...), got {type(spec).__name__}")
    if name in REGISTRY:
        raise ValueError(f"a data set named {name!r} exists already")
    REGISTRY[name] = spec


def list_datasets() -> list[str]:
    """Return the names of all data sets, sorted.

    >>> "digits" in list_datasets()
    True
    """
    return sorted(REGISTRY)


def find_spec(name: str, **options: Any) -> DataSpec:
    """Return what a name stands for, with other values for some of its options."""
    path = isinstance(name, os.PathLike) or (isinstance(name, str) and (os.sep in name or name.startswith((".", "~"))))
    if path and name not in REGISTRY:
        raise ValueError(f"{name} is no folder, and no data set has that name")
    spec = REGISTRY[check_name(name, REGISTRY, "data set")]
    check_field_names(type(spec), options, name)
    return dataclasses.replace(spec, **options)


def is_folder(name: object) -> bool:
    """Return whether what stands in the place of a name is a folder of images."""
    return name not in REGISTRY and isinstance(name, str | os.PathLike) and os.path.isdir(os.path.expanduser(name))


def create_dataset(
    name: str,
    split: str = "train",
    root: str | os.PathLike[str] | None = None,
    *,
    download: bool = True,
    **options: Any,
) -> Dataset:
    """Return a data set by its name.

    Args:
        name: one of `list_datasets`, or the path of a folder with one sub-folder of images a class.
        split: ``"train"``, ``"test"``, or what else the data set has.
        root: the data folder; by default ``TORCHCAPS_DATA``, else a cache folder of yours. For ``"folder"`` it is the
            folder of images.
        download: whether files that are missing are fetched.
        options: other values for any of its fields.

    >>> create_dataset("digits", split="test")
    <digits, test: 1,000 images of 1x28x28, 10 classes>
    """
    if is_folder(name):
        if root is not None:
            raise ValueError(f"give the folder of images once, got {os.fspath(name)!r} and root {os.fspath(root)!r}")
        name, root = "folder", name
    spec = find_spec(name, **options)
    if split not in spec.splits:
        raise ValueError(f"{name} has no split {split!r}: it has {join_quoted(spec.splits, 'and')}")
    request = Request(name, split, root, download)
    dataset = spec.load(request)
    problem = spec.count_problem(request, dataset)
    if problem:
        warnings.warn(f"{problem}: see 'torchcaps data check {name}'", stacklevel=2)
    return dataset
