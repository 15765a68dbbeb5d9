"""Data directory: where the files of data sets are stored, downloaded to and extracted.

Every file is written atomically: downloads and extracted archives appear under their final names only when complete.
"""

import contextlib
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from torchcaps._core.files import move_into_place, reason_of, staging_directory, write_atomic
from torchcaps._core.optional import import_optional
from torchcaps._core.progress import DownloadBar
from torchcaps.data.archives import extract_member, is_intact_zip
from torchcaps.data.published import (
    ArchiveMember,
    DataError,
    DownloadError,
    MissingDataError,
    RemoteFile,
    checksum_matches,
    file_digest,
)

__all__ = [
    "ArchiveMember",
    "DataDirectory",
    "DataError",
    "DownloadError",
    "MissingDataError",
    "RemoteFile",
    "cache_root",
    "check_observed_checksum",
    "checksum_matches",
    "data_root",
    "download_file",
]

DATA_VARIABLE = "TORCHCAPS_DATA"
MIRROR_VARIABLE = "TORCHCAPS_MIRROR"  # URL of a mirror that is tried first: URL/mnist/FILE
RECORD_SUFFIX = ".sha256"
MAX_DOWNLOAD_BYTES = 4 << 30  # of a file of unknown size; affNIST's largest archive has less than 1 GB
DOWNLOAD_TIMEOUT_S = 30  # without receiving a byte


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
        member_checksums: published checksums of files in archives, by path in the archive; verified when extracting.
    """

    dataset: str
    root: Path
    subdirectories: tuple[str, ...]
    download: bool = True
    member_checksums: Mapping[str, str] = field(default_factory=dict)

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
            MissingDataError: if it does not exist and ``download`` is false.
            DownloadError: if all mirrors fail or the directory can't be written.
        """
        path = self.find(file)
        if path is not None:
            return path
        if isinstance(file, ArchiveMember):
            archive = self.fetch(file.archive) if self.download else self.find(file.archive)
            if archive is None:
                raise self._missing_error(file.name)
            if not file.archive.checksum:
                check_observed_checksum(archive)
            extract_member(archive, self.download_directory, file.name, self.member_checksums)
            return self.download_directory / file.name
        if not self.download:
            raise self._missing_error(file.name)
        try:
            return download_file(file.name, self._urls(file), file.checksum, self.download_directory, file.size)
        except DownloadError as error:
            raise self._missing_error(file.name, str(error)) from error

    def _urls(self, file: RemoteFile) -> list[str]:
        """Return the URLs of a file: on the user's mirror, by https, and by http if a checksum can be verified."""
        custom = os.environ.get(MIRROR_VARIABLE, "").rstrip("/")
        if custom and not custom.startswith(("http://", "https://")):
            raise DataError(f"{MIRROR_VARIABLE} must be a URL such as https://example.org/data, got {custom!r}")
        mirrors = [f"{custom}/{self.subdirectories[0]}/"] if custom else []
        mirrors += [mirror for mirror in file.mirrors if mirror.startswith("https:")]
        if file.checksum:
            mirrors += [mirror for mirror in file.mirrors if not mirror.startswith("https:")]
        return [mirror + file.name for mirror in mirrors]

    def _missing_error(self, name: str, reason: str = "") -> MissingDataError:
        """Return the error for a missing file, a `DownloadError` if there is a reason why its download failed."""
        failed = f" and could not be downloaded ({reason})" if reason else ""
        command = "" if reason else f"download it with 'torchcaps data get {self.dataset}', or "
        kind = DownloadError if reason else MissingDataError
        return kind(
            f"{self.dataset}: {name} is missing{failed}: {command}copy it to {self.download_directory}, or name the "
            f"directory that contains it (--data-dir, root= or {DATA_VARIABLE}); the data set 'digits' needs no files"
        )


# Download ---------------------------------------------------------------------------------------------------


class _TooLargeError(ValueError):
    """A mirror sends more bytes than the file has."""


class _LimitedFile:
    """File that raises an error when more than a number of bytes are written to it."""

    def __init__(self, file: IO[bytes], max_bytes: int) -> None:
        self.file, self.max_bytes = file, max_bytes

    def write(self, data: bytes) -> None:
        if self.file.tell() + len(data) > self.max_bytes:
            raise _TooLargeError(f"more than {self.max_bytes:,} bytes")
        self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


