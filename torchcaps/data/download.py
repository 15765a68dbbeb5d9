"""Files from the network: the next mirror when one fails, and a file that is whole or not there."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from torchcaps._core.files import move_into_place, staging_directory
from torchcaps._core.optional import import_optional
from torchcaps._core.progress import DownloadBar
from torchcaps.data.archives import whole_zip
from torchcaps.data.errors import MissingData

__all__ = ["download"]

TIMEOUT = 30  # seconds without a byte


def download(name: str, urls: Sequence[str], checksum: str, folder: Path) -> Path:
    """Fetch a file from the first mirror that has it whole; return where it lies.

    It is written into a folder of its own and moved into place after its checksum was seen to be right, so that a
    file of this name is always whole, whatever happens, and two processes at once don't meet. A file without a
    published checksum must be a zip archive whose own checksums are right.
    """
    pooch = import_optional("pooch", f"downloading {name}")
    errors = import_optional("requests.exceptions", f"downloading {name}")
    logger = pooch.get_logger()
    level = logger.level
    logger.setLevel("ERROR")  # what goes wrong is said below, in our words
    problems = []
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        with staging_directory(folder) as own:
            for url in urls:
                try:
                    with DownloadBar(name) as bar:
                        fetch = pooch.HTTPDownloader(timeout=TIMEOUT, progressbar=bar)
                        pooch.retrieve(url, checksum or None, fname=name, path=own, downloader=fetch)
                    if not checksum and not whole_zip(own / name):  # at least its own checksums tell
                        (own / name).unlink()
                        raise ValueError("not a whole archive")
                    move_into_place(own / name, folder / name)
                    return folder / name
                except (errors.RequestException, ValueError) as error:
                    problems.append(_problem(url, error))
    except OSError as error:
        reason = error.strerror or str(error)
        raise MissingData(f"{folder} can't be written: {reason[:1].lower()}{reason[1:]}") from error
    finally:
        logger.setLevel(level)
    with contextlib.suppress(OSError):
        for path in new:
            path.rmdir()  # nothing came: leave no trace
    raise MissingData("; ".join(problems))


def _problem(url: str, error: Exception) -> str:
    """Say in a few words what went wrong with a mirror."""
    host = urlsplit(url).netloc or url
    response = getattr(error, "response", None)
    if response is not None:
        return f"{host} answered {response.status_code}"
    kind = type(error).__name__
    if "hash of downloaded file" in str(error):
        return f"{host} sent a file with another checksum"
    if "not a whole archive" in str(error):
        return f"{host} sent something that is not the whole archive"
    if "Timeout" in kind or "timed out" in str(error).lower():
        return f"{host} did not answer in time"
    if "Chunked" in kind or "IncompleteRead" in str(error):
        return f"{host} broke off"
    return f"{host} can't be reached"
