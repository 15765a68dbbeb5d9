"""Conversion of bytes and color transforms against their definitions, and properties of all transforms."""

import math

import pytest
import torch

from tests.data.helpers import make_rng
from tests.tolerances import SAME, assert_different, assert_equal, relative_rms
from torchcaps._core.random import CounterRNG
from torchcaps.data import (
    CenterCrop,
    ImageSet,
    Normalize,
    PadTo,
    RandomAffine,
    RandomBrightness,
    RandomContrast,
    RandomCrop,
    RandomHorizontalFlip,
    RandomShift,
    ScalePixels,
    Standardize,
    SubtractMeanImage,
    Transform,
)
from torchcaps.data.transforms import pixel_sum


def test_scale_pixels() -> None:
    bytes_ = torch.tensor([0, 51, 255], dtype=torch.uint8).view(3, 1, 1, 1)
    assert ScalePixels()(bytes_, make_rng(3)).flatten().tolist() == [0, torch.tensor(0.2).item(), 1]
    assert ScalePixels(256)(bytes_, make_rng(3)).flatten().tolist() == [0, 51 / 256, 255 / 256]
    assert ScalePixels()(bytes_, make_rng(3)).dtype == torch.float32


def test_random_brightness() -> None:
    images = torch.rand(400, 2, 3, 3)
    added = (RandomBrightness(0.25)(images, make_rng(400)) - images).flatten(1)
    assert float((added - added[:, :1]).abs().max()) < 1e-6
    assert 0.24 < float(added.max()) <= 0.25 + 1e-6
    assert -0.25 - 1e-6 <= float(added.min()) < -0.24


def test_random_contrast() -> None:
    images = torch.rand(50, 3, 5, 7)
    found = RandomContrast(0.2, 1.8)(images, make_rng(50))
    factor = make_rng(50).uniform(0.2, 1.8)
    mean = images.double().mean((2, 3), keepdim=True)
    expected = (images.double() - mean) * factor[:, None, None, None] + mean
    assert relative_rms(found, expected) < SAME[torch.float32]


def test_standardize_agrees_with_tensorflow() -> None:
    images = torch.rand(20, 3, 24, 24) * torch.rand(20, 1, 1, 1)
    found = Standardize()(images, make_rng(20))
    for image, standard in zip(images.double(), found, strict=True):
        floor = 1 / math.sqrt(image.numel()) / 255
        expected = (image - image.mean()) / max(float(image.std(correction=0)), floor)
        assert relative_rms(standard, expected) < SAME[torch.float32]
    flat = Standardize()(torch.full((1, 1, 4, 4), 0.7), make_rng(1))
    assert float(flat.abs().max()) < 1e-3  # and no NaN


def test_normalize() -> None:
    images = torch.rand(2, 3, 4, 4)
    found = Normalize((0.1, 0.2, 0.3), (0.5, 0.6, 0.7))(images, make_rng(2))
    for channel, (mean, std) in enumerate(((0.1, 0.5), (0.2, 0.6), (0.3, 0.7))):
        assert relative_rms(found[:, channel], (images[:, channel] - mean) / std) < SAME[torch.float32]


def test_subtract_mean_image() -> None:
    pixels = torch.randint(0, 256, (2500, 3, 4, 5), dtype=torch.uint8)
    dataset = ImageSet("some", "train", pixels, torch.zeros(2500), ["a", "b"])
    transform = SubtractMeanImage().fit(dataset, 256)
    expected = pixels.double().mean(0) / 256
    assert relative_rms(transform(torch.zeros(1, 3, 4, 5), make_rng(1))[0], -expected) < SAME[torch.float32]
    with pytest.raises(ValueError, match="fit"):
        SubtractMeanImage()(torch.zeros(1, 3, 4, 5), make_rng(1))
    with pytest.raises(ValueError, match=r"\[3, 4, 5\].*\[3, 5, 5\]"):
        transform.output_shape((3, 5, 5))


def test_pixel_sum() -> None:
    for shape in ((3, 1), (2, 3, 5, 7), (4, 3, 32, 32), (1, 2, 1, 1), (0, 3, 4, 4)):
        values = torch.rand(*shape)
        torch.testing.assert_close(pixel_sum(values).double(), values.double().flatten(1).sum(1), rtol=1e-5, atol=1e-8)


DETERMINISTIC: list[Transform] = [
    CenterCrop(5),
    Normalize((0.5,), (0.2,)),
    PadTo(12),
    ScalePixels(),
    Standardize(),
]
RANDOM: list[Transform] = [
    RandomAffine(20, 0.1, 0.2, 0.2),
    RandomAffine(shift=0.1, fill="nearest"),
    RandomBrightness(),
    RandomContrast(),
    RandomCrop(6, 1),
    RandomHorizontalFlip(),
    RandomShift(3),
]


@pytest.mark.parametrize("transform", [*DETERMINISTIC, *RANDOM], ids=str)
def test_image_is_bit_equal_in_any_batch(transform: Transform) -> None:
    images = torch.rand(130, 1, 9, 11)
    indices = torch.randperm(10_000)[:130]
    together = transform(images, CounterRNG(3, 1, indices))
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for start, end in ((0, 1), (5, 12), (129, 130), (0, 97)):
                apart = transform(images[start:end], CounterRNG(3, 1, indices[start:end]))
                torch.testing.assert_close(apart, together[start:end], rtol=0, atol=0)
    finally:
        torch.set_num_threads(before)
    assert together.shape[1:] == transform.output_shape((1, 9, 11))
    other_seed = transform(images, CounterRNG(4, 1, indices))
    (assert_equal if transform in DETERMINISTIC else assert_different)(other_seed, together)


@pytest.mark.parametrize(
    ("create", "field", "value"),
    [
        (lambda: RandomShift(-1), "max_shift", "-1"),
        (lambda: RandomShift(1.5), "max_shift", "1.5"),
        (lambda: RandomCrop(0), "size", "0"),
        (lambda: RandomHorizontalFlip(1.2), "probability", "1.2"),
        (lambda: ScalePixels(0), "scale", "0"),
        (lambda: RandomAffine(fill="mirror"), "fill", "'mirror'"),
        (lambda: RandomAffine(scale=1.0), "scale", "1.0"),
        (lambda: RandomContrast(0.5, 0.2), "high", "0.2"),
        (lambda: Normalize((0.1,), (0.2, 0.3)), "std", "(0.2, 0.3)"),
        (lambda: RandomCrop(40).output_shape((3, 32, 32)), "size=40", "32x32"),
        (lambda: Normalize().output_shape((3, 2, 2)), "1 channels", "got 3"),
    ],
)
def test_invalid_fields(create: object, field: str, value: str) -> None:
    with pytest.raises((ValueError, TypeError)) as error:
        create()  # type: ignore[operator]
    assert field in str(error.value)
    assert value in str(error.value)
