"""MATLAB's .mat files, by scipy."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchcaps._core.optional import import_optional
from torchcaps.data.errors import DataError

__all__ = ["as_tensor", "read_mat"]


def read_mat(path: Path, name: str) -> Any:
    """Return one variable of a .mat file, its structures with their fields as attributes."""
    scipy = import_optional("scipy.io", f"reading {path.name}")
    try:
        content = scipy.loadmat(path, struct_as_record=False, squeeze_me=True, variable_names=[name])
    except Exception as error:  # a broken .mat file can raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{path} is no whole .mat file ({reason}): delete it, and fetch it again") from error
    if name not in content:
        raise DataError(f"{path} has no variable {name!r}: it is another .mat file")
    return content[name]


def as_tensor(value: Any, path: Path, name: str) -> Tensor:
    """Return a variable as a tensor; refuse what is no array of numbers."""
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{path} is broken: {name} is no array of numbers") from error
