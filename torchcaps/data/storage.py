"""Data directory: where the files of data sets are stored, downloaded to and extracted.

Every file is written atomically: downloads and extracted archives appear under their final names only when complete.
"""

import contextlib
import gzip
import hashlib
import lzma
import os
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO
from urllib.parse import urlsplit

from torchcaps._core.files import move_into_place, move_tree_into_place, reason_of, staging_directory
from torchcaps._core.optional import import_optional
from torchcaps._core.progress import DownloadBar

__all__ = [
    "ArchiveMember",
    "DataDirectory",
    "DataError",
    "MissingDataError",
    "RemoteFile",
    "cache_root",
    "checksum_matches",
    "data_root",
    "download_file",
    "extract_member",
]

DATA_VARIABLE = "TORCHCAPS_DATA"
MIRROR_VARIABLE = "TORCHCAPS_MIRROR"  # URL of a mirror that is tried first: URL/mnist/FILE
DOWNLOAD_TIMEOUT_S = 30  # without receiving a byte
ARCHIVE_ERRORS = (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, lzma.LZMAError, zlib.error, EOFError)


class DataError(ValueError):
    """A data file or directory is missing, unreadable, or has unexpected content."""


class MissingDataError(DataError):
    """A data file does not exist and was not or could not be downloaded."""


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


def data_root(root: str | os.PathLike[str] | None = None) -> Path:
    """Return the data directory: ``root`` if given, else ``TORCHCAPS_DATA``, else a directory in the user's cache."""
    chosen = os.fspath(root) if root is not None else os.environ.get(DATA_VARIABLE, "")
    return Path(chosen).expanduser() if chosen else cache_root() / "data"


def cache_root() -> Path:
    """Return torchcaps' directory in the user's cache (``~/.cache/torchcaps`` on Linux)."""
    purpose = f"finding the user's cache directory (not needed if {DATA_VARIABLE}, --data-dir or root is set)"
    platformdirs = import_optional("platformdirs", purpose)
    return Path(platformdirs.user_cache_dir("torchcaps", appauthor=False))


@dataclass(frozen=True)
class DataDirectory:
    """The files of one data set below the data directory.

    Args:
        dataset: name of the data set, for error messages.
        root: the data directory.
        subdirectories: directories below ``root`` in which files are searched; downloads go to the first.
        download: download missing files.
    """

    dataset: str
    root: Path
    subdirectories: tuple[str, ...]
    download: bool = True

    @property
    def download_directory(self) -> Path:
        """Directory to which files are downloaded and archives are extracted."""
        return self.root / self.subdirectories[0]

    def find(self, file: RemoteFile | ArchiveMember) -> Path | None:
        """Return the path of a file, or ``None`` if it does not exist."""
        names = (file.name, *file.aliases) if isinstance(file, RemoteFile) else (file.name,)
        paths = (self.root / directory / name for name in names for directory in self.subdirectories)
        return next((path for path in paths if path.is_file()), None)

    def is_available(self, file: RemoteFile | ArchiveMember) -> bool:
        """Return whether a file, or the archive that contains it, exists locally."""
        return self.find(file) is not None or (isinstance(file, ArchiveMember) and self.find(file.archive) is not None)

    def fetch(self, file: RemoteFile | ArchiveMember) -> Path:
        """Return the path of a file; extract or download it if it does not exist.

        Raises:
            MissingDataError: if it does not exist and ``download`` is false, or if no mirror could be reached.
        """
        path = self.find(file)
        if path is not None:
            return path
        if isinstance(file, ArchiveMember):
            archive = self.fetch(file.archive) if self.download else self.find(file.archive)
            if archive is None:
                raise self._missing_error(file.name)
            extract_member(archive, self.download_directory, file.name)
            return self.download_directory / file.name
        if not self.download:
            raise self._missing_error(file.name)
        try:
            return download_file(file.name, self._urls(file), file.checksum, self.download_directory)
        except MissingDataError as error:
            raise self._missing_error(file.name, str(error)) from error

    def _urls(self, file: RemoteFile) -> list[str]:
        custom = os.environ.get(MIRROR_VARIABLE, "").rstrip("/")
        if custom and not custom.startswith(("http://", "https://")):
            raise DataError(f"{MIRROR_VARIABLE} must be a URL such as https://example.org/data, got {custom!r}")
        mirrors = (f"{custom}/{self.subdirectories[0]}/", *file.mirrors) if custom else file.mirrors
        return [mirror + file.name for mirror in mirrors]

    def _missing_error(self, name: str, reason: str = "") -> MissingDataError:
        failed = f" and could not be downloaded ({reason})" if reason else ""
        command = "" if reason else f"download it with 'torchcaps data get {self.dataset}', or "
        return MissingDataError(
            f"{self.dataset}: {name} is missing{failed}: {command}copy it to {self.download_directory}, or name the "
            f"directory that contains it (--data-dir, root= or {DATA_VARIABLE}); the data set 'digits' needs no files"
        )


def checksum_matches(path: Path, checksum: str) -> bool:
    """Return whether a file has a checksum given as ``"md5:..."`` or ``"sha256:..."``."""
    algorithm, _, expected = checksum.partition(":")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False))
    return digest.hexdigest() == expected


# Download ---------------------------------------------------------------------------------------------------


class _BrokenArchiveError(ValueError):
    """A downloaded archive without a published checksum is truncated or not an archive."""


