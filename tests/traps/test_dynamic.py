"""What public code gets wrong about Sabour 2017: one named test for each trap."""

import math

import torch

from tests.tolerances import EXACT
from torchcaps import route
from torchcaps.nn import Decoder, DenseCapsules, PrimaryCapsules, length, squash
from torchcaps.routing import Dynamic


def double(*values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_trap_01_the_softmax_is_over_parents() -> None:
    _, trace = route(torch.randn(2, 50, 10, 4), Dynamic(3), trace=True)
    for coupling in trace.couplings:
        assert torch.allclose(coupling.sum(-1), torch.ones(2, 50))
    assert torch.all(trace.couplings[0] == 1 / 10)


def test_trap_02_logits_have_no_pose_axis_and_belong_to_one_image() -> None:
    votes = torch.randn(3, 6, 4, 5)
    _, trace = route(votes, Dynamic(3), trace=True)
    assert all(logits.shape == (3, 6, 4) for logits in trace.logits)
    layer = DenseCapsules(6, 5, 4, 5, routing=Dynamic(3))
    children = torch.randn(3, 6, 5)
    first = layer(children).pose
    assert torch.equal(layer(children).pose, first)  # nothing carried over to the next call
    assert torch.allclose(layer(children[1:2]).pose, first[1:2], atol=1e-6)


def test_trap_03_iterations_are_counted_as_in_the_paper() -> None:
    votes = torch.randn(2, 6, 4, 5, dtype=torch.float64)
    assert torch.allclose(route(votes, Dynamic(1)).pose, squash(votes.sum(1) / 4), atol=EXACT)
    # One child, two parents, votes of one number, 2 and 0: everything by hand.
    by_hand = double([[[2.0], [0.0]]])
    assert abs(float(route(by_hand, Dynamic(1)).pose[0, 0]) - 0.5) < EXACT  # c = 1/2, s = 1
    logit = 2 * 0.5
    s = 2 * math.exp(logit) / (math.exp(logit) + 1)
    second = s * s / (1 + s * s)
    assert abs(float(route(by_hand, Dynamic(2)).pose[0, 0]) - second) < EXACT
    assert abs(second - 0.681304) < 1e-6
    logit += 2 * second
    s = 2 * math.exp(logit) / (math.exp(logit) + 1)
    assert abs(float(route(by_hand, Dynamic(3)).pose[0, 0]) - s * s / (1 + s * s)) < EXACT


def test_trap_04_squash_is_exact_and_has_a_gradient_at_zero() -> None:
    for size, expected in {0.5: 0.2, 1.0: 0.5, 2.0: 0.8}.items():
        for dtype, limit in {torch.float64: EXACT, torch.float32: 1e-6}.items():
            pose = torch.tensor([0.6, 0.8], dtype=dtype) * size
            assert abs(float(length(squash(pose))) - expected) < limit
    zero = torch.zeros(3, 4, requires_grad=True)
    squash(zero).sum().backward()
    assert torch.equal(zero.grad, torch.zeros(3, 4))
    length(zero).sum().backward()
    assert torch.isfinite(zero.grad).all()


def test_trap_05_a_primary_capsule_is_consecutive_channels_at_one_place() -> None:
    primary = PrimaryCapsules(6, 3, 2, kernel_size=1, bias=False, activation="none")
    primary.pose.weight.data = torch.eye(6).reshape(6, 6, 1, 1)
    features = torch.arange(6 * 4 * 5, dtype=torch.float32).reshape(1, 6, 4, 5)
    pose = primary(features).pose
    assert pose.shape == (1, 4, 5, 3, 2)
    for row in range(4):
        for column in range(5):
            for kind in range(3):
                assert torch.equal(pose[0, row, column, kind], features[0, 2 * kind : 2 * kind + 2, row, column])


def test_trap_06_no_matrix_is_shared_over_places() -> None:
    layer = DenseCapsules(1152, 8, 10, 16, routing=Dynamic(3))
    assert sum(p.numel() for p in layer.parameters()) == 1_474_560


def test_trap_10_and_45_training_decodes_the_label_whatever_is_predicted() -> None:
    decoder = Decoder(10, 4, (1, 3, 3), hidden=(5,))
    pose = torch.rand(10, 10, 4)
    labels = torch.arange(10)
    mask = decoder.mask(torch.ones(10, 10, 4), labels)
    assert torch.equal(mask[..., 0], torch.eye(10))  # the label's capsule and no other, for all ten labels
    louder = pose.clone()
    others = ~torch.eye(10, dtype=torch.bool)
    louder[others] *= 100  # changes every prediction, no labelled capsule
    assert torch.equal(decoder(pose, labels), decoder(louder, labels))
    assert not torch.equal(decoder(pose), decoder(louder))  # without labels the longest is decoded


def test_trap_11_the_decoder_sees_all_capsules() -> None:
    decoder = Decoder(10, 16, (1, 28, 28))
    assert decoder.layers[0].in_features == 160
    assert sum(p.numel() for p in decoder.parameters()) == 8_215_568 - 6_804_224


def test_trap_12_the_gradient_goes_through_every_iteration_unless_told_otherwise() -> None:
    votes = torch.randn(1, 4, 3, 2, dtype=torch.float64, requires_grad=True)
    full, last = (
        torch.autograd.grad(route(votes, Dynamic(3, gradient=mode)).pose.sum(), votes)[0]  # type: ignore[arg-type]
        for mode in ("full", "last")
    )
    assert not torch.allclose(full, last)
    assert Dynamic().gradient == "full"
    assert torch.autograd.gradcheck(lambda v: route(v, Dynamic(3)).pose, votes)
    last_only = Dynamic(3, gradient="last")
    assert not torch.autograd.gradcheck(lambda v: route(v, last_only).pose, votes, raise_exception=False)
    assert torch.equal(route(votes, Dynamic(3)).pose, route(votes, Dynamic(3, gradient="last")).pose)


def test_trap_13_the_leak_has_a_constant_logit_and_no_vote() -> None:
    votes = torch.randn(2, 6, 10, 4, dtype=torch.float64)
    _, trace = route(votes, Dynamic(3, leak=True), trace=True)
    assert torch.all(trace.couplings[0] == 1 / 11)
    for coupling in trace.couplings:
        assert torch.all(coupling.sum(-1) < 1)
    # By hand: one child, one parent, one number, vote 1.
    one = double([[[1.0]]])
    s = 0.5
    first = s * s / (1 + s * s)
    assert abs(float(route(one, Dynamic(1, leak=True)).pose) - first) < EXACT
    s = math.exp(first) / (1 + math.exp(first))
    assert abs(float(route(one, Dynamic(2, leak=True)).pose) - s * s / (1 + s * s)) < EXACT


def test_trap_34_a_batch_of_one_keeps_its_axis() -> None:
    assert DenseCapsules(6, 4, 10, 4, routing=Dynamic(3))(torch.randn(1, 6, 4)).length().shape == (1, 10)


def test_priors_and_bias_start_as_the_paper_and_its_code_have_them() -> None:
    votes = torch.randn(2, 6, 4, 5)
    assert torch.allclose(route(votes, Dynamic(3, prior=True)).pose, route(votes, Dynamic(3)).pose)
    bias = torch.full((4, 5), 0.1)
    assert torch.allclose(route(votes, Dynamic(1, bias=True)).pose, squash(votes.sum(1) / 4 + bias))
