"""Archives: zip and tar files, read to their end and extracted atomically.

An archive comes from outside. Its members may have any path, be links, or be damaged: nothing is written unless all of
it is valid.
"""

import gzip
import lzma
import shutil
import stat
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
ARCHIVE_ERRORS = (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, lzma.LZMAError, zlib.error, EOFError)


def is_intact_zip(path: Path) -> bool:
    """Return whether a file is a zip archive whose members all have their CRC."""
    try:
        with zipfile.ZipFile(path) as file:
            return file.testzip() is None
    except (*ARCHIVE_ERRORS, RuntimeError):
        return False


def extract_member(archive: Path, directory: Path, member: str, checksums: Mapping[str, str] | None = None) -> None:
    """Extract the top-level directory of an archive that contains ``member``, or a ``member`` at the top level alone.

    Args:
        archive: a zip or tar file, the latter compressed or not. It is read to the end, where gzip stores a CRC.
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
        while file.fileobj is not None and file.fileobj.read(READ_CHUNK_BYTES):
            pass  # the CRC of a gzip file is after the end of the tar archive, and compared only if it is read


def _check_member_path(archive: Path, name: str) -> None:
    """Raise a DataError if a member would be written outside of the target directory."""
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or ":" in name or not path.parts:
        raise DataError(f"{archive} contains the path {name!r}, outside of its directory: not extracted")
