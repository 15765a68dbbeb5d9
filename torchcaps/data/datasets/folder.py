"""Your own images: a folder with one sub-folder a class."""

import os
import warnings
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import ClassVar, Literal

import torch

from torchcaps._core.validation import check_range, join_quoted
from torchcaps.data.base import Dataset, ImageSet
from torchcaps.data.errors import DataError
from torchcaps.data.images import Form, common_form, read_pictures
from torchcaps.data.registry import register
from torchcaps.data.spec import DataSpec, Request

__all__ = ["Folder"]

SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
SPLITS = {"train": ("train", "training"), "val": ("val", "valid", "validation", "dev"), "test": ("test", "testing")}


@dataclass(frozen=True)
class Folder(DataSpec):
    """Images in a folder with one sub-folder a class, or with folders ``train``, ``test`` and, if you like, ``val``
    that have one sub-folder a class.

    Without such folders the images of each class are split at random, but always in the same way: by a hash of their
    names, so that new images hardly move the old ones. Decoded images are kept in your cache folder for a month after
    they were last used.

    Args:
        size: height and width in pixels; ``None``: as they are, where all have one size of at most 96, else squares of
            their median shorter side, at most 64.
        channels: ``"grey"``, ``"colour"``, or ``"auto"``: grey where all images are.
        fit: how an image of another shape is made to fit: ``"crop"`` its middle, ``"pad"`` it with black, or
            ``"stretch"`` it. What is transparent becomes white; grey levels of 16 bits are divided by 257.
        broken: what to do about images that can't be read: ``"fail"``, or ``"skip"`` them with a warning.
        val, test: shares of the images that are held out where there are no folders for it.
        seed: of that split.
        cache: whether to keep decoded images for the next time.
    """

    title: ClassVar[str] = "your own images: a folder with one sub-folder a class"
    splits: ClassVar[tuple[str, ...]] = ("train", "val", "test")
    n_classes: ClassVar[int | None] = None

    size: int | None = None
    channels: Literal["auto", "grey", "colour"] = "auto"
    fit: Literal["crop", "pad", "stretch"] = "crop"
    broken: Literal["fail", "skip"] = "fail"
    val: float = 0.1
    test: float = 0.1
    seed: int = 0
    cache: bool = True

    def check(self) -> None:
        """Refuse sizes without pixels, and shares that leave nothing to learn from."""
        check_range(self, "size", 1, 4096)
        check_range(self, "seed", -(2**63), 2**63 - 1)
        check_range(self, "val", 0, 1)
        check_range(self, "test", 0, 1)
        if self.val + self.test >= 1:
            raise ValueError(f"folder: val and test must leave something to train with, got {self.val} and {self.test}")

    def load(self, request: Request) -> Dataset:
        """Read the images of a part."""
        if request.root is None:
            raise DataError(
                "folder: which one? Give it as root=, as --data-dir, or as the name itself: create_dataset('./images')"
            )
        root = Path(os.fspath(request.root)).expanduser()
        if not root.is_dir():
            raise DataError(f"folder: {root} is no folder: it must be one with a sub-folder of images for each class")
        example, chosen = self._found(root, request.split)
        classes = list(example)
        files = [(path, number) for number, name in enumerate(classes) for path in chosen.get(name, [])]
        if not files:
            raise DataError(f"folder: the split {request.split!r} of {root} is empty: there are too few images for it")
        form = self._form([path for paths in example.values() for path in paths])
        images, kept = read_pictures([path for path, _ in files], form, self.broken == "skip", self.cache)
        labels = torch.tensor([number for _, number in files])[kept]
        return ImageSet(root.resolve().name, request.split, images, labels, classes)

    def _found(self, root: Path, split: str) -> tuple[dict[str, list[Path]], dict[str, list[Path]]]:
        """Return the files by class: those that say which classes there are and what form they have, and a split's."""
        folders = _split_folders(root)
        example = _by_class(folders["train"] if folders else root)
        if len(example) < 2:
            (only,) = example
            alone = only.lower() in {name for names in SPLITS.values() for name in names}
            advice = ": give it itself, or put another of train, val and test beside it" if alone else ""
            raise DataError(f"folder: {root} has one class, {only!r}, and there is nothing to tell it from{advice}")
        if folders is None:
            return example, self._part(example, split)
        if split not in folders:
            there = join_quoted([folder.name for folder in folders.values()], "and")
            raise DataError(f"folder: {root} has no folder for the split {split!r}: it has {there}")
        chosen = _by_class(folders[split])
        if not set(chosen) <= set(example):
            different = sorted(set(chosen) - set(example))
            raise DataError(f"folder: {folders[split]} has classes that train has not: {join_quoted(different, 'and')}")
        return example, chosen

    def splits_of(self, root: Path) -> tuple[str, ...]:
        """Return the parts that a folder has."""
        by_split = _split_folders(root)
        if by_split is not None:
            return tuple(by_split)
        found = _by_class(root)
        return tuple(split for split in self.splits if any(self._part(found, split).values()))

    def _form(self, paths: list[Path]) -> Form:
        """Return the form that all images, of all splits, are brought into."""
        found = common_form(paths, self.fit)
        size = found.size if self.size is None else (self.size, self.size)
        return Form(size, {"auto": found.channels, "grey": 1, "colour": 3}[self.channels], self.fit)

    def _part(self, found: dict[str, list[Path]], split: str) -> dict[str, list[Path]]:
        """Return one part of each class's images, in the order of their hashes."""
        part = {}
        for name, paths in found.items():
            mixed = sorted(paths, key=lambda path: sha256(os.fsencode(f"{self.seed}/{_below(path, name)}")).digest())
            held = {}
            for other, share in (("test", self.test), ("val", self.val)):
                count = round(share * len(mixed))
                held[other] = max(count, 1) if share and len(mixed) >= 3 else min(count, len(mixed) - 1)
            while sum(held.values()) >= len(mixed):  # one at least is to be learnt from
                held[max(held, key=lambda key: held[key])] -= 1
            n_test, n_val = held["test"], held["val"]
            parts = {"test": mixed[:n_test], "val": mixed[n_test : n_test + n_val], "train": mixed[n_test + n_val :]}
            part[name] = sorted(parts[split])
        return part


