"""Properties of digits, and capsules whose dimensions have known meanings."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.papers.networks import fixed_context, network_with_outputs
from torchcaps.capsules import Capsules
from torchcaps.papers.measures.properties import PROPERTIES, digit_properties, measure_width_dimension

SIDE, DIM, CLASSES, PER_CLASS = 28, 16, 10, 8


def blob(width: Tensor, height: Tensor, slant: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return Gaussian blobs ``[B, 1, 28, 28]`` with these moments."""
    grid = torch.arange(SIDE, dtype=torch.float64)
    parts = (value[:, None, None].double() for value in (width, height, slant, x, y))
    width, height, slant, x, y = parts
    down, right = grid[:, None] - y, grid[None] - x
    images = torch.exp(-0.5 * (((right - slant * down) / width).square() + (down / height).square()))
    return images[:, None].float()


def test_properties_of_blobs() -> None:
    expected = torch.tensor([[2.0, 3.5, 0.4, 14.0, 13.0], [3.0, 2.0, -0.5, 12.0, 15.0]])
    width, height, slant, ink, x, y = digit_properties(blob(*expected.unbind(1))[:, 0]).unbind(1)
    measured = torch.stack([width, height, slant, x, y], 1)
    torch.testing.assert_close(measured, expected.double(), rtol=0.02, atol=0.02)
    torch.testing.assert_close(ink, 2 * torch.pi * width * height, rtol=0.02, atol=0)


def test_an_empty_image_has_finite_properties() -> None:
    assert digit_properties(torch.zeros(2, SIDE, SIDE)).tolist() == [[0.0] * len(PROPERTIES)] * 2


class BlobDecoder(nn.Module):
    """A decoder to a blob: ``moments`` times the labelled capsule is added to width, height, slant, x and y."""

    def __init__(self, moments: Tensor) -> None:
        super().__init__()
        self.moments = moments  # [5, D]

    def forward(self, capsules: Capsules, labels: Tensor) -> Tensor:
        pose = capsules.pose[torch.arange(len(labels)), labels]
        center = torch.tensor([2.5, 3.0, 0.0, 13.5, 13.5])
        return blob(*(center + pose @ self.moments.T).unbind(1))


def width_measures(moments: Tensor) -> dict[str, Any]:
    """Return the measures of capsules of zeros with a decoder, on digits of natural variation."""
    generator = torch.Generator().manual_seed(1)
    n = CLASSES * PER_CLASS
    spread = torch.tensor([0.1, 0.3, 0.1, 0.5, 0.5])
    natural = torch.tensor([2.5, 3.0, 0.0, 13.5, 13.5]) + spread * torch.randn(n, 5, generator=generator)
    images, labels = blob(*natural.unbind(1)), torch.arange(n) % CLASSES
    net: Any = network_with_outputs("sabour2017_mnist", images, torch.zeros(n, CLASSES, DIM))
    net.model.decoder = BlobDecoder(moments)
    return measure_width_dimension(fixed_context(images, labels), net, n_images=n, n_per_class=PER_CLASS)


def test_a_dimension_that_only_changes_the_width_represents_it() -> None:
    """All other dimensions change another moment as much; a random direction mixes them."""
    moments = torch.zeros(5, DIM)
    moments[0, 5] = 2.0
    for dim in range(DIM):
        if dim != 5:
            moments[1 + dim % 4, dim] = (2.0, 1.0, 5.0, 5.0)[dim % 4]
    results = width_measures(moments)
    assert results["width_classes"] == 100
    assert results["random_width_classes"] < 50
    assert results["width_response"] > 3
    assert results["width_response"] > 1.5 * results["random_width_response"]
    assert results["width_fraction"] > 1.5 * results["random_width_fraction"]
    assert results["responses"].shape == (CLASSES, DIM, len(PROPERTIES))
    assert results["responses"][:, :, 0].abs().argmax(1).tolist() == [5] * CLASSES
    assert (results["n"], results["width_classes_images"]) == (80, 10)


@pytest.mark.parametrize("factor", [0.02, 0.0])
def test_a_small_change_of_the_width_represents_nothing(factor: float) -> None:
    moments = torch.zeros(5, DIM)
    moments[0, 5] = factor
    results = width_measures(moments)
    assert (results["width_classes"], results["random_width_classes"]) == (0, 0)
    assert results["width_response"] < 0.5
