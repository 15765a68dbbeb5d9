"""Where data sets lie: the folder, the official names in it, and how a missing file is fetched."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from torchcaps._core.optional import import_optional
from torchcaps.data.archives import unpack
from torchcaps.data.download import download
from torchcaps.data.errors import DataError, MissingData

__all__ = ["File", "Member", "Place", "cache_root", "checksum_matches", "data_root"]

VARIABLE = "TORCHCAPS_DATA"
MIRROR = "TORCHCAPS_MIRROR"  # an address of the user's own that is tried first: ADDRESS/mnist/FILE


@dataclass(frozen=True)
class File:
    """A file of an official data set.

    Args:
        name: as its site has it.
        checksum: ``md5:...`` or ``sha256:...`` as published; empty where none is.
        mirrors: addresses of folders on the network that hold it, the best first.
        size: bytes of the download, 0 where it is not known.
        also: other names that it goes by, unpacked for instance.
    """

    name: str
    checksum: str
    mirrors: tuple[str, ...]
    size: int = 0
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class Member:
    """A file that comes in an archive.

    Args:
        name: its path in the archive, as ``cifar-10-batches-bin/test_batch.bin``.
        archive: where it comes from.
        checksum: of the member itself, where it is known.
    """

    name: str
    archive: File
    checksum: str = ""


def data_root(root: str | os.PathLike[str] | None = None) -> Path:
    """Return the data folder: the one given, else ``TORCHCAPS_DATA``, else a cache folder of the user's."""
    chosen = os.fspath(root) if root is not None else os.environ.get(VARIABLE, "")
    if chosen:
        return Path(chosen).expanduser()
    return cache_root() / "data"


def cache_root() -> Path:
    """Return the user's cache folder, as the system has it."""
    folders = import_optional(
        "platformdirs", f"finding your cache folder (set {VARIABLE}, or give root, to do without)"
    )
    return Path(folders.user_cache_dir("torchcaps", appauthor=False))


@dataclass(frozen=True)
class Place:
    """A data folder, as one data set sees it.

    Args:
        dataset: the name of the data set, for what is said to the user.
        root: the data folder.
        folders: where below it files are looked for; the first is where downloads go.
        fetch: whether missing files are downloaded.
    """

    dataset: str
    root: Path
    folders: tuple[str, ...]
    fetch: bool = True

    @property
    def home(self) -> Path:
        """Where downloads go."""
        return self.root / self.folders[0]

    def find(self, part: File | Member) -> Path | None:
        """Return where a file lies, or ``None``."""
        names = (part.name, *part.also) if isinstance(part, File) else (part.name,)
        paths = (self.root / folder / name for name in names for folder in self.folders)
        return next((path for path in paths if path.is_file()), None)

    def has(self, part: File | Member) -> bool:
        """Return whether a file is there, or the archive that it comes in."""
        return self.find(part) is not None or (isinstance(part, Member) and self.find(part.archive) is not None)

    def path(self, part: File | Member) -> Path:
        """Return where a file lies; it is unpacked or fetched if need be."""
        found = self.find(part)
        if found is not None:
            return found
        if isinstance(part, Member):
            archive = self.path(part.archive) if self.fetch else self.find(part.archive)
            if archive is None:
                raise self._missing(part.name)
            unpack(archive, self.home, part.name)
            return self.home / part.name
        if not self.fetch:
            raise self._missing(part.name)
        try:
            return download(part.name, self._addresses(part), part.checksum, self.home)
        except MissingData as error:
            raise self._missing(part.name, str(error)) from error

    def _addresses(self, file: File) -> list[str]:
        own = os.environ.get(MIRROR, "").rstrip("/")
        if own and not own.startswith(("http://", "https://")):
            raise DataError(f"{MIRROR} must be an address such as https://example.org/data, got {own!r}")
        mirrors = (f"{own}/{self.folders[0]}/", *file.mirrors) if own else file.mirrors
        return [mirror + file.name for mirror in mirrors]

    def _missing(self, name: str, reason: str = "") -> MissingData:
        tried = f" and could not be fetched ({reason})" if reason else ""
        fetch = "" if reason else f"'torchcaps data get {self.dataset}' fetches it; or "
        return MissingData(
            f"{self.dataset}: {name} is missing{tried}: {fetch}put it into {self.home}, or name the folder that has it "
            f"by --data-dir, root= or {VARIABLE}; the data set 'digits' needs no file"
        )


def checksum_matches(path: Path, checksum: str) -> bool:
    """Return whether a file has the published checksum."""
    kind, _, wanted = checksum.partition(":")
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(kind, usedforsecurity=False)).hexdigest() == wanted
