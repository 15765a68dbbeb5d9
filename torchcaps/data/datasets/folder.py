"""Folder: a directory of image files with one subdirectory per class."""

import dataclasses
import os
import warnings
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import ClassVar, Literal

import torch

from torchcaps._core.validation import FieldError, check_range, is_unicode, join_quoted
from torchcaps.data.base import Dataset, DataSpec, ImageSet, LoadRequest
from torchcaps.data.images import (
    MAX_MEGAPIXELS,
    PILLOW_MEGAPIXELS,
    ImageFormat,
    describe_resize,
    infer_format,
    read_images,
)
from torchcaps.data.registry import register_dataset
from torchcaps.data.storage import DataError

__all__ = ["IMAGE_SUFFIXES", "Folder", "find_image_files"]

IMAGE_SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
SPLIT_NAMES = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing"),
}
MAX_CLASSES_SHOWN = 10  # in an error


@dataclass(frozen=True)
class Folder(DataSpec):
    """A directory of images with one subdirectory per class, or with directories ``train``, ``test`` and optionally
    ``val`` that contain one subdirectory per class.

    Without split directories the images of each class are split at random, by a hash of their names: the split is
    reproducible, and added images hardly change the split of the others. Decoded images are cached until they have not
    been used for 30 days. The split ``"all"`` contains the images of all splits.

    Args:
        size: height and width in pixels; ``None``: the original size if all images have the same, of at most 96 pixels,
            otherwise squares of their median shorter side, at most 64.
        channels: ``"gray"``, ``"color"``, or ``"auto"``: gray if all images are.
        fit: how images of another aspect ratio are fitted: ``"crop"`` the center, ``"pad"`` with black, or
            ``"stretch"``. Transparent pixels become white; 16-bit gray levels are divided by 257.
        on_error: action for files that can't be decoded: ``"skip"`` them with a warning that counts them, or
            ``"fail"``.
        val_fraction, test_fraction: fractions of the images in the validation and test splits, without split
            directories.
        seed: seed of that split.
        classes: names of the classes in the order of their indices; not all need a subdirectory, and others are an
            error. Default: the names of the subdirectories in alphabetical order.
        cache: store decoded images in the user's cache directory.
        max_megapixels: files with more pixels are not decoded and count as unreadable.

    >>> folder = Folder(size=32, on_error="fail")
    >>> folder.size, folder.fit, folder.val_fraction
    (32, 'crop', 0.1)
    """

    title: ClassVar[str] = "a directory of images with one subdirectory per class"
    splits: ClassVar[tuple[str, ...]] = ("train", "val", "test", "all")
    n_classes: ClassVar[int | None] = None

    size: int | None = None
    channels: Literal["auto", "gray", "color"] = "auto"
    fit: Literal["crop", "pad", "stretch"] = "crop"
    on_error: Literal["skip", "fail"] = "skip"
    val_fraction: float = 0.1
    test_fraction: float = 0.1
    seed: int = 0
    classes: tuple[str, ...] = ()
    cache: bool = True
    max_megapixels: float = MAX_MEGAPIXELS

    def check(self) -> None:
        """Raise a ValueError if options are out of range or no training images would be left."""
        check_range(self, "size", 1, 4096)
        check_range(self, "max_megapixels", 0, PILLOW_MEGAPIXELS)
        check_range(self, "seed", -(2**63), 2**63 - 1)
        check_range(self, "val_fraction", 0, 1)
        check_range(self, "test_fraction", 0, 1)
        if len(set(self.classes)) < len(self.classes):
            raise FieldError(self, "classes", f"must be different names, got {self.classes}")
        if self.val_fraction + self.test_fraction >= 1:
            raise ValueError(
                "Folder: val_fraction and test_fraction must add up to less than 1, "
                f"got {self.val_fraction} and {self.test_fraction}"
            )

    def load(self, request: LoadRequest) -> Dataset:
        """Load the images of a split."""
        if request.root is None:
            raise DataError(
                "folder: the directory of images is missing: pass it as root=, as --data-dir, or instead of the name, "
                "create_dataset('./images')"
            )
        root = Path(os.fspath(request.root)).expanduser()
        if not root.is_dir():
            raise DataError(f"folder: {root} is not a directory: expected one with a subdirectory of images per class")
        train_files, split_files = self._find_files(root, request.split)
        classes = list(train_files)
        for name in classes:
            if not is_unicode(name):
                raise DataError(f"folder: {root} has a directory whose name {name!r} is not valid UTF-8: rename it")
        files = [(path, index) for index, name in enumerate(classes) for path in split_files.get(name, [])]
        if not files:
            raise DataError(f"folder: {root} has too few images: its split {request.split!r} is empty")
        image_format, note = self._image_format([path for paths in train_files.values() for path in paths])
        skip = self.on_error == "skip"
        images, indices = read_images([path for path, _ in files], image_format, skip, self.cache)
        labels = torch.tensor([index for _, index in files])[indices]
        dataset = ImageSet(root.resolve().name, request.split, images, labels, classes)
        dataset.note = note
        return dataset

    def _find_files(self, root: Path, split: str) -> tuple[dict[str, list[Path]], dict[str, list[Path]]]:
        """Return files by class: those that determine classes and image format, and those of a split."""
        directories = _find_split_directories(root)
        reference = _find_images_by_class(directories["train"] if directories else root)
        if self.classes:
            reference = self._select_classes(root, reference)
        elif len(reference) < 2:
            (only,) = reference
            raise DataError(f"folder: {root} must have at least two classes, got only {only!r}{_advice(root, only)}")
        if directories is None:
            return reference, reference if split == "all" else self._split_by_hash(reference, split)
        if split == "all":
            parts = [self._find_files(root, name)[1] for name in directories]
            return reference, {name: [path for part in parts for path in part.get(name, [])] for name in reference}
        if split not in directories:
            available = join_quoted([directory.name for directory in directories.values()], "and")
            raise DataError(f"folder: {root} has no directory for the split {split!r}, only {available}")
        selected = _find_images_by_class(directories[split])
        if not set(selected) <= set(reference):
            unknown = join_quoted(sorted(set(selected) - set(reference)), "and")
            raise DataError(f"folder: {directories[split]} has classes that the training split has not: {unknown}")
        return reference, selected

    def _select_classes(self, root: Path, files: dict[str, list[Path]]) -> dict[str, list[Path]]:
        """Return the files of each of `classes`, none of those without a subdirectory; raise a DataError for others."""
        unknown = [name for name in files if name not in self.classes]
        if unknown:
            known = join_quoted(self.classes[:MAX_CLASSES_SHOWN], "and")
            more = f" and {len(self.classes) - MAX_CLASSES_SHOWN} more" if len(self.classes) > MAX_CLASSES_SHOWN else ""
            raise DataError(
                f"folder: {root} must have subdirectories named like the classes {known}{more}, got "
                f"{join_quoted(unknown[:MAX_CLASSES_SHOWN], 'and')}{_advice(root, unknown[0])}"
            )
        return {name: files.get(name, []) for name in self.classes}

    def find_splits(self, root: Path) -> tuple[str, ...]:
        """Return the non-empty splits of a directory of images, without ``"all"``."""
        directories = _find_split_directories(root)
        if directories is not None:
            return tuple(directories)
        files = _find_images_by_class(root)
        return tuple(split for split in SPLIT_NAMES if any(self._split_by_hash(files, split).values()))

    @staticmethod
    def has_split_directories(root: Path) -> bool:
        """Return whether a directory of images has subdirectories ``train``, ``val`` or ``test``."""
        with warnings.catch_warnings(action="ignore"):
            return _find_split_directories(root) is not None

    def _image_format(self, paths: list[Path]) -> tuple[ImageFormat, str]:
        """Return the common format of the images of all splits, and a remark if they are reduced to it."""
        inferred, sizes = infer_format(paths, self.fit, self.max_megapixels)
        size = inferred.size if self.size is None else (self.size, self.size)
        channels = {"auto": inferred.channels, "gray": 1, "color": 3}[self.channels]
        image_format = dataclasses.replace(inferred, size=size, channels=channels)
        return image_format, describe_resize(image_format, sizes)

    def _split_by_hash(self, files: dict[str, list[Path]], split: str) -> dict[str, list[Path]]:
        """Return the files of a split, for each class those with the first or last hashes."""
        selected: dict[str, list[Path]] = {}
        for name, paths in files.items():
            if not paths:  # a class without images
                selected[name] = []
                continue
            ordered = sorted(
                paths, key=lambda path: sha256(os.fsencode(f"{self.seed}/{_path_from(path, name)}")).digest()
            )
            sizes = {}
            for other, fraction in (("test", self.test_fraction), ("val", self.val_fraction)):
                count = round(fraction * len(ordered))
                sizes[other] = max(count, 1) if fraction and len(ordered) >= 3 else min(count, len(ordered) - 1)
            while sum(sizes.values()) >= len(ordered):  # keep at least one training image
                sizes[max(sizes, key=lambda key: sizes[key])] -= 1
            n_test, n_val = sizes["test"], sizes["val"]
            splits = {
                "test": ordered[:n_test],
                "val": ordered[n_test : n_test + n_val],
                "train": ordered[n_test + n_val :],
            }
            selected[name] = sorted(splits[split])
        return selected


