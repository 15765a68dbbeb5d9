"""EM's two steps in one pass of the compiled kernel, against their definition with stored votes."""

import os
import threading
import weakref

import pytest
import torch
from torch import Tensor

from tests.tolerances import STREAMED, relative_rms
from torchcaps import Capsules
from torchcaps.nn import ConvCapsules, DenseCapsules
from torchcaps.routing import EM, Dynamic
from torchcaps.votes import DenseVotes, StreamedVotes, Wiring, dispatch, fitting, streaming
from torchcaps.votes.base import Density
from torchcaps.votes.cpu.build import has_kernel
from torchcaps.votes.reductions import BY_NAME

pytestmark = pytest.mark.skipif(not has_kernel(torch.float32), reason="no compiled kernel")

LEAST_MASS = 1e-10
DOUBLE = STREAMED[torch.float64]


def values_and_gradients(votes: StreamedVotes | DenseVotes, inputs: list[Tensor], uniform: bool) -> list[Tensor]:
    """Return the sums and their gradients; inputs: children, weight, bias, activation, constant, mean, scale."""
    density = None if uniform else Density(*inputs[4:])
    found = votes.fit(inputs[3], density, LEAST_MASS)
    results = [found.mass, found.total, found.mean, found.squares]
    generator = torch.Generator().manual_seed(1)
    directions = [torch.randn(r.shape, generator=generator, dtype=r.dtype) for r in results]
    loss = sum((r * d).sum() for r, d in zip(results, directions, strict=True))
    assert isinstance(loss, Tensor)
    return [*results, *torch.autograd.grad(loss, inputs[: 4 if uniform else 7])]


