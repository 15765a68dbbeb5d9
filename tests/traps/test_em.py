"""Traps of Hinton 2018 (EM routing)."""

import math

import pytest
import torch

from tests.tolerances import EXACT, assert_different, assert_finite
from torchcaps import Capsules, route
from torchcaps.nn import ConvCapsules, PrimaryCapsules
from torchcaps.routing import EM


def test_trap_36_parents_depend_on_the_activations_of_children() -> None:
    votes = torch.randn(2, 6, 3, 16)
    first, second = torch.rand(2, 6), torch.rand(2, 6)
    assert_different(route(votes, EM(2), first).pose, route(votes, EM(2), second).pose)
    assert_different(route(votes, EM(2), first).activation, route(votes, EM(2), second).activation)


@pytest.mark.parametrize(("far", "variance"), [(3.0, 1.0), (5.0, 4.0)])
def test_trap_37_cost_contains_log_sigma(far: float, variance: float) -> None:
    """Two children with one-dimensional votes 1 and ``far``, one parent, lambda 1, computed by hand."""
    votes = torch.tensor([[[[1.0]], [[far]]]], dtype=torch.float64)
    routing = EM(1, inverse_temperature=1.0, annealing=0.0, variance_floor=0.0)
    betas = {"beta_u": torch.tensor([0.25]).double(), "beta_a": torch.tensor([1.0]).double()}
    parents = route(votes, routing, coefficients=betas)
    assert float(parents.pose) == pytest.approx((1 + far) / 2, abs=EXACT)
    cost = (0.25 + math.log(math.sqrt(variance))) * 2
    assert float(parents.activation) == pytest.approx(1 / (1 + math.exp(-(1 - cost))), abs=EXACT)


def test_trap_37_e_step_by_hand() -> None:
    """Two children, two parents, one-dimensional votes, lambda 1."""
    votes = torch.tensor([[[[0.0], [0.0]], [[-2.0], [1.0]]]], dtype=torch.float64)
    routing = EM(2, inverse_temperature=1.0, annealing=0.0, variance_floor=0.0)
    _, trace = route(votes, routing, trace=True)
    # First M-step: R = 1/2, S = 1, means -1 and 0.5, variances 1 and 0.25.
    sigmas = [1.0, 0.5]
    logits = []
    for mean, sigma in zip([-1.0, 0.5], sigmas, strict=True):
        activation_logit = -math.log(sigma)
        log_a = -math.log1p(math.exp(-activation_logit))
        logits.append(log_a - mean**2 / (2 * sigma**2) - 0.5 * math.log(2 * math.pi * sigma**2))
    expected = [math.exp(x) / sum(math.exp(y) for y in logits) for x in logits]
    torch.testing.assert_close(
        trace.couplings[1][0, 0], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=EXACT
    )


def test_trap_38_coordinates_are_added_to_the_right_hand_column() -> None:
    plain, with_coordinates = (
        ConvCapsules(2, 16, 3, 16, (5, 4), routing=EM(2, coordinates=flag), pose="matrix").double()
        for flag in (False, True)
    )
    with_coordinates.weight.data.copy_(plain.weight)
    pose = torch.randn(1, 5, 4, 2, 16, dtype=torch.float64)
    added = (with_coordinates.votes(pose).dense() - plain.votes(pose).dense())[0, 0, 0].view(5, 4, 2, 3, 16)
    expected = torch.zeros(5, 4, 2, 3, 16, dtype=torch.float64)
    for row in range(5):
        for column in range(4):
            expected[row, column, :, :, 3] = (row + 0.5) / 5
            expected[row, column, :, :, 7] = (column + 0.5) / 4
    torch.testing.assert_close(added, expected, rtol=0, atol=EXACT)


def test_trap_39_assignments_sum_to_one_over_competing_parents() -> None:
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
                torch.testing.assert_close(by_slot, torch.ones_like(by_slot), rtol=0, atol=1e-5)
            else:
                torch.testing.assert_close(by_child, torch.ones_like(by_child), rtol=0, atol=1e-5)


