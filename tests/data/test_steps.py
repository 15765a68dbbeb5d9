"""Every step of the pipelines against its plain definition."""

import math

import pytest
import torch
from scipy import ndimage
from torch import Tensor

from tests.tolerances import EXACT, SAME, largest_difference, relative_rms
from torchcaps._core.random import CounterRNG
from torchcaps.data import ImageSet
from torchcaps.data.geometry import (
    CenterCrop,
    PadTo,
    RandomAffine,
    RandomCrop,
    RandomHorizontalFlip,
    RandomShift,
    affine_matrix,
    crop_windows,
    warp_affine,
)
from torchcaps.data.transforms import (
    Normalize,
    RandomBrightness,
    RandomContrast,
    ScalePixels,
    Standardize,
    SubtractMeanImage,
    Transform,
    pixel_sum,
)


def draws(count: int, seed: int = 0) -> CounterRNG:
    return CounterRNG(seed, 0, torch.arange(count))


def test_a_shift_moves_and_brings_in_zeros() -> None:
    images = torch.arange(1, 26).float().view(1, 1, 5, 5).repeat(300, 1, 1, 1)
    moved = RandomShift(2)(images, draws(300))
    same = draws(300)
    down, right = same.integers(-2, 2).tolist(), same.integers(-2, 2).tolist()
    seen = set()
    for n in range(300):
        expected = torch.zeros(5, 5)
        for row in range(5):
            for column in range(5):
                to_row, to_column = row + down[n], column + right[n]
                if 0 <= to_row < 5 and 0 <= to_column < 5:
                    expected[to_row, to_column] = images[n, 0, row, column]
        assert torch.equal(moved[n, 0], expected)
        seen.add((down[n], right[n]))
    assert len(seen) == 25  # all places of [-2, 2]² come up
    assert torch.equal(RandomShift(0)(images, draws(300)), images)


def test_crops_are_windows_of_the_padded_image() -> None:
    images = torch.rand(200, 3, 8, 10)
    found = RandomCrop(6, padding=1)(images, draws(200))
    same = draws(200)
    top, left = same.integers(0, 4), same.integers(0, 6)
    padded = torch.nn.functional.pad(images, (1, 1, 1, 1))
    for n, (t, x) in enumerate(zip(top.tolist(), left.tolist(), strict=True)):
        assert torch.equal(found[n], padded[n, :, t : t + 6, x : x + 6])
    assert {0, 4} <= set(top.tolist())
    assert {0, 6} <= set(left.tolist())
    middle = CenterCrop(24)(torch.arange(32 * 32).view(1, 1, 32, 32), draws(1))
    assert middle[0, 0, 0, 0] == 4 * 32 + 4  # as tf.image.resize_image_with_crop_or_pad
    assert middle.shape == (1, 1, 24, 24)
    odd = CenterCrop(4)(torch.arange(49).view(1, 1, 7, 7), draws(1))
    assert odd[0, 0, 0, 0] == 1 * 7 + 1  # what can't be halved is left at the far side
    assert RandomCrop(24).shape((3, 32, 32)) == CenterCrop(24).shape((3, 32, 32)) == (3, 24, 24)


def test_windows_are_at_their_own_places() -> None:
    images = torch.arange(2 * 16).view(2, 1, 4, 4)
    found = crop_windows(images, torch.tensor([0, 2]), torch.tensor([1, 2]), (2, 2), 0)
    assert found.tolist() == [[[[1, 2], [5, 6]]], [[[26, 27], [30, 31]]]]


def test_padding_reaches_the_size_and_leaves_larger_images_alone() -> None:
    images = torch.rand(2, 1, 28, 27)
    padded = PadTo(40)(images, draws(2))
    assert padded.shape == (2, 1, 40, 40)
    assert torch.equal(padded[:, :, 6:34, 6:33], images)
    assert math.isclose(float(padded.sum()), float(images.sum()), rel_tol=SAME[torch.float32])
    assert torch.equal(PadTo(20)(images, draws(2)), images)
    assert PadTo(40).shape((1, 28, 50)) == (1, 40, 50)


def test_flips_mirror_half_of_the_images() -> None:
    images = torch.rand(1000, 1, 3, 4)
    flipped = RandomHorizontalFlip()(images, draws(1000))
    chosen = draws(1000).bernoulli()
    assert 430 < int(chosen.sum()) < 570
    assert torch.equal(flipped[chosen], images[chosen].flip(-1))
    assert torch.equal(flipped[~chosen], images[~chosen])


def smooth(count: int, height: int, width: int) -> Tensor:
    rows, columns = torch.arange(height)[:, None] / 5, torch.arange(width)[None] / 4
    return torch.stack([torch.sin(rows + n) * torch.cos(columns - n) + 1 for n in range(count)])[:, None].float()


@pytest.mark.parametrize(("fill", "mode"), [("zero", "grid-constant"), ("nearest", "nearest")])
def test_resampling_is_scipys(fill: str, mode: str) -> None:
    """An independent library, given the inverse map about the middle, interpolates to the same values."""
    images = smooth(6, 17, 24)
    some = draws(6, seed=4)
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


