"""The one table of tolerances: nothing in the tests may be looser than what stands here."""

from typing import Any

import torch
from torch import Tensor

REFERENCE = 1e-9  # against the papers' loops, float64, largest difference
DIRECTION = 1e-7  # a gradient along a direction against differences of the papers' loops, relative
STREAMED = {torch.float64: 1e-10, torch.float32: 1e-5}  # relative RMS
SAME = {torch.float64: 1e-10, torch.float32: 1e-5}  # the same mathematics in another order, relative RMS
HALF = 0.1  # a whole model under autocast to bfloat16 or float16 against float32, relative RMS of its scores
EXACT = 1e-12  # hand-computed values in float64


def relative_rms(found: Tensor, expected: Tensor) -> float:
    """The root of the mean squared difference over that of the expected values; a plain one where those are 0."""
    found, expected = found.detach().double(), expected.detach().double()
    assert found.shape == expected.shape, f"shape {list(found.shape)} instead of {list(expected.shape)}"
    assert bool(torch.isfinite(found).all()), "values that are not finite"
    apart = (found - expected).pow(2).mean().sqrt()
    size = expected.pow(2).mean().sqrt()
    return float(apart / size) if size > 0 else float(apart)


def largest_difference(found: Tensor, expected: Any) -> float:
    expected = torch.as_tensor(expected, dtype=torch.float64)
    assert found.shape == expected.shape, f"shape {list(found.shape)} instead of {list(expected.shape)}"
    return float((found.detach().double() - expected).abs().max())
