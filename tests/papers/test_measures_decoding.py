"""A decoder that is given another network's capsules: Yang 2021, figure 2, with a decoder that can be done by hand."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.papers.nets import given, knowing
from tests.tolerances import SAME, largest_difference
from torchcaps.capsules import Capsules
from torchcaps.papers.measures.decoding import foreign_decoder
from torchcaps.training import Trained

N, SIDE = 6, 20


class Grey(nn.Module):
    """A decoder that paints all pixels with the first number of the label's capsule."""

    def forward(self, capsules: Capsules, labels: Tensor) -> Tensor:
        shade = capsules.pose[torch.arange(len(labels)), labels, 0]
        return shade[:, None, None, None].expand(-1, 1, SIDE, SIDE)


def network(images: Tensor, predictions: list[int], shade: float, decoder: nn.Module | None) -> Trained:
    """One whose capsules are ``(shade + class / 100, 0, ...)``, that of the prediction longer by its second number."""
    poses = torch.zeros(N, 10, 16)
    poses[:, :, 0] = shade + torch.arange(10) / 100
    poses[torch.arange(N), predictions, 1] = 1.0
    net: Any = knowing("yang2021_mnist", images, poses)
    net.model.decoder = decoder
    return net


@pytest.mark.parametrize("none_right", [False, True])
def test_the_capsules_of_the_net_are_decoded_by_the_decoder_of_the_other(none_right: bool) -> None:
    """Where both networks are right (0 to 3), or all images where there is none of these."""
    labels = [3, 3, 7, 7, 7, 3]
    images = torch.rand(N, 1, SIDE, SIDE)
    own = network(images, [3, 3, 7, 7, 7, 4], 0.2, Grey())
    net = network(images, [5] * N if none_right else [3, 3, 7, 7, 1, 3], 0.6, None)
    found = foreign_decoder(given(images, torch.tensor(labels)), own, net, images=N)
    chosen = range(N) if none_right else range(4)
    assert found["n"] == len(chosen)
    for name, shade in (("own", 0.2), ("foreign", 0.6)):
        errors = [float((images[k] - shade - labels[k] / 100).square().sum()) for k in chosen]
        assert found[name] == pytest.approx(sum(errors) / len(errors), rel=SAME[torch.float32])
        shown = torch.tensor([shade + number / 100 for number in (3, 7)])[:, None, None, None]
        assert largest_difference(found[f"shown_{name}"], shown.expand(2, 1, SIDE, SIDE)) < SAME[torch.float32]
    mean = {number: torch.stack([images[k] for k in chosen if labels[k] == number]).mean(0) for number in (3, 7)}
    errors = [float((images[k] - mean[labels[k]]).square().sum()) for k in chosen]
    assert found["class_mean"] == pytest.approx(sum(errors) / len(errors), rel=SAME[torch.float32])
    assert found["shown_labels"].tolist() == [3, 7]
    assert torch.equal(found["shown_images"], images[[0, 2]])