def test_a_quarter_turn_is_counter_clockwise_and_a_shift_goes_down_and_right() -> None:
    images = torch.zeros(1, 1, 5, 5)
    images[0, 0, 2, 4] = 1  # at the right
    one = torch.ones(1, dtype=torch.float64)
    turned_up = warp_affine(images, affine_matrix(90 * one, 0 * one, one, one), torch.zeros(1, 2), (5, 5))
    assert turned_up[0, 0].argmax() == 2  # at the top
    same = affine_matrix(0 * one, 0 * one, one, one)
    assert largest_difference(same, torch.eye(2)[None].double()) < EXACT
    moved = warp_affine(images, same, torch.tensor([[1.0, -2.0]]), (5, 5))
    assert largest_difference(moved[0, 0, 3, 2], 1.0) < 1e-6
    assert math.isclose(float(moved.sum()), 1, rel_tol=SAME[torch.float32])
    assert affine_matrix(0 * one, 0.5 * one, one, one)[0].tolist() == [[1, 0], [0.5, 1]]  # rows slide by their height


def test_keras_shifts_are_fractions_of_a_pixel_within_the_range() -> None:
    """Choi 2019: width_shift_range=0.1 of 28 pixels is up to 2.8, not 2 and not 3."""
    ramp = torch.arange(28.0).expand(1, 1, 28, 28).repeat(2000, 1, 1, 1)
    moved = RandomAffine(shift=0.1, fill="nearest")(ramp, draws(2000))
    right = 14 - moved[:, 0, 14, 14]
    assert 2.75 < float(right.max()) <= 2.8
    assert -2.8 <= float(right.min()) < -2.75
    assert float((right - right.round()).abs().mean()) > 0.2
    assert largest_difference(moved[:, 0, :, 0].min(), 0.0) < 1e-6  # nearest: the edge is repeated


def test_height_and_width_have_their_own_ranges() -> None:
    """Shifts are shares of each side; scales are drawn for each by itself; shear goes both ways."""
    rows, columns = (
        x.float().expand(1, 1, 20, 60).repeat(1000, 1, 1, 1) for x in (torch.arange(20)[:, None], torch.arange(60))
    )
    down = 10 - RandomAffine(shift=0.1, fill="nearest")(rows, draws(1000))[:, 0, 10, 30]
    right = 30 - RandomAffine(shift=0.1, fill="nearest")(columns, draws(1000))[:, 0, 10, 30]
    assert 1.9 < float(down.max()) <= 2.01
    assert 5.8 < float(right.max()) <= 6.01
    assert abs(float(torch.corrcoef(torch.stack([down, right]))[0, 1])) < 0.15
    slopes = [RandomAffine(scale=0.2, fill="nearest")(x, draws(1000))[:, 0] for x in (rows, columns)]
    tall, wide = 1 / (slopes[0][:, 11, 30] - slopes[0][:, 10, 30]), 1 / (slopes[1][:, 10, 31] - slopes[1][:, 10, 30])
    for scale in (tall, wide):
        assert 0.79 < float(scale.min()) < 0.82
        assert 1.18 < float(scale.max()) < 1.21
    assert abs(float(torch.corrcoef(torch.stack([tall, wide]))[0, 1])) < 0.15
    sheared = RandomAffine(shear=0.3, fill="nearest")(columns, draws(1000))[:, 0]
    slide = sheared[:, 11, 30] - sheared[:, 10, 30]
    assert 0.28 < float(slide.max()) < 0.31
    assert -0.31 < float(slide.min()) < -0.28


def test_affine_ranges() -> None:
    cross = torch.zeros(500, 1, 41, 41)
    cross[:, :, 20, 20:36] = 1
    ends = RandomAffine(rotation=20)(cross, draws(500))[:, 0, :, 34].argmax(1) - 20  # where the arm crosses column 34
    degrees = torch.atan2(ends.float(), torch.tensor(14.0)).rad2deg()
    assert 17 < float(degrees.max()) < 23
    assert -23 < float(degrees.min()) < -17
    assert torch.allclose(RandomAffine()(cross, draws(500)), cross, atol=1e-5)


# Colours ----------------------------------------------------------------------------------------------------


def test_pixels() -> None:
    bytes_ = torch.tensor([0, 51, 255], dtype=torch.uint8).view(3, 1, 1, 1)
    assert ScalePixels()(bytes_, draws(3)).flatten().tolist() == [0, torch.tensor(0.2).item(), 1]
    assert ScalePixels(256)(bytes_, draws(3)).flatten().tolist() == [0, 51 / 256, 255 / 256]
    assert ScalePixels()(bytes_, draws(3)).dtype == torch.float32


def test_brightness_adds_one_number_to_an_image() -> None:
    images = torch.rand(400, 2, 3, 3)
    added = (RandomBrightness(0.25)(images, draws(400)) - images).flatten(1)
    assert float((added - added[:, :1]).abs().max()) < 1e-6
    assert 0.24 < float(added.max()) <= 0.25 + 1e-6
    assert -0.25 - 1e-6 <= float(added.min()) < -0.24


