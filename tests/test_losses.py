"""Losses against values computed by hand, and traps 7, 8, 9, 14 and 40."""

import math
from collections.abc import Callable

import pytest
import torch

from tests.tolerances import EXACT, assert_equal
from torchcaps.capsules import Capsules
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
def test_trap_07_margin_loss_uses_lengths(value: float, labels: torch.Tensor, expected: float) -> None:
    assert float(MarginLoss()(lengths(value), labels)) == pytest.approx(expected, abs=EXACT)


def test_trap_08_official_weighting_is_a_twentieth_of_the_papers() -> None:
    scores = torch.rand(5, 10, dtype=torch.float64)
    labels = torch.randint(10, (5,))
    paper, official = MarginLoss()(scores, labels), MarginLoss(weighting="official")(scores, labels)
    assert float(official) == pytest.approx(float(paper) / 20, abs=EXACT)
    # So a reconstruction loss of weight 0.0005 has the relative weight 0.01.
    images, targets = torch.rand(2, 5, 1, 28, 28, dtype=torch.float64)
    as_official = official + ReconstructionLoss(weight=0.0005)(images, targets)
    as_paper = (paper + ReconstructionLoss(weight=0.01)(images, targets)) / 20
    assert float(as_official) == pytest.approx(float(as_paper), abs=EXACT)


@pytest.mark.parametrize("size", [28, 36])
def test_trap_09_weights_of_sum_and_mean_agree_only_for_28_pixels(size: int) -> None:
    images, targets = torch.rand(2, 3, 1, size, size, dtype=torch.float64)
    summed = ReconstructionLoss("sum", 0.0005)(images, targets)
    mean = ReconstructionLoss("mean", 0.392)(images, targets)
    assert float(summed / mean) == pytest.approx(size**2 / 28**2, abs=EXACT)
    half = ReconstructionLoss("half", 0.0005)(images, targets)
    assert float(half) == pytest.approx(float(summed) / 2, abs=EXACT)


def test_trap_14_each_object_has_its_own_target() -> None:
    decoder = Decoder(10, 4, (1, 6, 6), hidden=(7,)).double()
    pose = torch.randn(3, 10, 4, dtype=torch.float64)
    labels = torch.tensor([[1, 2], [5, 0], [9, 3]])
    targets = torch.rand(3, 2, 1, 6, 6, dtype=torch.float64)
    both = decoder(pose, labels)
    assert both.shape == (3, 2, 1, 6, 6)
    loss = ReconstructionLoss()
    separate = [loss(decoder(pose, labels[:, k]), targets[:, k]) for k in range(2)]
    for k in range(2):
        torch.testing.assert_close(both[:, k], decoder(pose, labels[:, k]), rtol=0, atol=EXACT)
    torch.testing.assert_close(loss(both, targets), sum(separate), rtol=0, atol=EXACT)


def test_trap_40_spread_loss_excludes_the_target() -> None:
    loss = SpreadLoss("linear", steps=70)
    equal = torch.full((2, 5), 0.3, dtype=torch.float64)
    labels = torch.tensor([0, 4])
    assert loss.margin(30) == pytest.approx(0.5, abs=EXACT)
    assert float(loss(equal, labels, step=30)) == pytest.approx(1.0, abs=EXACT)
    certain = torch.tensor([[1.0, 0.05, 0.2]], dtype=torch.float64)
    assert float(loss(certain, torch.tensor([0]))) == pytest.approx((0.9 - 0.8) ** 2, abs=EXACT)


def test_margin_schedules() -> None:
    linear = SpreadLoss("linear", steps=1000)
    assert [linear.margin(step) for step in (0, 500, 1000, 5000)] == pytest.approx([0.2, 0.55, 0.9, 0.9])
    authors = SpreadLoss("sigmoid")
    assert authors.margin(0) == pytest.approx(0.2 + 0.79 / (1 + math.exp(4)))
    assert authors.margin(200_000) == pytest.approx(0.2 + 0.79 / 2)
    assert authors.margin(10**9) == pytest.approx(0.2 + 0.79 / (1 + math.exp(-10)))
    assert SpreadLoss("constant").margin(0) == 0.9
    activations, labels = torch.rand(2, 5), torch.tensor([0, 4])
    for loss in (linear, authors):  # default: the final margin
        assert float(loss(activations, labels)) == pytest.approx(float(loss(activations, labels, step=10**9)))


