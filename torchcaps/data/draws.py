"""Random numbers that are a function of where they are needed: seed, epoch, index of the image, and nothing else.

A generator has a state, so what it gives an image depends on which images came before, on the batch size and on the
number of workers. Here each number is a hash of its place (a counter-based generator, as in Salmon et al. 2011,
"Parallel random numbers: as easy as 1, 2, 3"), with the finalizer of SplitMix64 (Steele et al. 2014) as the hash. All
of it is integer arithmetic on the CPU, so it is the same bit by bit everywhere.
"""

import zlib

import torch
from torch import Tensor

__all__ = ["Draws", "hashed"]

_GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as a signed number: 2**64 over the golden ratio
_FIRST = -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
_SECOND = -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift right, zeros coming in: torch's own shift of signed numbers copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def hashed(x: Tensor) -> Tensor:
    """Return the SplitMix64 hash of each number, as signed 64-bit integers.

    >>> hashed(torch.tensor([0, 1])).tolist()
    [-2152535657050944081, -7995527694508729151]
    """
    x = x + _GOLDEN
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


class Draws:
    """A row of random numbers for each image of a batch, read from left to right.

    Args:
        seed, epoch: any whole numbers.
        index: the images' places in their data set, ``[B]``.
        stream: what the numbers are for; those of different streams have nothing to do with each other.

    Every call takes the next number of each row, so who asks in the same order gets the same numbers. What is drawn for
    an image does not depend on the others of its batch:

    >>> Draws(0, 3, torch.tensor([5, 6, 7])).integers(-2, 2).tolist()
    [-1, 1, -1]
    >>> Draws(0, 3, torch.tensor([7])).integers(-2, 2).tolist()
    [-1]
    """

    def __init__(self, seed: int, epoch: int, index: Tensor, stream: str = "") -> None:
        start = hashed(hashed(torch.tensor(seed)) + zlib.crc32(stream.encode()))
        start = hashed(start + epoch)
        self._row = hashed(start + index.cpu())  # [B]
        self._column = 0

    def __len__(self) -> int:
        return len(self._row)

    def bits(self) -> Tensor:
        """Return 64 random bits for each image."""
        self._column += 1
        return hashed(self._row + torch.tensor(self._column) * _GOLDEN)

    def unit(self) -> Tensor:
        """Return numbers in [0, 1), float64."""
        return _shifted(self.bits(), 11).double() * 2.0**-53

    def uniform(self, low: float, high: float) -> Tensor:
        """Return numbers in [low, high), float64."""
        return low + (high - low) * self.unit()

    def integers(self, low: int, high: int | Tensor) -> Tensor:
        """Return whole numbers from ``low`` to ``high``, both included; ``high`` may differ from image to image."""
        return low + (self.unit() * (high - low + 1)).long()

    def coins(self, probability: float = 0.5) -> Tensor:
        """Return truth values."""
        return self.unit() < probability
