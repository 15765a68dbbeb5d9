"""Confidence intervals: Wilson's for proportions, quantiles of the normal and Student's t distribution."""

import math

__all__ = ["NORMAL_QUANTILE", "student_quantile", "wilson_interval"]

NORMAL_QUANTILE = 1.959964  # two-sided 95 %
# Two-sided 95 % quantiles of Student's t by degrees of freedom, from 1.
STUDENT_QUANTILES = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
)  # fmt: skip


def wilson_interval(n_correct: int, n: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of a proportion by Wilson's formula, which is also valid near 0 and 1.

    >>> low, high = wilson_interval(984, 1000)
    >>> round(low, 4), round(high, 4)
    (0.9742, 0.9901)
    """
    if n == 0:
        return 0.0, 1.0
    z, fraction = NORMAL_QUANTILE, n_correct / n
    middle = (fraction + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(fraction * (1 - fraction) / n + z * z / (4 * n * n))
    # Rounding may put the bound of 0 or n of n on the wrong side of the fraction.
    return min(fraction, max(0.0, middle - half)), max(fraction, min(1.0, middle + half))


def student_quantile(degrees_of_freedom: int) -> float:
    """Return the two-sided 95 % quantile of Student's t distribution; an approximation beyond 15 degrees of freedom.

    >>> student_quantile(1), round(student_quantile(100), 3)
    (12.706, 1.985)
    """
    if degrees_of_freedom <= len(STUDENT_QUANTILES):
        return STUDENT_QUANTILES[degrees_of_freedom - 1]
    return NORMAL_QUANTILE * (1 + 1.3 / degrees_of_freedom)
