"""Attacks and made digits as the records have them: against linear classifiers and nets whose answers are known."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.narrow import narrow
from tests.papers.nets import as_trained, given, knowing
from tests.tolerances import EXACT, largest_difference
from torchcaps.data import Batch
from torchcaps.papers.measures.robustness import black_box, gan_errors, gan_images, white_box
from torchcaps.reproduce.context import Context
from torchcaps.training import Trained

SCALES = pytest.mark.parametrize(("augmentation", "scale"), [("", 255), ("chen2019.mnist", 256)])


def linear(seed: int, augmentation: str) -> tuple[Trained, nn.Linear]:
    """A network of one linear map from 16x16 pixels to three logits."""
    model = narrow("chen2019_lenet", image=(1, 16, 16), classes=3).double()
    torch.manual_seed(seed)
    weights = nn.Linear(256, 3).double()
    model.front = nn.Sequential(nn.Flatten(), weights)
    return as_trained(model, "chen2019_lenet", augmentation), weights


def levels(n: int, scale: int) -> tuple[Tensor, Tensor]:
    """Images of all grey levels, black and white ones too, as a net that divides bytes by ``scale`` sees them."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (n, 1, 16, 16), generator=generator).double() / scale
    return images, torch.arange(n) % 3


def attacked(weights: nn.Linear, images: Tensor, labels: Tensor, eps: float, top: float) -> Tensor:
    """FGSM of a linear classifier by hand: along the signs of W'(p - y), and back to where a pixel may be."""
    with torch.no_grad():
        residual = weights(images.flatten(1)).softmax(1) - F.one_hot(labels, 3)
        return (images + eps * (residual @ weights.weight).sign().reshape(images.shape)).clamp(0, top)


def shares(weights: nn.Linear, images: Tensor) -> tuple[Tensor, list[float]]:
    """What is predicted, and how often each class is, in percent."""
    told = weights(images.flatten(1)).argmax(1)
    return told, [100 * float((told == number).double().mean()) for number in range(3)]


@SCALES
def test_a_black_box_attack_is_of_8_levels_with_the_sources_gradients(augmentation: str, scale: int) -> None:
    """Eight grey levels of 255 are 8/256 to a net whose white is 255/256; nothing is whiter than white."""
    (source, other), (net, own) = linear(3, augmentation), linear(0, augmentation)
    images, labels = levels(40, scale)
    labels[:30] = shares(own, images)[0][:30]  # so that the net is right at first
    found = black_box(given(images, labels), source, net, images=40)
    assert found["eps"] == pytest.approx(8 / scale, abs=EXACT)
    assert found["largest_change"] == pytest.approx(8 / scale, abs=EXACT)
    changed = {key: attacked(w, images, labels, 8 / scale, 255 / scale) for key, w in (("b", other), ("w", own))}
    told = {key: shares(own, x)[0] for key, x in (*changed.items(), ("c", images))}
    right = {key: 100 * float((predicted == labels).double().mean()) for key, predicted in told.items()}
    assert len(set(right.values())) == 3, "all three must differ for this to say anything"
    assert (found["clean"], found["attacked"], found["white_box"]) == (right["c"], right["b"], right["w"])
    assert found["most_predicted"] == max(shares(own, changed["b"])[1]) != max(shares(own, changed["w"])[1])
    assert found["clean_images"] == found["attacked_images"] == found["white_box_images"] == 40
    places = torch.cdist(found["before"].flatten(1), images.flatten(1)).argmin(1)
    assert largest_difference(found["after"], changed["b"][places]) < EXACT


def test_a_universal_change_is_learnt_on_training_images_and_tried_on_test_images(tmp_path: Path) -> None:
    """All training images are half grey; of the change 32 levels are 32/256, to a net whose white is 255/256."""
    net, weights = linear(1, "chen2019.mnist")
    test, labels = levels(12, 256)
    grey = torch.full((4, 1, 16, 16), 0.5, dtype=torch.float64)
    seen: list[Tensor] = []
    net.model.register_forward_pre_hook(lambda _, x: seen.append(x[0].detach()) if x[0].requires_grad else None)
    train = Batch(grey, torch.zeros(4, dtype=torch.long), grey, torch.arange(4))
    found = white_box(given(test, labels, tmp_path, train), net, eps=32, iterations=2, every=1, learnt=4, images=12)
    assert found["eps"] == pytest.approx(32 / 256, abs=EXACT)
    assert len(seen) == 2
    assert 0 < float((torch.cat(seen) - 0.5).abs().max()) <= 32 / 256, "not the training images"
    moved = (test + found["perturbation"]).clamp(0, 255 / 256)
    for name, images in (("attacked", moved), ("clean", test)):
        assert found[name] == 100 * float((shares(weights, images)[0] == labels).double().mean())
        assert found[f"{name}_images"] == 12


def test_made_digits_are_told_by_the_class_they_were_made_for(tmp_path: Path) -> None:
    """Of twenty that were made after the first epoch a net mistakes one for the next class, after the second three."""
    at = {name: Context("smoke", 0, tmp_path / f"chen2019-{name}-seed0") for name in ("gan", "table3")}
    record = gan_images(at["gan"], images=20, epochs=2, per_class=2, width=0.05, shown=2)
    at["table3"].records["gan"] = record
    made = torch.cat([record[f"shown{epoch}"].flatten(0, 1) for epoch in (1, 2)]).float() / 256
    assert len(made.unique(dim=0)) == 40
    nets = {}
    for name, wrong in (("fc", [4, 20, 27, 39]), ("conv", [28, 29])):
        answers = torch.tensor([number for _ in (1, 2) for number in range(10) for _ in (1, 2)])  # 0, 0, 1, 1, ...
        answers[wrong] = (answers[wrong] + 1) % 10
        nets[name] = knowing("chen2019_lenet", made, F.one_hot(answers, 10).float(), "chen2019.mnist")
    found = gan_errors(at["table3"], **nets)
    assert [found[f"fc {epoch}"] for epoch in (1, 2)] == [5, 15]
    assert [found[f"conv {epoch}"] for epoch in (1, 2)] == [0, 10]
    assert {found[f"{name} {epoch}_images"] for name in nets for epoch in (1, 2)} == {20}
