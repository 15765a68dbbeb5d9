"""Checks and normal forms of size arguments: counts, pairs, pose rows, padding."""

import math
import operator
from typing import Literal

from torchcaps.votes.wiring import Padding, same_padding

__all__ = ["Pair", "as_count", "as_padding", "as_pair", "as_rows", "resolve_padding"]

Pair = tuple[int, int]


def as_count(value: int, name: str, least: int = 1) -> int:
    """Return an int of at least ``least``; accept anything with ``__index__`` except bool."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an int, got {value!r}")
    count = operator.index(value)
    if count < least:
        raise ValueError(f"{name} must be at least {least}, got {count}")
    return count


def as_pair(value: int | Pair, name: str, least: int = 1) -> Pair:
    """Return (rows, columns); a single int is used for both."""
    pair = tuple(value) if isinstance(value, tuple | list) else (value, value)
    if len(pair) != 2:
        raise ValueError(f"{name} must be an int or a pair of ints, got {value!r}")
    return as_count(pair[0], name, least), as_count(pair[1], name, least)


def as_rows(pose: Literal["vector", "matrix"] | int, child_dim: int, parent_dim: int) -> int:
    """Return the rows of a pose viewed as a matrix: 1 for vectors, the square root of its size for square matrices."""
    if pose == "vector":
        return 1
    if pose == "matrix":
        rows = math.isqrt(child_dim)
        for name, dim in {"child_dim": child_dim, "parent_dim": parent_dim}.items():
            if math.isqrt(dim) ** 2 != dim:
                raise ValueError(f"{name} must be a square number with pose='matrix' (4, 9, 16, ...), got {dim}")
        if child_dim != parent_dim:
            raise ValueError(
                f"parent_dim must equal child_dim with pose='matrix', since the product of square matrices "
                f"keeps their size; got {child_dim} and {parent_dim}"
            )
        return rows
    if isinstance(pose, bool) or not isinstance(pose, int):
        raise ValueError(f"pose must be 'vector', 'matrix' or the number of rows of a matrix (int), got {pose!r}")
    if pose < 1:
        raise ValueError(f"pose must be at least 1 row, got {pose}")
    for name, dim in {"child_dim": child_dim, "parent_dim": parent_dim}.items():
        if dim % pose:
            raise ValueError(f"{name} must be a multiple of the {pose} rows given by pose, got {dim}")
    return pose


def as_padding(padding: int | Pair | str) -> Pair | Literal["same"]:
    """Return the padding per side as (rows, columns), or ``"same"``."""
    if padding == "same":
        return "same"
    if isinstance(padding, str):
        raise ValueError(f"padding must be an int, a pair of ints or 'same', got {padding!r}")
    return as_pair(padding, "padding", least=0)


def resolve_padding(padding: Pair | Literal["same"], grid: Pair, kernel: Pair, stride: Pair) -> Padding:
    """Return the padding of each side as (top, bottom, left, right)."""
    if padding == "same":
        return (*same_padding(grid[0], kernel[0], stride[0]), *same_padding(grid[1], kernel[1], stride[1]))
    return padding[0], padding[0], padding[1], padding[1]
