"""Metrics against cases with a known answer."""

import pytest
import torch

from torchcaps.metrics import coupling_entropy, dead_capsules, exact_set_match, top_k_set_match

SCORES = torch.tensor([[0.9, 0.1, 0.8, 0.2], [0.9, 0.8, 0.1, 0.2], [0.1, 0.2, 0.3, 0.9]])


def test_trap_15_both_digits_must_be_found_in_any_order() -> None:
    hot = torch.tensor([[1, 0, 1, 0], [1, 0, 1, 0], [0, 0, 1, 1]])
    assert top_k_set_match(SCORES, hot, k=2).tolist() == [True, False, True]
    assert top_k_set_match(SCORES, hot).tolist() == [True, False, True]


def test_top_one_is_accuracy() -> None:
    assert top_k_set_match(SCORES, torch.tensor([0, 1, 3])).tolist() == [True, False, True]
    ties = torch.zeros(1, 4)
    assert top_k_set_match(ties, torch.tensor([0])).tolist() == [True]  # one class is chosen, not four
    assert top_k_set_match(ties, torch.tensor([1])).tolist() == [False]


def test_the_number_of_labels_may_differ() -> None:
    hot = torch.tensor([[1, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 1]])
    assert top_k_set_match(SCORES, hot).tolist() == [True, True, True]
    assert exact_set_match(SCORES, hot).tolist() == [True, False, True]
    assert exact_set_match(SCORES, hot, threshold=0.85).tolist() == [False, True, True]


def test_entropy_of_equal_and_of_certain_couplings() -> None:
    equal = torch.full((2, 3, 4), 0.25)
    assert torch.allclose(coupling_entropy(equal), torch.ones(2, 3))
    assert torch.allclose(coupling_entropy(equal, dim=-2), torch.ones(2, 4))
    assert torch.equal(coupling_entropy(torch.eye(4)[None]), torch.zeros(1, 4))
    half = torch.tensor([[0.5, 0.5, 0.0, 0.0]])
    assert torch.allclose(coupling_entropy(half), torch.tensor([0.5]))
    assert torch.allclose(coupling_entropy(half / 3), torch.tensor([0.5]))  # a leak only scales
    assert torch.equal(coupling_entropy(torch.zeros(1, 4)), torch.ones(1))


def test_dead_capsules() -> None:
    activity = torch.tensor([[0.9, 0.01, 0.0, 0.04], [0.0, 0.02, 0.0, 0.06]])
    assert float(dead_capsules(activity)) == 0.5
    assert float(dead_capsules(activity, threshold=0.015)) == 0.25


def test_thresholds_are_what_must_be_passed() -> None:
    scores = torch.tensor([[0.5, 0.75]])
    assert exact_set_match(scores, torch.tensor([1])).tolist() == [True]  # 0.5 is not over 0.5
    assert float(dead_capsules(torch.tensor([[0.05, 0.06]]))) == 0.5  # nor is 0.05 over 0.05


def test_bad_input() -> None:
    nan = torch.full((3, 4), float("nan"))
    for metric in (top_k_set_match, exact_set_match):
        with pytest.raises(ValueError, match="scores must hold numbers, got 12 NaN"):
            metric(nan, torch.tensor([0, 1, 2]))
        with pytest.raises(ValueError, match=r"scores must be \[B, classes\], got \[4\]"):
            metric(SCORES[0], torch.tensor([0, 1, 2]))
    with pytest.raises(ValueError, match="coupling must hold numbers"):
        coupling_entropy(nan)
    with pytest.raises(ValueError, match="activity must hold numbers"):
        dead_capsules(nan)
    with pytest.raises(TypeError, match=r"activity must be a floating-point tensor, got torch\.int64"):
        dead_capsules(torch.ones(2, 3).long())
    with pytest.raises(ValueError, match=r"k must lie in 1\.\.4, got 5"):
        top_k_set_match(SCORES, torch.tensor([0, 1, 2]), k=5)
    for metric in (top_k_set_match, exact_set_match):
        with pytest.raises(ValueError, match="one for each of the 3 images, got 2"):
            metric(SCORES, torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="must not be negative"):
        coupling_entropy(torch.randn(2, 5))
    with pytest.raises(ValueError, match="two competitors"):
        coupling_entropy(torch.ones(2, 1))
    with pytest.raises(ValueError, match=r"activity must be \[B, ...\]"):
        dead_capsules(torch.rand(0, 3))