def test_cross_entropies_equal_torch() -> None:
    logits, labels = torch.randn(4, 10), torch.randint(10, (4,))
    torch.testing.assert_close(
        ClassLoss()(logits, labels), torch.nn.functional.cross_entropy(logits, labels), rtol=0, atol=0
    )
    hot = torch.nn.functional.one_hot(labels, 10)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits, hot.float())
    torch.testing.assert_close(MultiLabelLoss()(logits, hot), expected, rtol=0, atol=0)
    torch.testing.assert_close(MultiLabelLoss()(logits, labels), expected, rtol=0, atol=0)


def test_class_indices_and_multi_hot_labels_agree() -> None:
    scores, labels = torch.rand(4, 10), torch.randint(10, (4,))
    hot = torch.nn.functional.one_hot(labels, 10)
    for kind in (torch.float32, torch.bool, torch.int64):
        torch.testing.assert_close(MarginLoss()(scores, labels), MarginLoss()(scores, hot.to(kind)), rtol=0, atol=0)


@pytest.mark.parametrize(
    "make",
    [
        MarginLoss,
        lambda reduction: MarginLoss(weighting="official", reduction=reduction),
        lambda reduction: SpreadLoss("constant", reduction=reduction),
        ClassLoss,
        MultiLabelLoss,
    ],
    ids=["margin", "official margin", "spread", "cross-entropy", "binary"],
)
def test_reductions_combine_the_losses_of_the_images(make: Callable[..., torch.nn.Module]) -> None:
    scores, labels = torch.rand(4, 3, dtype=torch.float64), torch.tensor([0, 2, 1, 2])
    losses = make(reduction="none")(scores, labels)
    alone = torch.stack([make(reduction="mean")(scores[n : n + 1], labels[n : n + 1]) for n in range(4)])
    torch.testing.assert_close(losses, alone, rtol=0, atol=EXACT)
    torch.testing.assert_close(make(reduction="mean")(scores, labels), losses.mean(), rtol=0, atol=EXACT)
    torch.testing.assert_close(make(reduction="sum")(scores, labels), losses.sum(), rtol=0, atol=EXACT)


@pytest.mark.parametrize("pixels", ["sum", "mean", "half"])
@pytest.mark.parametrize("objects", [(), (2,)], ids=["one object", "two objects"])
def test_reductions_of_the_reconstruction_loss(pixels: str, objects: tuple[int, ...]) -> None:
    images, targets = torch.rand(2, 3, *objects, 1, 4, 4, dtype=torch.float64)
    losses = ReconstructionLoss(pixels, reduction="none")(images, targets)
    alone = torch.stack([ReconstructionLoss(pixels)(images[n : n + 1], targets[n : n + 1]) for n in range(3)])
    torch.testing.assert_close(losses, alone, rtol=0, atol=EXACT)
    torch.testing.assert_close(ReconstructionLoss(pixels)(images, targets), losses.mean(), rtol=0, atol=EXACT)
    summed = ReconstructionLoss(pixels, reduction="sum")(images, targets)
    torch.testing.assert_close(summed, losses.sum(), rtol=0, atol=EXACT)


@pytest.mark.parametrize("loss", [MarginLoss(), SpreadLoss()], ids=["margin", "spread"])
def test_capsules_are_scored_by_activation_or_length(loss: torch.nn.Module) -> None:
    pose, activation, labels = torch.randn(2, 3, 4), torch.rand(2, 3), torch.tensor([0, 2])
    assert_equal(loss(Capsules(pose), labels), loss(pose.norm(dim=-1), labels))
    assert_equal(loss(Capsules(pose, activation), labels), loss(activation, labels))
    on_grid = Capsules(pose.view(2, 1, 1, 3, 4))
    assert_equal(loss(on_grid, labels), loss(Capsules(pose), labels))


def test_repr_contains_the_settings() -> None:
    assert repr(MarginLoss(0.7)) == (
        "MarginLoss(positive=0.7, negative=0.1, down_weight=0.5, weighting='paper', reduction='mean')"
    )
    assert "steps=50000" in repr(SpreadLoss())
    assert "weight=0.3" in repr(ReconstructionLoss("mean", 0.3))
