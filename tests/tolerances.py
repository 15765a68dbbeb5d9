"""Tolerances of all tests, and the measures of difference that they apply to."""

from typing import Any

import torch
from torch import Tensor

REFERENCE = 1e-9  # layer against the reference loops in float64: largest absolute difference
DIRECTION = 1e-7  # directional derivative against finite differences of the reference loops: relative
STREAMED = {torch.float64: 1e-10, torch.float32: 1e-5}  # streamed against stored votes: relative RMS
SAME = {torch.float64: 1e-10, torch.float32: 1e-5}  # the same mathematics in another order: relative RMS
HALF = 0.1  # scores of a model under autocast to bfloat16 or float16 against float32: relative RMS
EXACT = 1e-12  # values computed by hand, in float64


def relative_rms(actual: Tensor, expected: Tensor) -> float:
    """Return the RMS difference divided by the RMS of the expected values; not divided if these are all 0."""
    actual, expected = actual.detach().double(), expected.detach().double()
    assert actual.shape == expected.shape, f"shape {list(actual.shape)}, expected {list(expected.shape)}"
    assert_finite(actual)
    difference = (actual - expected).pow(2).mean().sqrt()
    size = expected.pow(2).mean().sqrt()
    return float(difference / size) if size > 0 else float(difference)


def largest_difference(actual: Tensor, expected: Any) -> float:
    """Return the largest absolute difference."""
    expected = torch.as_tensor(expected, dtype=torch.float64)
    assert actual.shape == expected.shape, f"shape {list(actual.shape)}, expected {list(expected.shape)}"
    return float((actual.detach().double() - expected).abs().max())


def assert_finite(tensor: Tensor | None, name: str = "values") -> None:
    """Fail if there is no tensor or it contains NaN or infinities; report how many."""
    assert tensor is not None, f"{name}: None"
    finite = torch.isfinite(tensor.detach())
    assert bool(finite.all()), f"{name}: {int((~finite).sum())} of {tensor.numel()} values are NaN or infinite"


def assert_all_equal(tensor: Tensor | None, value: float) -> None:
    """Fail if an element differs from ``value``; report which."""
    assert tensor is not None
    torch.testing.assert_close(tensor, torch.full_like(tensor, value), rtol=0, atol=0)


def assert_equal(actual: Tensor | None, expected: Tensor | None) -> None:
    """Fail if two tensors are not bit-equal; report the largest difference."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def assert_different(actual: Tensor, other: Tensor, rtol: float = 1e-5, atol: float = 1e-8) -> None:
    """Fail if two tensors of one shape differ by no more than rounding; report the largest difference."""
    assert actual.shape == other.shape, f"shape {list(actual.shape)} and {list(other.shape)}"
    largest = float((actual.detach().double() - other.detach().double()).abs().max()) if actual.numel() else 0.0
    close = torch.allclose(actual, other, rtol=rtol, atol=atol)
    assert not close, f"expected different tensors {list(actual.shape)}; their largest difference is {largest:g}"
