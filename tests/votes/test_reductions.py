"""Reductions of votes: streamed against stored with arbitrary arguments, gradients against autograd, softmax."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tolerances import EXACT, STREAMED, relative_rms
from torchcaps.votes import DenseVotes, StreamedVotes, Votes, Wiring
from torchcaps.votes.reductions import BY_NAME

BATCH, PARENTS, ROWS, COLUMNS = 2, 3, 2, 2
DIM = ROWS * COLUMNS
PRIOR = torch.linspace(-1, 1, 12 * PARENTS, dtype=torch.float64).view(-1, PARENTS)
WIRINGS = {"dense": Wiring(6), "conv": Wiring(2, (4, 3), (3, 2), (1, 1), (1, 0, 0, 0))}

Reduce = Callable[..., Tensor]
# Each reduction as a function of the votes and of independent arguments: per slot and parent, or per parent.
REDUCTIONS: dict[str, tuple[Reduce, tuple[str, ...]]] = {
    "sum": (lambda votes, c: votes.sum(c), ("pair",)),
    "dot": (lambda votes, q: votes.dot(q), ("parent",)),
    "sqsum": (lambda votes, c, mean: votes.sqsum(c, mean), ("pair", "parent")),
    "sqdist": (lambda votes, mean, scale: votes.sqdist(mean, scale), ("parent", "parent")),
    "sqnorm": (lambda votes: votes.sqnorm(torch.zeros((), dtype=torch.float64)), ()),
    "moments": (lambda votes, c: torch.cat(votes.moments(c, 1 + (c * c).sum(-2))), ("pair",)),
    "attend_with_prior": (lambda votes, q: votes.attend_with_prior(q, PRIOR[: votes.shape[-3]])[0], ("parent",)),
    "mix": (lambda votes, kernel: votes.mix(kernel), ("kernel",)),
    "attend": (lambda votes, q: votes.attend(q)[0], ("parent",)),
}


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def make_arguments(kinds: tuple[str, ...], wiring: Wiring) -> list[Tensor]:
    shapes = {
        "pair": (BATCH, *wiring.sites, wiring.n_slots, PARENTS),
        "parent": (BATCH, *wiring.sites, PARENTS, DIM),
        "kernel": (PARENTS, wiring.n_slots, wiring.n_slots, DIM),
    }
    return [random(*shapes[kind]) for kind in kinds]


@pytest.mark.parametrize("wiring", WIRINGS.values(), ids=WIRINGS)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_streamed_equals_stored_for_arbitrary_arguments(name: str, wiring: Wiring) -> None:
    """Routings call `sqsum` with the mean that minimises it, where the gradient of the mean is 0: not here."""
    reduce, kinds = REDUCTIONS[name]
    grid = (6,) if wiring is WIRINGS["dense"] else (4, 3, 2)
    pose = random(BATCH, *grid, DIM)
    weight = random(wiring.n_slots, COLUMNS, PARENTS, COLUMNS)
    arguments = make_arguments(kinds, wiring)

    def values_and_gradients(votes: Votes) -> list[Tensor]:
        result = reduce(votes, *arguments)
        direction = torch.randn(result.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        return [result, *torch.autograd.grad((result * direction).sum(), [pose, weight, *arguments])]

    stored = values_and_gradients(DenseVotes.make(pose, weight, None, ROWS, wiring))
    streamed = values_and_gradients(StreamedVotes(pose, weight, None, ROWS, wiring))
    names = ["value", "gradient of pose", "gradient of weight", *(f"gradient of argument {n}" for n in range(9))]
    for quantity, actual, expected in zip(names, streamed, stored, strict=False):
        assert float(expected.detach().abs().max()) > 0, quantity
        assert relative_rms(actual, expected) < STREAMED[torch.float64], quantity


@pytest.mark.parametrize("name", [name for name in BY_NAME if not name.endswith("Fixed")])
def test_gradients_of_chunk_reductions_equal_autograd(name: str) -> None:
    """``gradients`` of each class in `torchcaps.votes.reductions` against autograd of its ``result``."""
    reduction, wiring = BY_NAME[name], WIRINGS["conv"]
    kinds = {"Sum": "sum", "Dot": "dot", "SqSum": "sqsum", "SqDist": "sqdist", "Mix": "mix"}.get(name, "attend")
    votes = random(BATCH, *wiring.sites, wiring.n_slots, PARENTS, DIM)
    arguments = make_arguments(REDUCTIONS[kinds][1], wiring)
    result = reduction.result(votes, *arguments)
    gradient = torch.randn_like(result)
    expected = torch.autograd.grad(result, [votes, *arguments], gradient)
    with torch.no_grad():
        actual = reduction.gradients(votes, gradient, *arguments)
    torch.testing.assert_close(list(actual), list(expected), rtol=1e-10, atol=1e-10)


def test_softmax_with_leak_and_global_competition_equals_explicit_softmax() -> None:
    """A softmax over all parents of a child, at any position, and one more category without parent if leaky."""
    wiring = Wiring(2, (4, 3), (3, 2), (1, 1), (1, 0, 0, 0), competition="global")
    logits = torch.randn(2, *wiring.sites, wiring.n_slots, 3, dtype=torch.float64)
    votes = DenseVotes(logits.unsqueeze(-1), wiring)
    child_of_slot = wiring.index().flatten()
    for leak in (True, False):
        coupling = votes.softmax(logits, leak).flatten(1, 3)
        uniform = votes.uniform(logits, leak).expand(logits.shape).flatten(1, 3)
        for child in child_of_slot.unique().tolist():
            slots = (child_of_slot == child).nonzero().flatten()
            competitors = logits.flatten(1, 3)[:, slots].flatten(1)
            extra = torch.zeros(2, int(leak), dtype=torch.float64)
            expected = torch.cat([extra, competitors], 1).softmax(1)[:, int(leak) :].view(2, len(slots), 3)
            torch.testing.assert_close(coupling[:, slots], expected, rtol=0, atol=EXACT)
            equal = torch.full_like(expected, 1 / (3 * len(slots) + leak))
            torch.testing.assert_close(uniform[:, slots], equal, rtol=0, atol=EXACT)


@pytest.mark.parametrize("name", ["moments", "sqsum", "sqdist", "sqnorm", "shared"])
def test_gradients_by_formula(name: str) -> None:
    """First and second derivatives, also batched, of the squared deviations of stored votes."""
    coupling, divisor = random(2, 2, 2), (random(2, 2).detach().abs() + 1).requires_grad_()
    mean, scale = random(2, 2, 1), random(2, 2, 1)

    def share(votes: DenseVotes, coupling: Tensor, divisor: Tensor) -> tuple[Tensor, ...]:
        center, squares = votes.moments(coupling, divisor)
        return center, votes.sqdist(center, squares)

    functions: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
        "moments": (DenseVotes.moments, [coupling, divisor]),
        "sqsum": (DenseVotes.sqsum, [coupling, mean]),
        "sqdist": (DenseVotes.sqdist, [mean, scale]),
        "sqnorm": (lambda votes: votes.sqnorm(mean), []),
        "shared": (share, [coupling, divisor]),
    }
    function, arguments = functions[name]

    def reduce(values: Tensor, *arguments: Tensor) -> Any:
        return function(DenseVotes(values, Wiring(2)), *arguments)

    inputs = [random(2, 2, 2, 1), *arguments]
    assert torch.autograd.gradcheck(reduce, inputs, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(reduce, inputs)


def test_shared_squared_deviations_have_their_own_gradient_mode() -> None:
    """Stored votes reuse squared deviations of the same means, but not those computed without gradients."""
    values = torch.randn(2, 3, 4, 5, dtype=torch.float64, requires_grad=True)
    mean, scale = (torch.randn(2, 4, 5, dtype=torch.float64).abs().requires_grad_() for _ in range(2))
    coupling = torch.rand(2, 3, 4, dtype=torch.float64)
    votes = DenseVotes(values, Wiring(3))
    with torch.no_grad():
        before = votes.sqsum(coupling, mean)
    assert not before.requires_grad
    results = votes.sqsum(coupling, mean).sum() + 2 * votes.sqdist(mean, scale).sum()
    other = votes.sqdist(scale, mean).sum()  # other means
    found = torch.autograd.grad(results + other, [values, mean, scale])
    square = (values - mean.unsqueeze(1)) ** 2
    total = (coupling.unsqueeze(-1) * square).sum() + 2 * (scale.unsqueeze(1) * square).sum()
    total = total + (mean.unsqueeze(1) * (values - scale.unsqueeze(1)) ** 2).sum()
    for a, b in zip(found, torch.autograd.grad(total, [values, mean, scale]), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("changed", ["mean", "votes"])
def test_deviations_of_tensors_modified_in_place_are_new(changed: str, inference: bool) -> None:
    """Stored votes reuse the deviations of the same means only if neither means nor votes were modified since."""
    with torch.inference_mode(inference), torch.no_grad():
        votes = DenseVotes(torch.randn(2, 3, 4, 5, dtype=torch.float64), Wiring(3))
        coupling, scale = torch.rand(2, 3, 4, dtype=torch.float64), torch.rand(2, 4, 5, dtype=torch.float64)
        mean, _ = votes.moments(coupling)
        for _ in range(2):
            (mean if changed == "mean" else votes.dense()).mul_(1.5)
            square = (votes.dense() - mean.unsqueeze(-3)) ** 2
            torch.testing.assert_close(votes.sqdist(mean, scale), (scale.unsqueeze(-3) * square).sum(-1))
            torch.testing.assert_close(votes.sqsum(coupling, mean), (coupling.unsqueeze(-1) * square).sum(-3))


def test_deviations_of_unmodified_means_are_computed_once() -> None:
    votes = DenseVotes(torch.randn(2, 3, 4, 5), Wiring(3))
    mean, _ = votes.moments(torch.rand(2, 3, 4))
    assert votes._deviations(mean) is votes._deviations(mean)
