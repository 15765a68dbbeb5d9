"""Capsule networks in PyTorch: any routing, in dense and convolutional layers, with vector and matrix poses.

>>> import torch
>>> from torchcaps.nn import DenseCapsules
>>> from torchcaps.routing import Dynamic
>>> layer = DenseCapsules(1152, 8, 10, 16, routing=Dynamic(iterations=3))
>>> layer(torch.randn(4, 1152, 8)).length().shape
torch.Size([4, 10])
"""

import os
import sys

if sys.argv[:1] == ["-m"] and sys.path[:1] in ([""], [os.getcwd()]):
    # 'python -m torchcaps' searches the current directory first, where any file could replace an installed package.
    sys.path.pop(0)
    if os.path.dirname(os.path.dirname(os.path.abspath(__file__))) == os.getcwd():
        sys.path.append(os.getcwd())  # a clone that is not installed

import importlib
import importlib.abc
from typing import TYPE_CHECKING, Any

from torchcaps._core.version import __version__

if TYPE_CHECKING:
    from torchcaps import data, losses, metrics, models, nn, routing
    from torchcaps.capsules import Capsules
    from torchcaps.data import create_dataset, list_datasets
    from torchcaps.models import create_model, list_models
    from torchcaps.routing import create_routing, list_routings, route
    from torchcaps.training import fit, load_run

__all__ = [
    "Capsules",
    "__version__",
    "create_dataset",
    "create_model",
    "create_routing",
    "data",
    "fit",
    "list_datasets",
    "list_models",
    "list_routings",
    "load_run",
    "losses",
    "metrics",
    "models",
    "nn",
    "route",
    "routing",
]

# Modules of the public names. They are imported on first access: `torchcaps --help` does not have to load torch.
_MODULES = {
    "Capsules": "capsules",
    "create_dataset": "data",
    "create_model": "models",
    "create_routing": "routing",
    "fit": "training",
    "list_datasets": "data",
    "list_models": "models",
    "list_routings": "routing",
    "load_run": "training",
    "route": "routing",
}


class _RegisterOnDeserialization(importlib.abc.MetaPathFinder):
    """Import hook that registers torchcaps' operators and output types when torch first reads or writes a program.

    ``torch.export.load`` then opens programs that contain them after ``import torchcaps`` alone, which does not load
    torch.
    """

    module = "torch._export.serde.serialize"

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        """Import `torchcaps.models` before the module that reads programs; other finders locate that module."""
        if fullname == self.module:
            sys.meta_path.remove(self)
            importlib.import_module("torchcaps.models")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value = getattr(importlib.import_module(f"torchcaps.{_MODULES[name]}"), name)
    elif name in __all__:
        value = importlib.import_module(f"torchcaps.{name}")
    else:
        raise AttributeError(f"module 'torchcaps' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if _RegisterOnDeserialization.module in sys.modules:
    importlib.import_module("torchcaps.models")
else:
    sys.meta_path.insert(0, _RegisterOnDeserialization())
