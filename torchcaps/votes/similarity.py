"""Similarities of votes and the centers of parents, for couplings that do not depend on the lengths of the votes.

With votes ``v``, centers ``s``, and ``centered(x)`` the vector ``x`` minus the mean of its elements::

    cosine     <v, s> / (|v| |s|)
    tanimoto   <v, s> / (|v|² + |s|² - <v, s>)
    pearson    <v, centered(s)> / (|centered(v)| |centered(s)|)
"""

from typing import Literal, get_args

from torch import Tensor

__all__ = ["SIMILARITIES", "Similarity", "agreement", "as_query", "unit"]

Similarity = Literal["cosine", "tanimoto", "pearson"]
SIMILARITIES: tuple[str, ...] = get_args(Similarity)  # in the order of the enum in cpu/kernel.cpp


def as_query(center: Tensor, similarity: Similarity, least: float) -> tuple[Tensor, Tensor | None]:
    """Return the vectors whose dot products with the votes are needed, and for Tanimoto their squared lengths."""
    if similarity == "tanimoto":
        return center, (center * center).sum(-1)
    if similarity == "pearson":
        center = center - center.mean(-1, keepdim=True)
    return unit(center, least), None


def agreement(product: Tensor, squares: Tensor, constant: Tensor | None, least: float) -> Tensor:
    """Return the similarity, ``[B, *L, I, J]``.

    Args:
        product: of votes and queries.
        squares: squared lengths of the votes, centered for Pearson.
        constant: the second result of `as_query`.
        least: least squared length of a vote, or divisor.
    """
    if constant is None:
        return product / squares.clamp_min(least).sqrt()
    return product / (squares + constant.unsqueeze(-2) - product).clamp_min(least)


def unit(vectors: Tensor, least: float) -> Tensor:
    """Return vectors of length 1; lengths whose square is below ``least`` count as its root.

    >>> import torch
    >>> unit(torch.tensor([3.0, 4.0]), 1e-6)
    tensor([0.6000, 0.8000])
    """
    return vectors / (vectors * vectors).sum(-1, keepdim=True).clamp_min(least).sqrt()