@pytest.mark.parametrize("uniform", [False, True], ids=["density", "uniform"])
@pytest.mark.parametrize("size", [1.0, 1e-11], ids=["active", "mass_below_the_least"])
def test_kernel_equals_definition(uniform: bool, size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding, stride, bias, inactive children, and parents whose mass is below the least divisor."""
    calls = []
    backward = fitting.fit_backward
    monkeypatch.setattr(fitting, "fit_backward", lambda *a: calls.append(1) or backward(*a))
    torch.manual_seed(0)
    wiring = Wiring(3, (5, 4), (3, 3), (2, 2), (1, 1, 1, 1))
    shapes = [(3, 5, 4, 3, 6), (27, 3, 5, 3), (27, 5, 6), (3, 5, 4, 3), (3, *wiring.sites, 5)]
    shapes += [(3, *wiring.sites, 5, 6)] * 2
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    inputs[3] = size * inputs[3].abs() * (inputs[3] > -0.5)
    inputs[6] = inputs[6].abs()
    inputs = [tensor.requires_grad_() for tensor in inputs]
    streamed = StreamedVotes(inputs[0], inputs[1], inputs[2], 2, wiring)
    stored = DenseVotes.make(inputs[0], inputs[1], inputs[2], 2, wiring)
    pairs = zip(*(values_and_gradients(votes, inputs, uniform) for votes in (streamed, stored)), strict=True)
    for index, (actual, expected) in enumerate(pairs):
        assert relative_rms(actual, expected) < DOUBLE, index
    assert calls


def test_variance_of_distant_votes() -> None:
    """Votes near 300 with a deviation of 0.1, in float32: a difference of two sums would lose the variance."""
    torch.manual_seed(0)
    wiring = Wiring(200)
    weight = torch.ones(200, 1, 2, 1)
    pose = 300 + 0.1 * torch.randn(32, 200, 1)
    activation = torch.ones(32, 200)
    found = StreamedVotes(pose, weight, None, 1, wiring).fit(activation, None, LEAST_MASS)
    exact = DenseVotes.make(pose.double(), weight.double(), None, 1, wiring).fit(activation.double(), None, LEAST_MASS)
    assert found.coupling is None
    assert relative_rms(found.squares, exact.squares) < 1e-4


def test_saved_memory_grows_with_parents_only() -> None:
    """Couplings of an iteration would be 72 times a set of parents' poses."""
    saved: list[int] = []
    for iterations in (2, 3, 5):
        layer = ConvCapsules(128, 16, 4, 16, 3, routing=EM(iterations), pose="matrix", streamed=True)
        storages: dict[int, int] = {}

        def pack(tensor: Tensor, storages: dict[int, int] = storages) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        children = Capsules(torch.randn(1, 8, 8, 128, 16, requires_grad=True), torch.rand(1, 8, 8, 128))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            parents = layer(children)
        assert parents.pose.requires_grad
        saved.append(sum(storages.values()))
    parents_bytes = 4 * 36 * 4 * 16
    assert saved[2] - saved[1] <= 2 * 20 * parents_bytes
    assert saved[1] - saved[0] <= 20 * parents_bytes


@pytest.mark.parametrize("enabled", [True, False], ids=["kernel", "torch"])
def test_gradients_that_are_not_needed_are_none(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not enabled:
        monkeypatch.setattr(streaming, "kernel_supports", lambda *_: False)
    wiring = Wiring(6)
    plan = dispatch.ChunkPlan(wiring, 1)
    for name in ("Sum", "Dot", "SqSum", "SqDist", "Attend"):
        kind = BY_NAME[name]
        arguments = [torch.randn(20, *((6, 3) if slotted else (3, 4))) for slotted in kind.slotted]
        inputs = [torch.randn(20, 6, 4), torch.randn(6, 4, 3, 4), torch.randn(6, 3, 4), *arguments]
        with torch.no_grad():
            gradient = torch.randn_like(streaming.reduce_votes(kind, plan, *inputs))
            every = streaming.reduce_gradients(kind, plan, [True] * len(inputs), gradient, *inputs)
            for index in range(len(inputs)):
                needs = [n == index for n in range(len(inputs))]
                found = streaming.reduce_gradients(kind, plan, needs, gradient, *inputs)
                assert [tensor is not None for tensor in found] == needs, name
                torch.testing.assert_close(found[index], every[index])


@pytest.mark.parametrize("routing", [EM(2), Dynamic(2)], ids=lambda r: r.name())
def test_frozen_weights_leave_other_gradients_unchanged(routing: EM | Dynamic) -> None:
    torch.manual_seed(0)
    layer = DenseCapsules(6, 4, 3, 4, routing=routing, streamed=True, init=0.5)
    pose = torch.randn(20, 6, 4, requires_grad=True)
    (expected,) = torch.autograd.grad(layer(pose).pose.square().sum(), pose)
    layer.requires_grad_(False)
    (found,) = torch.autograd.grad(layer(pose).pose.square().sum(), pose)
    torch.testing.assert_close(found, expected)


def test_threads_are_shared_by_all_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel_threads() -> set[int | None]:
        return {thread.ident for thread in threading.enumerate() if thread.name.startswith("torchcaps-kernel")}

    monkeypatch.setattr(dispatch, "MIN_THREAD_WORK", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        layer = DenseCapsules(6, 4, 3, 4, routing="dynamic", streamed=True)
        layer(torch.randn(100, 6, 4)).pose.sum().backward()
        first = kernel_threads()
        for _ in range(5):
            layer(torch.randn(100, 6, 4)).pose.sum().backward()
    finally:
        torch.set_num_threads(before)
    assert first
    assert first <= kernel_threads()
    assert len(kernel_threads()) <= (os.cpu_count() or 1)


def test_backward_of_a_batch_of_gradients() -> None:
    layers = [DenseCapsules(6, 4, 3, 4, routing=EM(2), streamed=s, init=1.0).double() for s in (True, False)]
    layers[1].load_state_dict(layers[0].state_dict())
    children = Capsules(torch.randn(2, 6, 4).double().requires_grad_(), torch.rand(2, 6).double())
    found = []
    for layer in layers:
        pose = layer(children).pose
        gradients = torch.randn(3, *pose.shape, generator=torch.Generator().manual_seed(0)).double()
        by_row = torch.vmap(lambda g, pose=pose: torch.autograd.grad(pose, children.pose, g, retain_graph=True)[0])
        found.append(by_row(gradients))
    assert relative_rms(*found) < 1e-9


def test_shared_densities_are_broadcast() -> None:
    """A density that all images share equals a copy for each; the kernel would read past its end."""
    tensors = torch.randn(2, 5, 4), torch.randn(5, 4, 3, 4), None, 1, Wiring(5)
    density, activation = Density(torch.randn(3), torch.randn(3, 4), torch.rand(3, 4)), torch.rand(2, 5)
    found, expected = (make(*tensors).fit(activation, density, 1e-8) for make in (StreamedVotes, DenseVotes.make))
    for name in ("mass", "total", "squares"):
        assert relative_rms(getattr(found, name), getattr(expected, name)) < 1e-4


def test_the_graph_does_not_keep_the_children() -> None:
    layer = DenseCapsules(6, 4, 3, 4, routing=EM(2), streamed=True)
    pose = torch.randn(2, 6, 4)
    children = weakref.ref(pose)
    parents = layer(Capsules(pose, torch.rand(2, 6))).pose
    parents.sum().backward()
    del pose
    assert children() is None
    assert parents.grad_fn is not None