def _below(path: Path, class_name: str) -> str:
    """Return a file's path from its class's folder on."""
    parts = path.parts
    start = len(parts) - 1 - parts[::-1].index(class_name)
    return "/".join(parts[start:])


def _split_folders(root: Path) -> dict[str, Path] | None:
    """Return the folders of the splits, where there is one for training and one for another."""
    folders = {path.name.lower(): path for path in _sub_folders(root)}
    found = {}
    for split, names in SPLITS.items():
        for name in names:
            if name in folders:
                found[split] = folders.pop(name)
                break
    if len(found) >= 2 and "train" not in found:
        names = join_quoted([folder.name for folder in found.values()], "and")
        raise DataError(f"folder: {root} has {names} but no folder 'train' to learn from")
    if len(found) < 2:
        return None
    for other in folders.values():
        if _images_below(other):
            names = join_quoted([folder.name for folder in found.values()], "and")
            warnings.warn(f"folder: {other} is left out: it is none of the splits {names}", stacklevel=2)
    return found


def _sub_folders(folder: Path) -> list[Path]:
    """Return the folders in a folder but for what programs put there, such as .git and __MACOSX."""
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith((".", "__")))


def _images_below(folder: Path) -> list[Path]:
    files = (p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES and not p.name.startswith("."))
    return sorted(path for path in files if path.is_file())


def _by_class(folder: Path) -> dict[str, list[Path]]:
    """Return the image files below each sub-folder."""
    found = {}
    for sub_folder in _sub_folders(folder):
        found[sub_folder.name] = _images_below(sub_folder)
        if not found[sub_folder.name]:
            kinds = ", ".join(sorted(SUFFIXES))
            raise DataError(f"folder: {sub_folder} is a class without images ({kinds}): fill it, or remove it")
    inside = [{path.name for path in _sub_folders(folder / name)} for name in found]
    splits = any("train" in name.lower() for name in found)  # as in seg_train and seg_test
    if splits and len(found) > 1 and inside[0] and all(names == inside[0] for names in inside):
        names = join_quoted(found, "and")
        raise DataError(
            f"folder: {names} in {folder} all have the folders {join_quoted(sorted(inside[0]), 'and')}: "
            "are these the classes? Name the folders above them train, val and test"
        )
    if not found:
        raise DataError(f"folder: {folder} has no sub-folders: put the images of each class into one of their own")
    return found


register("folder", Folder())
