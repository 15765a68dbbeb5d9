"""Models of smoke-test size by name, and batches that fit them."""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

import torchcaps
from tests.sampling import all_cases, covering_sample
from torchcaps.models import CapsuleSpec, Network
from torchcaps.models.registry import MODELS
from torchcaps.routing import SelfRouting

EVERY = pytest.mark.parametrize("name", torchcaps.list_models())
CAPSULE_MODELS = [name for name in torchcaps.list_models() if isinstance(MODELS.get(name).spec, CapsuleSpec)]

EXPENSIVE = ("ribeiro2020_smallnorb", "tsai2020_equilibrium_cifar10")  # five times the time of the others


def narrow(name: str, **changes: Any) -> Network:
    """Build a model of smoke-test size, with other values for some fields."""
    torch.manual_seed(0)
    model = torchcaps.create_model(name, **(MODELS.get(name).spec.smoke_changes() | changes))
    for layer in model.modules():  # initially 0, so that neither scores nor other gradients depend on the image
        if isinstance(getattr(layer, "routing", None), SelfRouting) and not layer.weight.is_meta:
            layer.coefficients["classifier"].data.normal_(0, 0.5)
    return model


def structure(model: Network) -> tuple[object, ...]:
    """Return what determines the graph of a model: its modules in order and their routings, not their sizes."""
    modules = tuple(type(module) for module in model.modules())
    routings = tuple(str(module.routing) for module in model.modules() if hasattr(module, "routing"))
    return (*modules, *routings, model.n_objects)


def sample_models(names: Iterable[str], n: int) -> list[str]:
    """Return a seeded sample of models with every spec class, routing and decoding, or all with `--all-cases`.

    The sample lacks the models of `EXPENSIVE`, whose routings the tests of layers cover.
    """
    return covering_sample(without_expensive(names), n, KEYS)


def without_expensive(names: Iterable[str]) -> list[str]:
    """Return all names with `--all-cases`, otherwise those that are not in `EXPENSIVE`."""
    return [name for name in names if all_cases() or name not in EXPENSIVE]


def paper(name: str) -> str:
    """Return the paper, or the family of starters, that a model is named after."""
    return name.partition("_")[0]


def _spec_class(name: str) -> str:
    return type(MODELS.get(name).spec).__name__


def _routing(name: str) -> str:
    return str(getattr(MODELS.get(name).spec, "routing", None))


def decoding(name: str) -> tuple[object, object]:
    """Return whether a model has a decoder, and its number of objects."""
    spec = MODELS.get(name).spec
    return getattr(spec, "reconstruction", False), getattr(spec, "n_objects", 1)


KEYS = [_spec_class, _routing, decoding]
GRAPH_KEYS: list[Callable[[str], Hashable]] = [decoding]  # of the models that are compiled and exported

# one model for each graph
STRUCTURES = list({structure(narrow(name)): name for name in reversed(torchcaps.list_models())}.values())


@functools.cache
def pixels(image: tuple[int, int, int], n_images: int) -> Tensor:
    """Return images that differ: a bright bar of random angle and position on noise."""
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
    """Return images, labels and reconstruction targets in the format of a model."""
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


def narrow_graph(name: str) -> Network:
    """Build a model of smoke-test size with a small graph: at most 3 steps of a solver, which a graph contains all."""
    if not is_approximate(name):
        return narrow(name)
    routing = MODELS.get(name).spec.routing
    return narrow(name, routing=dataclasses.replace(routing, max_steps=3))


def is_approximate(name: str) -> bool:
    """Return whether a model's routing is a solver, whose results hold up to its tolerance."""
    return getattr(getattr(MODELS.get(name).spec, "routing", None), "approximate", False)
