"""Model profiling: the layer table (`summarize`) and the memory that training needs (`estimate_memory`)."""

from torchcaps.profiling.memory import TrainingMemory, estimate_memory
from torchcaps.profiling.summary import LayerRow, Summary, summarize

__all__ = ["LayerRow", "Summary", "TrainingMemory", "estimate_memory", "summarize"]
