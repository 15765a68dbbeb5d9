"""Capsule networks in PyTorch: any routing, in dense and convolutional layers, with vector and matrix poses.

>>> import torch
>>> from torchcaps.nn import DenseCapsules
>>> from torchcaps.routing import Dynamic
>>> layer = DenseCapsules(1152, 8, 10, 16, routing=Dynamic(iterations=3))
>>> layer(torch.randn(4, 1152, 8)).length().shape
torch.Size([4, 10])
"""

from torchcaps import data, losses, metrics, models, nn, routing
from torchcaps.capsules import Capsules
from torchcaps.data import create_dataset, list_datasets
from torchcaps.models import create_model, list_models
from torchcaps.routing import create_routing, list_routings, route

__all__ = [
    "Capsules",
    "create_dataset",
    "create_model",
    "create_routing",
    "data",
    "list_datasets",
    "list_models",
    "list_routings",
    "losses",
    "metrics",
    "models",
    "nn",
    "route",
    "routing",
]

__version__ = "0.1.0.dev0"
