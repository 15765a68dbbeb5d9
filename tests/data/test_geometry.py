"""Geometric transforms against their definitions."""

import math

import pytest
import torch
from scipy import ndimage
from torch import Tensor

from tests.data.helpers import assert_bit_equal, make_rng
from tests.tolerances import EXACT, SAME, largest_difference, relative_rms
from torchcaps.data import (
    CenterCrop,
    PadTo,
    RandomAffine,
    RandomCrop,
    RandomHorizontalFlip,
    RandomRelativeShift,
    RandomShift,
)
from torchcaps.data.geometry import affine_matrix, crop_windows, warp_affine


def test_random_shift() -> None:
    images = torch.arange(1, 26).float().view(1, 1, 5, 5).repeat(300, 1, 1, 1)
    moved = RandomShift(2)(images, make_rng(300))
    same = make_rng(300)
    down, right = same.integers(-2, 2).tolist(), same.integers(-2, 2).tolist()
    seen = set()
    for n in range(300):
        expected = torch.zeros(5, 5)
        for row in range(5):
            for column in range(5):
                to_row, to_column = row + down[n], column + right[n]
                if 0 <= to_row < 5 and 0 <= to_column < 5:
                    expected[to_row, to_column] = images[n, 0, row, column]
        assert_bit_equal(moved[n, 0], expected)
        seen.add((down[n], right[n]))
    assert len(seen) == 25  # all shifts in [-2, 2]²
    assert_bit_equal(RandomShift(0)(images, make_rng(300)), images)


def test_random_crop_and_center_crop() -> None:
    images = torch.rand(200, 3, 8, 10)
    found = RandomCrop(6, padding=1)(images, make_rng(200))
    same = make_rng(200)
    top, left = same.integers(0, 4), same.integers(0, 6)
    padded = torch.nn.functional.pad(images, (1, 1, 1, 1))
    for n, (t, x) in enumerate(zip(top.tolist(), left.tolist(), strict=True)):
        assert_bit_equal(found[n], padded[n, :, t : t + 6, x : x + 6])
    assert {0, 4} <= set(top.tolist())
    assert {0, 6} <= set(left.tolist())
    middle = CenterCrop(24)(torch.arange(32 * 32).view(1, 1, 32, 32), make_rng(1))
    assert middle[0, 0, 0, 0] == 4 * 32 + 4  # as tf.image.resize_image_with_crop_or_pad
    assert middle.shape == (1, 1, 24, 24)
    odd = CenterCrop(4)(torch.arange(49).view(1, 1, 7, 7), make_rng(1))
    assert odd[0, 0, 0, 0] == 1 * 7 + 1  # an odd remainder is cropped at the bottom and right
    assert RandomCrop(24).output_shape((3, 32, 32)) == CenterCrop(24).output_shape((3, 32, 32)) == (3, 24, 24)


def test_crop_windows() -> None:
    images = torch.arange(2 * 16).view(2, 1, 4, 4)
    found = crop_windows(images, torch.tensor([0, 2]), torch.tensor([1, 2]), (2, 2), 0)
    assert found.tolist() == [[[[1, 2], [5, 6]]], [[[26, 27], [30, 31]]]]


def test_random_crop_of_an_image_padded_by_its_edges() -> None:
    images = torch.rand(1, 1, 4, 4).expand(30, 1, 4, 4)
    padded = torch.nn.functional.pad(images[:1], (2, 2, 2, 2), mode="replicate")[0, 0]
    windows = padded.unfold(0, 4, 1).unfold(1, 4, 1).reshape(-1, 4, 4)
    found = RandomCrop(4, padding=2, fill="nearest")(images, make_rng(30))
    matches = (found == windows).all(-1).all(-1)  # [30, 25]
    assert matches.any(1).all()
    assert int(matches.any(0).sum()) > 5


def test_pad_to() -> None:
    images = torch.rand(2, 1, 28, 27)
    padded = PadTo(40)(images, make_rng(2))
    assert padded.shape == (2, 1, 40, 40)
    assert_bit_equal(padded[:, :, 6:34, 6:33], images)
    assert math.isclose(float(padded.sum()), float(images.sum()), rel_tol=SAME[torch.float32])
    assert_bit_equal(PadTo(20)(images, make_rng(2)), images)
    assert PadTo(40).output_shape((1, 28, 50)) == (1, 40, 50)


def test_random_horizontal_flip() -> None:
    images = torch.rand(1000, 1, 3, 4)
    flipped = RandomHorizontalFlip()(images, make_rng(1000))
    chosen = make_rng(1000).bernoulli()
    assert 430 < int(chosen.sum()) < 570
    assert_bit_equal(flipped[chosen], images[chosen].flip(-1))
    assert_bit_equal(flipped[~chosen], images[~chosen])


def smooth_images(count: int, height: int, width: int) -> Tensor:
    rows, columns = torch.arange(height)[:, None] / 5, torch.arange(width)[None] / 4
    return torch.stack([torch.sin(rows + n) * torch.cos(columns - n) + 1 for n in range(count)])[:, None].float()