def test_contrast_stretches_about_the_mean_of_each_channel() -> None:
    images = torch.rand(50, 3, 5, 7)
    found = RandomContrast(0.2, 1.8)(images, draws(50))
    factor = draws(50).uniform(0.2, 1.8)
    mean = images.double().mean((2, 3), keepdim=True)
    expected = (images.double() - mean) * factor[:, None, None, None] + mean
    assert relative_rms(found, expected) < SAME[torch.float32]


def test_standardisation_is_tensorflows() -> None:
    images = torch.rand(20, 3, 24, 24) * torch.rand(20, 1, 1, 1)
    found = Standardize()(images, draws(20))
    for image, standard in zip(images.double(), found, strict=True):
        floor = 1 / math.sqrt(image.numel()) / 255
        expected = (image - image.mean()) / max(float(image.std(correction=0)), floor)
        assert relative_rms(standard, expected) < SAME[torch.float32]
    flat = Standardize()(torch.full((1, 1, 4, 4), 0.7), draws(1))
    assert float(flat.abs().max()) < 1e-3  # and no NaN


def test_fixed_numbers_for_each_channel() -> None:
    images = torch.rand(2, 3, 4, 4)
    found = Normalize((0.1, 0.2, 0.3), (0.5, 0.6, 0.7))(images, draws(2))
    for channel, (mean, deviation) in enumerate(((0.1, 0.5), (0.2, 0.6), (0.3, 0.7))):
        assert relative_rms(found[:, channel], (images[:, channel] - mean) / deviation) < SAME[torch.float32]


def test_the_mean_image_is_of_the_training_set() -> None:
    pixels = torch.randint(0, 256, (2500, 3, 4, 5), dtype=torch.uint8)
    dataset = ImageSet("some", "train", pixels, torch.zeros(2500), ["a", "b"])
    step = SubtractMeanImage().fit(dataset, 256)
    expected = pixels.double().mean(0) / 256
    assert relative_rms(step(torch.zeros(1, 3, 4, 5), draws(1))[0], -expected) < SAME[torch.float32]
    with pytest.raises(ValueError, match="call fit"):
        SubtractMeanImage()(torch.zeros(1, 3, 4, 5), draws(1))
    with pytest.raises(ValueError, match="another shape"):
        step.shape((3, 5, 5))


def test_pixel_sums_are_sums() -> None:
    for shape in ((3, 1), (2, 3, 5, 7), (4, 3, 32, 32), (1, 2, 1, 1), (0, 3, 4, 4)):
        values = torch.rand(*shape)
        assert torch.allclose(pixel_sum(values).double(), values.double().flatten(1).sum(1))


STEPS: list[Transform] = [
    RandomAffine(20, 0.1, 0.2, 0.2), RandomAffine(shift=0.1, fill="nearest"), RandomBrightness(), CenterCrop(5), RandomContrast(), RandomHorizontalFlip(),
    Normalize((0.5,), (0.2,)), PadTo(12), ScalePixels(), RandomCrop(6, 1), RandomShift(3), Standardize(),
]  # fmt: skip


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_an_image_comes_out_the_same_bit_by_bit_whatever_comes_with_it(step: Transform) -> None:
    images = torch.rand(130, 1, 9, 11)
    index = torch.randperm(10_000)[:130]
    together = step(images, CounterRNG(3, 1, index))
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for start, end in ((0, 1), (5, 12), (129, 130), (0, 97)):
            apart = step(images[start:end], CounterRNG(3, 1, index[start:end]))
            assert torch.equal(apart, together[start:end])
    assert together.shape[1:] == step.shape((1, 9, 11))
    assert not torch.equal(step(images, CounterRNG(4, 1, index)), together) or step in (
        CenterCrop(5), Normalize((0.5,), (0.2,)), PadTo(12), ScalePixels(), Standardize(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: RandomShift(-1), "most must be 0 or more, got -1"),
        (lambda: RandomShift(1.5), "most must be a whole number"),
        (lambda: RandomCrop(0), "size must be 1 or more"),
        (lambda: RandomHorizontalFlip(1.2), "at most 1"),
        (lambda: ScalePixels(0), "scale must be 1 or more"),
        (lambda: RandomAffine(fill="mirror"), "fill must be 'zero' or 'nearest'"),
        (lambda: RandomAffine(scale=1.0), "at most 0.99"),
        (lambda: RandomContrast(0.5, 0.2), "high must be 0.5 or more"),
        (lambda: Normalize((0.1,), (0.2, 0.3)), "one number a channel"),
        (lambda: RandomCrop(40).shape((3, 32, 32)), "does not fit into images of 32x32"),
        (lambda: Normalize().shape((3, 2, 2)), "is for 1 channels, got images with 3"),
    ],
)
def test_steps_refuse_what_makes_no_sense(make: object, said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        make()  # type: ignore[operator]
