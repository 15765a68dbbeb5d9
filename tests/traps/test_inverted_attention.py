"""What is easy to get wrong about Tsai 2020, its released code included."""

import itertools
import math
from typing import Any

import pytest
import torch

from tests.reference import inverted_attention as loops
from tests.reference.sites import dense_sites
from tests.tolerances import EXACT, REFERENCE, largest_difference
from torchcaps import Capsules, route
from torchcaps.nn import CapsuleStack, ConvCapsules, DenseCapsules, PrimaryCapsules
from torchcaps.routing import Dynamic, InvertedAttention


def stack(iterations: int, schedule: Any = "concurrent", n_layers: int = 3, **options: Any) -> CapsuleStack:
    """Dense layers of 5 -> 4 -> 3 -> 2 capsules; the same weights for any number of iterations."""
    torch.manual_seed(0)
    routing = InvertedAttention(iterations, **options)
    sizes = [5, 4, 3, 2][: n_layers + 1]
    layers = [DenseCapsules(a, 4, b, 4, routing=routing, pose="matrix", init=0.8) for a, b in itertools.pairwise(sizes)]
    return CapsuleStack(layers, schedule).double()


def test_trap_26_the_softmax_is_over_parents() -> None:
    _, trace = route(torch.randn(2, 6, 4, 9), InvertedAttention(2), trace=True)
    assert torch.allclose(trace.couplings[-1].sum(-1), torch.ones(2, 6))
    _, single = route(torch.randn(2, 6, 1, 9), InvertedAttention(2), trace=True)
    assert torch.all(single.couplings[-1] == 1)  # attention over children would give less than 1


def test_trap_27_the_first_iteration_is_uniform() -> None:
    votes = torch.randn(2, 6, 4, 9, dtype=torch.float64)
    zeros = {"gamma": torch.ones(9).double(), "beta": torch.zeros(9).double()}
    found = route(votes, InvertedAttention(1)).pose
    expected = torch.nn.functional.layer_norm(votes.sum(1) / 4, (9,))
    assert torch.allclose(found, expected, atol=EXACT)
    from_zeros = route(
        votes,
        InvertedAttention(1, initial="learned"),
        coefficients=zeros | {"initial": torch.zeros(4, 9).double()},
    ).pose
    assert torch.allclose(found, from_zeros, atol=EXACT)


def test_trap_28_the_agreement_is_scaled_by_the_root_of_the_size() -> None:
    """By hand: one child, votes (2, 0) and (0, 1); the first parents are half of them."""
    votes = torch.tensor([[[[2.0, 0.0], [0.0, 1.0]]]], dtype=torch.float64)
    for scale, divisor in {True: math.sqrt(2), False: 1.0}.items():
        powers = [math.exp(2 / divisor), math.exp(0.5 / divisor)]
        found = route(votes, InvertedAttention(2, scale=scale, normalize=False)).pose[0]
        assert abs(float(found[0, 0]) - 2 * powers[0] / sum(powers)) < EXACT
        assert abs(float(found[1, 1]) - powers[1] / sum(powers)) < EXACT


def test_trap_29_one_layer_norm_for_the_layer() -> None:
    for iterations in (1, 4):
        layer = ConvCapsules(3, 16, 5, 16, 3, routing=InvertedAttention(iterations), pose="matrix")
        assert sum(p.numel() for p in layer.coefficients.parameters()) == 2 * 16


def test_trap_30_the_window_is_not_scrambled() -> None:
    """Votes against loops over places and cells: v[h, w, (k, c, m), n] = p[2h + k, 2w + c, m] W[k, c, m, n]."""
    layer = ConvCapsules(2, 4, 3, 4, 3, 2, routing=InvertedAttention(2), pose="matrix").double()
    pose = torch.randn(1, 7, 5, 2, 4, dtype=torch.float64)
    votes = layer.votes(pose).dense()
    assert votes.shape == (1, 3, 2, 18, 3, 4)
    for h, w, k, c, m, n in [(0, 0, 0, 0, 0, 0), (2, 1, 1, 2, 1, 2), (1, 0, 2, 0, 1, 1), (2, 0, 0, 1, 0, 2)]:
        slot = (k * 3 + c) * 2 + m
        expected = pose[0, 2 * h + k, 2 * w + c, m].view(2, 2) @ layer.weight[slot, :, n]
        assert torch.allclose(votes[0, h, w, slot, n], expected.flatten(), atol=EXACT)


