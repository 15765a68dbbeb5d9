"""Metadata of exported files: the preprocessing of images, the classes, and the meaning of the scores."""

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torchcaps._core.validation import is_unicode
from torchcaps._core.version import __version__
from torchcaps.data import Pipeline, ScalePixels
from torchcaps.data.geometry import CenterCrop
from torchcaps.data.transforms import Normalize, Transform
from torchcaps.models import Network

__all__ = ["ExportFormatError", "Metadata", "split_preprocessing"]

MAX_TEXT_CHARACTERS = 2**20  # of all values together
MAX_CLASSES = 100_000
MAX_PIXELS = 2**26  # channels times height times width of an image

Probabilities = Literal["identity", "softmax", "sigmoid"]


class ExportFormatError(ValueError):
    """A file is not a model that `torchcaps.export` has written, or has unsafe or inconsistent content.

    >>> from torchcaps.export import validate_onnx
    >>> try:
    ...     validate_onnx(b"not a graph")
    ... except ExportFormatError as error:
    ...     print(error)
    it is not an ONNX file
    """


@dataclass(frozen=True)
class Metadata:
    """Everything that a program needs to use an exported model, stored in the file as JSON values by name.

    An image is resized to ``image``, divided by ``scale``, and normalised to ``(image - mean) / std``.

    Args:
        model: name of the model.
        version: version of torchcaps that wrote the file.
        classes: names of the classes.
        image: shape ``(channels, height, width)`` of the input.
        scale: divisor that maps pixels to 0..1: 255, or 256 for Chen 2019.
        mean, std: normalisation of each channel.
        probabilities: function that maps scores to 0..1: ``"identity"`` for lengths and activations, ``"softmax"`` or
            ``"sigmoid"`` for logits.
        objects: number of objects per image; 0: any number.
        data: name of the training set; empty if it was a directory of images.
        fit: how images of another aspect ratio are fitted: ``"crop"``, ``"pad"``, ``"stretch"``, or empty for the
            default of the data set.

    >>> import torchcaps
    >>> metadata = Metadata.of(torchcaps.create_model("capsnet_small"))
    >>> metadata.model, metadata.image, metadata.probabilities, len(metadata.classes)
    ('capsnet_small', (1, 28, 28), 'identity', 10)
    """

    model: str = ""
    version: str = __version__
    classes: tuple[str, ...] = ()
    image: tuple[int, int, int] = (1, 28, 28)
    scale: int = 255
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    probabilities: Probabilities = "identity"
    objects: int = 1
    data: str = ""
    fit: Literal["", "crop", "pad", "stretch"] = ""

    @classmethod
    def of(cls, model: Network, **values: Any) -> "Metadata":
        """Return the metadata of a model; ``values`` replace those that do not follow from it."""
        channels = model.spec.image[0]
        losses: dict[str, Probabilities] = {"cross_entropy": "softmax", "binary": "sigmoid"}
        defaults: dict[str, Any] = {
            "model": model.name,
            "classes": tuple(str(index) for index in range(model.spec.classes)),
            "image": tuple(model.spec.image),
            "mean": (0.0,) * channels,
            "std": (1.0,) * channels,
            "probabilities": losses.get(model.recipe.loss.name, "identity"),
            "objects": model.n_objects or 0,
        }
        return cls(**{**defaults, **values})

    def to_text(self) -> dict[str, str]:
        """Return the values as JSON texts by name."""
        return {field.name: json.dumps(getattr(self, field.name)) for field in dataclasses.fields(self)}

    @classmethod
    def from_text(cls, texts: Mapping[str, str]) -> "Metadata":
        """Return the metadata of a file, checked; raise an `ExportFormatError` if a value is missing or invalid."""
        if sum(map(len, texts.values())) > MAX_TEXT_CHARACTERS:
            raise ExportFormatError(f"its metadata has more than {MAX_TEXT_CHARACTERS:,} characters")
        values: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            if field.name not in texts:
                raise ExportFormatError(
                    f"it has no metadata {field.name!r}: only files written by torchcaps export can be used"
                )
            try:
                value = json.loads(texts[field.name])
            except (ValueError, RecursionError) as error:
                raise ExportFormatError(f"its metadata {field.name!r} is not valid JSON") from error
            if not _CHECKS[field.name](value):
                raise ExportFormatError(f"its metadata {field.name!r} is invalid: {json.dumps(value)[:100]}")
            values[field.name] = tuple(value) if isinstance(value, list) else value
        metadata = cls(**values)
        channels = metadata.image[0]
        if not len(metadata.mean) == len(metadata.std) == channels:
            raise ExportFormatError(f"its metadata 'mean' and 'std' must have {channels} values, one per channel")
        if math.prod(metadata.image) > MAX_PIXELS:
            raise ExportFormatError(f"its images have more than {MAX_PIXELS:,} values")
        if metadata.objects > len(metadata.classes):
            raise ExportFormatError("its metadata 'objects' must be at most the number of classes")
        return metadata


def _is_int(value: Any, least: int, largest: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= largest


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e6


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= 1000 and is_unicode(value)


_CHECKS = {
    "model": _is_text,
    "version": _is_text,
    "classes": lambda v: isinstance(v, list) and 2 <= len(v) <= MAX_CLASSES and all(map(_is_text, v)),
    "image": lambda v: isinstance(v, list) and len(v) == 3 and all(_is_int(size, 1, 2**16) for size in v),
    "scale": lambda v: _is_int(v, 1, 2**16),
    "mean": lambda v: isinstance(v, list) and all(map(_is_number, v)),
    "std": lambda v: isinstance(v, list) and all(_is_number(x) and x > 1e-6 for x in v),
    "probabilities": lambda v: v in ("identity", "softmax", "sigmoid"),
    "objects": lambda v: _is_int(v, 0, MAX_CLASSES),
    "data": _is_text,
    "fit": lambda v: v in ("", "crop", "pad", "stretch"),
}


def split_preprocessing(pipeline: Pipeline) -> tuple[ScalePixels, Normalize | None, list[Transform]]:
    """Split the preprocessing of test images into the part described by metadata and the part inside the graph.

    Scaling and normalisation with constants are left to the program that uses the file. Crops, padding, the mean image
    and standardisation become part of the graph.
    """
    scale, *rest = pipeline.transforms(train=False)
    if not isinstance(scale, ScalePixels):
        raise ValueError(f"the pipeline must start with ScalePixels to be exported, got {scale}")
    index = next((i for i, transform in enumerate(rest) if not isinstance(transform, CenterCrop)), None)
    if index is not None and isinstance(normalize := rest[index], Normalize):  # commutes with the crops before it
        return scale, normalize, rest[:index] + rest[index + 1 :]
    return scale, None, rest
