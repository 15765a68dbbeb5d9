"""Archives, unpacked with care: one folder of one archive, whole or not at all, and never outside its place."""

import gzip
import lzma
import os
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from torchcaps._core.files import staging_directory
from torchcaps.data.errors import DataError

__all__ = ["unpack", "whole_zip"]

BROKEN = (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, lzma.LZMAError, zlib.error, EOFError)


def whole_zip(path: Path) -> bool:
    """Return whether a file is a zip archive, all of whose members have their CRC."""
    try:
        with zipfile.ZipFile(path) as file:
            return file.testzip() is None
    except (*BROKEN, RuntimeError):
        return False


def unpack(archive: Path, folder: Path, wanted: str) -> None:
    """Unpack an archive's folder that a wanted file is in (or that file alone, at its top) into ``folder``.

    Raises:
        DataError: it is broken, lacks the file, or has a member that would land outside of ``folder`` or is no plain
            file or folder. Nothing is written then.
    """
    top = PurePosixPath(wanted).parts[0]
    try:
        with staging_directory(folder) as own:
            for name, content in _members(archive):
                if PurePosixPath(name).parts[0] == top:
                    path = own / name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with path.open("wb") as file:
                        shutil.copyfileobj(content, file)
            if not (own / wanted).is_file():
                raise DataError(f"{archive} has no {wanted}: it is not the archive it is named for")
            _move(own / top, folder / top)
    except DataError:
        raise
    except (*BROKEN, RuntimeError) as error:  # RuntimeError: encrypted, or packed in a way that Python doesn't know
        reason = (str(error).splitlines() or ["it ends too early"])[0].rstrip(":")
        raise DataError(f"{archive} is broken ({reason}): delete it, and it will be fetched again") from error
    except OSError as error:
        raise DataError(f"{archive} can't be unpacked into {folder}: {error.strerror or error}") from error


def _members(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """Return the names and contents of an archive's files, after all names have been seen to be harmless."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as file:
            entries = [entry for entry in file.infolist() if not entry.is_dir()]
            for entry in entries:
                _refuse_climbing(archive, entry.filename)
                if stat.S_ISLNK(entry.external_attr >> 16):
                    raise DataError(f"{archive} has a link in it, {entry.filename!r}: it is not unpacked")
            for entry in entries:
                with file.open(entry) as content:
                    yield entry.filename, content
        return
    with tarfile.open(archive) as file:
        members = [member for member in file if not member.isdir()]
        for member in members:
            _refuse_climbing(archive, member.name)
            if not member.isfile():
                raise DataError(f"{archive} has a link or device in it, {member.name!r}: it is not unpacked")
        for member in members:
            content = file.extractfile(member)
            assert content is not None, "a plain file has content"
            with content:
                yield str(PurePosixPath(member.name)), content


def _refuse_climbing(archive: Path, name: str) -> None:
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or ":" in name or not path.parts:
        raise DataError(f"{archive} has a path that climbs out of its folder, {name!r}: it is not unpacked")


def _move(source: Path, target: Path) -> None:
    """Move a file or a folder's files into place, each whole; what is there already, another process may have put."""
    if source.is_file():
        os.replace(source, target)
        return
    try:
        os.rename(source, target)
    except OSError:
        for path in sorted(source.rglob("*")):
            if path.is_file():
                place = target / path.relative_to(source)
                place.parent.mkdir(parents=True, exist_ok=True)
                os.replace(path, place)
