import pytest
import torch

from tests.tolerances import EXACT
from torchcaps import Capsules
from torchcaps.nn import Decoder


def assert_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("training", [True, False])
def test_reconstruction_equals_linear_layers_on_masked_capsules(training: bool) -> None:
    decoder = Decoder(3, 4, (2, 3, 3), hidden=(7, 6)).double().train(training)
    pose = torch.randn(2, 3, 4, dtype=torch.float64)
    labels = Capsules(pose).length().argmin(-1)  # not the classes that the decoder would predict
    masked = torch.zeros_like(pose)
    for image, label in enumerate(labels.tolist()):
        masked[image, label] = pose[image, label]
    first, second, last = (decoder.layers[index] for index in (0, 2, 4))
    expected = torch.sigmoid(last(second(first(masked.flatten(1)).relu()).relu())).view(2, 2, 3, 3)
    torch.testing.assert_close(decoder(pose, labels), expected, rtol=0, atol=EXACT)


def test_without_labels_the_longest_capsules_are_decoded() -> None:
    decoder = Decoder(5, 4, (2, 3, 3), hidden=(7, 6))
    pose = torch.randn(3, 5, 4)
    order = Capsules(pose).length().argsort(-1, descending=True)
    assert_equal(decoder(pose), decoder(pose, order[:, 0]))
    torch.testing.assert_close(decoder(pose, top=2), decoder(pose, order[:, :2]))
    assert decoder(pose, top=1).shape == (3, 1, 2, 3, 3)
    on_grid = pose.unflatten(1, (1, 1, 5))
    assert_equal(decoder(on_grid), decoder(pose))  # the class layer may be a convolution


def test_prediction_is_by_activation_if_there_is_one() -> None:
    decoder = Decoder(3, 4, (1, 3, 3), hidden=(5,))
    pose = torch.ones(1, 3, 4) * torch.tensor([3.0, 1.0, 2.0]).view(1, 3, 1)
    with_activation = Capsules(pose, torch.tensor([[0.1, 0.9, 0.2]]))
    assert_equal(decoder(with_activation), decoder(pose, torch.tensor([1])))
    assert_equal(decoder(pose), decoder(pose, torch.tensor([0])))
    assert decoder.predict(pose).tolist() == [0]


def test_input_is_converted_to_the_dtype_of_the_weights() -> None:
    decoder = Decoder(3, 4, (1, 3, 3), hidden=(5,))
    pose = torch.randn(2, 3, 4)
    assert_equal(decoder(pose.double()), decoder(pose))
