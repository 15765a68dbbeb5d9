"""Passes over votes by a compiled kernel, where there is a compiler; the plain path is taken everywhere else."""

from torchcaps.votes.cpu.build import library
from torchcaps.votes.cpu.kernel import available, can_take, reduce_gradients, reduce_votes

__all__ = ["available", "can_take", "library", "reduce_gradients", "reduce_votes"]
