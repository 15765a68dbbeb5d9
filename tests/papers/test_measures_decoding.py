"""The decoder of another network (Yang 2021, figure 2), with a decoder whose output is known."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.papers.networks import fixed_context, network_with_outputs
from tests.tolerances import SAME, assert_equal, largest_difference
from torchcaps.capsules import Capsules
from torchcaps.papers.measures.decoding import measure_foreign_decoder
from torchcaps.training import TrainedRun

N, SIDE = 6, 20


class ConstantDecoder(nn.Module):
    """A decoder whose pixels all equal the first component of the labelled capsule."""

    def forward(self, capsules: Capsules, labels: Tensor) -> Tensor:
        shade = capsules.pose[torch.arange(len(labels)), labels, 0]
        return shade[:, None, None, None].expand(-1, 1, SIDE, SIDE)


def network(images: Tensor, predictions: list[int], shade: float, decoder: nn.Module | None) -> TrainedRun:
    """Return a network with capsules ``(shade + class / 100, 0, ...)``; that of the prediction is longer."""
    poses = torch.zeros(N, 10, 16)
    poses[:, :, 0] = shade + torch.arange(10) / 100
    poses[torch.arange(N), predictions, 1] = 1.0
    net: Any = network_with_outputs("yang2021_mnist", images, poses)
    net.model.decoder = decoder
    return net


@pytest.mark.parametrize("none_correct", [False, True])
def test_capsules_are_decoded_by_the_decoder_of_the_other_network(none_correct: bool) -> None:
    """Of the images that both networks classify correctly (0 to 3), or of all images if there is none."""
    labels = [3, 3, 7, 7, 7, 3]
    images = torch.rand(N, 1, SIDE, SIDE)
    own = network(images, [3, 3, 7, 7, 7, 4], 0.2, ConstantDecoder())
    net = network(images, [5] * N if none_correct else [3, 3, 7, 7, 1, 3], 0.6, None)
    results = measure_foreign_decoder(fixed_context(images, torch.tensor(labels)), own, net, n_images=N)
    chosen = range(N) if none_correct else range(4)
    assert results["n"] == len(chosen)
    for name, shade in (("own", 0.2), ("foreign", 0.6)):
        errors = [float((images[k] - shade - labels[k] / 100).square().sum()) for k in chosen]
        assert results[name] == pytest.approx(sum(errors) / len(errors), rel=SAME[torch.float32])
        shown = torch.tensor([shade + number / 100 for number in (3, 7)])[:, None, None, None]
        assert largest_difference(results[f"shown_{name}"], shown.expand(2, 1, SIDE, SIDE)) < SAME[torch.float32]
    mean = {number: torch.stack([images[k] for k in chosen if labels[k] == number]).mean(0) for number in (3, 7)}
    errors = [float((images[k] - mean[labels[k]]).square().sum()) for k in chosen]
    assert results["class_mean"] == pytest.approx(sum(errors) / len(errors), rel=SAME[torch.float32])
    assert results["shown_labels"].tolist() == [3, 7]
    assert_equal(results["shown_images"], images[[0, 2]])
