"""Image files: decode them to one common format, cache the result, and center handwritten digits as in MNIST."""

import concurrent.futures
import contextlib
import dataclasses
import json
import math
import os
import statistics
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchcaps._core.files import atomic_path
from torchcaps._core.machine import memory_limit
from torchcaps._core.optional import import_optional
from torchcaps._core.progress import track
from torchcaps.data.storage import DataError, cache_root

__all__ = [
    "IMAGE_FORMATS",
    "MAX_MEGAPIXELS",
    "PILLOW_MEGAPIXELS",
    "ImageFormat",
    "center_ink",
    "check_pixels",
    "describe_resize",
    "infer_format",
    "read_image",
    "read_images",
]

# Pillow goes by content, not by suffix, and would hand PostScript to Ghostscript, which executes it.
IMAGE_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
MAX_ORIGINAL_SIDE = 96  # images of one common size keep it up to this side length
MAX_SQUARE_SIDE = 64  # otherwise they are reduced to squares of at most this side length
EXIF_ORIENTATION = 0x0112  # tag; values from 5 on exchange height and width
GRAY_MODES = ("1", "L", "LA", "La", "I", "I;16", "I;16B", "F")
MAX_MEGAPIXELS = 64.0  # default
PILLOW_MEGAPIXELS = 89.0  # above this limit, Pillow itself warns
LARGE_IMAGE_PIXELS = 8_000_000  # larger images, which take up to 1 GB, are decoded one at a time
CACHE_LIFETIME_S = 30 * 24 * 3600  # unused cache files are removed after this
CACHE_VERSION = 2  # increase if decoding changes
MAX_PATHS_SHOWN = 5  # in a warning
DIGIT_BOX = 20  # MNIST digits fit into 20x20 pixels (LeCun et al. 1998, section III.A)
MIN_INK_CONTRAST = 25  # gray levels between the strongest ink and the background
MIN_RELATIVE_INK = 0.15  # of the strongest ink; fainter pixels are background


_one_large_image = threading.Lock()


@dataclass(frozen=True)
class ImageFormat:
    """Size and channels to which image files are converted.

    Args:
        size: height and width.
        channels: 1 (gray) or 3 (RGB).
        fit: how other aspect ratios are handled: ``"crop"``, ``"pad"`` or ``"stretch"``.
        max_megapixels: files with more pixels are not decoded; see `check_pixels`.
    """

    size: tuple[int, int]
    channels: int
    fit: str
    max_megapixels: float = MAX_MEGAPIXELS


def check_pixels(image: Any, max_megapixels: float) -> None:
    """Raise a DataError if an opened, not yet decoded image has too many pixels.

    A small file can have any number of pixels: a PNG of 650 KB takes 2 GB of memory.
    """
    if image.width * image.height > 1e6 * max_megapixels:
        raise _too_many_pixels(f"{image.width}x{image.height} pixels exceed", max_megapixels)


def _too_many_pixels(found: str, max_megapixels: float) -> DataError:
    """Return the error for an image with more pixels than the limit."""
    return DataError(
        f"{found} the limit of {max_megapixels:g} megapixels, which "
        "max_megapixels (--max-megapixels; in training and evaluation --data.max-megapixels) changes"
    )


def _open_image(path: Path, max_megapixels: float) -> Any:
    """Open an image file without decoding it; raise a DataError if Pillow rejects its number of pixels."""
    pillow = import_optional("PIL.Image", "reading images")
    try:
        return pillow.open(path, formats=IMAGE_FORMATS)
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning) as error:
        raise _too_many_pixels("its pixels exceed", max_megapixels) from error


