"""Predicted classes and accuracy for one, several and any number of objects per image."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.narrow import narrow
from tests.tolerances import assert_all_equal
from torchcaps.metrics import exact_set_match, top_k_set_match
from torchcaps.models import Output

ONE, TWO = "sabour2017_mnist", "sabour2017_multimnist"
ANY_NUMBER, ANY_NUMBER_OF_LENGTHS = "tsai2020_diverse_vector", "tsai2020_diverse_dynamic"


def random_scores(n_images: int = 64) -> Tensor:
    return torch.rand(n_images, 10, generator=torch.Generator().manual_seed(1))


def test_one_object_is_the_class_with_the_highest_score() -> None:
    model, scores = narrow(ONE), random_scores()
    labels = torch.arange(64) % 10
    torch.testing.assert_close(model.predict(scores), scores.argmax(1))
    torch.testing.assert_close(model.predict(Output(scores)), scores.argmax(1))
    torch.testing.assert_close(model.is_correct(scores, labels), scores.argmax(1) == labels)
    torch.testing.assert_close(model.is_correct(Output(scores), torch.eye(10)[labels]), scores.argmax(1) == labels)
    torch.testing.assert_close(model.is_correct(scores, labels), top_k_set_match(scores, labels))


def test_two_objects_are_the_two_classes_with_the_highest_scores_in_any_order() -> None:
    model, scores = narrow(TWO), random_scores()
    torch.testing.assert_close(model.predict(scores), scores.topk(2, dim=1).indices)
    labels = torch.stack([torch.arange(64) % 10, (torch.arange(64) // 10 + 1 + torch.arange(64)) % 10], dim=1)
    labels[:20] = scores[:20].topk(2, dim=1).indices.flip(1)
    hot = torch.zeros(64, 10).scatter(1, labels, 1.0)
    correct = model.is_correct(scores, labels)
    torch.testing.assert_close(correct, top_k_set_match(scores, hot, 2))
    torch.testing.assert_close(model.is_correct(scores, hot), correct)
    assert 20 <= int(correct.sum()) < 64


def test_predictions_of_several_objects_have_the_positions_of_their_labels() -> None:
    model: Any = narrow(TWO, classes=4)
    scores = torch.tensor([[0.9, 0.8, 0.1, 0.2]]).repeat(4, 1)
    labels = torch.tensor([[1, 0], [2, 0], [2, 3], [0, 3]])
    assert model.predict(scores, labels).tolist() == [[1, 0], [1, 0], [0, 1], [0, 1]]
    assert model.predict(scores).tolist() == [[0, 1]] * 4


def test_any_number_of_objects_are_all_classes_above_one_half() -> None:
    labels = torch.eye(10, dtype=torch.long)[torch.arange(64) % 10]
    logits = 4 * (random_scores() - 0.7)
    scores = random_scores()
    for model, values, probabilities in (
        (narrow(ANY_NUMBER), logits, logits.sigmoid()),
        (narrow(ANY_NUMBER_OF_LENGTHS), scores, scores),
    ):
        truth = labels.clone()
        truth[:20] = (probabilities > 0.5)[:20].long()
        torch.testing.assert_close(model.probabilities(values), probabilities)
        torch.testing.assert_close(model.predict(values), probabilities > 0.5)
        torch.testing.assert_close(model.predict_multi_hot(values), probabilities > 0.5)
        torch.testing.assert_close(model.is_correct(values, truth), exact_set_match(probabilities, truth))
        assert int(model.is_correct(values, truth).sum()) >= 20


@pytest.mark.parametrize("name", [ONE, TWO, ANY_NUMBER])
def test_multi_hot_predictions_are_the_predicted_classes(name: str) -> None:
    model, scores = narrow(name), random_scores()
    hot, predicted = model.predict_multi_hot(scores), model.predict(scores)
    assert hot.dtype == torch.bool
    if model.n_objects is None:
        torch.testing.assert_close(hot, predicted)
    else:
        torch.testing.assert_close(hot.sum(1), torch.full((64,), model.n_objects))
        assert_all_equal(hot.gather(1, predicted.view(64, -1)), True)
    torch.testing.assert_close(model.top_class(scores), scores.argmax(1))


@pytest.mark.parametrize("name", [ONE, TWO])
def test_of_equal_scores_the_lower_class_is_predicted(name: str) -> None:
    model = narrow(name)
    n = model.n_objects or 1
    assert model.predict_multi_hot(torch.full((1, 10), 0.25))[0].tolist() == [True] * n + [False] * (10 - n)


def test_probabilities_of_logits_are_a_softmax() -> None:
    scores = random_scores()
    torch.testing.assert_close(narrow("tsai2020_cifar10").probabilities(scores), scores.softmax(1))
    torch.testing.assert_close(narrow(ONE).probabilities(scores), scores)


def test_scores_that_do_not_fit_are_rejected() -> None:
    model = narrow(ONE)
    with pytest.raises(ValueError, match=r"scores .*\[B, 10\].*\[2, 9\]"):
        model.predict(torch.rand(2, 9))
    with pytest.raises(ValueError, match="scores"):
        model.is_correct(torch.full((1, 10), torch.nan), torch.zeros(1, dtype=torch.long))
    with pytest.raises(ValueError, match=r"labels .*2 .*3"):
        model.is_correct(torch.rand(2, 10), torch.zeros(3, dtype=torch.long))