def _advice(root: Path, name: str) -> str:
    """Return the end of an error message: advice if a subdirectory is a split or contains the classes, or empty."""
    if name.lower() in {other for names in SPLIT_NAMES.values() for other in names}:
        return ": pass this directory, or add another of train, val and test next to it"
    inner = [path.name for path in _subdirectories(root / name) if find_image_files(path)]
    if len(inner) < 2:
        return ""
    shown = join_quoted(inner[:MAX_CLASSES_SHOWN], "and")
    return f": pass {root / name} if its subdirectories, such as {shown}, are the classes"


def _path_from(path: Path, class_name: str) -> str:
    """Return the part of a file's path that starts with the directory of its class."""
    parts = path.parts
    start = len(parts) - 1 - parts[::-1].index(class_name)
    return "/".join(parts[start:])


def _find_split_directories(root: Path) -> dict[str, Path] | None:
    """Return the directories of the splits, or ``None`` if there are fewer than two; warn about other directories."""
    directories = {path.name.lower(): path for path in _subdirectories(root)}
    found = {}
    for split, names in SPLIT_NAMES.items():
        for name in names:
            if name in directories:
                found[split] = directories.pop(name)
                break
    if len(found) < 2:
        return None
    names = join_quoted([directory.name for directory in found.values()], "and")
    if "train" not in found:
        raise DataError(f"folder: {root} has the directories {names} but no directory 'train'")
    for other in directories.values():
        if find_image_files(other):
            warnings.warn(f"folder: {other} is ignored: it is not one of the split directories {names}", stacklevel=2)
    return found