def infer_format(
    paths: Sequence[Path], fit: str, max_megapixels: float = MAX_MEGAPIXELS
) -> tuple[ImageFormat, list[tuple[int, int]]]:
    """Return a format that suits all files, and the heights and widths in their headers.

    Unreadable files are ignored unless all are.
    """
    pillow = import_optional("PIL.Image", "reading images")
    sizes, color, failures = [], False, {}
    for path in track(paths, "reading image headers"):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", pillow.DecompressionBombWarning)
                with _open_image(path, max_megapixels) as image:
                    check_pixels(image, max_megapixels)
                    rotated = image.getexif().get(EXIF_ORIENTATION, 1) >= 5
                    sizes.append((image.width, image.height) if rotated else (image.height, image.width))
                    color = color or image.mode not in GRAY_MODES
        except Exception as error:  # Pillow raises exceptions of many types for a corrupt file
            failures[path] = error
    if not sizes:
        _report_unreadable(failures, len(paths), skip=False)
    if len(set(sizes)) == 1 and max(sizes[0]) <= MAX_ORIGINAL_SIDE:
        return ImageFormat(sizes[0], 3 if color else 1, fit, max_megapixels), sizes
    side = min(MAX_SQUARE_SIDE, round(statistics.median(min(size) for size in sizes)))
    return ImageFormat((side, side), 3 if color else 1, fit, max_megapixels), sizes


def describe_resize(image_format: ImageFormat, sizes: Sequence[tuple[int, int]]) -> str:
    """Return a remark about photographs that are reduced to the format; empty if no image is larger.

    >>> describe_resize(ImageFormat((64, 64), 3, "crop"), [(480, 640), (64, 64)])
    'images of up to 480x640 pixels are resized to 64x64 (fit: crop); --image-size changes that'
    """
    height, width = max(sizes, key=lambda size: size[0] * size[1])
    if height * width <= image_format.size[0] * image_format.size[1]:
        return ""
    target = "x".join(map(str, image_format.size))
    size = f"images of up to {height}x{width} pixels are resized to {target}"
    return f"{size} (fit: {image_format.fit}); --image-size changes that"


def read_images(paths: Sequence[Path], image_format: ImageFormat, skip: bool, cache: bool) -> tuple[Tensor, Tensor]:
    """Decode image files, or read them from the cache.

    Args:
        paths: the files.
        image_format: common format of the result.
        skip: omit unreadable files with a warning; otherwise raise a DataError.
        cache: read decoded images from the user's cache directory, and store them there.

    Returns:
        Images ``[N, C, H, W]`` as uint8, and the indices of their files in ``paths``, ``[N]``.
    """
    cache_path = _cache_path(paths, image_format) if cache else None
    result = _read_cache(cache_path, len(paths), image_format) if cache_path is not None else None
    if result is None:
        result, failures = _decode_all(paths, image_format)
        _report_unreadable(failures, len(paths), skip)
        # An I/O error may not occur again, so that its file must not be remembered as unreadable.
        if cache_path is not None and not any(getattr(error, "errno", None) for error in failures.values()):
            _write_cache(cache_path, *result)
    elif len(result[1]) < len(paths):
        missing = sorted(set(range(len(paths))) - set(result[1].tolist()))
        failures = {paths[index]: DataError("unreadable when the cache was written") for index in missing}
        _report_unreadable(failures, len(paths), skip)
    return result


def _decode_all(
    paths: Sequence[Path], image_format: ImageFormat
) -> tuple[tuple[Tensor, Tensor], dict[Path, Exception]]:
    """Decode files in parallel; return the images, the indices of their files, and the errors of the other files."""
    shape = (image_format.channels, *image_format.size)
    n_bytes, available = len(paths) * math.prod(shape), memory_limit() // 2  # half: unreadable files cause a copy
    if n_bytes > available:  # a run from a stranger can expect images of any size
        raise DataError(
            f"folder: {len(paths):,} images of {'x'.join(map(str, shape))} need {n_bytes / 2**20:,.1f} MiB, more than "
            f"half of the memory that this process may use, {available / 2**20:,.1f} MiB: use fewer images, or a "
            "smaller --image-size"
        )
    images = torch.empty(len(paths), *shape, dtype=torch.uint8)
    failures: dict[Path, Exception] = {}

    def decode(index: int) -> bool:
        """Decode a file into ``images``; return whether that succeeded, otherwise record the error."""
        try:
            images[index] = read_image(paths[index], image_format)
            return True
        except Exception as error:  # Pillow raises exceptions of many types for a corrupt file
            failures[paths[index]] = error
            return False

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        succeeded = list(track(pool.map(decode, range(len(paths))), "decoding images", len(paths)))
    indices = torch.tensor(succeeded).nonzero()[:, 0]
    result = (images if all(succeeded) else images[indices], indices)
    return result, {path: failures[path] for path in paths if path in failures}


