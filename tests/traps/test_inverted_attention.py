"""Traps of Tsai 2020 (inverted dot-product attention) and of its released code."""

import itertools
import math
from typing import Any

import pytest
import torch

from tests.reference import inverted_attention as reference
from tests.reference.sites import dense_sites
from tests.tolerances import EXACT, REFERENCE, assert_all_equal, assert_different, largest_difference
from torchcaps import Capsules, route
from torchcaps.nn import CapsuleStack, ConvCapsules, DenseCapsules, PrimaryCapsules
from torchcaps.routing import Dynamic, InvertedAttention


def stack(iterations: int, schedule: Any = "concurrent", n_layers: int = 3, **options: Any) -> CapsuleStack:
    """Return dense layers of 5 -> 4 -> 3 -> 2 capsules, with the same weights for any number of iterations."""
    torch.manual_seed(0)
    routing = InvertedAttention(iterations, **options)
    sizes = [5, 4, 3, 2][: n_layers + 1]
    layers = [DenseCapsules(a, 4, b, 4, routing=routing, pose="matrix", init=0.8) for a, b in itertools.pairwise(sizes)]
    return CapsuleStack(layers, schedule).double()


def test_trap_26_softmax_is_over_parents() -> None:
    _, trace = route(torch.randn(2, 6, 4, 9), InvertedAttention(2), trace=True)
    torch.testing.assert_close(trace.couplings[-1].sum(-1), torch.ones(2, 6))
    _, single = route(torch.randn(2, 6, 1, 9), InvertedAttention(2), trace=True)
    assert_all_equal(single.couplings[-1], 1)  # attention over children would give less than 1


def test_trap_27_first_iteration_is_uniform() -> None:
    votes = torch.randn(2, 6, 4, 9, dtype=torch.float64)
    zeros = {"gamma": torch.ones(9).double(), "beta": torch.zeros(9).double()}
    parents = route(votes, InvertedAttention(1)).pose
    expected = torch.nn.functional.layer_norm(votes.sum(1) / 4, (9,))
    torch.testing.assert_close(parents, expected, rtol=0, atol=EXACT)
    from_zeros = route(
        votes,
        InvertedAttention(1, initial="learned"),
        coefficients=zeros | {"initial": torch.zeros(4, 9).double()},
    ).pose
    torch.testing.assert_close(parents, from_zeros, rtol=0, atol=EXACT)


def test_trap_28_agreement_is_divided_by_the_root_of_the_size() -> None:
    """One child with votes (2, 0) and (0, 1), whose first parents are half of them, computed by hand."""
    votes = torch.tensor([[[[2.0, 0.0], [0.0, 1.0]]]], dtype=torch.float64)
    for scale, divisor in {True: math.sqrt(2), False: 1.0}.items():
        powers = [math.exp(2 / divisor), math.exp(0.5 / divisor)]
        parents = route(votes, InvertedAttention(2, scale=scale, normalize=False)).pose[0]
        assert float(parents[0, 0]) == pytest.approx(2 * powers[0] / sum(powers), abs=EXACT)
        assert float(parents[1, 1]) == pytest.approx(powers[1] / sum(powers), abs=EXACT)


def test_trap_29_one_layer_norm_per_layer() -> None:
    for iterations in (1, 4):
        layer = ConvCapsules(3, 16, 5, 16, 3, routing=InvertedAttention(iterations), pose="matrix")
        assert sum(p.numel() for p in layer.coefficients.parameters()) == 2 * 16


def test_trap_30_window_is_not_scrambled() -> None:
    """v[h, w, (k, c, m), n] = p[2h + k, 2w + c, m] W[k, c, m, n], for output (h, w), cell (k, c) and types m, n."""
    layer = ConvCapsules(2, 4, 3, 4, 3, 2, routing=InvertedAttention(2), pose="matrix").double()
    pose = torch.randn(1, 7, 5, 2, 4, dtype=torch.float64)
    votes = layer.votes(pose).dense()
    assert votes.shape == (1, 3, 2, 18, 3, 4)
    for h, w, k, c, m, n in [(0, 0, 0, 0, 0, 0), (2, 1, 1, 2, 1, 2), (1, 0, 2, 0, 1, 1), (2, 0, 0, 1, 0, 2)]:
        slot = (k * 3 + c) * 2 + m
        expected = pose[0, 2 * h + k, 2 * w + c, m].view(2, 2) @ layer.weight[slot, :, n]
        torch.testing.assert_close(votes[0, h, w, slot, n], expected.flatten(), rtol=0, atol=EXACT)


