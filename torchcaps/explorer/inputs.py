"""Input images of the explorer: samples, drawings and uploads, placed, overlaid and attacked."""

import functools
import tempfile
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchcaps._core.optional import import_optional
from torchcaps.analysis.attacks import fgsm, pgd
from torchcaps.data import Batch, DataError
from torchcaps.data.geometry import affine_matrix, warp_affine
from torchcaps.explorer.arrays import decode_pixels
from torchcaps.explorer.schema import ImageInput, Placement, Source
from torchcaps.explorer.session import ExploredRun
from torchcaps.training.prediction import load_image

__all__ = ["MAX_UPLOAD_BYTES", "MAX_UPLOAD_MEGAPIXELS", "InputCache", "ResolvedInput", "fit_image", "read_upload"]

MAX_UPLOAD_BYTES = 5 * 2**20
MAX_UPLOAD_MEGAPIXELS = 16.0
UPLOAD_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
CACHED_INPUTS = 16


@dataclass(frozen=True)
class ResolvedInput:
    """The pixels of an input.

    Args:
        pixels: input of the network in 0..1, ``[1, C, H, W]``.
        clean: the same before the attack.
        labels: true classes of a sample, ``None`` for other images.
    """

    pixels: Tensor
    clean: Tensor
    labels: tuple[int, ...] | None


class InputCache:
    """Resolve inputs, and keep the last ones: most requests change something else than the image.

    The pixels are those of the first run, fitted to the run that computes; attacks use that run's own gradients. The
    caller holds `torchcaps.explorer.session.compute_lock`.
    """

    def __init__(self, runs: list[ExploredRun]) -> None:
        self.runs = runs
        self._resolve = functools.lru_cache(maxsize=CACHED_INPUTS)(self._resolve_text)

    def resolve(self, image: ImageInput, run: int) -> ResolvedInput:
        """Return the pixels of an input for a run."""
        return self._resolve(image.model_dump_json(), run)

    def _resolve_text(self, text: str, run: int) -> ResolvedInput:
        """Return the pixels of an `ImageInput` given as JSON: placed, overlaid, fitted to the run and attacked."""
        image = ImageInput.model_validate_json(text)
        base = self.runs[0]
        pixels, labels = _load_source(base, image.source, "source")
        pixels = place(pixels, image.placement)
        if image.second is not None:
            other, other_labels = _load_source(base, image.second, "second")
            pixels = torch.maximum(pixels, place(other, image.second_placement))
            labels = None if labels is None or other_labels is None else tuple(sorted({*labels, *other_labels}))
        target = self.runs[run]
        if target.run.classes != base.run.classes:
            labels = None
        clean = fit_image(pixels, target.shape).clamp(0, 1)
        return ResolvedInput(_apply_attack(target, clean, labels, image), clean, labels)


def _load_source(run: ExploredRun, source: Source, name: str) -> tuple[Tensor, tuple[int, ...] | None]:
    """Return the image ``[1, C, H, W]`` and, for a sample, its classes."""
    if (source.sample is None) == (source.pixels is None):
        raise ValueError(f"{name} must have either sample or pixels")
    if source.sample is not None:
        images, labels = run.sample([source.sample])
        return images, tuple(run.label_sets(labels)[0])
    return decode_pixels(source.pixels or "", run.shape, f"{name}.pixels")[None], None


def place(images: Tensor, placement: Placement) -> Tensor:
    """Apply a placement to images ``[B, C, H, W]``; the identity returns them unchanged."""
    if placement == Placement():
        return images
    values = (placement.rotation, placement.shear, placement.scale, placement.scale)
    matrix = affine_matrix(*(torch.tensor([value], dtype=torch.float64) for value in values))
    height, width = images.shape[-2:]
    shift = torch.tensor([[placement.down * height, placement.right * width]], dtype=torch.float64)
    return warp_affine(images, matrix, shift, (height, width))


def fit_image(images: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Convert images ``[B, C, H, W]`` to the channels and size of another network."""
    channels, *size = shape
    if images.shape[1] != channels:
        images = images.mean(1, keepdim=True).expand(-1, channels, -1, -1)
    if list(images.shape[2:]) != size:
        images = F.interpolate(images, size=size, mode="bilinear", align_corners=False, antialias=True)
    return images


def _apply_attack(run: ExploredRun, clean: Tensor, labels: tuple[int, ...] | None, image: ImageInput) -> Tensor:
    """Return the attacked pixels; without true classes the attack is against the predicted ones."""
    attack = image.attack
    if attack is None or attack.eps == 0:
        return clean
    with torch.no_grad():
        predicted = run.pixels.predict_multi_hot(run.pixels(clean))[0].nonzero()[:, 0].tolist()
    classes = labels if labels is not None and len(labels) == (run.model.n_objects or len(labels)) else predicted
    if run.model.n_objects is None:
        target = torch.zeros(1, run.model.spec.classes)
        target[0, list(classes)] = 1
    else:
        target = torch.tensor([classes if run.model.n_objects > 1 else classes[0]])
    options: dict[str, Any] = {"eps": attack.eps}
    if attack.method == "pgd":
        return pgd(run.pixels, clean, target, steps=attack.steps, **options)
    return fgsm(run.pixels, clean, target, **options)


def read_upload(run: ExploredRun, content: bytes) -> tuple[Tensor, str]:
    """Return an uploaded image file as pixels ``[C, H, W]`` in 0..1, and the changes that were made to it.

    Raises a DataError for files that are not images, and for those above `MAX_UPLOAD_MEGAPIXELS`.
    """
    pillow = import_optional("PIL.Image", "reading images")
    try:
        with pillow.open(BytesIO(content), formats=UPLOAD_FORMATS) as image:
            width, height = image.size
    except Exception as error:  # Pillow raises many types for damaged files
        raise DataError(f"the upload must be an image ({', '.join(UPLOAD_FORMATS)}), and can't be read") from error
    if width * height > 1e6 * MAX_UPLOAD_MEGAPIXELS:
        raise DataError(f"the upload must have at most {MAX_UPLOAD_MEGAPIXELS:g} megapixels, got {width}x{height}")
    with tempfile.TemporaryDirectory(prefix="torchcaps-explore-") as directory:
        path = Path(directory) / "upload"
        path.write_bytes(content)
        try:
            image, changes = load_image(run.run, path, max_megapixels=MAX_UPLOAD_MEGAPIXELS)
        except DataError as error:
            raise DataError(str(error).replace(str(path), "the upload")) from error
    index = torch.zeros(1, dtype=torch.int64)
    pixels = run.pixels.pipeline(Batch(image[None], index, image[None], index), train=False).images
    return pixels[0], "; ".join(changes)
