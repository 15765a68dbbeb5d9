"""The chance of a step: a function of the seed and of which step it is, so that no generator has to be remembered."""

import torch

from torchcaps.data.draws import hashed

__all__ = ["step_seed"]


def step_seed(seed: int, step: int, rank: int) -> int:
    """Return what torch's generator starts a step from.

    >>> step_seed(0, 5, 0) == step_seed(0, 5, 0) != step_seed(0, 6, 0)
    True
    """
    value = hashed(hashed(hashed(torch.tensor(seed)) + step) - rank)
    return int(value) & (2**63 - 1)
