"""What can go wrong in a run: always one sentence that says what, and what to do."""

import importlib
from types import ModuleType
from typing import Any

__all__ = ["CheckpointError", "Diverged", "RunError", "RunStopped", "Taken", "extra"]


class RunError(RuntimeError):
    """A run can't go on; what it had reached is kept."""


class Diverged(RunError):
    """A run has come to values that are no numbers, or to coefficients without bounds: it does not train."""


class Taken(ValueError):
    """A folder has a run already, or another process trains there."""


class CheckpointError(ValueError):
    """A file is no checkpoint, or a broken one."""


class RunStopped(Exception):
    """A run was asked to stop, and has written where it stands.

    Args:
        message: what was reached, and how to go on.
        signal: the number of the signal that asked.
    """

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.signal = signal


def extra(module: str, what_for: str, name: str = "train") -> ModuleType | Any:
    """Import what ``torchcaps[train]`` brings; say so where it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if error.name is not None and error.name.partition(".")[0] != module.partition(".")[0]:
            raise  # it is there, and broken
        raise ValueError(f"{what_for} needs {module.partition('.')[0]}: pip install 'torchcaps[{name}]'") from error