def read_image(path: Path, image_format: ImageFormat, fill: str = "black", background: str = "white") -> Tensor:
    """Decode one image file to ``[C, H, W]``, uint8, with its EXIF orientation applied.

    Args:
        path: the file.
        image_format: format of the result.
        fill: color of the padding, if ``image_format.fit`` is ``"pad"``.
        background: color behind transparent pixels.
    """
    pillow = import_optional("PIL.Image", "reading images")
    operations = import_optional("PIL.ImageOps", "reading images")
    height, width = image_format.size
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(_open_image(path, image_format.max_megapixels))
        check_pixels(file, image_format.max_megapixels)
        if file.width * file.height > LARGE_IMAGE_PIXELS:
            stack.enter_context(_one_large_image)
        if image_format.fit != "stretch" and file.format == "JPEG":
            # JPEG files can be decoded at 1/2, 1/4 or 1/8 of their size; keep at least twice the target size
            file.draft(None, (2 * width, 2 * height))
        image = operations.exif_transpose(file)
        image = _to_eight_bits(image)
        if image.mode in ("RGBA", "LA", "La", "PA") or "transparency" in image.info:
            image = image.convert("RGBA")
            image = pillow.alpha_composite(pillow.new("RGBA", image.size, background), image)
        image = image.convert("L" if image_format.channels == 1 else "RGB")
        resampling = pillow.Resampling.BILINEAR
        if image.size != (width, height):
            if image_format.fit == "stretch":
                image = image.resize((width, height), resampling)
            elif image_format.fit == "crop":
                image = operations.fit(image, (width, height), resampling)
            else:
                image = operations.pad(image, (width, height), resampling, color=fill)
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.view(height, width, image_format.channels).permute(2, 0, 1)


def _to_eight_bits(image: Any) -> Any:
    """Divide 16-bit gray levels by 257, in all images alike; raise a DataError for other numeric pixel types."""
    if image.mode == "F":
        raise DataError("floating-point pixels, whose range is unknown")
    if not image.mode.startswith("I"):
        return image
    image = image.convert("I")
    if image.getextrema()[1] > 65535:
        raise DataError("pixels with more than 16 bits")
    return image.point(lambda value: value * (1 / 257) + 0.5).convert("L")


def _report_unreadable(failures: Mapping[Path, Exception], n_files: int, skip: bool) -> None:
    """Warn about unreadable files if they are skipped; otherwise, or if no file is readable, raise a DataError."""
    if not failures:
        return
    first, error = next(iter(failures.items()))
    reason = " ".join(str(error).split()).replace(f" {str(first)!r}", "") or type(error).__name__
    if len(failures) == n_files:
        raise DataError(f"folder: none of {n_files:,} files is a readable image, for example {first}: {reason}")
    count = f"{len(failures):,} of {n_files:,} images"
    if not skip:
        raise DataError(
            f"folder: {count} can't be read, the first is {first} ({reason}): repair or remove them, or skip them with "
            "--on-error skip (in Python on_error='skip')"
        )
    names = ", ".join(str(path) for path in list(failures)[:MAX_PATHS_SHOWN])
    more = ", ..." if len(failures) > MAX_PATHS_SHOWN else ""
    warnings.warn(f"folder: {count} can't be read and are skipped: {names}{more}", stacklevel=2)


# Cache ------------------------------------------------------------------------------------------------------


def _cache_path(paths: Sequence[Path], image_format: ImageFormat) -> Path:
    """Return the cache file for these files, in their current state, and this format."""
    state = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    pillow_version = import_optional("PIL", "reading images").__version__
    key = [CACHE_VERSION, pillow_version, *dataclasses.astuple(image_format), state]
    return cache_root() / "folders" / f"{sha256(json.dumps(key).encode()).hexdigest()[:32]}.pt"


def _read_cache(path: Path, n_files: int, image_format: ImageFormat) -> tuple[Tensor, Tensor] | None:
    """Return cached images and the indices of their files; ``None`` if there are none or the file is corrupt."""
    if not path.is_file():
        return None
    try:
        content = torch.load(path, weights_only=True, mmap=True)
        images, indices = content["images"], content["indices"]
        valid = images.shape == (len(indices), image_format.channels, *image_format.size)
        valid = valid and images.dtype == torch.uint8 and content["sha256"] == _cache_digest(images, indices)
        with contextlib.suppress(OSError):
            os.utime(path)  # mark as recently used
        return (images, indices) if valid and 0 < len(indices) <= n_files and int(indices.max()) < n_files else None
    except Exception:  # not a valid cache file: decode again
        return None


