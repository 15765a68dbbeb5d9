"""Image files of any size and mode, brought into one form and kept for the next time."""

import concurrent.futures
import contextlib
import json
import os
import statistics
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchcaps._core.files import staging_directory
from torchcaps._core.optional import import_optional
from torchcaps._core.progress import track
from torchcaps.data.errors import DataError
from torchcaps.data.storage import cache_root

__all__ = ["Form", "common_form", "read_picture", "read_pictures"]

LARGEST_KEPT = 96  # images of one size stay as they are up to this
LARGEST_SQUARE = 64  # and are otherwise reduced to squares of at most this
ORIENTATION = 0x0112  # of EXIF: from 5 on, height and width change places
UNUSED = 30 * 24 * 3600  # seconds after which kept images that nobody asked for are removed
VERSION = 1  # of how images are read: a new one makes old caches worthless


@dataclass(frozen=True)
class Form:
    """What all images of a folder are brought into.

    Args:
        size: height and width.
        channels: 1 or 3.
        fit: ``"crop"``, ``"pad"`` or ``"stretch"``.
    """

    size: tuple[int, int]
    channels: int
    fit: str


def common_form(paths: Sequence[Path], fit: str) -> Form:
    """Return the form that suits all of these files, by a look at their headers; what can't be read has no say."""
    pillow = import_optional("PIL.Image", "reading images")
    sizes, colour, problems = [], False, {}
    for path in track(paths, "looking at images"):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", pillow.DecompressionBombWarning)
                with pillow.open(path) as image:
                    sideways = image.getexif().get(ORIENTATION, 1) >= 5
                    sizes.append((image.width, image.height) if sideways else (image.height, image.width))
                    colour = colour or image.mode not in ("1", "L", "LA", "La", "I", "I;16", "I;16B", "F")
        except Exception as error:  # Pillow raises anything over a broken file
            problems[path] = error
    if not sizes:
        _report(problems, len(paths), skip=False)
    if len(set(sizes)) == 1 and max(sizes[0]) <= LARGEST_KEPT:
        return Form(sizes[0], 3 if colour else 1, fit)
    side = min(LARGEST_SQUARE, round(statistics.median(min(size) for size in sizes)))
    return Form((side, side), 3 if colour else 1, fit)


def read_pictures(paths: Sequence[Path], form: Form, skip: bool, keep: bool) -> tuple[Tensor, Tensor]:
    """Return the images ``[N, C, H, W]`` in bytes, and which of the files they are, ``[N]``.

    Args:
        paths: the files.
        form: what they are brought into.
        skip: leave out files that can't be read, with a warning; otherwise they are an error.
        keep: look for the images in the cache folder, and leave them there for the next time.
    """
    cache = _cache_file(paths, form) if keep else None
    found = _cached(cache, len(paths), form) if cache is not None else None
    if found is None:
        found, problems = _decoded(paths, form)
        _report(problems, len(paths), skip)
        if cache is not None and not any(getattr(error, "errno", None) for error in problems.values()):
            _store(cache, *found)  # what a disk failed to read today it may read tomorrow
    elif len(found[1]) < len(paths):
        missing = sorted(set(range(len(paths))) - set(found[1].tolist()))
        _report({paths[number]: DataError("could not be read the last time") for number in missing}, len(paths), skip)
    return found


def _decoded(paths: Sequence[Path], form: Form) -> tuple[tuple[Tensor, Tensor], dict[Path, Exception]]:
    images = torch.empty(len(paths), form.channels, *form.size, dtype=torch.uint8)
    problems: dict[Path, Exception] = {}

    def read(number: int) -> bool:
        try:
            images[number] = read_picture(paths[number], form)
            return True
        except Exception as error:  # Pillow raises anything over a broken file
            problems[paths[number]] = error
            return False

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        fine = list(track(pool.map(read, range(len(paths))), "reading images", len(paths)))
    kept = torch.tensor(fine).nonzero()[:, 0]
    return (images if all(fine) else images[kept], kept), {path: problems[path] for path in paths if path in problems}


