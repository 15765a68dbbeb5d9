"""Requests and responses of the explorer's API, from which its OpenAPI description is generated."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = [
    "MAX_ITERATIONS",
    "Array",
    "Attack",
    "DecodeRequest",
    "Decoded",
    "ErrorBody",
    "ForwardRequest",
    "ImageInput",
    "ParentRequest",
    "Placement",
    "Result",
    "SampleList",
    "Source",
    "TargetRequest",
    "Uploaded",
]

MAX_ITERATIONS = 10
MAX_PIXEL_TEXT = 1_500_000  # characters of base64: an image of 600x600 pixels in colour
MAX_DECODED = 512  # images per request

RunIndex = Annotated[int, Field(ge=0, le=1, description="index of the run on the command line")]
Iterations = Annotated[
    int | None, Field(ge=1, le=MAX_ITERATIONS, description="number of routing iterations; null: as trained")
]


class _Strict(BaseModel):
    """A request without unknown fields and without conversions between types."""

    model_config = ConfigDict(extra="forbid", strict=True)


def _number(low: float, high: float, description: str) -> Any:
    return Field(ge=low, le=high, allow_inf_nan=False, description=description)


class Source(_Strict):
    """An image: either a sample of the test set or the bytes of the pixels."""

    sample: Annotated[int | None, Field(ge=0, le=10_000_000, description="index in the test set")] = None
    pixels: Annotated[str | None, Field(max_length=MAX_PIXEL_TEXT, description="base64 of C*H*W bytes")] = None


class Placement(_Strict):
    """Affine map of an image about its centre."""

    rotation: Annotated[float, _number(-180, 180, "degrees, counter-clockwise")] = 0.0
    scale: Annotated[float, _number(0.2, 4, "factor of height and width")] = 1.0
    shear: Annotated[float, _number(-2, 2, "horizontal shift of a row, as a fraction of its distance")] = 0.0
    right: Annotated[float, _number(-1, 1, "shift as a fraction of the width")] = 0.0
    down: Annotated[float, _number(-1, 1, "shift as a fraction of the height")] = 0.0


class Attack(_Strict):
    """An adversarial attack within an L-infinity ball."""

    method: Literal["fgsm", "pgd"] = "fgsm"
    eps: Annotated[float, _number(0, 1, "largest change of a pixel in 0..1")] = 0.1
    steps: Annotated[int, Field(ge=1, le=40, description="steps of PGD")] = 10


class ImageInput(_Strict):
    """The input of the network: an image, its placement, a second image over it, and an attack, in this order."""

    source: Source
    placement: Placement = Placement()
    second: Source | None = None
    second_placement: Placement = Placement()
    attack: Attack | None = None


class ForwardRequest(_Strict):
    """A forward pass with trace."""

    run: RunIndex = 0
    image: ImageInput
    iterations: Iterations = None
    sites: Annotated[
        list[Annotated[list[Annotated[int, Field(ge=0, le=4096)]], Field(min_length=2, max_length=2)] | None],
        Field(max_length=32, description="row and column of the parents to trace, for each capsule layer"),
    ] = []


class TargetRequest(_Strict):
    """A quantity for one class."""

    run: RunIndex = 0
    image: ImageInput
    target: Annotated[int, Field(ge=0, le=100_000, description="class index")]
    iterations: Iterations = None


class ParentRequest(_Strict):
    """The numbers of one parent in one iteration."""

    run: RunIndex = 0
    image: ImageInput
    layer: Annotated[int, Field(ge=0, le=100)]
    site: Annotated[list[Annotated[int, Field(ge=0, le=4096)]] | None, Field(min_length=2, max_length=2)] = None
    parent: Annotated[int, Field(ge=0, le=100_000)]
    iteration: Annotated[int, Field(ge=0, le=MAX_ITERATIONS - 1)]
    iterations: Iterations = None


class Array(_Strict):
    """A tensor: shape, dtype, and base64 of the little-endian values."""

    shape: Annotated[list[Annotated[int, Field(ge=0, le=1_000_000)]], Field(max_length=6)]
    dtype: Literal["float32", "float16", "uint8", "int32"]
    data: Annotated[str, Field(max_length=8_000_000)]


class DecodeRequest(_Strict):
    """Class capsules to decode, all but the wanted ones already zero: ``[n, classes, dim]``."""

    run: RunIndex = 0
    capsules: Array


# Responses, for the description only: they are built by the code that computes them.


class ErrorBody(BaseModel):
    """One sentence that names the problem."""

    error: str


class Result(BaseModel):
    """A result; arrays have the form of `Array`."""

    model_config = ConfigDict(extra="allow")


class Decoded(BaseModel):
    """Decoded images ``[n, C, H, W]``."""

    images: Array


class SampleList(BaseModel):
    """Samples of the test set; ``ready`` is false while predictions are being computed."""

    ready: bool
    total: int
    samples: list[dict[str, Any]]


class Uploaded(BaseModel):
    """An uploaded image as the network's pixels, and the changes that were made to it."""

    pixels: str
    note: str
