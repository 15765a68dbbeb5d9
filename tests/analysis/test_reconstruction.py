"""Reconstructions by label and by prediction."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.narrow import batch, narrow
from tests.tolerances import SAME, relative_rms
from torchcaps._core.optional import import_optional
from torchcaps.analysis.common import round_robin_indices
from torchcaps.analysis.reconstruction import (
    Reconstructions,
    draw_reconstructions,
    reconstruct,
    show_objects,
)
from torchcaps.capsules import Capsules


class Templates(nn.Module):
    """A decoder with one fixed image for each class."""

    def __init__(self, templates: Tensor) -> None:
        super().__init__()
        self.templates = templates

    def forward(self, capsules: Capsules, labels: Tensor) -> Tensor:
        return self.templates[labels]


def test_errors_are_squared_and_summed_over_the_image() -> None:
    model: Any = narrow("sabour2017_mnist")
    images, labels, _ = batch(model, 4)
    model.decoder = Templates(torch.arange(10.0).view(10, 1, 1, 1).expand(10, 1, 28, 28) / 10)
    result = reconstruct(model, images, labels, torch.zeros_like(images), batch_size=3)
    expected = 784 * (labels / 10) ** 2
    assert relative_rms(result.error_by_label, expected) < SAME[torch.float32]
    assert relative_rms(result.error_by_prediction, 784 * (result.predictions / 10) ** 2) < SAME[torch.float32]


def test_reconstructions_are_those_of_the_model() -> None:
    model: Any = narrow("sabour2017_mnist").eval()
    images, labels, _ = batch(model)
    result = reconstruct(model, images, labels)
    output = model(images)
    assert result.predictions.tolist() == output.scores.argmax(-1).tolist()
    assert result.correct.tolist() == (result.predictions == labels).tolist()
    assert relative_rms(result.by_prediction, output.reconstruction) < SAME[torch.float32]
    assert relative_rms(result.by_label, model.decode(output, labels)) < SAME[torch.float32]
    assert relative_rms(result.confidence, output.scores.amax(-1)) < SAME[torch.float32]
    torch.testing.assert_close(result.targets, images, rtol=0, atol=0)


def test_several_objects_are_reconstructed_one_by_one() -> None:
    model: Any = narrow("sabour2017_multimnist").eval()
    images, labels, targets = batch(model, 5)
    result = reconstruct(model, images, labels, targets, batch_size=2)
    output = model(images, labels)
    assert result.by_label.shape == targets.shape
    assert relative_rms(result.by_prediction, output.reconstruction) < SAME[torch.float32]
    assert relative_rms(result.by_label, model.decode(output, labels)) < SAME[torch.float32]
    expected = [set(a) == set(b) for a, b in zip(result.predictions.tolist(), labels.tolist(), strict=True)]
    assert result.correct.tolist() == expected


def test_round_robin_indices_take_one_image_of_each_label_in_turn() -> None:
    labels = torch.tensor([3, 3, 3, 1, 1, 0])
    assert round_robin_indices(labels, torch.ones(6)) == [5, 3, 0, 4, 1, 2]
    assert round_robin_indices(labels, labels == 3) == [0, 1, 2]


def test_invalid_arguments_are_rejected() -> None:
    model: Any = narrow("sabour2017_multimnist")
    images, labels, targets = batch(model, 2)
    with pytest.raises(ValueError, match="targets"):
        reconstruct(model, images, labels)
    with pytest.raises(ValueError, match="targets"):
        reconstruct(model, images, labels, targets[:, 0])
    with pytest.raises(ValueError, match="labels"):
        reconstruct(model, images[:1], labels, targets)
    with pytest.raises(ValueError, match="images"):
        reconstruct(model, images[:0], labels, targets)
    plain: Any = narrow("hinton2018_smallnorb")
    with pytest.raises(ValueError, match="hinton2018_smallnorb"):
        reconstruct(plain, *batch(plain, 2)[:2])


def random_result(correct: list[bool]) -> Reconstructions:
    n = len(correct)
    images, labels = torch.rand(n, 1, 8, 8), torch.arange(n) % 10
    predictions = torch.where(torch.tensor(correct), labels, (labels + 1) % 10)
    tensors = (images, images, labels, predictions, images, images)
    return Reconstructions(*tensors, torch.tensor(correct), torch.rand(n), torch.rand(n), torch.rand(n))


@pytest.mark.parametrize("correct", [[True, True], [True, False, False], [False]])
def test_figure_with_correct_and_incorrect_images(correct: list[bool], tmp_path: Path) -> None:
    out = tmp_path / "reconstructions.svg"
    draw_reconstructions(random_result(correct), out, "a model", n=4)
    text = out.read_text()
    shown = [f"({n}, {n if is_correct else n + 1}, {n})" in text for n, is_correct in enumerate(correct)]
    assert shown == [True] * len(correct)
    with pytest.raises(ValueError, match="n must"):
        draw_reconstructions(random_result(correct), out, n=1)


def test_figure_shows_the_most_confident_errors_first(tmp_path: Path) -> None:
    result = random_result([False, False, False])
    result.confidence[:] = torch.tensor([0.2, 0.9, 0.5])
    draw_reconstructions(result, tmp_path / "reconstructions.svg", n=4)
    text = (tmp_path / "reconstructions.svg").read_text()
    shown = [f"({n}, {n + 1}, {r})" in text for n in range(3) for r in (n, n + 1)]
    assert shown == [False, False, True, True, True, True]
    assert text.index("(1, 2, 1)") < text.index("(2, 3, 2)")


def test_figure_of_several_objects_has_two_colors(tmp_path: Path) -> None:
    model: Any = narrow("sabour2017_multimnist")
    draw_reconstructions(reconstruct(model, *batch(model, 3)), tmp_path / "reconstructions.png")
    assert (tmp_path / "reconstructions.png").stat().st_size > 0
    axes = import_optional("matplotlib.figure", "drawing").Figure().subplots()
    show_objects(axes, torch.stack([torch.ones(1, 2, 2), torch.zeros(1, 2, 2)]))
    red, _, blue = axes.images[0].get_array()[0, 0]
    assert red > blue
