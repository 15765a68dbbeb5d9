"""Counter-based random numbers and permutations."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.helpers import assert_bit_equal
from torchcaps._core.random import CounterRNG, hash64, permute_indices, step_seed


def splitmix64(x: int) -> int:
    """SplitMix64 with Python ints."""
    mask = 2**64 - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


@given(st.integers(-(2**63), 2**63 - 1))
def test_hash64_is_splitmix64(number: int) -> None:
    assert int(hash64(torch.tensor(number))) & (2**64 - 1) == splitmix64(number & (2**64 - 1))


def test_numbers_depend_only_on_seed_epoch_and_index() -> None:
    index = torch.tensor([3, 1_000_000_007, 5, 59_999_999])

    def rows(seed: int, epoch: int, index: torch.Tensor) -> list[list[float]]:
        rng = CounterRNG(seed, epoch, index)
        return torch.stack([rng.unit() for _ in range(5)], dim=1).tolist()

    together = rows(7, 2, index)
    assert [rows(7, 2, index[n : n + 1])[0] for n in range(4)] == together
    assert rows(7, 2, index.flip(0)) == together[::-1]
    numbers = [x for key in ((7, 2), (7, 3), (8, 2), (2, 7), (-1, 2)) for row in rows(*key, index) for x in row]
    assert len(set(numbers)) == len(numbers)


def test_numbers_are_uniform_and_independent() -> None:
    rng = CounterRNG(0, 0, torch.arange(200_000))
    first, second = rng.unit(), rng.unit()
    for unit in (first, second):
        assert 0 <= float(unit.min()) < 1e-4
        assert 1 - 1e-4 < float(unit.max()) < 1
        counts = torch.histc(unit, 100, 0, 1)
        assert float(((counts - 2000) ** 2 / 2000).sum()) < 160  # chi-squared, 99 degrees of freedom: 1 in 10,000
    assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 0.01
    assert abs(float(torch.corrcoef(torch.stack([first[:-1], first[1:]]))[0, 1])) < 0.01


def test_integers_include_both_ends() -> None:
    counts = Counter(CounterRNG(1, 0, torch.arange(90_000)).integers(-4, 4).tolist())
    assert sorted(counts) == list(range(-4, 5))
    assert {n: count for n, count in counts.items() if not 9_600 < count < 10_400} == {}
    high = torch.tensor([0, 5])
    assert int(CounterRNG(1, 0, torch.arange(2)).integers(0, high)[0]) == 0
    assert 0.24 < CounterRNG(2, 0, torch.arange(50_000)).bernoulli(0.25).double().mean() < 0.26


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.integers(-(2**62), 2**62), st.integers(0, 1000))
def test_permutation_has_every_index_once(length: int, seed: int, epoch: int) -> None:
    order = permute_indices(torch.arange(length), length, seed, epoch)
    assert sorted(order.tolist()) == list(range(length))
    some = torch.randperm(length)[:7]
    assert_bit_equal(permute_indices(some, length, seed, epoch), order[some])


def test_permutations_of_epochs_and_seeds_are_uncorrelated() -> None:
    length = 10_000
    permutations = [permute_indices(torch.arange(length), length, s, e).double() for s, e in ((0, 0), (0, 1), (1, 0))]
    positions = torch.arange(length).double()
    for number, order in enumerate(permutations):
        for other in [positions, *permutations[:number]]:
            assert abs(float(torch.corrcoef(torch.stack([order, other]))[0, 1])) < 0.04
        assert int((order == positions).sum()) < 10  # fixed points: one is expected
        steps = (order[1:] - order[:-1]).abs()
        assert 3_100 < float(steps.mean()) < 3_550  # a third of the length


def test_small_permutations_are_uniform() -> None:
    counts = Counter(tuple(permute_indices(torch.arange(4), 4, seed, 0).tolist()) for seed in range(1_200))
    assert len(counts) == 24
    assert 25 < min(counts.values()) <= max(counts.values()) < 80  # 50 on average


def test_permutation_of_sixty_million() -> None:
    length = 60_000_000
    positions = torch.tensor([0, 1, 31_415_926, length - 1])
    index = permute_indices(positions, length, 0, 0)
    assert len(set(index.tolist())) == 4
    assert int(index.max()) < length


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_tiny_permutations(length: int) -> None:
    assert sorted(permute_indices(torch.arange(length), length, 3, 4).tolist()) == list(range(length))


def test_step_seed_differs_between_seeds_steps_and_ranks() -> None:
    seeds = [step_seed(seed, step, rank) for seed in (0, 1, -5) for step in range(4) for rank in range(4)]
    assert len(set(seeds)) == len(seeds)
    assert min(seeds) >= 0
    assert seeds[0] == step_seed(0, 0, 0)