class _BrokenArchiveError(ValueError):
    """A downloaded archive without a published checksum is truncated or not an archive."""


def download_file(name: str, urls: Sequence[str], checksum: str, directory: Path, size: int = 0) -> Path:
    """Download a file from the first mirror that serves it intact, and return its path.

    The file is downloaded to a staging directory, verified, and then renamed: a file with the final name is always
    complete, and concurrent processes do not interfere. A file without a published checksum must be a zip archive
    whose member CRCs are correct; a warning reports this, and the SHA-256 that it has is recorded in ``NAME.sha256``.

    Args:
        name: file name.
        urls: its URL on each mirror, in the order in which they are tried.
        checksum: ``"md5:..."``, ``"sha256:..."``, or empty.
        directory: target directory; created if missing.
        size: size of the file in bytes, if known. A download ends when it exceeds it, or else `MAX_DOWNLOAD_BYTES`.

    Raises:
        DownloadError: if all mirrors fail or the directory can't be written.
    """
    pooch = import_optional("pooch", f"downloading {name}")
    exceptions = import_optional("requests.exceptions", f"downloading {name}")
    logger = pooch.get_logger()
    level = logger.level
    logger.setLevel("ERROR")  # failures are reported in the DownloadError
    failures = []
    created = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        with staging_directory(directory) as staging:
            for url in urls:
                try:
                    with DownloadBar(name) as bar:
                        downloader = _create_downloader(pooch, bar, size or MAX_DOWNLOAD_BYTES)
                        pooch.retrieve(url, checksum or None, fname=name, path=staging, downloader=downloader)
                    if not checksum and not is_intact_zip(staging / name):
                        (staging / name).unlink()
                        raise _BrokenArchiveError
                    if not checksum:
                        _record_checksum(staging / name, directory)
                    move_into_place(staging / name, directory / name)
                    return directory / name
                except (exceptions.RequestException, ValueError) as error:
                    failures.append(_describe_failure(url, error))
    except OSError as error:
        raise DownloadError(f"can't write to {directory}: {reason_of(error)}") from error
    finally:
        logger.setLevel(level)
    with contextlib.suppress(OSError):
        for path in created:
            path.rmdir()  # leave no empty directories behind
    raise DownloadError("; ".join(failures))


def _create_downloader(pooch: Any, bar: DownloadBar, max_bytes: int) -> Callable[[str, str, Any], None]:
    """Return a downloader for ``pooch.retrieve`` with a progress bar and a size limit."""
    download = pooch.HTTPDownloader(timeout=DOWNLOAD_TIMEOUT_S, progressbar=bar)

    def download_limited(url: str, output_file: str, owner: Any) -> None:
        with open(output_file, "wb") as file:
            download(url, _LimitedFile(file, max_bytes), owner)

    return download_limited


def _record_checksum(path: Path, directory: Path) -> None:
    """Write the SHA-256 of a file to ``NAME.sha256`` in a directory, in the format of sha256sum, and report it."""
    digest = file_digest(path, "sha256")
    record = directory / f"{path.name}{RECORD_SUFFIX}"
    write_atomic(record, f"{digest}  {path.name}\n")
    warnings.warn(
        f"{path.name}: no checksum was published; the downloaded file has the SHA-256 {digest}, recorded in {record}",
        stacklevel=2,
    )


def check_observed_checksum(path: Path) -> None:
    """Raise a DataError if a file differs from the one that was downloaded, whose SHA-256 is recorded next to it."""
    record = path.with_name(path.name + RECORD_SUFFIX)
    if record.is_file():
        expected = record.read_text(encoding="utf-8", errors="replace").partition(" ")[0]
        if not checksum_matches(path, f"sha256:{expected}"):
            raise DataError(
                f"{path} has changed since its download: its SHA-256 is not that in {record.name}; delete both to "
                "download it again"
            )


def _describe_failure(url: str, error: Exception) -> str:
    """Return one clause about why a mirror failed."""
    host = urlsplit(url).netloc or url
    response = getattr(error, "response", None)
    if response is not None:
        return f"{host}: HTTP status {response.status_code}"
    if isinstance(error, _TooLargeError):
        return f"{host}: {error}"
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