def run_reference_stack(model: CapsuleStack, pose: torch.Tensor, iterations: int) -> list:
    """Run Procedure 2 in plain Python for one image; return the poses by iteration and layer."""
    p = [{name: tensor.tolist() for name, tensor in layer.coefficients.named().items()} for layer in model.layers]
    weights = [layer.weight.tolist() for layer in model.layers]

    def step(index: int, children: list, parents: list, t: int) -> list:
        (site,) = dense_sites(children, None, weights[index], None, 2)
        return reference.step(site, p[index], parents, t, True, True, False).pose

    now = [pose.tolist()]
    for index, weight in enumerate(weights):  # the first iteration: bottom up, on new children
        now.append(step(index, now[-1], [[0.0] * 4 for _ in weight[0][0]], 0))
    history = [now]
    for t in range(1, iterations):  # all layers at once, on the children and parents of the previous iteration
        now = [now[0], *(step(n, now[n], now[n + 1], t) for n in range(len(weights)))]
        history.append(now)
    return history


@pytest.mark.parametrize("iterations", [1, 2, 4])
def test_trap_31_concurrent_steps_use_children_of_the_previous_iteration(iterations: int) -> None:
    model = stack(iterations)
    pose = torch.randn(2, 5, 4, dtype=torch.float64)
    parents, traces = model(pose, trace=True)
    for image in range(2):
        history = run_reference_stack(model, pose[image], iterations)
        assert largest_difference(parents.pose[image], history[-1][-1]) < REFERENCE
        for index, trace in enumerate(traces):
            for t, state in enumerate(trace.states):
                assert largest_difference(state.pose[image], history[t][index + 1]) < REFERENCE


def test_trap_32_schedules_agree_for_one_iteration_and_in_the_first_layer() -> None:
    pose = torch.randn(2, 5, 4, dtype=torch.float64)

    def poses(iterations: int, schedule: str) -> list[torch.Tensor]:
        _, traces = stack(iterations, schedule)(pose, trace=True)
        return [trace.states[-1].pose for trace in traces]

    for concurrent, sequential in zip(poses(1, "concurrent"), poses(1, "sequential"), strict=True):
        torch.testing.assert_close(concurrent, sequential, rtol=0, atol=EXACT)
    for iterations in (2, 3):
        concurrent, sequential = poses(iterations, "concurrent"), poses(iterations, "sequential")
        torch.testing.assert_close(
            concurrent[0], sequential[0], rtol=0, atol=EXACT
        )  # the children of the first layer are the input
        for layer in (1, 2):
            assert_different(concurrent[layer], sequential[layer], atol=1e-6)


def test_trap_35_primary_convolution_has_no_bias() -> None:
    primary = PrimaryCapsules(256, 32, 16, 1, bias=False, activation="layer_norm")
    assert sum(p.numel() for p in primary.parameters()) == 256 * 512 + 32


def test_simple_cifar10_net_has_the_published_parameter_count() -> None:
    routing = InvertedAttention(2)
    layers = [
        PrimaryCapsules(256, 32, 16, 1, bias=False, activation="layer_norm"),
        ConvCapsules(32, 16, 32, 16, 3, 2, routing=routing, pose="matrix"),
        ConvCapsules(32, 16, 32, 16, 3, 1, routing=routing, pose="matrix"),
        DenseCapsules(800, 16, 10, 16, routing=routing, pose="matrix"),
    ]
    n_parameters = sum(p.numel() for layer in layers for p in layer.parameters())
    assert n_parameters + (3 * 256 * 9 + 256) + (16 + 1) == 561_297


def test_concurrent_schedule_runs_other_routings_and_layers() -> None:
    routing = Dynamic(3)
    layers = [
        ConvCapsules(2, 4, 3, 4, 2, routing=routing, streamed=True),
        DenseCapsules(12, 4, 5, 4, routing=routing),
    ]
    model = CapsuleStack(layers)
    out = model(Capsules(torch.randn(2, 3, 3, 2, 4)))
    assert out.pose.shape == (2, 5, 4)
    out.pose.sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


def test_activations_weight_the_votes() -> None:
    votes = torch.randn(2, 6, 3, 4, dtype=torch.float64)
    routing = InvertedAttention(2, activations=True)
    activation = torch.rand(2, 6, dtype=torch.float64)
    parents = route(votes, routing, activation)
    assert parents.activation is not None
    assert_different(parents.pose, route(votes, routing, activation / 2 + 0.5).pose)
    inactive = activation.clone()
    inactive[:, 0] = 0
    changed = votes.clone()
    changed[:, 0] += 1
    poses = [route(v, routing, inactive).pose for v in (votes, changed)]
    torch.testing.assert_close(*poses, rtol=0, atol=EXACT)  # an inactive child does not vote
