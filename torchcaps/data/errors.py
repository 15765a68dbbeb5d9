"""What can be wrong with data: always one sentence that says what, and what to do."""

import importlib
from types import ModuleType
from typing import Any

__all__ = ["DataError", "MissingData", "extra"]


class DataError(ValueError):
    """A file is not what it should be."""


class MissingData(DataError):
    """A file is not there, and could not be fetched."""


def extra(module: str, what_for: str) -> ModuleType | Any:
    """Import what ``torchcaps[data]`` brings; say so where it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise DataError(f"{what_for} needs {package}: pip install 'torchcaps[data]'") from error