def test_initial_global_couplings_are_uniform_over_all_parents_of_a_child() -> None:
    layer = ConvCapsules(1, 4, 3, 4, 3, routing=EM(1, competition="global"), pose="matrix")
    _, trace = layer(torch.randn(1, 5, 5, 1, 4), trace=True)
    first = trace.couplings[0][0]
    torch.testing.assert_close(first[0, 0, 0], torch.full((3,), 1 / 3))  # the corner is in one window
    torch.testing.assert_close(first[0, 0, 8], torch.full((3,), 1 / 27))  # the centre is in all nine windows


def test_trap_41_class_matrices_are_shared_between_positions() -> None:
    layer = ConvCapsules(32, 16, 10, 16, 5, routing=EM(2, coordinates=True), pose="matrix", weights="type")
    assert layer.weight.numel() == 32 * 10 * 16
    assert layer(torch.randn(2, 5, 5, 32, 16)).pose.shape == (2, 1, 1, 10, 16)
    # The EM baseline of Tsai 2020 on CIFAR-10, Table 6: 453,044 parameters.
    routing = EM(2)
    capsules = [
        PrimaryCapsules(256, 32, 16, 1, activation="none", activations=True),
        ConvCapsules(32, 16, 32, 16, 3, 2, routing=routing, pose="matrix"),
        ConvCapsules(32, 16, 32, 16, 3, 1, routing=routing, pose="matrix"),
        layer,
    ]
    backbone = 3 * 256 * 16 + 256 + 2 * 256
    assert backbone + sum(p.numel() for part in capsules for p in part.parameters()) == 453_044


def test_inverse_temperature_follows_the_authors_schedule() -> None:
    """Lambda is 5.0e-4, 9.75e-4, 1.426e-3: the derivative of the activation logit by beta_a."""
    votes = torch.zeros(1, 2, 1, 1, dtype=torch.float64)
    betas = {"beta_u": torch.zeros(1).double(), "beta_a": torch.ones(1).double()}
    shifted = {"beta_u": torch.zeros(1).double(), "beta_a": torch.zeros(1).double()}
    for iterations, expected in {1: 5.0e-4, 2: 9.75e-4, 3: 1.42625e-3}.items():
        logits = [route(votes, EM(iterations), coefficients=b).activation.logit() for b in (betas, shifted)]
        assert float(logits[0] - logits[1]) == pytest.approx(expected, abs=EXACT)


def test_padding_does_not_vote() -> None:
    """Padding has activation 0: the result equals that of the slots inside the grid alone."""
    layer = ConvCapsules(1, 4, 2, 4, 3, stride=3, padding=1, routing=EM(2), pose="matrix").double()
    children = Capsules(torch.randn(1, 3, 3, 1, 4).double(), torch.rand(1, 3, 3, 1).double())
    votes = layer.votes(children).dense()[:, 0, 0]  # the corner window: four of its nine cells are inside the grid
    inside = [4, 5, 7, 8]
    corner = children.activation[:, :2, :2].flatten(1)  # type: ignore[index]
    expected = route(votes[:, inside], EM(2), corner, coefficients=layer.coefficients.named())
    parents = layer(children)
    torch.testing.assert_close(parents.pose[:, 0, 0], expected.pose, rtol=0, atol=EXACT)
    torch.testing.assert_close(parents.activation[:, 0, 0], expected.activation, rtol=0, atol=EXACT)


def test_e_step_is_finite_if_activations_underflow() -> None:
    """The activations underflow to 0 in float32; the E-step uses their logarithms."""
    votes = torch.randn(2, 6, 3, 16) * 50
    parents, trace = route(votes, EM(3, inverse_temperature=1e4), trace=True)
    assert float(trace.states[0].activation.max()) == 0
    for coupling in trace.couplings:
        torch.testing.assert_close(coupling.sum(-1), torch.ones(2, 6), rtol=0, atol=1e-5)
    assert_finite(parents.pose, "pose")
    exact, _ = route(votes.double(), EM(3, inverse_temperature=1e4), trace=True)
    torch.testing.assert_close(parents.pose.double(), exact.pose, rtol=1e-3, atol=1e-2)