def download_file(name: str, urls: Sequence[str], checksum: str, directory: Path) -> Path:
    """Download a file from the first mirror that serves it intact, and return its path.

    The file is downloaded to a staging directory, verified, and then renamed: a file with the final name is always
    complete, and concurrent processes do not interfere. A file without a published checksum must be a zip archive
    whose member CRCs are correct.

    Args:
        name: file name.
        urls: its URL on each mirror, in the order in which they are tried.
        checksum: ``"md5:..."``, ``"sha256:..."``, or empty.
        directory: target directory; created if missing.

    Raises:
        MissingDataError: if all mirrors fail or the directory can't be written.
    """
    pooch = import_optional("pooch", f"downloading {name}")
    exceptions = import_optional("requests.exceptions", f"downloading {name}")
    logger = pooch.get_logger()
    level = logger.level
    logger.setLevel("ERROR")  # failures are reported in the MissingDataError
    failures = []
    created = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        with staging_directory(directory) as staging:
            for url in urls:
                try:
                    with DownloadBar(name) as bar:
                        downloader = pooch.HTTPDownloader(timeout=DOWNLOAD_TIMEOUT_S, progressbar=bar)
                        pooch.retrieve(url, checksum or None, fname=name, path=staging, downloader=downloader)
                    if not checksum and not _is_intact_zip(staging / name):
                        (staging / name).unlink()
                        raise _BrokenArchiveError
                    move_into_place(staging / name, directory / name)
                    return directory / name
                except (exceptions.RequestException, ValueError) as error:
                    failures.append(_describe_failure(url, error))
    except OSError as error:
        raise MissingDataError(f"can't write to {directory}: {reason_of(error)}") from error
    finally:
        logger.setLevel(level)
    with contextlib.suppress(OSError):
        for path in created:
            path.rmdir()  # leave no empty directories behind
    raise MissingDataError("; ".join(failures))


def _describe_failure(url: str, error: Exception) -> str:
    """Return one clause about why a mirror failed."""
    host = urlsplit(url).netloc or url
    response = getattr(error, "response", None)
    if response is not None:
        return f"{host}: HTTP status {response.status_code}"
    if isinstance(error, _BrokenArchiveError):
        return f"{host}: truncated or invalid archive"
    kind, message = type(error).__name__, str(error)
    if "hash of downloaded file" in message:  # pooch raises a plain ValueError
        return f"{host}: checksum mismatch"
    if "Timeout" in kind or "timed out" in message.lower():
        return f"{host}: timeout"
    if "Chunked" in kind or "IncompleteRead" in message:
        return f"{host}: connection lost during transfer"
    return f"{host}: connection failed"


def _is_intact_zip(path: Path) -> bool:
    """Return whether a file is a zip archive whose members all have their CRC."""
    try:
        with zipfile.ZipFile(path) as file:
            return file.testzip() is None
    except (*ARCHIVE_ERRORS, RuntimeError):
        return False


# Archives ---------------------------------------------------------------------------------------------------


def extract_member(archive: Path, directory: Path, member: str) -> None:
    """Extract the top-level directory of an archive that contains ``member``, or a ``member`` at the top level alone.

    Raises:
        DataError: if the archive is corrupt, lacks the member, or contains a link, a device or a path outside of
            ``directory``. Nothing is written then.
    """
    top = PurePosixPath(member).parts[0]
    try:
        with staging_directory(directory) as staging:
            for name, content in _iterate_files(archive):
                if PurePosixPath(name).parts[0] == top:
                    path = staging / name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with path.open("wb") as file:
                        shutil.copyfileobj(content, file)
            if not (staging / member).is_file():
                raise DataError(f"{archive} does not contain {member}: delete it to download it again")
            move_tree_into_place(staging / top, directory / top)
    except DataError:
        raise
    except (*ARCHIVE_ERRORS, RuntimeError) as error:  # RuntimeError: encrypted, or an unknown compression method
        reason = (str(error).splitlines() or ["unexpected end of file"])[0].rstrip(":")
        raise DataError(f"{archive} is corrupt ({reason}): delete it to download it again") from error
    except OSError as error:
        raise DataError(f"can't extract {archive} to {directory}: {reason_of(error)}") from error


def _iterate_files(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield the name and content of each file of a zip or tar archive, after checking all names."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as file:
            entries = [entry for entry in file.infolist() if not entry.is_dir()]
            for entry in entries:
                _check_member_path(archive, entry.filename)
                if stat.S_ISLNK(entry.external_attr >> 16):
                    raise DataError(f"{archive} contains the link {entry.filename!r}: not extracted")
            for entry in entries:
                with file.open(entry) as content:
                    yield entry.filename, content
        return
    with tarfile.open(archive) as file:
        members = [member for member in file if not member.isdir()]
        for member in members:
            _check_member_path(archive, member.name)
            if not member.isfile():
                raise DataError(f"{archive} contains the link or device {member.name!r}: not extracted")
        for member in members:
            content = file.extractfile(member)
            assert content is not None, "a regular file has content"
            with content:
                yield str(PurePosixPath(member.name)), content


def _check_member_path(archive: Path, name: str) -> None:
    """Raise a DataError if a member would be written outside of the target directory."""
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or ":" in name or not path.parts:
        raise DataError(f"{archive} contains the path {name!r}, outside of its directory: not extracted")
