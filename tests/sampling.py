"""Seeded samples of large products of test cases.

`pytest` runs a sample; `pytest --all-cases`, or the environment variable TORCHCAPS_ALL_CASES=1, runs all cases. Samples
depend only on the cases, their order and the seed, so that every process collects the same tests.
"""

import os
import random
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

ALL_CASES_VARIABLE = "TORCHCAPS_ALL_CASES"

Case = TypeVar("Case")


def all_cases() -> bool:
    """Whether products of cases run in full."""
    return os.environ.get(ALL_CASES_VARIABLE, "") not in ("", "0")


def sample(cases: Iterable[Case], n: int, seed: int = 0) -> list[Case]:
    """Return `n` cases in their original order, or all of them with `--all-cases`."""
    return covering_sample(cases, n, (), seed)


def covering_sample(
    cases: Iterable[Case], n: int, keys: Sequence[str | Callable[[Case], Hashable]], seed: int = 0
) -> list[Case]:
    """Return at least `n` cases that contain every value of each key, or all cases with `--all-cases`.

    Args:
        cases: All cases; the sample keeps their order.
        n: Size of the sample. It is exceeded if the keys have more values than `n` cases can cover.
        keys: Attribute names, or functions of a case. A tuple-valued function covers combinations.
        seed: Seed of the sample.

    >>> covering_sample([(a, b) for a in "xyz" for b in range(3)], 3, [lambda case: case[0]])
    [('x', 0), ('y', 1), ('z', 0)]
    """
    cases = list(cases)
    if all_cases() or len(cases) <= n:
        return cases
    values = [frozenset((k, _value(case, key)) for k, key in enumerate(keys)) for case in cases]
    order = random.Random(seed).sample(range(len(cases)), len(cases))
    uncovered = set().union(*values)
    chosen: list[int] = []
    for gain in range(len(keys), 0, -1):  # greedy set cover: first the cases that cover the most new values
        for index in order:
            if len(values[index] & uncovered) >= gain:
                chosen.append(index)
                uncovered -= values[index]
    taken = set(chosen)
    chosen += [index for index in order if index not in taken][: max(0, n - len(chosen))]
    return [cases[index] for index in sorted(chosen)]


def _value(case: object, key: str | Callable[..., Hashable]) -> Hashable:
    return getattr(case, key) if isinstance(key, str) else key(case)
