"""The order of an epoch: a permutation of any length, of which any part is worked out without the rest."""

import math

import torch
from torch import Tensor

from torchcaps.data.draws import hashed

__all__ = ["permuted"]

ROUNDS = 4


def permuted(positions: Tensor, length: int, seed: int, epoch: int) -> Tensor:
    """Return which index stands at each of these positions of an epoch's order.

    The numbers below ``length`` are written as two digits ``(high, low)`` of a rectangle with about as many rows as
    columns, and each digit in turn is moved round by a hash of the other: a Feistel network, which is a permutation
    whatever the hash (the generalised one of Black and Rogaway 2002). What falls off the rectangle's ragged last row is
    sent through again. So 60 million images need no table of 480 MB, a restart needs no replay, and every process
    works out its own share.

    >>> permuted(torch.arange(6), 6, seed=0, epoch=0).tolist()
    [2, 1, 4, 3, 5, 0]
    """
    columns = math.isqrt(max(length - 1, 0)) + 1
    rows = -(-length // columns)
    key = hashed(hashed(torch.tensor(seed)) - epoch - 1)  # minus: draws of the same seed are another row of hashes
    keys = [hashed(key + number) for number in range(2 * ROUNDS)]

    def once(index: Tensor) -> Tensor:
        high, low = index // columns, index % columns
        for first, second in zip(keys[::2], keys[1::2], strict=True):
            high = (high + (hashed(low ^ first) & 0x7FFFFFFF)) % rows
            low = (low + (hashed(high ^ second) & 0x7FFFFFFF)) % columns
        return high * columns + low

    index = once(positions)
    while bool((outside := index >= length).any()):
        index = torch.where(outside, once(index), index)
    return index
