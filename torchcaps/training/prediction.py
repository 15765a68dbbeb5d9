"""Prediction for image files: read a file as the data set of a trained run would contain it, and classify it."""

import dataclasses
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from torchcaps._core.optional import import_optional
from torchcaps.data import Batch, DataError, Dataset
from torchcaps.data.images import (
    IMAGE_FORMATS,
    MAX_MEGAPIXELS,
    PILLOW_MEGAPIXELS,
    ImageFormat,
    center_ink,
    read_image,
)
from torchcaps.data.registry import names_image_folder
from torchcaps.training.inference import TrainedRun
from torchcaps.training.setup import folder_options, is_other_folder, open_test_set

__all__ = ["Prediction", "load_image", "open_run_test_set", "predict", "unprocessed_shape"]

Polarity = Literal["auto", "as-is", "inverted"]
Fit = Literal["crop", "pad", "stretch"]
FRAME_FRACTION = 0.08  # width of the frame whose brightness tells paper from ink, of the shorter side
PAPER_BRIGHTNESS = 0.6  # mean brightness of the frame above which it is paper
MIN_CONFIDENT_SCORE = 0.5
INK_SCALE = 10  # resolution at which ink is located, relative to the network's input
MAX_INK_PIXELS = 2**22  # at that resolution; MNIST's images have 280x280
CENTERED_DIGITS = ("digits", "mnist", "expanded-mnist", "affnist-style")  # data sets of bright digits on black
OVERLAPPING_DIGITS = ("multimnist", "multimnist-official", "diverse-multimnist")
SIZE_CHANGES = (0, 8, -12, 16, 4, -4, -8, 12, 24)  # by which the papers' pipelines crop or pad, in pixels


@dataclass(frozen=True)
class Prediction:
    """Prediction for an image file.

    Args:
        path: the file.
        classes: predicted classes, highest score first: one, or as many as `Network.predict_multi_hot` finds.
        scores: score of each class: length or activation of its capsule, or probability if the network gives logits.
        image: input of the network before normalization, ``[C, H, W]`` in 0..1.
        reconstruction: output of the decoder, ``None`` if the network has none.
        note: changes to the image, and low confidence; empty if there are none.
    """

    path: Path
    classes: tuple[str, ...]
    scores: tuple[float, ...]
    image: Tensor
    reconstruction: Tensor | None
    note: str


def predict(
    run: TrainedRun,
    path: str | os.PathLike[str],
    polarity: Polarity = "auto",
    fit: Fit | None = None,
    max_megapixels: float = MAX_MEGAPIXELS,
) -> Prediction:
    """Classify an image file of any size and mode.

    Args:
        run: the trained run.
        path: the image file.
        polarity: ``"inverted"`` inverts the brightness, ``"as-is"`` does not. ``"auto"`` inverts an image with a bright
            frame (dark ink on paper) if the network was trained on bright digits on black.
        fit: how an image of another aspect ratio is fitted: ``"crop"``, ``"pad"`` or ``"stretch"``. Default: as the
            run's directory of images; for single digits, the ink is located and centred as in MNIST; others are padded.
        max_megapixels: an image with more pixels is not decoded; at most 89.
    """
    path = Path(path).expanduser()
    pixels, changes = load_image(run, path, polarity, fit, max_megapixels)
    label = torch.zeros(1, dtype=torch.int64)
    batch = Batch(pixels[None], label, pixels[None], label).to(run.device)
    with torch.no_grad():
        output = run.model(run.pipeline(batch, train=False).images)
    scores = run.model.probabilities(output.scores.float())[0].cpu()
    predicted = run.model.predict_multi_hot(output.scores.float())[0].cpu()
    classes = tuple(run.classes[n] for n in scores.argsort(descending=True, stable=True).tolist() if predicted[n])
    reconstruction = None if output.reconstruction is None else output.reconstruction[0].float().cpu()
    notes = list(changes)
    if float(scores.max()) < MIN_CONFIDENT_SCORE:
        notes.append(f"low confidence: no score above {MIN_CONFIDENT_SCORE}")
    return Prediction(path, classes, tuple(scores.tolist()), pixels / 255, reconstruction, "; ".join(notes))