def read_picture(path: Path, form: Form, fill: str = "black", ground: str = "white") -> Tensor:
    """Read one file: upright, whatever its mode, on white where it is transparent, ``[C, H, W]``.

    Args:
        path: the file.
        form: what it is brought into.
        fill: the colour that it is padded with.
        ground: the colour that shows where it is transparent.
    """
    pillow, operations = (
        import_optional("PIL.Image", "reading images"),
        import_optional("PIL.ImageOps", "reading images"),
    )
    height, width = form.size
    with pillow.open(path) as file:
        if form.fit != "stretch" and file.format == "JPEG":
            # JPEGs can be decoded at half, a quarter or an eighth of their size: as long as that is still too large
            file.draft(None, (2 * width, 2 * height))
        image = operations.exif_transpose(file)
        image = _eight_bits(image)
        if image.mode in ("RGBA", "LA", "La", "PA") or "transparency" in image.info:
            image = image.convert("RGBA")
            image = pillow.alpha_composite(pillow.new("RGBA", image.size, ground), image)
        image = image.convert("L" if form.channels == 1 else "RGB")
        resampling = pillow.Resampling.BILINEAR
        if image.size != (width, height):
            if form.fit == "stretch":
                image = image.resize((width, height), resampling)
            else:
                colour = {} if form.fit == "crop" else {"color": fill}
                fitted = operations.fit if form.fit == "crop" else operations.pad
                image = fitted(image, (width, height), resampling, **colour)
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.view(height, width, form.channels).permute(2, 0, 1)


def _eight_bits(image: Any) -> Any:
    """Bring 16 bits a pixel down to 8, all images by one rule; other kinds of numbers are refused."""
    if image.mode == "F":
        raise DataError("its pixels are real numbers without a known range")
    if not image.mode.startswith("I"):
        return image
    image = image.convert("I")
    if image.getextrema()[1] > 65535:
        raise DataError("its pixels have more than 16 bits")
    return image.point(lambda value: value * (1 / 257) + 0.5).convert("L")


def _report(problems: dict[Path, Exception], n_files: int, skip: bool) -> None:
    """Name what can't be read: in a warning where it is skipped, otherwise in an error."""
    if not problems:
        return
    first, error = next(iter(problems.items()))
    reason = " ".join(str(error).split()).replace(f" {str(first)!r}", "") or type(error).__name__
    others = f" (and {len(problems) - 1:,} more)" if len(problems) > 1 else ""
    if len(problems) == n_files:
        raise DataError(f"folder: none of {n_files:,} files can be read as an image, {first} first: {reason}")
    if not skip:
        flags = "(--broken skip, in training --data.broken skip)"
        advice = f"mend or remove it, or leave out such files by broken='skip' {flags}"
        raise DataError(f"folder: {first}{others} can't be read as an image ({reason}): {advice}")
    names = ", ".join(str(path) for path in list(problems)[:5])
    more = f" and {len(problems) - 5:,} more" if len(problems) > 5 else ""
    counts = f"{len(problems):,} of {n_files:,} images"
    warnings.warn(f"folder: {counts} can't be read and are left out: {names}{more}", stacklevel=2)


# The cache --------------------------------------------------------------------------------------------------


def _cache_file(paths: Sequence[Path], form: Form) -> Path:
    """Return where images of these files, as they are now, are kept in this form."""
    state = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    reader = import_optional("PIL", "reading images").__version__
    key = sha256(json.dumps([VERSION, reader, form.size, form.channels, form.fit, state]).encode()).hexdigest()
    return cache_root() / "folders" / f"{key[:32]}.pt"


def _cached(cache: Path, n_files: int, form: Form) -> tuple[Tensor, Tensor] | None:
    """Return what is kept; ``None`` where that is nothing, or broken."""
    if not cache.is_file():
        return None
    try:
        content = torch.load(cache, weights_only=True, mmap=True)
        images, kept = content["images"], content["kept"]
        whole = images.shape == (len(kept), form.channels, *form.size) and images.dtype == torch.uint8
        with contextlib.suppress(OSError):
            os.utime(cache)  # it is in use
        return (images, kept) if whole and 0 < len(kept) <= n_files and int(kept.max()) < n_files else None
    except Exception:  # whatever it is, it is not ours: it is made again
        return None


def _store(cache: Path, images: Tensor, kept: Tensor) -> None:
    """Keep images: whole or not at all. That it can't be done is no reason to stop."""
    try:
        with staging_directory(cache.parent) as own:
            torch.save({"images": images, "kept": kept}, own / cache.name)
            os.replace(own / cache.name, cache)
        for other in cache.parent.glob("*.pt"):
            with contextlib.suppress(OSError):  # another process may remove it as well
                if time.time() - other.stat().st_mtime > UNUSED:
                    other.unlink()
    except (OSError, RuntimeError) as error:
        warnings.warn(f"folder: the images can't be kept in {cache.parent} for the next time: {error}", stacklevel=2)
