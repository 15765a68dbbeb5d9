"""Measurements of robustness, with linear classifiers and networks whose outputs are known."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.narrow import narrow
from tests.papers.networks import as_trained, fixed_context, network_with_outputs
from tests.tolerances import EXACT, largest_difference
from torchcaps.data import Batch
from torchcaps.papers.measures.robustness import (
    measure_black_box,
    measure_gan_errors,
    measure_gan_images,
    measure_white_box,
)
from torchcaps.reproduce.runner import MeasurementContext
from torchcaps.training import TrainedRun

SCALES = pytest.mark.parametrize(("augmentation", "scale"), [("", 255), ("chen2019.mnist", 256)])


def linear_network(seed: int, augmentation: str) -> tuple[TrainedRun, nn.Linear]:
    """Return a network with one linear map from 16x16 pixels to three logits."""
    model = narrow("chen2019_lenet", image=(1, 16, 16), classes=3).double()
    torch.manual_seed(seed)
    weights = nn.Linear(256, 3).double()
    model.front = nn.Sequential(nn.Flatten(), weights)
    return as_trained(model, "chen2019_lenet", augmentation), weights


def random_images(n: int, scale: int) -> tuple[Tensor, Tensor]:
    """Return images of random grey levels, divided by ``scale``, and labels."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (n, 1, 16, 16), generator=generator).double() / scale
    return images, torch.arange(n) % 3


def fgsm(weights: nn.Linear, images: Tensor, labels: Tensor, eps: float, top: float) -> Tensor:
    """Return FGSM images of a linear classifier: along the signs of W'(p - y), clamped."""
    with torch.no_grad():
        residual = weights(images.flatten(1)).softmax(1) - F.one_hot(labels, 3)
        return (images + eps * (residual @ weights.weight).sign().reshape(images.shape)).clamp(0, top)


def predictions(weights: nn.Linear, images: Tensor) -> tuple[Tensor, list[float]]:
    """Return the predicted classes, and the percentage of each class."""
    predicted = weights(images.flatten(1)).argmax(1)
    return predicted, [100 * float((predicted == number).double().mean()) for number in range(3)]


@SCALES
def test_a_black_box_attack_changes_8_levels_by_the_gradients_of_the_source(augmentation: str, scale: int) -> None:
    """Eight grey levels of 255 are 8/256 if white is 255/256; pixels are clamped to white."""
    (source, other), (net, own) = linear_network(3, augmentation), linear_network(0, augmentation)
    images, labels = random_images(40, scale)
    labels[:30] = predictions(own, images)[0][:30]  # so that the clean accuracy is high
    results = measure_black_box(fixed_context(images, labels), source, net, n_images=40)
    assert results["eps"] == pytest.approx(8 / scale, abs=EXACT)
    assert results["largest_change"] == pytest.approx(8 / scale, abs=EXACT)
    changed = {key: fgsm(w, images, labels, 8 / scale, 255 / scale) for key, w in (("b", other), ("w", own))}
    predicted = {key: predictions(own, x)[0] for key, x in (*changed.items(), ("c", images))}
    accuracy = {key: 100 * float((classes == labels).double().mean()) for key, classes in predicted.items()}
    assert len(set(accuracy.values())) == 3
    assert (results["clean"], results["attacked"], results["white_box"]) == (
        accuracy["c"],
        accuracy["b"],
        accuracy["w"],
    )
    assert results["most_predicted"] == max(predictions(own, changed["b"])[1]) != max(predictions(own, changed["w"])[1])
    assert results["clean_images"] == results["attacked_images"] == results["white_box_images"] == 40
    indices = torch.cdist(results["before"].flatten(1), images.flatten(1)).argmin(1)
    assert largest_difference(results["after"], changed["b"][indices]) < EXACT


