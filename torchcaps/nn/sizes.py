"""Sizes as users write them, checked at the door."""

import math
import operator
from typing import Literal

from torchcaps.votes.wiring import Padding, same_padding

__all__ = ["Pair", "as_count", "as_padding", "as_pair", "as_rows", "resolve_padding"]

Pair = tuple[int, int]


def as_count(value: int, name: str, least: int = 1) -> int:
    """Return a whole number of at least ``least``."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    count = operator.index(value)
    if count < least:
        raise ValueError(f"{name} must be {least} or more, got {count}")
    return count


def as_pair(value: int | Pair, name: str, least: int = 1) -> Pair:
    """Return (rows, columns); one number stands for both."""
    pair = tuple(value) if isinstance(value, tuple | list) else (value, value)
    if len(pair) != 2:
        raise ValueError(f"{name} must be a number or a pair of them, got {value!r}")
    return as_count(pair[0], name, least), as_count(pair[1], name, least)


def as_rows(pose: Literal["vector", "matrix"] | int, child_dim: int, parent_dim: int) -> int:
    """Return the rows of a pose seen as a matrix: 1 for vectors, the root of its size for square matrices."""
    if pose == "vector":
        return 1
    if pose == "matrix":
        rows = math.isqrt(child_dim)
        for name, dim in {"child_dim": child_dim, "parent_dim": parent_dim}.items():
            if math.isqrt(dim) ** 2 != dim:
                raise ValueError(f"{name} must be a square number with pose='matrix' (4, 9, 16, ...), got {dim}")
        if child_dim != parent_dim:
            raise ValueError(
                f"parent_dim must equal child_dim with pose='matrix': a square matrix times a square matrix "
                f"keeps its size; got {child_dim} and {parent_dim}"
            )
        return rows
    if isinstance(pose, bool) or not isinstance(pose, int):
        raise ValueError(f"pose must be 'vector', 'matrix' or the number of rows of a matrix, got {pose!r}")
    if pose < 1:
        raise ValueError(f"pose must be 1 row or more, got {pose}")
    for name, dim in {"child_dim": child_dim, "parent_dim": parent_dim}.items():
        if dim % pose:
            raise ValueError(f"{name} must be a multiple of the {pose} rows that pose asks for, got {dim}")
    return pose


def as_padding(padding: int | Pair | str) -> Pair | Literal["same"]:
    """Return (rows, columns) of padding on both sides, or ``"same"``."""
    if padding == "same":
        return "same"
    if isinstance(padding, str):
        raise ValueError(f"padding must be a number, a pair of them or 'same', got {padding!r}")
    return as_pair(padding, "padding", least=0)


def resolve_padding(padding: Pair | Literal["same"], grid: Pair, kernel: Pair, stride: Pair) -> Padding:
    """Return the padding on each side: (top, bottom, left, right)."""
    if padding == "same":
        return (*same_padding(grid[0], kernel[0], stride[0]), *same_padding(grid[1], kernel[1], stride[1]))
    return padding[0], padding[0], padding[1], padding[1]
