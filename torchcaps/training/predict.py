"""Image files of any kind to the class that a network sees in them."""

import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from torchcaps._core.optional import import_optional
from torchcaps.data import Batch, DataError
from torchcaps.data.images import ImageFormat, center_ink, read_image
from torchcaps.data.registry import is_image_folder
from torchcaps.training.inference import Trained

__all__ = ["Prediction", "predict"]

Polarity = Literal["auto", "as-is", "inverted"]
Fit = Literal["crop", "pad", "stretch"]
FRAME = 0.08  # of the shorter side: how wide the frame is whose brightness tells paper from ink
BRIGHT = 0.6  # from which on it is paper
SURE = 0.5  # capsules that are shorter say that nothing is there
LARGE = 10  # times the network's size: what a photograph is read in before its ink is found
MNIST_LIKE = ("digits", "mnist", "expanded-mnist", "affnist-style")
OVERLAPPING = ("multimnist", "multimnist-official", "diverse-multimnist")


@dataclass(frozen=True)
class Prediction:
    """What a network makes of an image file.

    Args:
        path: the file.
        classes: the classes that it sees, the surest first: one, or as many as it was trained to find.
        scores: of every class: lengths of capsules, activations, or probabilities where the network gives logits.
        image: what it was shown, ``[C, H, W]`` in 0..1.
        reconstruction: what the decoder makes of the capsules, or ``None``.
        note: what was done to the file on the way.
    """

    path: Path
    classes: tuple[str, ...]
    scores: tuple[float, ...]
    image: Tensor
    reconstruction: Tensor | None
    note: str


def predict(
    run: Trained, path: str | os.PathLike[str], polarity: Polarity = "auto", fit: Fit | None = None
) -> Prediction:
    """Return what a network makes of an image file, of any size and mode.

    Args:
        run: the network.
        path: the file.
        polarity: digits are bright on dark in MNIST, and dark on bright on paper. ``"auto"`` inverts an image with a
            bright frame for a network that was trained on MNIST's kind; ``"as-is"`` leaves it alone.
        fit: how an image of another shape is made to fit: ``"crop"`` its middle, ``"pad"`` it or ``"stretch"`` it. By
            default as the network's folder of images was read; for digits their ink is found and centred as in MNIST;
            other images are padded.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise DataError(f"{path} is no file")
    channels, height, width = _raw_size(run)
    if channels not in (1, 3):
        raise ValueError(f"{run.path} is for images with {channels} channels, and a picture has 1 or 3")
    size = (height, width)
    ground = "white"
    whole = _read(path, ImageFormat(size, channels, "stretch"))
    if int(whole.max()) == int(whole.min()):
        ground = "black"  # what is white on nothing shows on black only
        whole = _read(path, ImageFormat(size, channels, "stretch"), background=ground)
    if int(whole.max()) == int(whole.min()):
        raise DataError(f"{path} is one colour all over: there is nothing to see in it")
    inverted = polarity == "inverted" or (polarity == "auto" and channels == 1 and _on_paper(whole, run))
    fill = "white" if inverted else "black"
    ink = fit is None and _knows_ink(run) and _size(path) != size
    if ink:
        pixels = _read(path, ImageFormat((LARGE * height, LARGE * width), channels, "pad"), fill, ground)
    else:
        used = fit or run.spec.data_options.get("fit") or ("crop" if is_image_folder(run.spec.recipe.data) else "pad")
        pixels = _read(path, ImageFormat(size, channels, used), fill, ground)
    if inverted:
        pixels = 255 - pixels
    if ink:
        try:
            pixels = center_ink(pixels, size)
        except DataError as error:
            raise DataError(f"{path}: {error}") from error
    batch = Batch(pixels[None], torch.zeros(1, dtype=torch.int64), pixels[None], torch.zeros(1, dtype=torch.int64))
    with torch.no_grad():
        output = run.model(run.pipeline(batch, train=False).images)
    scores = run.model.probabilities(output.scores.float())[0]
    predicted = run.model.predict_multi_hot(output.scores.float())[0]
    numbers = [int(n) for n in scores.argsort(descending=True, stable=True) if predicted[n]]
    classes = tuple(run.classes[number] for number in numbers)
    made = None if output.reconstruction is None else output.reconstruction[0].float()
    notes = ["inverted: the network knows bright on dark"] * inverted + ["its ink centred, as MNIST's is"] * ink
    notes += ["not sure: no class has more than 0.5"] if float(scores.max()) < SURE else []
    return Prediction(path, classes, tuple(scores.tolist()), pixels / 255, made, "; ".join(notes))


def _read(path: Path, image_format: ImageFormat, fill: str = "black", background: str = "white") -> Tensor:
    if path.stat().st_size == 0:
        raise DataError(f"{path} can't be read as an image: it is empty")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return read_image(path, image_format, fill, background)
    except Exception as error:  # Pillow raises anything over a broken file
        reason = " ".join(str(error).split()).replace(f" {str(path)!r}", "") or type(error).__name__
        raise DataError(f"{path} can't be read as an image: {reason}") from error


def _size(path: Path) -> tuple[int, int]:
    """Return height and width of an image file."""
    with import_optional("PIL.Image", "reading images").open(path) as image:
        return image.height, image.width


def _knows_ink(run: Trained) -> bool:
    """Return whether a network was trained on MNIST's kind of digits: bright ink on black, in the middle."""
    return run.model.spec.image[0] == 1 and run.spec.recipe.data in MNIST_LIKE and run.model.n_objects == 1


def _raw_size(run: Trained) -> tuple[int, int, int]:
    """Return the size that images have before the pipeline crops or pads them."""
    wanted = run.model.spec.image
    for side in (0, 8, -12, 16, 4, -4, -8, 12, 24):  # what crops and pads of the papers take off or add
        channels, height, width = wanted[0], wanted[1] + side, wanted[2] + side
        if min(height, width) > 0:
            try:
                if run.pipeline.output_shape((channels, height, width), train=False) == wanted:
                    return channels, height, width
            except ValueError:
                continue
    raise ValueError(f"the augmentation {run.spec.recipe.augmentation!r} makes no image of {list(wanted)} out of any")


def _on_paper(pixels: Tensor, run: Trained) -> bool:
    """Return whether an image has a bright frame, and the network was trained on images with dark ones."""
    if run.spec.recipe.data not in (*MNIST_LIKE, *OVERLAPPING):
        return False  # of other grey images nobody knows which way round they are
    frame = max(1, round(FRAME * min(pixels.shape[1:])))
    inner = pixels[:, frame:-frame, frame:-frame]
    n = pixels.numel() - inner.numel()
    mean = (float(pixels.sum()) - float(inner.sum())) / (255 * max(1, n))
    return mean > BRIGHT
