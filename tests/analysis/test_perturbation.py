"""Reconstructions from capsules with one dimension perturbed."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.narrow import batch, narrow
from tests.tolerances import EXACT, SAME, largest_difference, relative_rms
from torchcaps.analysis.common import first_labels
from torchcaps.analysis.perturbation import AMOUNTS, Perturbation, draw_perturbation, perturb
from torchcaps.capsules import Capsules


class PoseAsPixels(nn.Module):
    """A decoder whose first pixels are the pose of the labelled capsule."""

    def __init__(self, image: tuple[int, int, int]) -> None:
        super().__init__()
        self.image = image

    def forward(self, capsules: Capsules, labels: Tensor) -> Tensor:
        pose = capsules.pose[torch.arange(len(labels)), labels]
        n_pixels = self.image[0] * self.image[1] * self.image[2]
        return F.pad(pose, (0, n_pixels - pose.shape[-1])).unflatten(-1, self.image)


def pose_decoder_model(name: str) -> Any:
    model: Any = narrow(name).double()
    model.decoder = PoseAsPixels(model.spec.image)
    return model


def test_one_dimension_of_the_labelled_capsule_is_perturbed() -> None:
    model = pose_decoder_model("sabour2017_mnist")
    images, labels, _ = batch(model, 3)
    images = images.double()
    result = perturb(model, images, labels, batch_size=2)
    model.eval()
    pose = model(images).capsules.pose[torch.arange(3), labels]  # [B, D]
    amounts = torch.tensor(AMOUNTS, dtype=torch.float64)
    moved = pose[:, None, None, :] + amounts[:, None] * torch.eye(16, dtype=torch.float64)[:, None, :]
    assert result.decoded.shape == (3, 16, 11, 1, 28, 28)
    assert largest_difference(result.decoded.flatten(3)[..., :16], moved.detach()) < EXACT
    assert result.decoded.flatten(3)[..., 16:].unique().tolist() == [0]
    assert largest_difference(result.unperturbed.flatten(1)[:, :16], pose.detach()) < EXACT


def test_amounts_are_those_of_figure_4() -> None:
    assert AMOUNTS == (-0.25, -0.2, -0.15, -0.1, -0.05, 0.0, 0.05, 0.1, 0.15, 0.2, 0.25)


def test_other_capsules_are_masked() -> None:
    model: Any = narrow("sabour2017_mnist").eval()
    images, labels, _ = batch(model, 2)
    result = perturb(model, images, labels, amounts=(0.3,), dims=(4,))
    pose = model(images).capsules.pose.detach()
    masked = torch.zeros_like(pose)
    for n, label in enumerate(labels.tolist()):
        masked[n, label] = pose[n, label]
        masked[n, label, 4] += 0.3
    expected = model.decoder.layers(masked.flatten(1)).unflatten(1, (1, 28, 28))
    assert result.dims.tolist() == [4]
    assert relative_rms(result.decoded[:, 0, 0], expected) < SAME[torch.float32]


def test_an_amount_of_0_is_the_unperturbed_reconstruction() -> None:
    model: Any = narrow("capsnet_small")
    result = perturb(model, batch(model, 2)[0])
    for d in range(result.decoded.shape[1]):
        assert relative_rms(result.decoded[:, d, 5], result.unperturbed) < SAME[torch.float32]


def test_default_amounts_are_scaled_by_sqrt_d_for_normalised_lengths() -> None:
    model: Any = narrow("choi2019_mnist")
    images = batch(model, 1)[0]
    assert relative_rms(perturb(model, images).amounts, 8**0.5 * torch.tensor(AMOUNTS)) < SAME[torch.float32]
    assert perturb(model, images, amounts=(0.5, 1.0)).amounts.tolist() == [0.5, 1.0]


def test_without_labels_the_predicted_capsule_is_perturbed() -> None:
    model: Any = narrow("sabour2017_mnist").eval()
    images = batch(model, 4)[0]
    assert perturb(model, images, dims=(0,)).labels.tolist() == model(images).scores.argmax(-1).tolist()


def test_the_first_of_several_labels_is_used() -> None:
    model: Any = narrow("sabour2017_multimnist")
    images, labels, _ = batch(model, 3)
    assert perturb(model, images, labels, dims=(0,)).labels.tolist() == labels[:, 0].tolist()
    assert first_labels(model, labels[:, 1], 3).tolist() == labels[:, 1].tolist()
    hot = F.one_hot(labels, 10).amax(1)
    assert first_labels(model, hot, 3).tolist() == labels.amin(1).tolist()


def test_the_mode_of_the_model_is_restored() -> None:
    model: Any = narrow("sabour2017_mnist").train()
    perturb(model, batch(model, 1)[0], dims=(0,))
    assert model.training is True


@pytest.mark.parametrize("name", ["tsai2020_cifar10", "sabour2017_cnn_mnist"])
def test_a_model_without_a_decoder_is_rejected(name: str) -> None:
    model: Any = narrow(name)
    with pytest.raises(ValueError, match=name):
        perturb(model, batch(model, 1)[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dims": (16,)}, "dims"),
        ({"dims": ()}, "dims"),
        ({"amounts": ()}, "amounts"),
        ({"amounts": (float("nan"),)}, "amounts"),
        ({"labels": torch.tensor([1])}, "labels"),
        ({"labels": torch.tensor([1, 10])}, r"labels .*0\.\.9"),
    ],
)
def test_invalid_arguments_are_rejected(options: dict[str, Any], message: str) -> None:
    model: Any = narrow("sabour2017_mnist")
    with pytest.raises(ValueError, match=message):
        perturb(model, batch(model, 2)[0], **options)
    with pytest.raises(ValueError, match="images"):
        perturb(model, batch(model, 2)[0][:0])


def test_figure(tmp_path: Path) -> None:
    model: Any = narrow("sabour2017_mnist")
    result = perturb(model, batch(model, 2)[0], amounts=(-1.0, 0.0, 1.0), dims=(0, 3))
    assert isinstance(result, Perturbation)
    draw_perturbation(result, tmp_path / "perturbed.png", "a model", image=1)
    assert (tmp_path / "perturbed.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ValueError, match="image"):
        draw_perturbation(result, tmp_path / "perturbed.png", image=2)


def test_figure_of_the_dimensions_with_the_largest_effect(tmp_path: Path) -> None:
    """Squared changes of 1.25, 18, 4 and 16: the second dimension first, then the fourth."""
    still, moved = torch.zeros(1, 1, 4, 4), torch.zeros(1, 4, 2, 1, 4, 4)
    moved[0, :, 0, 0, 0, 0], moved[0, :, 1, 0, 0, 0] = torch.tensor([1.0, -3.0, 2.0, 4.0]), torch.tensor([0.5, 3, 0, 0])
    result = Perturbation(still, torch.tensor([7]), torch.arange(4), torch.tensor([-1.0, 1.0]), moved, still)
    draw_perturbation(result, tmp_path / "largest.svg", n_dims=2)
    text = (tmp_path / "largest.svg").read_text()
    assert re.findall(r"<!-- (\d) -->", text) == ["1", "3"]
    with pytest.raises(ValueError, match="n_dims"):
        draw_perturbation(result, tmp_path / "largest.svg", n_dims=0)
