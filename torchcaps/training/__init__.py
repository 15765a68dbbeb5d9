"""Training: a run, from what was chosen to its report."""

from torchcaps.training.errors import CheckpointError, RunError, RunStopped
from torchcaps.training.run import Result, resume, train
from torchcaps.training.spec import RunSpec

__all__ = ["CheckpointError", "Result", "RunError", "RunSpec", "RunStopped", "resume", "train"]
