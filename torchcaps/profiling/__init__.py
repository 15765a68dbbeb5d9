"""Model profiling: layer table and memory estimate."""

from torchcaps.profiling.memory import estimate_memory
from torchcaps.profiling.summary import summarize

__all__ = ["estimate_memory", "summarize"]
