"""Losses against values computed by hand, and what public code gets wrong about them."""

import math

import pytest
import torch

from tests.tolerances import EXACT
from torchcaps.losses import ClassLoss, MarginLoss, MultiLabelLoss, ReconstructionLoss, SpreadLoss
from torchcaps.nn import Decoder

ONE = torch.tensor([3])
TWO = torch.zeros(1, 10).index_fill(1, torch.tensor([3, 7]), 1.0)


def lengths(value: float) -> torch.Tensor:
    return torch.full((1, 10), value, dtype=torch.float64)


@pytest.mark.parametrize(
    ("value", "labels", "expected"),
    [(0.0, ONE, 0.81), (0.5, ONE, 0.88), (1.0, ONE, 3.645), (0.5, TWO, 0.96)],
    ids=["absent", "half", "all", "two labels"],
)
def test_trap_07_the_margin_loss_is_on_lengths(value: float, labels: torch.Tensor, expected: float) -> None:
    assert abs(float(MarginLoss()(lengths(value), labels)) - expected) < EXACT


def test_trap_08_the_official_reduction_is_a_twentieth() -> None:
    scores = torch.rand(5, 10, dtype=torch.float64)
    labels = torch.randint(10, (5,))
    paper, official = MarginLoss()(scores, labels), MarginLoss(reduction="official")(scores, labels)
    assert abs(float(official - paper / 20)) < EXACT
    # So the same weight of the reconstruction beside it counts twenty times as much: 0.0005 is 0.01.
    images, targets = torch.rand(2, 5, 1, 28, 28, dtype=torch.float64)
    as_official = official + ReconstructionLoss(weight=0.0005)(images, targets)
    as_paper = (paper + ReconstructionLoss(weight=0.01)(images, targets)) / 20
    assert abs(float(as_official - as_paper)) < EXACT


def test_trap_09_sum_and_mean_agree_at_one_image_size_only() -> None:
    for size, same in {28: True, 36: False}.items():
        images, targets = torch.rand(2, 3, 1, size, size, dtype=torch.float64)
        summed = ReconstructionLoss("sum", 0.0005)(images, targets)
        mean = ReconstructionLoss("mean", 0.392)(images, targets)
        assert (abs(float(summed - mean)) < EXACT) == same
        half = ReconstructionLoss("half", 0.0005)(images, targets)
        assert abs(float(half - summed / 2)) < EXACT


def test_trap_14_each_target_is_one_digit_alone() -> None:
    decoder = Decoder(10, 4, (1, 6, 6), hidden=(7,)).double()
    pose = torch.randn(3, 10, 4, dtype=torch.float64)
    labels = torch.tensor([[1, 2], [5, 0], [9, 3]])
    targets = torch.rand(3, 2, 1, 6, 6, dtype=torch.float64)
    both = decoder(pose, labels)
    assert both.shape == (3, 2, 1, 6, 6)
    loss = ReconstructionLoss()
    apart = [loss(decoder(pose, labels[:, k]), targets[:, k]) for k in range(2)]
    for k in range(2):
        assert torch.allclose(both[:, k], decoder(pose, labels[:, k]), atol=EXACT)
    assert abs(float((loss(both, targets) - sum(apart)).detach())) < EXACT


def test_trap_40_the_spread_loss_leaves_the_target_out() -> None:
    loss = SpreadLoss("linear", steps=70)
    equal = torch.full((2, 5), 0.3, dtype=torch.float64)
    labels = torch.tensor([0, 4])
    assert abs(loss.margin(30) - 0.5) < EXACT
    assert abs(float(loss(equal, labels, step=30)) - 1.0) < EXACT
    certain = torch.tensor([[1.0, 0.05, 0.2]], dtype=torch.float64)
    assert abs(float(loss(certain, torch.tensor([0]))) - (0.9 - 0.8) ** 2) < EXACT


def test_both_margin_schedules() -> None:
    linear = SpreadLoss("linear", steps=1000)
    assert [linear.margin(step) for step in (0, 500, 1000, 5000)] == pytest.approx([0.2, 0.55, 0.9, 0.9])
    authors = SpreadLoss("sigmoid")
    assert authors.margin(0) == pytest.approx(0.2 + 0.79 / (1 + math.exp(4)))
    assert authors.margin(200_000) == pytest.approx(0.2 + 0.79 / 2)
    assert authors.margin(10**9) == pytest.approx(0.2 + 0.79 / (1 + math.exp(-10)))
    assert SpreadLoss("constant").margin(0) == 0.9
    activations, labels = torch.rand(2, 5), torch.tensor([0, 4])
    for loss in (linear, authors):  # without a step, the margin that the schedule ends at
        assert float(loss(activations, labels)) == pytest.approx(float(loss(activations, labels, step=10**9)))


def test_cross_entropies_are_torchs() -> None:
    logits, labels = torch.randn(4, 10), torch.randint(10, (4,))
    assert torch.equal(ClassLoss()(logits, labels), torch.nn.functional.cross_entropy(logits, labels))
    hot = torch.nn.functional.one_hot(labels, 10)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits, hot.float())
    assert torch.equal(MultiLabelLoss()(logits, hot), expected)
    assert torch.equal(MultiLabelLoss()(logits, labels), expected)


def test_class_numbers_and_multi_hot_labels_agree() -> None:
    scores, labels = torch.rand(4, 10), torch.randint(10, (4,))
    hot = torch.nn.functional.one_hot(labels, 10)
    for kind in (torch.float32, torch.bool, torch.int64):
        assert torch.equal(MarginLoss()(scores, labels), MarginLoss()(scores, hot.to(kind)))
