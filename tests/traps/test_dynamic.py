"""Traps of Sabour 2017 (dynamic routing)."""

import math

import pytest
import torch

from tests.tolerances import EXACT, assert_all_equal, assert_different, assert_finite
from torchcaps import route
from torchcaps.nn import ConvCapsules, Decoder, DenseCapsules, PrimaryCapsules, length, squash
from torchcaps.routing import Dynamic


def double(*values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_trap_01_softmax_is_over_parents() -> None:
    _, trace = route(torch.randn(2, 50, 10, 4), Dynamic(3), trace=True)
    for coupling in trace.couplings:
        torch.testing.assert_close(coupling.sum(-1), torch.ones(2, 50))
    assert_all_equal(trace.couplings[0], 1 / 10)


def test_trap_02_logits_have_no_pose_axis_and_no_memory_between_calls() -> None:
    votes = torch.randn(3, 6, 4, 5)
    _, trace = route(votes, Dynamic(3), trace=True)
    assert [tuple(logits.shape) for logits in trace.logits] == [(3, 6, 4)] * 3
    layer = DenseCapsules(6, 5, 4, 5, routing=Dynamic(3))
    children = torch.randn(3, 6, 5)
    first = layer(children).pose
    torch.testing.assert_close(layer(children).pose, first, rtol=0, atol=0)  # no state between calls
    torch.testing.assert_close(layer(children[1:2]).pose, first[1:2], rtol=0, atol=1e-6)


def test_trap_03_number_of_iterations_is_that_of_the_paper() -> None:
    votes = torch.randn(2, 6, 4, 5, dtype=torch.float64)
    torch.testing.assert_close(route(votes, Dynamic(1)).pose, squash(votes.sum(1) / 4), rtol=0, atol=EXACT)
    # One child, two parents, one-dimensional votes 2 and 0, computed by hand.
    by_hand = double([[[2.0], [0.0]]])
    assert float(route(by_hand, Dynamic(1)).pose[0, 0]) == pytest.approx(0.5, abs=EXACT)  # c = 1/2, s = 1
    logit = 2 * 0.5
    s = 2 * math.exp(logit) / (math.exp(logit) + 1)
    second = s * s / (1 + s * s)
    assert float(route(by_hand, Dynamic(2)).pose[0, 0]) == pytest.approx(second, abs=EXACT)
    assert second == pytest.approx(0.681304, abs=1e-6)
    logit += 2 * second
    s = 2 * math.exp(logit) / (math.exp(logit) + 1)
    assert float(route(by_hand, Dynamic(3)).pose[0, 0]) == pytest.approx(s * s / (1 + s * s), abs=EXACT)


def test_trap_04_squash_is_exact_and_has_a_finite_gradient_at_zero() -> None:
    for size, expected in {0.5: 0.2, 1.0: 0.5, 2.0: 0.8}.items():
        for dtype, limit in {torch.float64: EXACT, torch.float32: 1e-6}.items():
            pose = torch.tensor([0.6, 0.8], dtype=dtype) * size
            assert float(length(squash(pose))) == pytest.approx(expected, abs=limit)
    zero = torch.zeros(3, 4, requires_grad=True)
    squash(zero).sum().backward()
    assert_all_equal(zero.grad, 0)
    length(zero).sum().backward()
    assert_finite(zero.grad, "gradient of length")


def test_couplings_of_a_child_sum_to_one_over_all_parents_with_global_competition() -> None:
    """Eq. 3 in a convolution: the child in the centre is read by nine windows of 3x3, a corner by one."""
    pose = torch.randn(2, 5, 5, 2, 4)
    for competition, at_center in (("local", 9.0), ("global", 1.0)):
        routing = Dynamic(3, competition=competition)  # type: ignore[arg-type]
        _, trace = ConvCapsules(2, 4, 3, 4, 3, routing=routing, init=1.0)(pose, trace=True)
        for coupling in trace.couplings:
            by_child = torch.zeros(2, 5, 5, 2)
            for h in range(3):
                for w in range(3):
                    by_child[:, h : h + 3, w : w + 3] += coupling.sum(-1)[:, h, w].view(2, 3, 3, 2)
            torch.testing.assert_close(by_child[:, 2, 2], torch.full((2, 2), at_center))
            torch.testing.assert_close(by_child[:, 0, 0], torch.ones(2, 2))


def test_trap_05_primary_capsule_is_consecutive_channels_at_one_position() -> None:
    primary = PrimaryCapsules(6, 3, 2, kernel_size=1, bias=False, activation="none")
    primary.pose.weight.data = torch.eye(6).reshape(6, 6, 1, 1)
    features = torch.arange(6 * 4 * 5, dtype=torch.float32).reshape(1, 6, 4, 5)
    pose = primary(features).pose
    assert pose.shape == (1, 4, 5, 3, 2)
    for row in range(4):
        for column in range(5):
            for kind in range(3):
                channels = features[0, 2 * kind : 2 * kind + 2, row, column]
                assert pose[0, row, column, kind].tolist() == channels.tolist()


def test_trap_06_matrices_are_not_shared_between_positions() -> None:
    layer = DenseCapsules(1152, 8, 10, 16, routing=Dynamic(3))
    assert sum(p.numel() for p in layer.parameters()) == 1_474_560


def test_trap_10_and_45_decoder_is_masked_by_the_label_not_by_the_prediction() -> None:
    decoder = Decoder(10, 4, (1, 3, 3), hidden=(5,))
    pose = torch.rand(10, 10, 4)
    labels = torch.arange(10)
    mask = decoder.mask(torch.ones(10, 10, 4), labels)
    assert mask[..., 0].tolist() == torch.eye(10).tolist()  # the capsule of the label only, for all ten labels
    other_prediction = pose.clone()
    others = ~torch.eye(10, dtype=torch.bool)
    other_prediction[others] *= 100  # changes every prediction but no capsule of a label
    torch.testing.assert_close(decoder(pose, labels), decoder(other_prediction, labels), rtol=0, atol=0)
    assert_different(decoder(pose), decoder(other_prediction))  # without labels the longest is decoded


def test_trap_11_decoder_receives_all_capsules() -> None:
    decoder = Decoder(10, 16, (1, 28, 28))
    assert decoder.layers[0].in_features == 160
    assert sum(p.numel() for p in decoder.parameters()) == 8_215_568 - 6_804_224


def test_trap_12_gradient_flows_through_every_iteration_by_default() -> None:
    votes = torch.randn(1, 4, 3, 2, dtype=torch.float64, requires_grad=True)
    full, last = (
        torch.autograd.grad(route(votes, Dynamic(3, gradient=mode)).pose.sum(), votes)[0]  # type: ignore[arg-type]
        for mode in ("full", "last")
    )
    assert_different(full, last)
    assert Dynamic().gradient == "full"
    assert torch.autograd.gradcheck(lambda v: route(v, Dynamic(3)).pose, votes)
    last_only = Dynamic(3, gradient="last")
    assert not torch.autograd.gradcheck(lambda v: route(v, last_only).pose, votes, raise_exception=False)
    torch.testing.assert_close(route(votes, last_only).pose, route(votes, Dynamic(3)).pose, rtol=0, atol=0)


def test_trap_13_leak_has_a_constant_logit_and_no_vote() -> None:
    votes = torch.randn(2, 6, 10, 4, dtype=torch.float64)
    _, trace = route(votes, Dynamic(3, leak=True), trace=True)
    assert_all_equal(trace.couplings[0], 1 / 11)
    for coupling in trace.couplings:
        assert float(coupling.sum(-1).max()) < 1
    # One child, one parent, one-dimensional vote 1, computed by hand.
    one = double([[[1.0]]])
    s = 0.5
    first = s * s / (1 + s * s)
    assert float(route(one, Dynamic(1, leak=True)).pose) == pytest.approx(first, abs=EXACT)
    s = math.exp(first) / (1 + math.exp(first))
    assert float(route(one, Dynamic(2, leak=True)).pose) == pytest.approx(s * s / (1 + s * s), abs=EXACT)


def test_trap_34_batch_of_one_keeps_its_axis() -> None:
    assert DenseCapsules(6, 4, 10, 4, routing=Dynamic(3))(torch.randn(1, 6, 4)).length().shape == (1, 10)


def test_initial_prior_is_zero_and_initial_bias_is_0_1() -> None:
    votes = torch.randn(2, 6, 4, 5)
    torch.testing.assert_close(route(votes, Dynamic(3, prior=True)).pose, route(votes, Dynamic(3)).pose)
    bias = torch.full((4, 5), 0.1)
    torch.testing.assert_close(route(votes, Dynamic(1, bias=True)).pose, squash(votes.sum(1) / 4 + bias))
