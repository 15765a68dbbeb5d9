"""Confidence intervals."""

import math

__all__ = ["wilson_interval"]


def wilson_interval(n_correct: int, n: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of a proportion by Wilson's formula, which is also valid near 0 and 1.

    >>> low, high = wilson_interval(984, 1000)
    >>> round(low, 4), round(high, 4)
    (0.9742, 0.9901)
    """
    if n == 0:
        return 0.0, 1.0
    z, fraction = 1.959964, n_correct / n
    middle = (fraction + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(fraction * (1 - fraction) / n + z * z / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)
