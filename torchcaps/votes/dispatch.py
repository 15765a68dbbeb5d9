"""How votes are made piece by piece."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from torchcaps.votes.wiring import Wiring

__all__ = ["Plan", "assumed_batch"]

PIECE_BYTES = 4 * 2**20  # votes of one piece: about what a core's second-level cache holds
TRACED_BATCH = 32  # the batch that is decided by inside a traced graph, where it may be a symbol


def assumed_batch(batch: int) -> int:
    """Return the batch size to decide by: inside a traced graph a fixed one, so that no size is baked in."""
    return TRACED_BATCH if torch.compiler.is_compiling() else batch


@dataclass(frozen=True)
class Plan:
    """How votes are made piece by piece.

    Args:
        wiring: which child each slot reads.
        rows: rows of a pose, ``A``.
        size: slots in a piece, at most; by default what fits into the cache.
    """

    wiring: Wiring
    rows: int
    size: int | None = None

    def slots_in_a_piece(self, pose: Tensor, weight: Tensor) -> int:
        """Return how many slots to take at once."""
        if self.size is not None:
            return self.size
        sites = assumed_batch(pose.shape[0]) * math.prod(self.wiring.sites)
        slot_bytes = sites * self.rows * weight.shape[-2] * weight.shape[-1] * pose.element_size()
        return max(1, min(self.wiring.types, PIECE_BYTES // max(1, slot_bytes)))