@pytest.mark.parametrize(("fill", "mode"), [("zero", "grid-constant"), ("nearest", "nearest")])
def test_warp_affine_agrees_with_scipy(fill: str, mode: str) -> None:
    """scipy, given the inverse map about the center, interpolates to the same values."""
    images = smooth_images(6, 17, 24)
    some = make_rng(6, seed=4)
    matrix = affine_matrix(
        some.uniform(-40, 40), some.uniform(-0.3, 0.3), some.uniform(0.7, 1.3), some.uniform(0.7, 1.3)
    )
    shift = torch.stack([some.uniform(-4, 4), some.uniform(-4, 4)], dim=1)
    found = warp_affine(images, matrix, shift, (20, 22), fill)
    for n in range(6):
        inverse = torch.linalg.inv(matrix[n])
        into, out = torch.tensor([8.0, 11.5]).double(), torch.tensor([9.5, 10.5]).double()
        offset = into - inverse @ (out + shift[n])
        expected = ndimage.affine_transform(
            images[n, 0].double().numpy(), inverse.numpy(), offset.numpy(), (20, 22), order=1, mode=mode
        )
        assert relative_rms(found[n, 0], torch.tensor(expected)) < SAME[torch.float32]


def test_direction_of_rotation_shift_and_shear() -> None:
    images = torch.zeros(1, 1, 5, 5)
    images[0, 0, 2, 4] = 1  # at the right
    one = torch.ones(1, dtype=torch.float64)
    rotated = warp_affine(images, affine_matrix(90 * one, 0 * one, one, one), torch.zeros(1, 2), (5, 5))
    assert rotated[0, 0].argmax() == 2  # at the top
    same = affine_matrix(0 * one, 0 * one, one, one)
    assert largest_difference(same, torch.eye(2)[None].double()) < EXACT
    moved = warp_affine(images, same, torch.tensor([[1.0, -2.0]]), (5, 5))
    assert largest_difference(moved[0, 0, 3, 2], 1.0) < 1e-6
    assert math.isclose(float(moved.sum()), 1, rel_tol=SAME[torch.float32])
    assert affine_matrix(0 * one, 0.5 * one, one, one)[0].tolist() == [
        [1, 0],
        [0.5, 1],
    ]


def test_shift_is_a_fraction_of_the_size_not_rounded() -> None:
    """Choi 2019: Keras' width_shift_range=0.1 of 28 pixels is up to 2.8, not 2 and not 3."""
    ramp = torch.arange(28.0).expand(1, 1, 28, 28).repeat(2000, 1, 1, 1)
    moved = RandomAffine(shift=0.1, fill="nearest")(ramp, make_rng(2000))
    right = 14 - moved[:, 0, 14, 14]
    assert 2.75 < float(right.max()) <= 2.8
    assert -2.8 <= float(right.min()) < -2.75
    assert float((right - right.round()).abs().mean()) > 0.2
    assert largest_difference(moved[:, 0, :, 0].min(), 0.0) < 1e-6  # nearest: the edge is repeated


def test_height_and_width_are_drawn_independently() -> None:
    """Shifts are fractions of each side, scales are independent, and shear has both signs."""
    rows, columns = (
        x.float().expand(1, 1, 20, 60).repeat(1000, 1, 1, 1) for x in (torch.arange(20)[:, None], torch.arange(60))
    )
    down = 10 - RandomAffine(shift=0.1, fill="nearest")(rows, make_rng(1000))[:, 0, 10, 30]
    right = 30 - RandomAffine(shift=0.1, fill="nearest")(columns, make_rng(1000))[:, 0, 10, 30]
    assert 1.9 < float(down.max()) <= 2.01
    assert 5.8 < float(right.max()) <= 6.01
    assert abs(float(torch.corrcoef(torch.stack([down, right]))[0, 1])) < 0.15
    slopes = [RandomAffine(scale=0.2, fill="nearest")(x, make_rng(1000))[:, 0] for x in (rows, columns)]
    tall, wide = 1 / (slopes[0][:, 11, 30] - slopes[0][:, 10, 30]), 1 / (slopes[1][:, 10, 31] - slopes[1][:, 10, 30])
    for scale in (tall, wide):
        assert 0.79 < float(scale.min()) < 0.82
        assert 1.18 < float(scale.max()) < 1.21
    assert abs(float(torch.corrcoef(torch.stack([tall, wide]))[0, 1])) < 0.15
    sheared = RandomAffine(shear=0.3, fill="nearest")(columns, make_rng(1000))[:, 0]
    slide = sheared[:, 11, 30] - sheared[:, 10, 30]
    assert 0.28 < float(slide.max()) < 0.31
    assert -0.31 < float(slide.min()) < -0.28


def test_rotation_range_and_identity() -> None:
    cross = torch.zeros(500, 1, 41, 41)
    cross[:, :, 20, 20:36] = 1
    ends = RandomAffine(rotation=20)(cross, make_rng(500))[:, 0, :, 34].argmax(1) - 20
    degrees = torch.atan2(ends.float(), torch.tensor(14.0)).rad2deg()
    assert 17 < float(degrees.max()) < 23
    assert -23 < float(degrees.min()) < -17
    torch.testing.assert_close(RandomAffine()(cross, make_rng(500)), cross, atol=1e-5, rtol=1e-5)


def test_relative_shift_is_a_shift_by_a_fraction_of_the_shorter_side() -> None:
    images = torch.rand(5, 3, 40, 26)
    assert_bit_equal(RandomRelativeShift(1 / 8)(images, make_rng(5)), RandomShift(3)(images, make_rng(5)))
    with pytest.raises(ValueError, match="fraction"):
        RandomRelativeShift(1.5)
