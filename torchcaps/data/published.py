"""Files of data sets as they were published: names, mirrors and checksums, and the errors about them."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "ArchiveMember",
    "DataError",
    "DownloadError",
    "MissingDataError",
    "RemoteFile",
    "checksum_matches",
    "file_digest",
]


class DataError(ValueError):
    """A data file or directory is missing, unreadable, or has unexpected content.

    >>> from torchcaps.data import create_dataset
    >>> try:
    ...     create_dataset("svhn", root="empty", download=False)
    ... except DataError as error:
    ...     print(type(error).__name__)
    MissingDataError
    """


class MissingDataError(DataError):
    """A data file does not exist and was not or could not be downloaded.

    >>> from torchcaps.data import create_dataset
    >>> try:
    ...     create_dataset("cifar10", root="empty", download=False)
    ... except MissingDataError:
    ...     print("not downloaded")
    not downloaded
    """


class DownloadError(MissingDataError, OSError):
    """A data file could not be downloaded or written: a failure of network or disk, not an invalid argument.

    >>> issubclass(DownloadError, OSError)
    True
    """


@dataclass(frozen=True)
class RemoteFile:
    """A downloadable file of a data set.

    Args:
        name: file name on the official site.
        checksum: published checksum, ``"md5:..."`` or ``"sha256:..."``; empty if none was published.
        mirrors: URLs of directories that contain the file, in the order in which they are tried.
        size: download size in bytes; 0 if unknown.
        aliases: other names under which the file may be stored, for example decompressed.
    """

    name: str
    checksum: str
    mirrors: tuple[str, ...]
    size: int = 0
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class ArchiveMember:
    """A file that is distributed inside an archive.

    Args:
        name: path in the archive, such as ``cifar-10-batches-bin/test_batch.bin``.
        archive: the archive that contains it.
        checksum: published checksum of the member itself; empty if none was published.
    """

    name: str
    archive: RemoteFile
    checksum: str = ""


def file_digest(path: Path, algorithm: str) -> str:
    """Return a hash of a file, such as ``"md5"`` or ``"sha256"``, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()


def checksum_matches(path: Path, checksum: str) -> bool:
    """Return whether a file has a checksum given as ``"md5:..."`` or ``"sha256:..."``."""
    algorithm, _, expected = checksum.partition(":")
    return file_digest(path, algorithm) == expected
