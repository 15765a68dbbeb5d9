"""Training of models: runs with checkpoints and exact resume, evaluation, and use of trained models.

>>> spec = RunSpec.of("capsnet_small", epochs=2, val_fraction=0.1)
>>> spec.recipe.optimizer.lr
0.003
"""

from torchcaps.training.config import RunSpec
from torchcaps.training.errors import CheckpointError, DivergenceError, RunError, RunInterrupted
from torchcaps.training.fitting import FittedRun, fit
from torchcaps.training.inference import TrainedRun, load_run
from torchcaps.training.run import resume, train
from torchcaps.training.state import StopReason, TrainResult

__all__ = [
    "CheckpointError",
    "DivergenceError",
    "FittedRun",
    "RunError",
    "RunInterrupted",
    "RunSpec",
    "StopReason",
    "TrainResult",
    "TrainedRun",
    "fit",
    "load_run",
    "resume",
    "train",
]