def _subdirectories(directory: Path) -> list[Path]:
    """Return the subdirectories, without hidden ones and those of other programs (.git, __MACOSX)."""
    return sorted(path for path in directory.iterdir() if path.is_dir() and not path.name.startswith((".", "__")))


def find_image_files(directory: Path) -> list[Path]:
    """Return all image files below a directory."""
    files = (p for p in directory.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES and not p.name.startswith("."))
    return sorted(path for path in files if path.is_file())


def _find_images_by_class(directory: Path) -> dict[str, list[Path]]:
    """Return the image files below each subdirectory; raise a DataError if these are not classes."""
    files = {}
    for subdirectory in _subdirectories(directory):
        files[subdirectory.name] = find_image_files(subdirectory)
        if not files[subdirectory.name]:
            suffixes = ", ".join(sorted(IMAGE_SUFFIXES))
            raise DataError(f"folder: the class directory {subdirectory} has no images ({suffixes}): fill or remove it")
    nested = [{path.name for path in _subdirectories(directory / name)} for name in files]
    named_like_splits = any("train" in name.lower() for name in files)  # for example seg_train and seg_test
    if named_like_splits and len(files) > 1 and nested[0] and all(names == nested[0] for names in nested):
        inner = join_quoted(sorted(nested[0]), "and")
        raise DataError(
            f"folder: {join_quoted(files, 'and')} in {directory} all contain the directories {inner}: if these are the "
            "classes, rename the directories above them to train, val and test"
        )
    if not files:
        raise DataError(f"folder: {directory} has no subdirectories: expected one subdirectory of images per class")
    return files


register_dataset("folder", Folder())
