"""Decodes by label and by prediction."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.narrow import batch, narrow
from tests.tolerances import SAME, relative_rms
from torchcaps._core.optional import import_optional
from torchcaps.analysis.reconstruction import (
    Reconstructions,
    draw_reconstructions,
    mixed,
    reconstruct,
    show_objects,
)
from torchcaps.capsules import Capsules


class Templates(nn.Module):
    """A decoder that draws one picture for each class, whatever the capsules say."""

    def __init__(self, pictures: Tensor) -> None:
        super().__init__()
        self.pictures = pictures

    def forward(self, capsules: Capsules, labels: Tensor) -> Tensor:
        return self.pictures[labels]


def test_errors_are_squared_differences_from_the_targets() -> None:
    model: Any = narrow("sabour2017_mnist")
    images, labels, _ = batch(model, 4)
    model.decoder = Templates(torch.arange(10.0).view(10, 1, 1, 1).expand(10, 1, 28, 28) / 10)
    found = reconstruct(model, images, labels, torch.zeros_like(images), batch_size=3)
    expected = 784 * (labels / 10) ** 2
    assert relative_rms(found.error_by_label, expected) < SAME[torch.float32]
    assert relative_rms(found.error_by_prediction, 784 * (found.predictions / 10) ** 2) < SAME[torch.float32]


def test_decodes_are_those_of_the_model() -> None:
    model: Any = narrow("sabour2017_mnist").eval()
    images, labels, _ = batch(model)
    found = reconstruct(model, images, labels)
    output = model(images)
    assert found.predictions.tolist() == output.scores.argmax(-1).tolist()
    assert found.right.tolist() == (found.predictions == labels).tolist()
    assert relative_rms(found.by_prediction, output.reconstruction) < SAME[torch.float32]
    assert relative_rms(found.by_label, model.decode(output, labels)) < SAME[torch.float32]
    assert relative_rms(found.confidence, output.scores.amax(-1)) < SAME[torch.float32]
    assert torch.equal(found.targets, images)


def test_several_objects_are_decoded_each_by_itself() -> None:
    model: Any = narrow("sabour2017_multimnist").eval()
    images, labels, targets = batch(model, 5)
    found = reconstruct(model, images, labels, targets, batch_size=2)
    output = model(images, labels)
    assert found.by_label.shape == targets.shape
    assert relative_rms(found.by_prediction, output.reconstruction) < SAME[torch.float32]
    assert relative_rms(found.by_label, model.decode(output, labels)) < SAME[torch.float32]
    same = [set(a) == set(b) for a, b in zip(found.predictions.tolist(), labels.tolist(), strict=True)]
    assert found.right.tolist() == same


def test_images_of_all_labels_come_in_turn() -> None:
    labels = torch.tensor([3, 3, 3, 1, 1, 0])
    assert mixed(labels, torch.ones(6)) == [5, 3, 0, 4, 1, 2]
    assert mixed(labels, labels == 3) == [0, 1, 2]


def test_what_makes_no_sense_is_refused() -> None:
    model: Any = narrow("sabour2017_multimnist")
    images, labels, targets = batch(model, 2)
    with pytest.raises(ValueError, match="targets must be given"):
        reconstruct(model, images, labels)
    with pytest.raises(ValueError, match="targets must be"):
        reconstruct(model, images, labels, targets[:, 0])
    with pytest.raises(ValueError, match="labels must be one for each of 1"):
        reconstruct(model, images[:1], labels, targets)
    with pytest.raises(ValueError, match="images must be one or more"):
        reconstruct(model, images[:0], labels, targets)
    plain: Any = narrow("hinton2018_smallnorb")
    with pytest.raises(ValueError, match="reconstruction needs a decoder"):
        reconstruct(plain, *batch(plain, 2)[:2])


def made(right: list[bool]) -> Reconstructions:
    n = len(right)
    pictures, numbers = torch.rand(n, 1, 8, 8), torch.arange(n) % 10
    predictions = torch.where(torch.tensor(right), numbers, (numbers + 1) % 10)
    decodes = (pictures, pictures, numbers, predictions, pictures, pictures)
    return Reconstructions(*decodes, torch.tensor(right), torch.rand(n), torch.rand(n), torch.rand(n))


@pytest.mark.parametrize("right", [[True, True], [True, False, False], [False]])
def test_it_is_drawn_with_failures_and_without(right: list[bool], tmp_path: Path) -> None:
    out = tmp_path / "decodes.svg"
    draw_reconstructions(made(right), out, "a model", n=4)
    text = out.read_text()
    said = "no image of these was taken for another class" in text
    assert said == all(right)
    assert ("no image of these is right" in text) == (not any(right))
    with pytest.raises(ValueError, match="n must be 2"):
        draw_reconstructions(made(right), out, n=1)


def test_the_most_confident_errors_come_first(tmp_path: Path) -> None:
    found = made([False, False, False])
    found.confidence[:] = torch.tensor([0.2, 0.9, 0.5])
    draw_reconstructions(found, tmp_path / "decodes.svg", n=4)
    text = (tmp_path / "decodes.svg").read_text()
    shown = [f"({n}, {n + 1}, {r})" in text for n in range(3) for r in (n, n + 1)]
    assert shown == [False, False, True, True, True, True]
    assert text.index("(1, 2, 1)") < text.index("(2, 3, 2)")


def test_several_objects_are_drawn_in_two_colours(tmp_path: Path) -> None:
    model: Any = narrow("sabour2017_multimnist")
    draw_reconstructions(reconstruct(model, *batch(model, 3)), tmp_path / "decodes.png")
    assert (tmp_path / "decodes.png").stat().st_size > 0
    axes = import_optional("matplotlib.figure", "drawing").Figure().subplots()
    show_objects(axes, torch.stack([torch.ones(1, 2, 2), torch.zeros(1, 2, 2)]))
    red, _, blue = axes.images[0].get_array()[0, 0]
    assert red > blue
