"""Training: a run, from what was chosen to its report, and what was trained, to be used.

>>> spec = RunSpec.of("capsnet_small", epochs=2, val_fraction=0.1)
>>> spec.recipe.optimizer.lr
0.003
"""

from torchcaps.training.config import RunSpec
from torchcaps.training.errors import CheckpointError, Diverged, RunError, RunStopped
from torchcaps.training.inference import Trained, load_run
from torchcaps.training.run import Result, resume, train

__all__ = [
    "CheckpointError",
    "Diverged",
    "Result",
    "RunError",
    "RunSpec",
    "RunStopped",
    "Trained",
    "load_run",
    "resume",
    "train",
]
