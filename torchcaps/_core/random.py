"""Counter-based randomness: every random number is a function of (seed, epoch, index, stream), without hidden state.

A stateful generator gives an image numbers that depend on the images before it, the batch size and the number of
workers. Here each number is a hash of its coordinates (a counter-based generator as in Salmon et al. 2011, "Parallel
random numbers: as easy as 1, 2, 3"), with the finaliser of SplitMix64 (Steele et al. 2014) as the hash. All of it is
integer arithmetic on the CPU, so it is bit-equal on every machine.
"""

import math
import zlib
from statistics import NormalDist

import torch
from torch import Tensor

__all__ = ["CounterRNG", "hash64", "permute_indices", "step_seed"]

_GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as a signed number: 2**64 over the golden ratio
_FIRST = -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
_SECOND = -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
FEISTEL_ROUNDS = 4
_quantile = NormalDist().inv_cdf


def _logical_shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros; torch's own shift of signed integers copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def hash64(x: Tensor) -> Tensor:
    """Return the SplitMix64 hash of each element as signed 64-bit integers.

    >>> hash64(torch.tensor([0, 1])).tolist()
    [-2152535657050944081, -7995527694508729151]
    """
    x = x + _GOLDEN
    x = (x ^ _logical_shift_right(x, 30)) * _FIRST
    x = (x ^ _logical_shift_right(x, 27)) * _SECOND
    return x ^ _logical_shift_right(x, 31)


class CounterRNG:
    """One sequence of random numbers per image of a batch.

    Args:
        seed, epoch: any integers.
        index: dataset indices of the images, ``[B]``.
        stream: name of the use; different streams are independent.

    Each call returns the next number of every sequence, so the same order of calls gives the same numbers. The numbers
    of an image do not depend on the rest of its batch:

    >>> CounterRNG(0, 3, torch.tensor([5, 6, 7])).integers(-2, 2).tolist()
    [-1, 1, -1]
    >>> CounterRNG(0, 3, torch.tensor([7])).integers(-2, 2).tolist()
    [-1]
    """

    def __init__(self, seed: int, epoch: int, index: Tensor, stream: str = "") -> None:
        start = hash64(hash64(torch.tensor(seed)) + zlib.crc32(stream.encode()))
        start = hash64(start + epoch)
        self._row = hash64(start + index.cpu())  # [B]
        self._column = 0

    def __len__(self) -> int:
        return len(self._row)

    def bits(self) -> Tensor:
        """Return 64 random bits for each image."""
        self._column += 1
        return hash64(self._row + torch.tensor(self._column) * _GOLDEN)

    def unit(self) -> Tensor:
        """Return float64 numbers in [0, 1)."""
        return _logical_shift_right(self.bits(), 11).double() * 2.0**-53

    def uniform(self, low: float, high: float) -> Tensor:
        """Return float64 numbers in [low, high)."""
        return low + (high - low) * self.unit()

    def normal(self, std: float = 1.0) -> Tensor:
        """Return float64 numbers of a normal distribution with mean 0, by the inverse of its distribution function."""
        # in Python: the last bit of vectorised functions can depend on the position in the batch
        return std * torch.tensor([_quantile(max(u, 2.0**-54)) for u in self.unit().tolist()], dtype=torch.float64)

    def integers(self, low: int, high: int | Tensor) -> Tensor:
        """Return integers from ``low`` to ``high``, both included; ``high`` may differ between images."""
        return low + (self.unit() * (high - low + 1)).long()

    def bernoulli(self, probability: float = 0.5) -> Tensor:
        """Return bools that are true with the given probability."""
        return self.unit() < probability

    def bernoulli_rows(self, count: int, probability: float, device: torch.device | str = "cpu") -> Tensor:
        """Return ``count`` bools for each image, ``[B, count]``, that are true with the given probability.

        The probability is rounded to 32 bits. Each call returns others, whatever the ``count`` of the calls before.
        """
        start = self.bits().to(device)
        bits = hash64(start[:, None] + torch.arange(-(-count // 2), device=device))
        halves = torch.cat([bits & 0xFFFFFFFF, _logical_shift_right(bits, 32)], dim=1)
        return halves[:, :count] < round(probability * 2**32)


def permute_indices(positions: Tensor, length: int, seed: int, epoch: int) -> Tensor:
    """Return the dataset index at each of these positions of an epoch's shuffled order.

    The integers below ``length`` are written as two digits ``(high, low)`` of a near-square rectangle, and each digit
    in turn is rotated by a hash of the other: a Feistel network, which is a permutation for any hash (the generalised
    one of Black and Rogaway 2002). Values outside the rectangle's incomplete last row are permuted again. No table of
    indices is stored, a restart needs no replay, and every process computes only its part.

    >>> permute_indices(torch.arange(6), 6, seed=0, epoch=0).tolist()
    [2, 1, 4, 3, 5, 0]
    """
    columns = math.isqrt(max(length - 1, 0)) + 1
    rows = -(-length // columns)
    key = hash64(hash64(torch.tensor(seed)) - epoch - 1)  # minus: differs from every CounterRNG key of this seed
    keys = [hash64(key + number) for number in range(2 * FEISTEL_ROUNDS)]

    def permute_once(index: Tensor) -> Tensor:
        """Map indices below ``rows * columns`` by the Feistel network, which is a permutation of them."""
        high, low = index // columns, index % columns
        for first, second in zip(keys[::2], keys[1::2], strict=True):
            high = (high + (hash64(low ^ first) & 0x7FFFFFFF)) % rows
            low = (low + (hash64(high ^ second) & 0x7FFFFFFF)) % columns
        return high * columns + low

    index = permute_once(positions)
    while bool((outside := index >= length).any()):
        index = torch.where(outside, permute_once(index), index)
    return index


def step_seed(seed: int, step: int, rank: int) -> int:
    """Return the seed of torch's generator for one training step of one process, for random layers of a user.

    Derived from the coordinates, so no generator state has to be stored in a checkpoint.

    >>> step_seed(0, 5, 0) == step_seed(0, 5, 0) != step_seed(0, 6, 0)
    True
    """
    value = hash64(hash64(hash64(torch.tensor(seed)) + step) - rank)
    return int(value) & (2**63 - 1)
