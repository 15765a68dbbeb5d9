"""Golden values of routings: inputs by formula, results of plain Python loops in float64, to 8 decimals."""

import math

import torch
from torch import Tensor

GOLDEN = 1e-7  # largest absolute difference from values printed with 8 decimals


def wave(shape: tuple[int, ...], phase: float, scale: float = 1.0) -> Tensor:
    """Return a tensor whose k-th element is ``scale * sin(0.7 k + phase)``, rounded to 3 decimals."""
    values = [round(scale * math.sin(0.7 * k + phase), 3) for k in range(math.prod(shape))]
    return torch.tensor(values, dtype=torch.float64).view(shape)


def assert_golden(actual: Tensor | None, expected: list) -> None:
    """Compare a tensor with nested lists of golden values."""
    assert actual is not None
    values = torch.tensor(expected, dtype=torch.float64)
    assert actual.shape == values.shape
    assert float((actual.detach() - values).abs().max()) < GOLDEN
