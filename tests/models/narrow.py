"""Every model by name, at a width that a test can afford, and images and labels of its own shape."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import torchcaps
from torchcaps.models import CapsuleSpec, Network
from torchcaps.models.registry import MODELS

EVERY = pytest.mark.parametrize("name", torchcaps.list_models())
CAPSULE_MODELS = [name for name in torchcaps.list_models() if isinstance(MODELS.get(name).spec, CapsuleSpec)]


def narrow(name: str, **changes: Any) -> Network:
    """Build a model with few channels and types."""
    torch.manual_seed(0)
    return torchcaps.create_model(name, **(MODELS.get(name).spec.smoke_changes() | changes))


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
