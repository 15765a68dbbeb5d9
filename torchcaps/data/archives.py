"""Archives: zip and tar files, read to their end and extracted atomically.

An archive comes from outside. Its members may have any path, be links, or be damaged: nothing is written unless all of
it is valid.
"""

import contextlib
import errno
import gzip
import io
import lzma
import shutil
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import IO

from torchcaps._core.files import move_tree_into_place, reason_of, staging_directory
from torchcaps.data.published import DataError, checksum_matches

__all__ = ["extract_member", "is_intact_zip"]

READ_CHUNK_BYTES = 1 << 20
MAX_READ_BYTES = 1 << 24
MAX_MEMBER_BYTES = 8 << 30  # affNIST's training images have 2.6 GB
MAX_TOTAL_BYTES = 32 << 30
MAX_RATIO = 100  # extracted bytes per byte of the archive; affNIST's compress to a tenth
MIN_LIMIT_BYTES = 64 << 20  # small archives may exceed the ratio
ARCHIVE_ERRORS = (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, lzma.LZMAError, zlib.error, EOFError)


def is_intact_zip(path: Path) -> bool:
    """Return whether a file is a zip archive whose members all have their CRC."""
    try:
        with zipfile.ZipFile(path) as file:
            _check_zip(file, path)
            return file.testzip() is None
    except (*ARCHIVE_ERRORS, RuntimeError, DataError):
        return False
    except OSError as error:
        if error.errno != errno.EINVAL:  # a negative offset in the archive
            raise
        return False


def extract_member(archive: Path, directory: Path, member: str, checksums: Mapping[str, str] | None = None) -> None:
    """Extract the top-level directory of an archive that contains ``member``, or a ``member`` at the top level alone.

    Args:
        archive: a zip, tar or tar.gz file. It is read to the end, where gzip stores a CRC.
            Its size when extracted is limited.
        directory: target directory.
        member: path in the archive.
        checksums: published checksums by path in the archive, as ``"md5:..."`` or ``"sha256:..."``.

    Raises:
        DataError: if the archive is corrupt, lacks the member, has a member with another checksum than the published
            one, or contains a link, a device or a path outside of ``directory``. Nothing is written then.
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
                    checksum = (checksums or {}).get(name, "")
                    if checksum and not checksum_matches(path, checksum):
                        raise DataError(
                            f"{archive} is corrupt ({name} does not have the published checksum {checksum}): delete it "
                            "to download it again"
                        )
            if not (staging / member).is_file():
                raise DataError(f"{archive} does not contain {member}: delete it to download it again")
            move_tree_into_place(staging / top, directory / top)
    except DataError:
        raise
    except (*ARCHIVE_ERRORS, RuntimeError, ValueError, struct.error) as error:  # RuntimeError: for example encrypted
        reason = (str(error).splitlines() or ["unexpected end of file"])[0].rstrip(":")
        raise DataError(f"{archive} is corrupt ({reason}): delete it to download it again") from error
    except OSError as error:
        if error.errno == errno.EINVAL:  # a negative offset in the archive
            raise DataError(f"{archive} is corrupt (invalid offset): delete it to download it again") from error
        raise DataError(f"can't extract {archive} to {directory}: {reason_of(error)}") from error


def _iterate_files(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield the name and content of each file of a zip or tar archive, after checking all names and sizes."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as file:
            for entry in (entries := _check_zip(file, archive)):
                _check_member_path(archive, entry.filename)
                if stat.S_ISLNK(entry.external_attr >> 16):
                    raise DataError(f"{archive} contains the link {entry.filename!r}: not extracted")
            for entry in entries:
                with file.open(entry) as content:
                    yield str(PurePosixPath(entry.filename)), content
        return
    with _open_maybe_gzipped(archive) as stream, tarfile.open(fileobj=stream, mode="r:") as file:
        members, total = [], 0
        for member in file:
            total += member.size
            _check_sizes(archive, member.name, member.size, total)
            if member.isdir():
                continue
            _check_member_path(archive, member.name)
            if not member.isfile():
                raise DataError(f"{archive} contains the link or device {member.name!r}: not extracted")
            members.append(member)
        for member in members:
            content = file.extractfile(member)
            assert content is not None, "a regular file has content"
            with content:
                yield str(PurePosixPath(member.name)), content
        while chunk := stream.read(READ_CHUNK_BYTES):  # the CRC of a gzip file is after the end of the tar archive
            total += len(chunk)
            _check_sizes(archive, "data after the last member", 0, total)


def _check_zip(file: zipfile.ZipFile, archive: Path) -> list[zipfile.ZipInfo]:
    """Return the files of a zip archive; raise a DataError if they are too large or unusually compressed.

    zipfile never returns more bytes than the size that is announced.
    """
    if not all(entry.filename for entry in file.infolist()):
        raise DataError(f"{archive} is corrupt (a member without a name): delete it to download it again")
    entries, total = [entry for entry in file.infolist() if not entry.is_dir()], 0
    for entry in entries:
        total += entry.file_size
        _check_sizes(archive, entry.filename, entry.file_size, total)
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # LZMA takes up to 4 GB to decompress
            raise DataError(f"{archive} is corrupt (compression method {entry.compress_type} of {entry.filename!r})")
    return entries


def _check_sizes(archive: Path, name: str, size: int, total: int) -> None:
    """Raise a DataError if a member, or all of them so far, exceed a limit: a small archive can fill any disk."""
    most = min(MAX_TOTAL_BYTES, max(MIN_LIMIT_BYTES, MAX_RATIO * archive.stat().st_size))
    if size > MAX_MEMBER_BYTES or total > most:
        value, limit = (size, MAX_MEMBER_BYTES) if size > MAX_MEMBER_BYTES else (total, most)
        raise DataError(
            f"{archive} is too large when extracted: {value:,} bytes with {name!r}, at most {limit:,} are allowed"
        )


class _CappedReader(io.RawIOBase):
    """A readable, seekable file that refuses to return more than `MAX_READ_BYTES` at once.

    tarfile reads extended headers as a whole, however long they claim to be.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file

    def read(self, size: int = -1, /) -> bytes:
        if not 0 <= size <= MAX_READ_BYTES:
            raise tarfile.ReadError(f"header of {size:,} bytes")
        return self.file.read(size)

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        return self.file.seek(offset, whence)

    def tell(self) -> int:
        return self.file.tell()


@contextlib.contextmanager
def _open_maybe_gzipped(path: Path) -> Iterator[_CappedReader]:
    """Context manager: open a file, decompressed if it is gzipped, as a reader with limited reads."""
    with path.open("rb") as file:
        gzipped = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        with gzip.open(file) if gzipped else contextlib.nullcontext(file) as content:
            yield _CappedReader(content)  # type: ignore[arg-type]


def _check_member_path(archive: Path, name: str) -> None:
    """Raise a DataError if a member would be written outside of the target directory."""
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or ":" in name or not path.parts:
        raise DataError(f"{archive} contains the path {name!r}, outside of its directory: not extracted")
