"""Couplings and sums in one pass of the compiled kernel, against their definition with stored votes."""

import platform
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tolerances import STREAMED, relative_rms
from torchcaps.nn import DenseCapsules
from torchcaps.routing import KMeans, SelfAttention, SelfRouting
from torchcaps.votes import DenseVotes, StreamedVotes, Votes, Wiring, fitting
from torchcaps.votes.base import Density
from torchcaps.votes.cpu.build import has_kernel

pytestmark = pytest.mark.skipif(not has_kernel(torch.float32), reason="no compiled kernel")

DOUBLE = STREAMED[torch.float64]
LEAST = 1e-6
GRID = Wiring(3, (5, 4), (3, 3), (2, 2), (1, 1, 1, 1))  # padding and stride
Compute = Callable[[Votes, dict[str, Tensor]], list[Tensor]]


def make_inputs(wiring: Wiring, rows: int) -> dict[str, Tensor]:
    """Return children, weights and arguments of votes with 5 parents, 6 elements each."""
    torch.manual_seed(0)
    n_slots, sites = wiring.n_slots, wiring.sites
    children = (3, *(wiring.grid or ()), wiring.types)
    shapes = {"pose": (*children, 6), "weight": (n_slots, 6 // rows, 5, 6 // rows), "bias": (n_slots, 5, 6)}
    shapes |= {"activation": children, "query": (3, *sites, 5, 6), "pairs": (n_slots, 5)}
    shapes |= {"classifier": (n_slots, 5, 6), "constant": (3, *sites, 5), "scale": (3, *sites, 5, 6)}
    inputs = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    inputs["activation"] = inputs["activation"].abs() * (inputs["activation"] > -0.5)
    inputs["scale"] = inputs["scale"].abs()
    return {name: tensor.requires_grad_() for name, tensor in inputs.items()}


def attend_with_prior(votes: Votes, p: dict[str, Tensor]) -> list[Tensor]:
    return [votes.attend_with_prior(p["query"], p["pairs"]).total]


def choose(votes: Votes, p: dict[str, Tensor]) -> list[Tensor]:
    return list(votes.choose(p["pose"], p["activation"], p["classifier"], p["pairs"])[:2])


def resemble(similarity: Any) -> Compute:
    def compute(votes: Votes, p: dict[str, Tensor]) -> list[Tensor]:
        return [votes.attend_similar(p["query"], similarity, LEAST)[0].total]

    return compute


def fit(density: bool, more_mass: float) -> Compute:
    def compute(votes: Votes, p: dict[str, Tensor]) -> list[Tensor]:
        given = Density(p["constant"], p["query"], p["scale"]) if density else None
        found = votes.fit(p["activation"], given, 0.0, more_mass, p["pairs"])
        assert found.gained is not None
        return [found.mass, found.mean, found.squares, found.gained]

    return compute


CASES = {
    "attend_with_prior": attend_with_prior,
    "choose": choose,
    "cosine": resemble("cosine"),
    "tanimoto": resemble("tanimoto"),
    "pearson": resemble("pearson"),
    "fit_uniform": fit(False, 1.0),
    "fit_density": fit(True, 1.0),
    "fit_more_than_mass": fit(True, 100.0),
}


@pytest.mark.parametrize("rows", [1, 2], ids=["vectors", "matrices"])
@pytest.mark.parametrize("wiring", [Wiring(7), GRID], ids=["dense", "grid"])
@pytest.mark.parametrize("name", CASES)
def test_kernel_equals_definition(name: str, wiring: Wiring, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []
    for function in ("fit_backward", "fused_backward"):
        original = getattr(fitting, function)
        monkeypatch.setattr(fitting, function, lambda *a, f=original: passes.append(1) or f(*a))
    inputs = make_inputs(wiring, rows)
    tensors = inputs["pose"], inputs["weight"], inputs["bias"], rows, wiring
    found = []
    for votes in (StreamedVotes(*tensors), DenseVotes.make(*tensors)):
        results = CASES[name](votes, inputs)
        generator = torch.Generator().manual_seed(1)
        directions = [torch.randn(r.shape, generator=generator, dtype=r.dtype) for r in results]
        loss = torch.stack([(r * d).sum() for r, d in zip(results, directions, strict=True)]).sum()
        gradients = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True)
        found.append([*results, *gradients])
    for index, (actual, expected) in enumerate(zip(*found, strict=True)):
        if expected is None:
            assert actual is None or not actual.any(), index
        else:
            assert relative_rms(actual, expected) < DOUBLE, index
    assert passes


@pytest.mark.parametrize(
    "routing", [SelfAttention(), SelfRouting(), KMeans(2, "cosine"), KMeans(2, "pearson")], ids=repr
)
def test_second_derivatives_and_batched_gradients(routing: Any) -> None:
    torch.manual_seed(0)
    layers = [DenseCapsules(4, 3, 2, 3, routing=routing, streamed=streamed).double() for streamed in (True, False)]
    layers[1].load_state_dict(layers[0].state_dict())
    pose = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    for parameter in layers[0].parameters():
        parameter.data += 0.1
    layers[1].load_state_dict(layers[0].state_dict())
    found = []
    for layer in layers:
        (first,) = torch.autograd.grad(layer(pose).pose.square().sum(), pose, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), pose)
        jacobian = torch.func.jacrev(lambda x, layer=layer: layer(x).pose)(pose.detach())
        found.append([first.detach(), second, jacobian])
    for actual, expected in zip(*found, strict=True):
        assert relative_rms(actual, expected) < DOUBLE


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the kernel flushes on x86 only")
def test_denormal_couplings_count_as_zero() -> None:
    """A product of two small numbers that float32 can only represent as a denormal one, which is slow, becomes 0."""
    pose, weight = torch.full((16, 4, 1), 1e-20), torch.full((4, 1, 2, 1), 1e-20)
    streamed = StreamedVotes(pose, weight, None, 1, Wiring(4))
    is_flushed = _is_flushed()  # a training in the same process flushes
    torch.set_flush_denormal(False)
    try:
        assert not streamed.sum(torch.rand(16, 4, 2)).any()
        assert not _is_flushed()  # outside of the kernel nothing changes
    finally:
        torch.set_flush_denormal(is_flushed)


def _is_flushed() -> bool:
    return float(torch.tensor(1e-20) * 1e-20) == 0
