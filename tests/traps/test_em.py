"""What public code gets wrong about Hinton 2018."""

import math

import pytest
import torch

from tests.tolerances import EXACT
from torchcaps import Capsules, route
from torchcaps.nn import ConvCapsules, PrimaryCapsules
from torchcaps.routing import EM


def test_trap_36_the_childrens_activations_matter() -> None:
    votes = torch.randn(2, 6, 3, 16)
    one, other = torch.rand(2, 6), torch.rand(2, 6)
    assert not torch.allclose(route(votes, EM(2), one).pose, route(votes, EM(2), other).pose)
    assert not torch.allclose(route(votes, EM(2), one).activation, route(votes, EM(2), other).activation)


@pytest.mark.parametrize(("far", "variance"), [(3.0, 1.0), (5.0, 4.0)])
def test_trap_37_the_cost_has_log_sigma(far: float, variance: float) -> None:
    """By hand, lambda 1: two children, votes 1 and ``far``, one parent, one number."""
    votes = torch.tensor([[[[1.0]], [[far]]]], dtype=torch.float64)
    routing = EM(1, inverse_temperature=1.0, annealing=0.0, variance_floor=0.0)
    betas = {"beta_u": torch.tensor([0.25]).double(), "beta_a": torch.tensor([1.0]).double()}
    found = route(votes, routing, coefficients=betas)
    assert abs(float(found.pose) - (1 + far) / 2) < EXACT
    cost = (0.25 + math.log(math.sqrt(variance))) * 2
    assert abs(float(found.activation) - 1 / (1 + math.exp(-(1 - cost)))) < EXACT


def test_trap_37_the_e_step_by_hand() -> None:
    """Two children, two parents, one number, lambda 1."""
    votes = torch.tensor([[[[0.0], [0.0]], [[-2.0], [1.0]]]], dtype=torch.float64)
    routing = EM(2, inverse_temperature=1.0, annealing=0.0, variance_floor=0.0)
    _, trace = route(votes, routing, trace=True)
    # First M-step: R = 1/2, S = 1, means -1 and 0.5, variances 1 and 0.25.
    sigmas = [1.0, 0.5]
    logits = []
    for mean, sigma in zip([-1.0, 0.5], sigmas, strict=True):
        evidence = -math.log(sigma)
        log_a = -math.log1p(math.exp(-evidence))
        logits.append(log_a - mean**2 / (2 * sigma**2) - 0.5 * math.log(2 * math.pi * sigma**2))
    expected = [math.exp(x) / sum(math.exp(y) for y in logits) for x in logits]
    assert torch.allclose(trace.couplings[1][0, 0], torch.tensor(expected, dtype=torch.float64), atol=EXACT)


def test_trap_38_coordinates_go_into_the_right_hand_column() -> None:
    plain, placed = (
        ConvCapsules(2, 16, 3, 16, (5, 4), routing=EM(2, coordinates=flag), pose="matrix").double()
        for flag in (False, True)
    )
    placed.weight.data.copy_(plain.weight)
    pose = torch.randn(1, 5, 4, 2, 16, dtype=torch.float64)
    added = (placed.votes(pose).dense() - plain.votes(pose).dense())[0, 0, 0].view(5, 4, 2, 3, 16)
    expected = torch.zeros(5, 4, 2, 3, 16, dtype=torch.float64)
    for row in range(5):
        for column in range(4):
            expected[row, column, :, :, 3] = (row + 0.5) / 5
            expected[row, column, :, :, 7] = (column + 0.5) / 4
    assert torch.allclose(added, expected, atol=EXACT)


def test_trap_39_r_sums_to_one_over_the_parents_that_compete() -> None:
    children = Capsules(torch.randn(2, 5, 5, 2, 4), torch.rand(2, 5, 5, 2))
    for competition in ("local", "global"):
        layer = ConvCapsules(2, 4, 3, 4, 3, routing=EM(3, competition=competition), pose="matrix")  # type: ignore[arg-type]
        _, trace = layer(children, trace=True)
        for coupling in trace.couplings:
            by_slot = coupling.sum(-1)  # [B, 3, 3, 18]
            by_child = torch.zeros(2, 5, 5, 2)
            for h in range(3):
                for w in range(3):
                    by_child[:, h : h + 3, w : w + 3] += by_slot[:, h, w].view(2, 3, 3, 2)
            if competition == "local":
                assert torch.allclose(by_slot, torch.ones_like(by_slot), atol=1e-5)
            else:
                assert torch.allclose(by_child, torch.ones_like(by_child), atol=1e-5)


