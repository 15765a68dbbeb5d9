"""Metrics of cases with a known answer."""

import pytest
import torch

from tests.bad_input.rejection import Rejection, check_rejection
from torchcaps.metrics import coupling_entropy, dead_fraction, exact_set_match, top_k_set_match

SCORES = torch.tensor([[0.9, 0.1, 0.8, 0.2], [0.9, 0.8, 0.1, 0.2], [0.1, 0.2, 0.3, 0.9]])


def test_trap_15_both_digits_must_be_predicted_in_any_order() -> None:
    hot = torch.tensor([[1, 0, 1, 0], [1, 0, 1, 0], [0, 0, 1, 1]])
    assert top_k_set_match(SCORES, hot, k=2).tolist() == [True, False, True]
    assert top_k_set_match(SCORES, hot).tolist() == [True, False, True]


def test_top_1_is_accuracy() -> None:
    assert top_k_set_match(SCORES, torch.tensor([0, 1, 3])).tolist() == [True, False, True]
    ties = torch.zeros(1, 4)
    assert top_k_set_match(ties, torch.tensor([0])).tolist() == [True]  # one class is predicted, not four
    assert top_k_set_match(ties, torch.tensor([1])).tolist() == [False]


def test_number_of_labels_may_differ_between_images() -> None:
    hot = torch.tensor([[1, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 1]])
    assert top_k_set_match(SCORES, hot).tolist() == [True, True, True]
    assert exact_set_match(SCORES, hot).tolist() == [True, False, True]
    assert exact_set_match(SCORES, hot, threshold=0.85).tolist() == [False, True, True]


def test_entropy_of_uniform_and_one_hot_couplings() -> None:
    uniform = torch.full((2, 3, 4), 0.25)
    torch.testing.assert_close(coupling_entropy(uniform), torch.ones(2, 3))
    torch.testing.assert_close(coupling_entropy(uniform, dim=-2), torch.ones(2, 4))
    torch.testing.assert_close(coupling_entropy(torch.eye(4)[None]), torch.zeros(1, 4))
    half = torch.tensor([[0.5, 0.5, 0.0, 0.0]])
    torch.testing.assert_close(coupling_entropy(half), torch.tensor([0.5]))
    torch.testing.assert_close(coupling_entropy(half / 3), torch.tensor([0.5]))  # with a leak, couplings are scaled
    torch.testing.assert_close(coupling_entropy(torch.zeros(1, 4)), torch.ones(1))


def test_dead_capsules() -> None:
    activity = torch.tensor([[0.9, 0.01, 0.0, 0.04], [0.0, 0.02, 0.0, 0.06]])
    assert float(dead_fraction(activity)) == 0.5
    assert float(dead_fraction(activity, threshold=0.015)) == 0.25


def test_thresholds_are_exclusive() -> None:
    scores = torch.tensor([[0.5, 0.75]])
    assert exact_set_match(scores, torch.tensor([1])).tolist() == [True]  # 0.5 is not above 0.5
    assert float(dead_fraction(torch.tensor([[0.05, 0.06]]))) == 0.5  # 0.05 is not above 0.05


nan = torch.full((3, 4), float("nan"))
labels = torch.tensor([0, 1, 2])
REJECTIONS = {
    "top-k NaN": Rejection(lambda: top_k_set_match(nan, labels), ValueError, "scores", "12", "NaN"),
    "top-k rank": Rejection(lambda: top_k_set_match(SCORES[0], labels), ValueError, "scores", "[4]", "[B, classes]"),
    "top-k labels": Rejection(lambda: top_k_set_match(SCORES, labels[:2]), ValueError, "labels", "2", "3"),
    "top-k k": Rejection(lambda: top_k_set_match(SCORES, labels, k=5), ValueError, "k", "5", "1..4"),
    "exact NaN": Rejection(lambda: exact_set_match(nan, labels), ValueError, "scores", "12", "NaN"),
    "exact rank": Rejection(lambda: exact_set_match(SCORES[0], labels), ValueError, "scores", "[4]", "[B, classes]"),
    "exact labels": Rejection(lambda: exact_set_match(SCORES, labels[:2]), ValueError, "labels", "2", "3"),
    "entropy NaN": Rejection(lambda: coupling_entropy(nan), ValueError, "coupling", "12", "NaN"),
    "entropy negative": Rejection(lambda: coupling_entropy(-SCORES), ValueError, "coupling", "-0.9", "negative"),
    "entropy of one": Rejection(lambda: coupling_entropy(torch.ones(2, 1)), ValueError, "coupling", "1", "two"),
    "dead NaN": Rejection(lambda: dead_fraction(nan), ValueError, "activity", "12", "NaN"),
    "dead dtype": Rejection(
        lambda: dead_fraction(labels[None]), TypeError, "activity", "torch.int64", "floating-point"
    ),
    "dead batch": Rejection(lambda: dead_fraction(torch.rand(0, 3)), ValueError, "activity", "[0, 3]", "[B, ...]"),
}


@pytest.mark.parametrize("name", REJECTIONS)
def test_invalid_input_is_rejected(name: str) -> None:
    check_rejection(REJECTIONS[name])
