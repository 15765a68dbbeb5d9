"""What a long measurement must not lose when it is killed."""

import pickle
import struct
import time
from pathlib import Path
from typing import Any

import torch

from torchcaps._core.files import move_into_place, staging_directory
from torchcaps.training.errors import RunError

__all__ = ["Kept"]


class Kept:
    """A file that a measurement goes on from.

    Args:
        path: where.
        options: of the measurement: what was begun with others is not gone on with. ``None``: with whatever.
        minutes: how often `due` says that it is time to write; runs write their checkpoints as often.
    """

    def __init__(self, path: Path, options: dict[str, Any] | None, minutes: float = 1.0) -> None:
        self.path, self.options, self.minutes = path, options, minutes
        self._written = time.monotonic()

    def read(self) -> dict[str, Any] | None:
        """Return what was left, ``None`` where there is nothing: what can't be read is begun again."""
        try:
            found = torch.load(self.path, weights_only=True)
        except (OSError, RuntimeError, ValueError, EOFError, LookupError, struct.error, pickle.UnpicklingError):
            return None
        if not isinstance(found, dict) or "state" not in found:
            return None
        return found["state"] if self.options is None or found.get("options") == self.options else None

    @property
    def due(self) -> bool:
        """Whether the last writing is so long ago that more should not be lost."""
        return time.monotonic() - self._written >= 60 * self.minutes

    def write(self, state: dict[str, Any]) -> None:
        """Write what is to be gone on from, whole or not at all."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with staging_directory(self.path.parent) as own:
                torch.save({"state": state, "options": self.options}, own / self.path.name)
                move_into_place(own / self.path.name, self.path)
        except (OSError, RuntimeError) as error:  # torch has an error of its own for a full disk
            why = getattr(error, "strerror", None) or str(error).splitlines()[0]
            raise RunError(f"{self.path} can't be written: {why}") from error
        self._written = time.monotonic()

    def clear(self) -> None:
        """Remove it: what it was kept for is done."""
        self.path.unlink(missing_ok=True)
