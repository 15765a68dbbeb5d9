"""Augmentation of Byerly 2021 and Mazzia 2021: geometry, distributions, and independence of the batch."""

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.helpers import assert_bit_equal
from torchcaps._core.random import CounterRNG
from torchcaps.data import create_dataset, create_pipeline
from torchcaps.data.digit_augmentation import (
    RandomErase,
    RandomMarginShift,
    RandomRotation,
    RandomSqueeze,
    _squeeze_table,
)
from torchcaps.data.transforms import Transform

ALL = (RandomRotation(whole_degrees=True), RandomMarginShift(), RandomSqueeze(), RandomErase())


def digits(n: int) -> torch.Tensor:
    return create_dataset("digits", "test").get_batch(torch.arange(n) * 7 % 1000).images.float() / 255


def rng(n: int, seed: int = 0) -> CounterRNG:
    return CounterRNG(seed, 0, torch.arange(n), "test")


@pytest.mark.parametrize("transform", ALL)
def test_image_does_not_depend_on_its_batch(transform: Transform) -> None:
    images = digits(21)
    together = transform(images, rng(21))
    alone = transform(images[13:14], CounterRNG(0, 0, torch.tensor([13]), "test"))
    assert_bit_equal(together[13:14], alone)
    assert transform.output_shape((1, 28, 28)) == tuple(together.shape[1:])


def test_pipeline_transforms_images_and_targets_alike() -> None:
    batch = create_dataset("digits").get_batch(torch.arange(6))
    separate = batch._replace(targets=batch.images.clone())
    result = create_pipeline("mazzia2021.mnist")(separate, seed=1)
    assert_bit_equal(result.images, result.targets)
    assert_bit_equal(result.images, create_pipeline("mazzia2021.mnist")(batch, seed=1).images)


def test_normal_numbers_have_the_distribution() -> None:
    values = rng(4000).normal(0.33)
    assert abs(float(values.mean())) < 0.02
    assert float(values.std()) == pytest.approx(0.33, rel=0.04)
    assert float((values.abs() < 0.33).double().mean()) == pytest.approx(0.6827, abs=0.03)


def test_rotation_of_half_of_the_images_about_pixel_14() -> None:
    images = torch.zeros(400, 1, 28, 28)
    images[:, :, 14, 14] = 1  # a rotation about (14, 14) keeps this pixel
    images[:, :, 14, 24] = 1
    rotated = RandomRotation(30, whole_degrees=True)(images, rng(400))
    assert float((rotated[:, 0, 14, 14] - 1).abs().max()) < 1e-4
    changed = (rotated[:, 0, 14, 24] - 1).abs() > 1e-4
    assert 0.4 < float(changed.double().mean()) < 0.55  # half, less those with an angle below one degree
    mean_row = (rotated[:, 0, :, 15:] * torch.arange(28.0)[:, None]).sum((1, 2)) / rotated[:, 0, :, 15:].sum((1, 2))
    angles = torch.rad2deg(torch.asin((14 - mean_row[changed]) / 10))
    small = angles[angles.abs() < 8]  # at larger ones bilinear interpolation moves the center of mass
    assert len(small) > 50
    assert float((small - small.round()).abs().max()) < 0.15  # whole degrees
    assert 20 < float(angles.abs().max()) < 30


def test_shift_keeps_the_ink_and_reaches_the_margins() -> None:
    images = torch.zeros(500, 1, 28, 28)
    images[:, :, 3:20, 6:27] = 1  # margins: top 3, bottom 8, left 6, right 1
    shifted = RandomMarginShift()(images, rng(500))[:, 0]
    assert_bit_equal(shifted.sum((1, 2)), images[:, 0].sum((1, 2)))
    tops, lefts = shifted.any(2).int().argmax(1), shifted.any(1).int().argmax(1)
    assert (int(tops.min()), int(lefts.min()), int(lefts.max())) == (0, 0, 7)
    assert 8 <= int(tops.max()) <= 11
    assert_bit_equal(RandomMarginShift()(torch.zeros(3, 1, 5, 5), rng(3)), torch.zeros(3, 1, 5, 5))


def test_squeeze_equals_the_lanczos_filter_of_pillow() -> None:
    image = digits(1)[0, 0]
    columns, weights = _squeeze_table(28)
    assert len(columns) == 14
    for lost in range(1, 8):
        for offset in (0, 1):
            row = 2 * (lost - 1) + offset
            actual = (image[:, columns[row]] * weights[row]).sum(1)
            resized = Image.fromarray(image.numpy()).resize((28 - lost, 28), Image.Resampling.LANCZOS)
            expected = torch.zeros(28, 30)
            left = lost // 2 + offset
            expected[:, left : left + 28 - lost] = torch.from_numpy(np.array(resized))
            assert float((actual - expected[:, :28]).abs().max()) < 1e-5
    squeezed = RandomSqueeze()(torch.ones(500, 1, 2, 28), rng(500))
    assert 20 <= int((squeezed[:, 0, 0] > 0.5).sum(1).min()) <= 21
    assert int((squeezed[:, 0, 0] > 0.5).sum(1).max()) == 27


def test_erased_square_is_within_its_margins() -> None:
    erased = RandomErase()(torch.ones(2000, 1, 28, 28), rng(2000)) == 0
    assert set(erased.sum((1, 2, 3)).tolist()) == {16}
    rows = erased.any(0)[0].any(1).nonzero()[:, 0]
    assert (int(rows[0]), int(rows[-1])) == (4, 25)
    with pytest.raises(ValueError, match="8x30"):
        RandomErase().output_shape((1, 8, 30))
