"""Equilibrium routing: golden values, implicit gradients, memory, convergence, other routings and bad input."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.routing.golden import GOLDEN, assert_golden, wave
from tests.tolerances import SAME, relative_rms
from torchcaps.capsules import Capsules
from torchcaps.functional import squash
from torchcaps.nn import ConvCapsules, DenseCapsules
from torchcaps.routing import (
    EM,
    Dynamic,
    Equilibrium,
    Heinsen,
    HeinsenEM,
    InvertedAttention,
    KMeans,
    Routing,
    SelfAttention,
    Solution,
    VariationalBayes,
    count_one_step_gradients,
    route,
)
from torchcaps.routing.base import ROUTINGS, State
from torchcaps.votes import Votes

with ROUTINGS.restored():

    @dataclasses.dataclass(frozen=True)
    class Oscillating(KMeans):
        """K-means with a step back from the centers: its plain iteration diverges, a damped one converges."""

        def step(self, coefficients: Any, votes: Votes, children: Capsules, state: State, t: int) -> State:
            after = super().step(coefficients, votes, children, state, t)
            if state.memory is None:
                return after
            center = after.memory[0] - 1.5 * state.memory[0]
            return after._replace(pose=squash(center), memory=(center, None))


EXACT = {"max_steps": 300, "tolerance": 1e-13, "backward_tolerance": 1e-13}
INNER = [InvertedAttention(), KMeans(), KMeans(similarity="cosine"), EM(), VariationalBayes(), HeinsenEM(), Heinsen()]


def solution_of(votes: Tensor, routing: Routing) -> Solution:
    memory = route(votes, routing, trace=True)[1].states[-1].memory
    assert isinstance(memory, Solution)
    return memory


@pytest.mark.parametrize("solver", ["iteration", "anderson"])
def test_golden_values(solver: str) -> None:
    votes = wave((1, 4, 3, 4), 0.05).requires_grad_()
    routing = Equilibrium(solver=solver, **EXACT)  # type: ignore[arg-type]
    parents, trace = route(votes, routing, trace=True)
    pose = [
        [-1.24290907, -0.58774421, 0.45048285, 1.38017043],
        [1.60020604, 0.0902401, -0.86861288, -0.82183326],
        [-1.55164961, -0.20152087, 0.79132596, 0.96184451],
    ]
    assert_golden(parents.pose[0], pose)
    (gradient,) = torch.autograd.grad((wave((3, 4), 1.7) * parents.pose[0]).sum(), votes)
    assert_golden(gradient[0, 0, 0], [-0.14002654, 0.02798127, 0.09334415, 0.01870112])
    solution = trace.states[-1].memory
    assert float(solution.radius[0]) == pytest.approx(0.47327, abs=1e-4)
    assert bool(solution.converged[0])
    assert solution.steps[0] < (60 if solver == "iteration" else 40)


def test_residuals_and_one_step_gradient_of_the_golden_case() -> None:
    """Without convergence the gradient is that of the last step, and it is counted."""
    votes = wave((1, 4, 3, 4), 0.05)
    poses = [route(votes, InvertedAttention(n)).pose for n in range(1, 22)]
    for n, expected in {2: 0.80108531, 3: 0.41511806, 5: 0.05632496, 10: 0.00091013}.items():
        assert abs(float((poses[n - 1] - poses[n - 2]).norm()) - expected) < GOLDEN
    at_fixed_point = route(votes, Equilibrium(**EXACT)).pose  # type: ignore[arg-type]
    leaf = votes.clone().requires_grad_()
    count_one_step_gradients(reset=True)
    unreached = Equilibrium(max_steps=60, tolerance=1e-300)
    parents = route(leaf, unreached).pose
    assert relative_rms(parents, at_fixed_point) < 1e-10
    (gradient,) = torch.autograd.grad((wave((3, 4), 1.7) * parents[0]).sum(), leaf)
    assert_golden(gradient[0, 0, 0], [-0.13556501, 0.03212936, 0.09289385, 0.01054179])
    assert count_one_step_gradients(reset=True) == 1
    assert count_one_step_gradients() == 0
    assert not bool(solution_of(votes, unreached).converged[0])


@pytest.mark.parametrize("streamed", [False, True], ids=["stored", "streamed"])
@pytest.mark.parametrize("inner", INNER, ids=lambda r: getattr(r, "similarity", r.name()))
def test_gradients_equal_those_of_many_iterations(inner: Routing, streamed: bool) -> None:
    """The gradient through all iterations converges to that of the fixed point, for children and all parameters."""
    torch.manual_seed(1)
    changes = {"annealing": 0.0} if isinstance(inner, EM) else {}
    many = dataclasses.replace(inner, iterations=80, **changes)
    layers = [
        DenseCapsules(5, 3, 2, 4, routing=routing, streamed=streamed).double()
        for routing in (Equilibrium(inner, **EXACT), many)  # type: ignore[arg-type]
    ]
    layers[0].weight.data.mul_(0.5)
    layers[1].load_state_dict(layers[0].state_dict())
    pose = torch.randn(2, 5, 3, dtype=torch.float64)
    results = []
    for layer in layers:
        leaf = pose.clone().requires_grad_()
        parents = layer(leaf)
        outputs = [x for x in parents if x is not None]
        directions = [torch.arange(x.numel(), dtype=x.dtype).view(x.shape).cos() for x in outputs]
        torch.autograd.backward(outputs, directions)
        results.append([*outputs, leaf.grad, *(p.grad for p in layer.parameters() if p.grad is not None)])
    for actual, expected in zip(*results, strict=True):
        assert relative_rms(actual, expected) < 1e-7


def test_image_is_independent_of_its_batch() -> None:
    votes = torch.randn(5, 12, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    routing = Equilibrium(tolerance=1e-3)
    batch = route(votes, routing).pose
    for image in range(5):
        assert relative_rms(route(votes[image : image + 1], routing).pose[0], batch[image]) < SAME[torch.float64]


def test_memory_does_not_grow_with_steps() -> None:
    """Bytes saved for the backward pass."""
    votes = torch.randn(2, 16, 4, 8, requires_grad=True)

    def saved_bytes(max_steps: int) -> int:
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.nbytes) or x, lambda x: x):
            route(votes, Equilibrium(max_steps=max_steps, tolerance=1e-12))
        return sum(sizes)

    assert saved_bytes(2) == saved_bytes(40)


def test_convolution_and_damping() -> None:
    layer = ConvCapsules(2, 4, 3, 4, 2, routing=Equilibrium(damping=0.8, **EXACT), pose="matrix").double()  # type: ignore[arg-type]
    pose = torch.randn(2, 3, 3, 2, 4, dtype=torch.float64)
    many = ConvCapsules(2, 4, 3, 4, 2, routing=InvertedAttention(100), pose="matrix").double()
    many.load_state_dict(layer.state_dict())
    assert relative_rms(layer(pose).pose, many(pose).pose) < 1e-8


@pytest.mark.parametrize("solver", ["iteration", "anderson"])
def test_exported_graph_computes_the_same_values(solver: Any) -> None:
    """Also for images that are not converged: the graph has the steps of the solver, for any batch size."""
    routing = Equilibrium(max_steps=3, solver=solver, tolerance=1e-12)
    first = DenseCapsules(4, 3, 2, 3, routing=routing)
    pose = torch.randn(6, 4, 3, generator=torch.Generator().manual_seed(0))
    residuals = first(pose, trace=True)[1].states[-1].memory.residual
    tolerance = 1.01 * float(residuals.median())  # some images stop early, others do not
    routing = dataclasses.replace(routing, tolerance=tolerance)
    layer = DenseCapsules(4, 3, 2, 3, routing=routing)
    layer.load_state_dict(first.state_dict())
    batch = torch.export.Dim("batch", min=1)
    program = torch.export.export(layer.eval(), (pose[:3],), dynamic_shapes=({0: batch},)).module()
    for n_images in (1, 6):
        assert relative_rms(program(pose[:n_images]).pose, layer(pose[:n_images]).pose) < SAME[torch.float32]


@pytest.mark.parametrize(("inner", "reason"), [(Dynamic(), "accumulates"), (SelfAttention(), "no iterations")])
def test_routings_without_fixed_point_are_rejected(inner: Routing, reason: str) -> None:
    with pytest.raises(ValueError, match=f"{type(inner).__name__} has no fixed point.*{reason}"):
        Equilibrium(inner)


def test_temperature_schedule_is_rejected_when_built() -> None:
    with pytest.raises(ValueError, match="activations=True"):
        Equilibrium(InvertedAttention(activations=True))


def test_number_of_iterations_of_the_routing_is_ignored() -> None:
    """Heinsen routing with one iteration lacks the coefficients of the others."""
    torch.manual_seed(0)
    first, second = (DenseCapsules(6, 4, 3, 4, routing=Equilibrium(Heinsen(n))) for n in (1, 2))
    second.load_state_dict(first.state_dict())
    pose = torch.randn(2, 6, 4)
    assert torch.equal(first(pose).pose, second(pose).pose)


def test_routing_by_name() -> None:
    assert Equilibrium("kmeans") == Equilibrium(KMeans())


@pytest.mark.parametrize("streamed", [False, True], ids=["stored", "streamed"])
@pytest.mark.parametrize(("inner", "damping"), [(KMeans(), 1.0), (Oscillating(), 0.4)], ids=["plain", "damped"])
def test_transforms_equal_autograd(inner: Routing, damping: float, streamed: bool) -> None:
    """Per-sample gradients by vmap and grad, and forward mode, equal those of the implicit gradient."""
    torch.manual_seed(1)
    routing = Equilibrium(inner, damping=damping, **EXACT)  # type: ignore[arg-type]
    layer = DenseCapsules(5, 3, 2, 4, routing=routing, streamed=streamed).double()
    layer.weight.data.mul_(0.5)
    pose = torch.randn(3, 5, 3, dtype=torch.float64)

    def loss(image: Tensor) -> Tensor:
        return layer(image[None]).pose.sin().sum()

    leaf = pose.clone().requires_grad_()
    total = layer(leaf).pose.sin().sum()
    (expected,) = torch.autograd.grad(total, leaf)
    assert relative_rms(torch.func.vmap(lambda image: layer(image[None]).pose[0])(pose), layer(pose).pose) < 1e-7
    assert relative_rms(torch.func.vmap(torch.func.grad(loss))(pose), expected) < 1e-7
    direction = torch.arange(pose.numel(), dtype=pose.dtype).view_as(pose).cos()
    _, tangent = torch.func.jvp(lambda x: layer(x).pose.sin().sum(), (pose,), (direction,))
    assert float(tangent.detach()) == pytest.approx(float((direction * expected).sum()), rel=1e-7)
