"""Model profiling: the layer table (`summarize`) and the memory that training needs (`estimate_memory`)."""

from torchcaps.profiling.memory import TrainingMemory, estimate_memory
from torchcaps.profiling.summary import LayerRow, ModelSummary, summarize

__all__ = ["LayerRow", "ModelSummary", "TrainingMemory", "estimate_memory", "summarize"]
