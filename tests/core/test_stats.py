import pytest

from torchcaps._core.stats import wilson_interval


@pytest.mark.parametrize(
    ("n_correct", "n", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_interval_equals_published_values(n_correct: int, n: int, low: float, high: float) -> None:
    """Newcombe 1998, table I."""
    assert wilson_interval(n_correct, n) == pytest.approx((low, high), abs=1e-4)


def test_wilson_interval_ends() -> None:
    assert wilson_interval(20, 20)[1] == 1
    assert wilson_interval(0, 0) == (0, 1)


def test_wilson_interval_contains_the_fraction() -> None:
    """Also if rounding moves a bound past 0 or 1, as for 0 of 3 and 4 of 4."""
    outside = [
        (n_correct, n)
        for n in range(1, 60)
        for n_correct in (0, n)
        if not wilson_interval(n_correct, n)[0] <= n_correct / n <= wilson_interval(n_correct, n)[1]
    ]
    assert outside == []
