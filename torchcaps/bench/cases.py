"""Benchmark cases: layers and models of the papers, with the speedups that they must reach."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchcaps.bench.naive import use_naive_votes
from torchcaps.models import create_model
from torchcaps.nn import ConvCapsules, DenseCapsules
from torchcaps.nn.layers import CapsuleLayer
from torchcaps.profiling import summarize
from torchcaps.routing import EM, Dynamic, InvertedAttention, Routing

__all__ = ["CASES", "LAYER_CASES", "Case", "LayerCase", "Work"]


@dataclass
class Work:
    """A prepared computation to time.

    Args:
        run: computes once; returns results and gradients.
        multiply_adds: multiply-adds of one run, forward and backward.
        compared: returns the tensors to compare between implementations, if not those of ``run``.
    """

    run: Callable[[], list[Tensor]]
    multiply_adds: int
    compared: Callable[[], list[Tensor]] | None = None


@dataclass(frozen=True)
class Case:
    """A benchmark case: the same computation by torchcaps and by the naive baseline.

    Args:
        title: description.
        make: prepares the computation; the argument is whether to use the naive baseline. Both get the same values.
        min_speedup, target_speedup: required and desired speedup over the baseline.
        max_matmul_ratio: largest accepted ratio to the time of its multiply-adds in a large matrix product, if any.
        max_difference: largest accepted relative RMS difference between the two; larger for models with ReLUs, which
            may switch by rounding.

    >>> import torch
    >>> left, right = torch.rand(8, 8), torch.rand(8, 8)
    >>> case = Case("matrix product", lambda naive: Work(lambda: [left @ right], multiply_adds=8**3))
    >>> case.title, case.make(True).multiply_adds
    ('matrix product', 512)
    """

    title: str
    make: Callable[[bool], Work] = field(repr=False)
    min_speedup: float = 1.0
    target_speedup: float = 1.0
    max_matmul_ratio: float | None = None
    max_difference: float = 1e-5


def _random(shape: tuple[int, ...], seed: int, distribution: Callable[..., Tensor] = torch.randn) -> Tensor:
    """Return random numbers on the default device, the same for each device."""
    values = distribution(shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    return values.to(torch.get_default_device())


def _layer_work(layer: CapsuleLayer, shape: tuple[int, ...], naive: bool) -> Work:
    """Return forward and backward of a layer, with the gradients of children and weights."""
    children = _random(shape, 1).requires_grad_()
    if naive:
        use_naive_votes(layer)
    with torch.no_grad():
        size = layer(children).pose.shape
    direction = _random(tuple(size), 2)
    inputs = [children, *layer.parameters()]

    def run() -> list[Tensor]:
        pose = layer(children).pose
        gradients = torch.autograd.grad(pose, inputs, direction, allow_unused=True)
        return [pose.detach(), *(g for g in gradients if g is not None)]

    return Work(run, _layer_multiply_adds(layer, shape))


def _layer_multiply_adds(layer: CapsuleLayer, shape: tuple[int, ...]) -> int:
    """Count multiply-adds: each vote is computed once and read by every reduction; backward costs twice the forward."""
    geometry, routing = layer.geometry, layer.routing
    with torch.no_grad():
        votes = 1
        for size in layer.votes(torch.zeros(shape)).shape:
            votes *= size
    steps = routing.iterations
    passes = 5 * steps - 2 if isinstance(routing, EM) else 2 * steps - 1
    return 3 * votes * (geometry.columns + passes)


@dataclass(frozen=True)
class LayerCase:
    """A layer of the benchmark.

    Args:
        make: builds the layer, on the default device.
        shape: shape of the children's poses.
    """

    make: Callable[[], CapsuleLayer] = field(repr=False)
    shape: tuple[int, ...]


def _dense(routing: Routing) -> LayerCase:
    """Return the dense layer of Sabour 2017, batch 128."""
    return LayerCase(lambda: DenseCapsules(1152, 8, 10, 16, routing=routing), (128, 1152, 8))


def _conv(routing: Routing) -> LayerCase:
    """Return a convolutional layer of Tsai 2020, batch 8."""
    make = functools.partial(ConvCapsules, 32, 16, 32, 16, 3, 2, routing=routing, pose="matrix")
    return LayerCase(make, (8, 16, 16, 32, 16))


LAYER_CASES = {
    "dynamic-last": _dense(Dynamic(3, gradient="last")),
    "dynamic-full": _dense(Dynamic(3)),
    "inverted-conv": _conv(InvertedAttention(2)),
    "em-conv": _conv(EM(2)),
}


def _layer(name: str) -> Callable[[bool], Work]:
    """Return a function that makes the forward and backward pass of a layer."""

    def make(naive: bool) -> Work:
        torch.manual_seed(0)
        return _layer_work(LAYER_CASES[name].make(), LAYER_CASES[name].shape, naive)

    return make


def _small(naive: bool) -> Work:
    """Return a layer so small that only call overhead matters: stored votes against the automatic choice of path."""
    torch.manual_seed(0)
    layer = DenseCapsules(16, 8, 10, 16, routing=Dynamic(3), streamed=False if naive else "auto")
    return _layer_work(layer, (1, 16, 8), False)


def model_work(name: str, batch: int, train: bool) -> Callable[[bool], Work]:
    """Return a `Case.make` for a training step or an inference of a model."""

    def make(naive: bool) -> Work:
        """Return the step of the model, with naive or with its own votes."""
        torch.manual_seed(0)
        model = create_model(name).train(train)
        if naive:
            use_naive_votes(model)
        images = _random((batch, *model.spec.image), 1, torch.rand)
        multiply_adds = batch * summarize(model).multiply_adds
        if not train:

            def infer() -> list[Tensor]:
                with torch.no_grad():
                    return [model(images).scores]

            return Work(infer, multiply_adds)
        labels = torch.arange(batch) % model.spec.classes
        optimizer, loss = model.recipe.optimizer.make(model.parameters()), model.loss()

        def backward() -> Tensor:
            """Run forward and backward pass; return the scores without gradient."""
            torch.manual_seed(3)  # for dropout
            optimizer.zero_grad()
            output = model(images, labels)
            loss(output, labels, images).backward()
            return output.scores.detach()

        def step() -> list[Tensor]:
            scores = backward()
            optimizer.step()
            return [scores]

        def compared() -> list[Tensor]:
            """Run forward and backward pass; return the scores, and all gradients as one vector."""
            # All gradients as one tensor: a ReLU that differs between the two because its input is zero up to rounding
            # would dominate a small one.
            scores = backward()
            return [scores, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])]

        return Work(step, 3 * multiply_adds, compared)

    return make


CASES = {
    "dynamic-last": Case("Dynamic(3, gradient='last'), 1152x8 to 10x16, batch 128", _layer("dynamic-last"), 12, 20, 8),
    "dynamic-full": Case("Dynamic(3), 1152x8 to 10x16, batch 128", _layer("dynamic-full"), 8, 15, 8),
    "inverted-conv": Case(
        "InvertedAttention(2), 3x3 s2, 32 to 32 types of 4x4, 16x16 grid, batch 8",
        _layer("inverted-conv"),
        10,
        20,
        4,
    ),
    "em-conv": Case("EM(2), same geometry as inverted-conv", _layer("em-conv"), 3, 8, 4, max_difference=1e-4),
    "sabour-step": Case(
        "sabour2017_mnist, training step, batch 64",
        model_work("sabour2017_mnist", 64, True),
        1.6,
        2,
        max_difference=1e-3,
    ),
    "tsai-step": Case(
        "tsai2020_cifar10, training step, batch 16",
        model_work("tsai2020_cifar10", 16, True),
        8,
        20,
        max_difference=1e-3,
    ),
    "choi-step": Case(
        "choi2019_mnist, training step, batch 100", model_work("choi2019_mnist", 100, True), 1.5, 3, max_difference=1e-3
    ),
    "sabour-1": Case("sabour2017_mnist, inference, batch 1", model_work("sabour2017_mnist", 1, False), 1.5, 2),
    "sabour-128": Case("sabour2017_mnist, inference, batch 128", model_work("sabour2017_mnist", 128, False), 1.5, 2),
    "tsai-1": Case("tsai2020_cifar10, inference, batch 1", model_work("tsai2020_cifar10", 1, False), 5, 15),
    "tsai-64": Case("tsai2020_cifar10, inference, batch 64", model_work("tsai2020_cifar10", 64, False), 5, 15),
    "small": Case("Dynamic(3), 16x8 to 10x16, batch 1, against stored votes", _small, 1 / 1.2, 1),
}