def test_a_universal_perturbation_is_trained_on_training_images_and_tested_on_test_images(tmp_path: Path) -> None:
    """All training images are mid-grey; a change of 32 levels is 32/256 if white is 255/256."""
    net, weights = linear_network(1, "chen2019.mnist")
    test, labels = random_images(12, 256)
    grey = torch.full((4, 1, 16, 16), 0.5, dtype=torch.float64)
    seen: list[Tensor] = []
    net.model.register_forward_pre_hook(lambda _, x: seen.append(x[0].detach()) if x[0].requires_grad else None)
    train = Batch(grey, torch.zeros(4, dtype=torch.long), grey, torch.arange(4))
    results = measure_white_box(
        fixed_context(test, labels, tmp_path, train),
        net,
        eps=32,
        iterations=2,
        interval=1,
        n_train_images=4,
        n_images=12,
    )
    assert results["eps"] == pytest.approx(32 / 256, abs=EXACT)
    assert len(seen) == 2
    assert 0 < float((torch.cat(seen) - 0.5).abs().max()) <= 32 / 256
    moved = (test + results["perturbation"]).clamp(0, 255 / 256)
    for name, images in (("attacked", moved), ("clean", test)):
        assert results[name] == 100 * float((predictions(weights, images)[0] == labels).double().mean())
        assert results[f"{name}_images"] == 12


def test_an_untargeted_perturbation_moves_away_from_the_correct_class(tmp_path: Path) -> None:
    """The loss of the correct class is larger than with a perturbation towards random classes.

    The early accuracy is that of the last evaluation within 100 iterations.
    """
    net, weights = linear_network(1, "")
    images, _ = random_images(12, 255)
    labels = predictions(weights, images)[0]
    labels = torch.full_like(labels, int(labels.mode().values))
    train = Batch(images, labels, images, torch.arange(12))
    results = {
        objective: measure_white_box(
            fixed_context(images, labels, tmp_path, train), net, 64, 140, 40, 12, 12, objective=objective
        )
        for objective in ("random_class", "untargeted")
    }
    away = results["untargeted"]
    assert away["iterations"] == (0, 40, 80, 120, 140)
    assert away["attacked_early"] == 100 * away["accuracy"][2]
    assert (away["attacked"], away["attacked_early_images"]) == (100 * away["accuracy"][-1], 12)

    @torch.no_grad()
    def mean_loss(perturbation: Tensor) -> float:
        moved = (images + perturbation).clamp(0, 1)
        return float(F.cross_entropy(weights(moved.flatten(1)), labels))

    assert mean_loss(away["perturbation"]) > mean_loss(results["random_class"]["perturbation"])


def test_generated_digits_are_judged_by_the_class_they_were_generated_for(tmp_path: Path) -> None:
    """One network misclassifies 1 and 3 of twenty images of the two epochs, the other 0 and 2."""
    at = {name: MeasurementContext("smoke", 0, tmp_path / f"chen2019-{name}-seed0") for name in ("gan", "table3")}
    record = measure_gan_images(at["gan"], n_images=20, epochs=2, images_per_class=2, width=0.05, n_shown=2)
    at["table3"].dependencies["gan"] = record
    generated = torch.cat([record[f"shown{epoch}"].flatten(0, 1) for epoch in (1, 2)]).float() / 256
    assert len(generated.unique(dim=0)) == 40
    nets = {}
    for name, errors in (("fc", [4, 20, 27, 39]), ("conv", [28, 29])):
        classes = torch.tensor([number for _ in (1, 2) for number in range(10) for _ in (1, 2)])  # 0, 0, 1, 1, ...
        classes[errors] = (classes[errors] + 1) % 10
        nets[name] = network_with_outputs("chen2019_lenet", generated, F.one_hot(classes, 10).float(), "chen2019.mnist")
    results = measure_gan_errors(at["table3"], **nets)
    assert [results[f"fc {epoch}"] for epoch in (1, 2)] == [5, 15]
    assert [results[f"conv {epoch}"] for epoch in (1, 2)] == [0, 10]
    assert {results[f"{name} {epoch}_images"] for name in nets for epoch in (1, 2)} == {20}
