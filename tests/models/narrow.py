"""Every model by name, at a width that a test can afford, and images and labels of its own shape."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import torchcaps
from torchcaps.models import (
    CapsuleSpec,
    Chen2019,
    Chen2019Dynamic,
    Chen2019Multi,
    ChenCNN,
    ChenFlatCNN,
    Choi2019,
    FlatCNN,
    Hinton2018,
    LeNet,
    Network,
    PooledCNN,
    ResNet18,
    Sabour2017,
    Tsai2020,
    Tsai2020Diverse,
    Tsai2020Dynamic,
    Tsai2020EM,
    TsaiCNN,
    TsaiDiverseCNN,
    Yang2021,
)
from torchcaps.models.registry import REGISTRY

NARROW: dict[type, dict[str, Any]] = {
    Sabour2017: {"width": 16, "types": 4, "hidden": (32,)},
    Choi2019: {"width": 8, "types": 4, "primary_dim": 8, "dim": 8, "hidden": (32,)},
    Hinton2018: {"width": 16, "primary_types": 4, "types": 4},
    Tsai2020: {"width": 16, "types": 4, "stages": ((16, 1),), "blocks": 1},
    Tsai2020Dynamic: {"width": 16, "types": 4, "stages": ((16, 1),), "blocks": 1},
    Tsai2020EM: {"width": 16, "types": 4, "stages": ((16, 1),), "blocks": 1, "image": (3, 20, 20)},
    Tsai2020Diverse: {"width": 16, "types": 4, "dim": 16},
    Chen2019: {"width": 16, "types": 4, "hidden": (32,)},
    Chen2019Multi: {"width": 16, "types": 4},
    Chen2019Dynamic: {"width": 16, "types": 4, "hidden": (32,)},
    Yang2021: {"width": 16, "types": 4, "hidden": (32,)},
    FlatCNN: {"width": 8, "features": (24, 16)},
    ChenFlatCNN: {"width": 8, "features": (24, 16)},
    LeNet: {"width": 4, "channels": 8, "features": 32},
    PooledCNN: {"width": 8, "features": 32},
    TsaiCNN: {"width": 16},
    ResNet18: {"width": 4},
    TsaiDiverseCNN: {"width": 16, "features": 32},
    ChenCNN: {"width": 8, "channels": 16, "features": 32},
}

EVERY = pytest.mark.parametrize("name", torchcaps.list_models())
CAPSULE_MODELS = [name for name in torchcaps.list_models() if isinstance(REGISTRY[name].spec, CapsuleSpec)]


def narrow(name: str, **changes: Any) -> Network:
    """Build a model with few channels and types."""
    torch.manual_seed(0)
    reduced = dict(NARROW[type(REGISTRY[name].spec)])
    if name.startswith("tsai2020") and "cifar100" in name and "dim" in REGISTRY[name].spec.__dataclass_fields__:
        reduced["dim"] = 16
    if name == "capsnet_images":
        reduced |= {"image": (3, 32, 32), "stages": ((16, 1), (16, 1))}
    return torchcaps.create_model(name, **(reduced | changes))


def structure(model: Network) -> tuple[object, ...]:
    """What makes a program of its own: the modules in order and the routings, whatever their sizes."""
    modules = tuple(type(module) for module in model.modules())
    routings = tuple(str(module.routing) for module in model.modules() if hasattr(module, "routing"))
    return (*modules, *routings, model.n_objects)


STRUCTURES = list({structure(narrow(name)): name for name in reversed(torchcaps.list_models())}.values())


@functools.cache
def pixels(image: tuple[int, int, int], n_images: int) -> Tensor:
    """Images that differ: a bright bar each, at its own place and slant, over some noise."""
    generator = torch.Generator().manual_seed(3)
    channels, height, width = image
    rows, columns = torch.meshgrid(torch.linspace(-1, 1, height), torch.linspace(-1, 1, width), indexing="ij")
    images = []
    for _ in range(n_images):
        angle, shift = 3.14 * torch.rand((), generator=generator), torch.rand((), generator=generator) - 0.5
        bar = ((rows * angle.sin() + columns * angle.cos() - shift).abs() < 0.2).float()
        noise = 0.1 * torch.rand(channels, height, width, generator=generator)
        images.append((bar * (0.5 + 0.5 * torch.rand(channels, 1, 1, generator=generator)) + noise).clamp(0, 1))
    return torch.stack(images)


def batch(model: Network, n_images: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Images, labels and what a decoder is to make of them, as this model takes them."""
    images = pixels(model.spec.image, n_images)
    classes = model.spec.classes
    first = torch.arange(n_images) % classes
    if model.n_objects is None:
        second = (first + 1) % classes
        labels = torch.nn.functional.one_hot(first, classes)
        labels[::2] |= torch.nn.functional.one_hot(second, classes)[::2]
        return images, labels, images
    if model.n_objects == 1:
        return images, first, images
    labels = torch.stack([first, (first + 1 + first // 3) % classes], dim=1)
    return images, labels, torch.stack([images, images.flip(-1)], dim=1)