def _cache_digest(images: Tensor, indices: Tensor) -> str:
    """Return a hash of the content of a cache file; torch does not compare the CRCs of a file that it maps."""
    digest = sha256(indices.contiguous().numpy().tobytes())
    digest.update(images.contiguous().numpy().data)
    return digest.hexdigest()


def _write_cache(path: Path, images: Tensor, indices: Tensor) -> None:
    """Store decoded images atomically and remove expired cache files; a failure is only a warning."""
    try:
        with atomic_path(path, sweep=True) as temporary:
            content = {"images": images, "indices": indices, "sha256": _cache_digest(images, indices)}
            torch.save(content, temporary)
        for other in path.parent.glob("*.pt"):
            with contextlib.suppress(OSError):  # another process may remove it at the same time
                if time.time() - other.stat().st_mtime > CACHE_LIFETIME_S:
                    other.unlink()
    except (OSError, RuntimeError) as error:
        warnings.warn(f"folder: decoded images can't be cached in {path.parent}: {error}", stacklevel=2)


# Handwritten digits -----------------------------------------------------------------------------------------


def center_ink(pixels: Tensor, size: tuple[int, int]) -> Tensor:
    """Scale the ink of a photographed digit to a box of 20x20 and center its mass, as MNIST's digits were made.

    Args:
        pixels: bright ink on a dark background, ``[1, H, W]``, uint8.
        size: height and width of the result.

    Returns:
        The digit, ``[1, *size]``, uint8.

    Raises:
        DataError: if nothing stands out from the background.
    """
    image = pixels.float()[0]
    ink = (image - _estimate_background(image)).clamp(min=0)
    if float(ink.max()) < MIN_INK_CONTRAST:
        raise DataError("the image has no ink that is brighter or darker than its background")
    mask = ink > MIN_RELATIVE_INK * ink.max()
    ink = torch.where(mask, ink, 0) * (255 / ink.max())
    rows, columns = mask.any(1).nonzero()[:, 0], mask.any(0).nonzero()[:, 0]
    cropped = ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    scale = DIGIT_BOX / max(cropped.shape)
    box = [max(1, round(side * scale)) for side in cropped.shape]
    digit = F.interpolate(cropped[None, None], box, mode="bilinear", antialias=True)[0, 0].clamp(0, 255)
    height, width = size
    mass = float(digit.sum())  # MNIST's centers of mass are at pixel 14 of 0 to 27
    center = [float((digit.sum(1 - axis) * torch.arange(digit.shape[axis])).sum()) / mass for axis in (0, 1)]
    top, left = (
        min(max(round(side / 2 - middle), 0), side - length)
        for side, middle, length in zip((height, width), center, digit.shape, strict=True)
    )
    canvas = torch.zeros(height, width)
    canvas[top : top + digit.shape[0], left : left + digit.shape[1]] = digit
    return canvas.round().to(torch.uint8)[None]


def _estimate_background(image: Tensor) -> Tensor:
    """Fit a plane to the border pixels (illumination is uneven) and return it plus the noise level, ``[H, W]``."""
    height, width = image.shape
    rows, columns = torch.meshgrid(torch.linspace(-1, 1, height), torch.linspace(-1, 1, width), indexing="ij")
    terms = torch.stack([torch.ones_like(image), rows, columns], dim=-1)  # [H, W, 3]
    border = torch.ones(height, width, dtype=torch.bool)
    border[1:-1, 1:-1] = False
    inputs, values = terms[border], image[border]
    plane = torch.linalg.lstsq(inputs, values.unsqueeze(1)).solution[:, 0]
    for _ in range(3):  # ink that touches the border is not background: refit without outliers
        residual = (values - inputs @ plane).abs()
        inliers = residual <= 2 * residual.median() + 1
        inputs, values = inputs[inliers], values[inliers]
        plane = torch.linalg.lstsq(inputs, values.unsqueeze(1)).solution[:, 0]
    noise = 3 * float((values - inputs @ plane).abs().median())  # three times the median noise is still background
    return terms @ plane + noise
