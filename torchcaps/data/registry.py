"""Registry of data sets: list them, look them up and create them by name."""

import dataclasses
import os
import warnings
from typing import Any

from torchcaps._core.registry import Registry, import_instance, is_import_path
from torchcaps._core.validation import check_field_names, join_quoted
from torchcaps.data.base import Dataset, DataSpec, LoadRequest

__all__ = [
    "DATASETS",
    "create_dataset",
    "find_spec",
    "is_image_folder",
    "list_datasets",
    "names_image_folder",
    "register_dataset",
]

DATASETS = Registry[DataSpec]("data set", "torchcaps.data.datasets")


def register_dataset(name: str, spec: DataSpec) -> None:
    """Register a data set under a name.

    A module in ``torchcaps/data/datasets`` that calls this is found by itself: adding a data set takes one file.

    >>> from torchcaps.data import AffNISTStyle, create_dataset
    >>> from torchcaps.data.registry import DATASETS
    >>> with DATASETS.restored():  # only for this example
    ...     register_dataset("turned-digits", AffNISTStyle(source="digits", rotation=90.0))
    ...     dataset = create_dataset("turned-digits", "test")
    >>> dataset
    <turned-digits, test: 32,000 images of 1x40x40, 10 classes>
    """
    if not isinstance(spec, DataSpec):
        raise TypeError(f"spec must be a DataSpec instance such as MultiMNIST(...), got {type(spec).__name__}")
    DATASETS.register(name, spec)


def list_datasets() -> list[str]:
    """Return the names of all data sets, sorted.

    >>> "digits" in list_datasets()
    True
    """
    return DATASETS.list()


def find_spec(name: str, **options: Any) -> DataSpec:
    """Return the specification of a data set, with some of its options replaced.

    Args:
        name: a registered name, or the import path of a `DataSpec` of your own, ``my_module.MyData``.
        options: values for its fields.
    """
    if _is_path(name) and name not in DATASETS:
        raise ValueError(f"{name} is neither an existing directory nor the name of a data set")
    # An import path is not registered: files of settings may name registered data sets without trust_remote_code.
    is_own = is_import_path(name) and name not in DATASETS
    try:
        spec = import_instance(name, DataSpec) if is_own else DATASETS.get(name)
    except ValueError as error:
        if is_own:
            raise
        raise ValueError(f"{error} ({name!r} is not an existing directory either)") from error
    check_field_names(type(spec), options, name)
    return dataclasses.replace(spec, **options)


def is_image_folder(name: object) -> bool:
    """Return whether the argument for a data set is the path of a directory instead of a registered name."""
    return isinstance(name, str | os.PathLike) and name not in DATASETS and os.path.isdir(os.path.expanduser(name))


def names_image_folder(name: object) -> bool:
    """Return whether the ``data`` of a run is a directory of images, which need not exist on this machine."""
    return name == "folder" or is_image_folder(name) or (_is_path(name) and name not in DATASETS)


def _is_path(name: object) -> bool:
    """Return whether the argument for a data set can be nothing but a path."""
    return isinstance(name, os.PathLike) or (isinstance(name, str) and (os.sep in name or name.startswith((".", "~"))))


def create_dataset(
    name: str,
    split: str = "train",
    root: str | os.PathLike[str] | None = None,
    *,
    download: bool = True,
    **options: Any,
) -> Dataset:
    """Create a data set by name.

    Args:
        name: one of `list_datasets`, or the path of a directory with one subdirectory of images per class.
        split: ``"train"``, ``"test"`` or another split of the data set.
        root: the data directory; by default ``TORCHCAPS_DATA``, else a directory in the user's cache. For ``"folder"``
            the directory of images.
        download: download missing files.
        options: values for fields of the data set's specification.

    >>> create_dataset("digits", split="test")
    <digits, test: 1,000 images of 1x28x28, 10 classes>
    """
    if is_image_folder(name):
        if root is not None:
            both = f"name={os.fspath(name)!r} and root={os.fspath(root)!r}"
            raise ValueError(f"the directory of images must be given once, as name or as root, got {both}")
        name, root = "folder", name
    spec = find_spec(name, **options)
    if split not in spec.splits:
        raise ValueError(f"split of {name} must be {join_quoted(spec.splits)}, got {split!r}")
    request = LoadRequest(name, split, root, download)
    dataset = spec.load(request)
    mismatch = spec.describe_size_mismatch(request, dataset) or spec.describe_checksum_mismatch(request)
    if mismatch:
        warnings.warn(f"{mismatch}: run 'torchcaps data check {name}'", stacklevel=2)
    return dataset