def test_global_couplings_start_at_one_over_all_parents_of_a_child() -> None:
    layer = ConvCapsules(1, 4, 3, 4, 3, routing=EM(1, competition="global"), pose="matrix")
    _, trace = layer(torch.randn(1, 5, 5, 1, 4), trace=True)
    first = trace.couplings[0][0]
    assert torch.allclose(first[0, 0, 0], torch.full((3,), 1 / 3))  # the corner is read once
    assert torch.allclose(first[0, 0, 8], torch.full((3,), 1 / 27))  # the middle by all nine places


def test_trap_41_class_matrices_are_shared_over_places() -> None:
    layer = ConvCapsules(32, 16, 10, 16, 5, routing=EM(2, coordinates=True), pose="matrix", weights="type")
    assert layer.weight.numel() == 32 * 10 * 16
    assert layer(torch.randn(2, 5, 5, 32, 16)).pose.shape == (2, 1, 1, 10, 16)
    # The whole net of Tsai 2020, Table 6: 453,044.
    routing = EM(2)
    capsules = [
        PrimaryCapsules(256, 32, 16, 1, activation="none", activations=True),
        ConvCapsules(32, 16, 32, 16, 3, 2, routing=routing, pose="matrix"),
        ConvCapsules(32, 16, 32, 16, 3, 1, routing=routing, pose="matrix"),
        layer,
    ]
    backbone = 3 * 256 * 16 + 256 + 2 * 256
    assert backbone + sum(p.numel() for part in capsules for p in part.parameters()) == 453_044


def test_lambda_follows_the_authors_schedule() -> None:
    """5.0e-4, 9.75e-4, 1.426e-3: seen through beta_a, which it multiplies."""
    votes = torch.zeros(1, 2, 1, 1, dtype=torch.float64)
    betas = {"beta_u": torch.zeros(1).double(), "beta_a": torch.ones(1).double()}
    shifted = {"beta_u": torch.zeros(1).double(), "beta_a": torch.zeros(1).double()}
    for iterations, expected in {1: 5.0e-4, 2: 9.75e-4, 3: 1.42625e-3}.items():
        logits = [route(votes, EM(iterations), coefficients=b).activation.logit() for b in (betas, shifted)]
        assert abs(float(logits[0] - logits[1]) - expected) < EXACT


def test_padding_is_not_heard() -> None:
    """Places outside the grid have no activation: a padded layer equals one that never reads them."""
    layer = ConvCapsules(1, 4, 2, 4, 3, stride=3, padding=1, routing=EM(2), pose="matrix").double()
    children = Capsules(torch.randn(1, 3, 3, 1, 4).double(), torch.rand(1, 3, 3, 1).double())
    votes = layer.votes(children).dense()[:, 0, 0]  # the corner window: four of its nine places exist
    inside = [4, 5, 7, 8]
    corner = children.activation[:, :2, :2].flatten(1)  # type: ignore[index]
    expected = route(votes[:, inside], EM(2), corner, coefficients=layer.coefficients.named())
    found = layer(children)
    assert torch.allclose(found.pose[:, 0, 0], expected.pose, atol=EXACT)
    assert torch.allclose(found.activation[:, 0, 0], expected.activation, atol=EXACT)


def test_log_space_where_activations_underflow() -> None:
    """Evidence far below what a sigmoid can show in float32: the E-step still tells the parents apart."""
    votes = torch.randn(2, 6, 3, 16) * 50
    found, trace = route(votes, EM(3, inverse_temperature=1e4), trace=True)
    assert float(trace.states[0].activation.max()) == 0  # the sigmoid itself is gone
    for coupling in trace.couplings:
        assert torch.allclose(coupling.sum(-1), torch.ones(2, 6), atol=1e-5)
    assert torch.isfinite(found.pose).all()
    exact, _ = route(votes.double(), EM(3, inverse_temperature=1e4), trace=True)
    assert torch.allclose(found.pose.double(), exact.pose, rtol=1e-3, atol=1e-2)
