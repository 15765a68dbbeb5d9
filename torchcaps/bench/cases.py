"""What is measured: layers and models of the papers, with the bars that they are to reach."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchcaps.bench.naive import make_explicit
from torchcaps.models import create_model
from torchcaps.nn import ConvCapsules, DenseCapsules
from torchcaps.nn.layers import CapsuleLayer
from torchcaps.profiling.summary import summarize
from torchcaps.routing import EM, Dynamic, InvertedAttention, Routing

__all__ = ["CASES", "Case", "Work"]


@dataclass
class Work:
    """Something to time, once set up.

    Args:
        run: does it once, and returns results and gradients.
        multiply_adds: of doing it once, forward and backward.
        compared: returns what is compared, where that is not what ``run`` returns.
    """

    run: Callable[[], list[Tensor]]
    multiply_adds: int
    compared: Callable[[], list[Tensor]] | None = None


@dataclass(frozen=True)
class Case:
    """A case of the benchmark.

    Args:
        title: for people.
        make: sets it up, ours or in the usual way, with the same numbers.
        least, aim: how many times faster than the usual way it is to be.
        floor: how many times the time of its multiply-adds alone it may take; ``None``: not asked.
        limit: the largest relative RMS difference between the two; more for models with ReLUs, which are on or off.
    """

    title: str
    make: Callable[[bool], Work] = field(repr=False)
    least: float = 1.0
    aim: float = 1.0
    floor: float | None = None
    limit: float = 1e-5


def _layer_work(layer: CapsuleLayer, shape: tuple[int, ...], explicit: bool) -> Work:
    """Forward and backward of a layer, with the gradients of children and weights."""
    children = torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
    if explicit:
        make_explicit(layer)
    with torch.no_grad():
        size = layer(children).pose.shape
    direction = torch.randn(size, generator=torch.Generator().manual_seed(2))
    inputs = [children, *layer.parameters()]

    def run() -> list[Tensor]:
        pose = layer(children).pose
        gradients = torch.autograd.grad(pose, inputs, direction, allow_unused=True)
        return [pose.detach(), *(g for g in gradients if g is not None)]

    return Work(run, _layer_multiply_adds(layer, shape))


def _layer_multiply_adds(layer: CapsuleLayer, shape: tuple[int, ...]) -> int:
    """Count forward: each vote is made once, and taken in by every reduction; backward is twice that."""
    geometry, routing = layer.geometry, layer.routing
    with torch.no_grad():
        votes = 1
        for size in layer.votes(torch.zeros(shape)).shape:
            votes *= size
    steps = routing.iterations
    passes = 5 * steps - 2 if isinstance(routing, EM) else 2 * steps - 1
    return 3 * votes * (geometry.columns + passes)


def _dense(routing: Routing) -> Callable[[bool], Work]:
    def make(explicit: bool) -> Work:
        torch.manual_seed(0)
        return _layer_work(DenseCapsules(1152, 8, 10, 16, routing=routing), (128, 1152, 8), explicit)

    return make


def _conv(routing: Routing) -> Callable[[bool], Work]:
    def make(explicit: bool) -> Work:
        torch.manual_seed(0)
        layer = ConvCapsules(32, 16, 32, 16, 3, 2, routing=routing, pose="matrix")
        return _layer_work(layer, (8, 16, 16, 32, 16), explicit)

    return make


def _small(explicit: bool) -> Work:
    """A layer so small that nothing but the calls costs: the plain path against what is chosen by itself."""
    torch.manual_seed(0)
    layer = DenseCapsules(16, 8, 10, 16, routing=Dynamic(3), streamed=False if explicit else "auto")
    return _layer_work(layer, (1, 16, 8), False)


def model_work(name: str, batch: int, train: bool) -> Callable[[bool], Work]:
    """Return what sets up a training step of a model, or an inference, ours or in the usual way."""

    def make(explicit: bool) -> Work:
        torch.manual_seed(0)
        model = create_model(name).train(train)
        if explicit:
            make_explicit(model)
        images = torch.rand(batch, *model.spec.image, generator=torch.Generator().manual_seed(1))
        multiply_adds = batch * summarize(model).multiply_adds
        if not train:

            def infer() -> list[Tensor]:
                with torch.no_grad():
                    return [model(images).scores]

            return Work(infer, multiply_adds)
        labels = torch.arange(batch) % model.spec.classes
        optimizer, loss = model.recipe.optimizer.make(model.parameters()), model.loss()

        def backward() -> Tensor:
            torch.manual_seed(3)  # of dropout
            optimizer.zero_grad()
            output = model(images, labels)
            loss(output, labels, images).backward()
            return output.scores.detach()

        def step() -> list[Tensor]:
            scores = backward()
            optimizer.step()
            return [scores]

        def compared() -> list[Tensor]:
            # All gradients as one: a ReLU that is on in one way and off in the other, since its input is zero but for
            # rounding, would show in a small one.
            scores = backward()
            return [scores, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])]

        return Work(step, 3 * multiply_adds, compared)

    return make


CASES = {
    "dynamic-last": Case(
        "Dynamic(3, gradient='last'), 1152x8 to 10x16, batch 128", _dense(Dynamic(3, gradient="last")), 12, 20, 8
    ),
    "dynamic-full": Case("Dynamic(3), 1152x8 to 10x16, batch 128", _dense(Dynamic(3)), 8, 15, 8),
    "inverted-conv": Case(
        "InvertedAttention(2), 3x3 s2, 32 to 32 types of 4x4, 16x16 grid, batch 8",
        _conv(InvertedAttention(2)),
        10,
        20,
        4,
    ),
    "em-conv": Case("EM(2), the same geometry", _conv(EM(2)), 3, 8, 4, limit=1e-4),
    "sabour-step": Case(
        "sabour2017_mnist, training step, batch 64", model_work("sabour2017_mnist", 64, True), 1.6, 2, limit=1e-3
    ),
    "tsai-step": Case(
        "tsai2020_cifar10, training step, batch 16", model_work("tsai2020_cifar10", 16, True), 8, 20, limit=1e-3
    ),
    "choi-step": Case(
        "choi2019_mnist, training step, batch 100", model_work("choi2019_mnist", 100, True), 1.5, 3, limit=1e-3
    ),
    "sabour-1": Case("sabour2017_mnist, inference, batch 1", model_work("sabour2017_mnist", 1, False), 1.5, 2),
    "sabour-128": Case("sabour2017_mnist, inference, batch 128", model_work("sabour2017_mnist", 128, False), 1.5, 2),
    "tsai-1": Case("tsai2020_cifar10, inference, batch 1", model_work("tsai2020_cifar10", 1, False), 5, 15),
    "tsai-64": Case("tsai2020_cifar10, inference, batch 64", model_work("tsai2020_cifar10", 64, False), 5, 15),
    "small": Case("Dynamic(3), 16x8 to 10x16, batch 1, against the plain path", _small, 1 / 1.2, 1),
}