def load_image(
    run: TrainedRun,
    path: Path,
    polarity: Polarity = "auto",
    fit: Fit | None = None,
    max_megapixels: float = MAX_MEGAPIXELS,
) -> tuple[Tensor, tuple[str, ...]]:
    """Read an image file as the data set of a run would contain it; the arguments are those of `predict`.

    Returns:
        The image before the run's pipeline, ``[C, H, W]``, uint8, and the changes that were made to it.
    """
    if not path.is_file():
        raise DataError(f"{path} is not a file")
    channels, height, width = unprocessed_shape(run)
    if channels not in (1, 3):
        raise ValueError(f"{run.path} expects images with {channels} channels; image files have 1 or 3")
    if not 0 < max_megapixels <= PILLOW_MEGAPIXELS:
        raise ValueError(f"max_megapixels must be positive and at most {PILLOW_MEGAPIXELS:g}, got {max_megapixels}")
    size, background = (height, width), "white"
    image_format = ImageFormat(size, channels, "stretch", max_megapixels)
    overview = _read(path, image_format)
    if int(overview.max()) == int(overview.min()):
        background = "black"  # a white drawing on a transparent background is visible on black only
        overview = _read(path, image_format, background=background)
    if int(overview.max()) == int(overview.min()):
        raise DataError(f"{path} has one colour everywhere: it contains nothing to classify")
    invert = polarity == "inverted" or (polarity == "auto" and channels == 1 and _is_paper(overview, run))
    fill = "white" if invert else "black"
    center = fit is None and _has_centered_digits(run) and _file_size(path) != size
    if center:
        large = dataclasses.replace(image_format, size=(INK_SCALE * height, INK_SCALE * width), fit="pad")
        pixels = _read(path, large, fill, background)
    else:
        default = "crop" if names_image_folder(run.spec.recipe.data) else "pad"
        fitted = dataclasses.replace(image_format, fit=fit or run.spec.data_options.get("fit") or default)
        pixels = _read(path, fitted, fill, background)
    if invert:
        pixels = 255 - pixels
    if center:
        try:
            pixels = center_ink(pixels, size)
        except DataError as error:
            raise DataError(f"{path}: {error}") from error
    return pixels, ("inverted: bright ink expected",) * invert + ("ink centred as in MNIST",) * center


def _read(path: Path, image_format: ImageFormat, fill: str = "black", background: str = "white") -> Tensor:
    """Read an image file; raise a DataError, also for warnings of Pillow."""
    if path.stat().st_size == 0:
        raise DataError(f"{path} can't be read as an image: the file is empty")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return read_image(path, image_format, fill, background)
    except Exception as error:  # Pillow raises many types for damaged files
        reason = " ".join(str(error).split()).replace(f" {str(path)!r}", "") or type(error).__name__
        raise DataError(f"{path} can't be read as an image: {reason}") from error


def _file_size(path: Path) -> tuple[int, int]:
    """Return height and width of an image file."""
    with import_optional("PIL.Image", "reading images").open(path, formats=IMAGE_FORMATS) as image:
        return image.height, image.width


def _has_centered_digits(run: TrainedRun) -> bool:
    """Return whether a run was trained on single digits as in MNIST: bright, on black, centred.

    A file from a stranger can claim this for images of any size, which are not enlarged further.
    """
    channels, height, width = run.model.spec.image
    is_small = INK_SCALE**2 * height * width <= MAX_INK_PIXELS
    return is_small and channels == 1 and run.spec.recipe.data in CENTERED_DIGITS and run.model.n_objects == 1


def unprocessed_shape(run: TrainedRun) -> tuple[int, int, int]:
    """Return the shape of images before the pipeline crops or pads them to the network's input."""
    channels, height, width = run.model.spec.image
    for change in SIZE_CHANGES:
        shape = (channels, height + change, width + change)
        if min(shape) > 0:
            try:
                if run.pipeline.output_shape(shape, train=False) == run.model.spec.image:
                    return shape
            except ValueError:
                continue
    raise ValueError(
        f"no image size is known from which augmentation {run.spec.recipe.augmentation!r} makes images of "
        f"{channels}x{height}x{width}"
    )


def open_run_test_set(run: TrainedRun, download: bool = True) -> Dataset | None:
    """Return the test set of a trained run; a directory of images is read in the format of its training images."""
    recipe = run.spec.recipe
    needs_format = is_other_folder(recipe.test_data, recipe.data)
    options = folder_options(run.spec, unprocessed_shape(run), run.classes) if needs_format else None
    return open_test_set(run.spec, download, options)


def _is_paper(pixels: Tensor, run: TrainedRun) -> bool:
    """Return whether an image has a bright frame, and the run was trained on digits with a dark one."""
    if run.spec.recipe.data not in (*CENTERED_DIGITS, *OVERLAPPING_DIGITS):
        return False  # the polarity of other grey images is unknown
    frame = max(1, round(FRAME_FRACTION * min(pixels.shape[1:])))
    inner = pixels[:, frame:-frame, frame:-frame]
    n = pixels.numel() - inner.numel()
    mean = (float(pixels.sum()) - float(inner.sum())) / (255 * max(1, n))
    return mean > PAPER_BRIGHTNESS
