"""Dropout by image: masks that don't depend on batch, micro-batch or process, and torch's generator elsewhere."""

import pytest
import torch
from torch import nn

from tests.tolerances import assert_different
from torchcaps.nn import DenseCapsules, ImageDropout, image_dropout
from torchcaps.routing import Attention

INDICES = torch.tensor([3, 8, 1, 70_000, 5, 2])


def masked(x: torch.Tensor, indices: torch.Tensor, seed: int = 0, step: int = 4, p: float = 0.5) -> torch.Tensor:
    with image_dropout(seed, step, indices):
        return ImageDropout(p)(x)


@pytest.mark.parametrize("shape", [(7,), (3, 5), ()], ids=str)
def test_the_mask_of_an_image_does_not_depend_on_its_batch(shape: tuple[int, ...]) -> None:
    x = torch.rand(6, *shape) + 1
    full = masked(x, INDICES)
    for rows in ([0, 1, 2], [5, 3], [4]):
        torch.testing.assert_close(masked(x[rows], INDICES[rows]), full[rows], rtol=0, atol=0)


def test_masks_differ_between_seeds_steps_images_and_layers() -> None:
    x = torch.ones(6, 64)
    masks = [masked(x, INDICES), masked(x, INDICES, seed=1), masked(x, INDICES, step=5), masked(x, INDICES + 1)]
    with image_dropout(0, 4, INDICES):
        masks += [ImageDropout(0.5)(x), ImageDropout(0.5)(x)]
    equal = [(i, j) for i in range(6) for j in range(i) if torch.equal(masks[i], masks[j])]
    assert equal == [(4, 0)]  # the first layer of the same step
    rows = {tuple(row) for row in masks[0].tolist()}
    assert len(rows) == 6


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_rate_and_scale(p: float) -> None:
    values = masked(torch.ones(100, 1001), torch.arange(100), p=p)
    assert values.unique().tolist() == [0.0, pytest.approx(1 / (1 - p))]
    deviation = (p * (1 - p) / values.numel()) ** 0.5
    assert float((values == 0).double().mean()) == pytest.approx(p, abs=5 * deviation)
    between = torch.corrcoef(torch.stack([values[:, :-1].flatten(), values[:, 1:].flatten()]))[0, 1]
    assert abs(float(between)) < 5 / values.numel() ** 0.5


def test_all_or_nothing() -> None:
    x = torch.rand(6, 4)
    assert masked(x, INDICES, p=1.0).abs().sum() == 0
    torch.testing.assert_close(masked(x, INDICES, p=0.0), x, rtol=0, atol=0)


def test_without_indices_it_is_dropout_of_torch() -> None:
    x = torch.rand(6, 9)
    outputs = []
    for layer in (ImageDropout(0.3), nn.Dropout(0.3)):
        torch.manual_seed(5)
        outputs.append(layer(x))
    torch.testing.assert_close(*outputs, rtol=0, atol=0)
    layer = ImageDropout(0.3).eval()
    torch.testing.assert_close(layer(x), x, rtol=0, atol=0)
    torch.manual_seed(5)  # rows that do not belong to the images
    torch.testing.assert_close(masked(x, torch.arange(5), p=0.3), outputs[1], rtol=0, atol=0)


def test_several_rows_per_image() -> None:
    x = torch.ones(6, 8)
    pairs = masked(x, INDICES[:3])
    torch.testing.assert_close(pairs.view(3, 16), masked(x.view(3, 16), INDICES[:3]), rtol=0, atol=0)


def test_dropout_of_a_capsule_layer_follows_the_images() -> None:
    layer = DenseCapsules(5, 4, 3, 4, routing=Attention(dropout=0.5))
    poses = torch.randn(6, 5, 4)
    with image_dropout(0, 1, INDICES):
        full = layer(poses).pose
    with image_dropout(0, 1, INDICES[2:4]):
        part = layer(poses[2:4]).pose
    torch.testing.assert_close(part, full[2:4])
    with image_dropout(0, 2, INDICES):
        assert_different(layer(poses).pose, full)