def loops_of_a_stack(model: CapsuleStack, pose: torch.Tensor, iterations: int) -> list:
    """Procedure 2 in plain Python, for one image: the poses of every layer after every iteration."""
    p = [{name: tensor.tolist() for name, tensor in layer.coefficients.named().items()} for layer in model.layers]
    weights = [layer.weight.tolist() for layer in model.layers]

    def step(number: int, children: list, parents: list, t: int) -> list:
        (site,) = dense_sites(children, None, weights[number], None, 2)
        return loops.step(site, p[number], parents, t, True, True, False).pose

    now = [pose.tolist()]
    for number, weight in enumerate(weights):  # the first pass: bottom up, on fresh children
        now.append(step(number, now[-1], [[0.0] * 4 for _ in weight[0][0]], 0))
    history = [now]
    for t in range(1, iterations):  # all at once, on old children and old parents
        now = [now[0], *(step(n, now[n], now[n + 1], t) for n in range(len(weights)))]
        history.append(now)
    return history


@pytest.mark.parametrize("iterations", [1, 2, 4])
def test_trap_31_concurrent_steps_take_old_children(iterations: int) -> None:
    model = stack(iterations)
    pose = torch.randn(2, 5, 4, dtype=torch.float64)
    found, traces = model(pose, trace=True)
    for image in range(2):
        history = loops_of_a_stack(model, pose[image], iterations)
        assert largest_difference(found.pose[image], history[-1][-1]) < REFERENCE
        for number, trace in enumerate(traces):
            for t, state in enumerate(trace.states):
                assert largest_difference(state.pose[image], history[t][number + 1]) < REFERENCE


def test_trap_32_how_the_two_schedules_relate() -> None:
    pose = torch.randn(2, 5, 4, dtype=torch.float64)

    def poses(iterations: int, schedule: str) -> list[torch.Tensor]:
        _, traces = stack(iterations, schedule)(pose, trace=True)
        return [trace.states[-1].pose for trace in traces]

    for concurrent, sequential in zip(poses(1, "concurrent"), poses(1, "sequential"), strict=True):
        assert torch.allclose(concurrent, sequential, atol=EXACT)
    for iterations in (2, 3):
        concurrent, sequential = poses(iterations, "concurrent"), poses(iterations, "sequential")
        assert torch.allclose(concurrent[0], sequential[0], atol=EXACT)  # the first layer's children never change
        for layer in (1, 2):
            assert not torch.allclose(concurrent[layer], sequential[layer], atol=1e-6)


def test_trap_35_the_primary_convolution_has_no_bias() -> None:
    primary = PrimaryCapsules(256, 32, 16, 1, bias=False, activation="layer_norm")
    assert sum(p.numel() for p in primary.parameters()) == 256 * 512 + 32


def test_the_simple_cifar10_net_counts_to_the_last_parameter() -> None:
    routing = InvertedAttention(2)
    layers = [
        PrimaryCapsules(256, 32, 16, 1, bias=False, activation="layer_norm"),
        ConvCapsules(32, 16, 32, 16, 3, 2, routing=routing, pose="matrix"),
        ConvCapsules(32, 16, 32, 16, 3, 1, routing=routing, pose="matrix"),
        DenseCapsules(800, 16, 10, 16, routing=routing, pose="matrix"),
    ]
    counted = sum(p.numel() for layer in layers for p in layer.parameters())
    assert counted + (3 * 256 * 9 + 256) + (16 + 1) == 561_297


def test_schedules_run_any_routing_and_take_any_layer() -> None:
    routing = Dynamic(3)
    layers = [
        ConvCapsules(2, 4, 3, 4, 2, routing=routing, streamed=True),
        DenseCapsules(12, 4, 5, 4, routing=routing),
    ]
    model = CapsuleStack(layers)
    out = model(Capsules(torch.randn(2, 3, 3, 2, 4)))
    assert out.pose.shape == (2, 5, 4)
    out.pose.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_activations_weigh_the_votes() -> None:
    votes = torch.randn(2, 6, 3, 4, dtype=torch.float64)
    some = torch.rand(2, 6, dtype=torch.float64)
    found = route(votes, InvertedAttention(2, activations=True), some)
    assert found.activation is not None
    assert not torch.allclose(found.pose, route(votes, InvertedAttention(2, activations=True), some / 2 + 0.5).pose)
    dead = some.clone()
    dead[:, 0] = 0
    changed = votes.clone()
    changed[:, 0] += 1
    without = [route(v, InvertedAttention(2, activations=True), dead).pose for v in (votes, changed)]
    assert torch.allclose(*without, atol=EXACT)  # a dead child is not heard
