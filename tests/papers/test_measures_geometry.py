"""How capsules move and routing settles, as the records have it: against capsules and nets that are known."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.analysis.test_alignment import dot, placer
from tests.models.narrow import batch, narrow
from tests.papers.nets import as_trained, given, knowing
from tests.tolerances import SAME, largest_difference
from torchcaps import create_model
from torchcaps.data import ImageSet
from torchcaps.papers.measures.geometry import alignment, logits, two_domains

CLOSE = SAME[torch.float32]
WAYS = {"Rot+": "rotation +", "x+": "x +", "y+": "y +", "Rot-": "rotation -", "x-": "x -", "y-": "y -"}


def bent() -> list[float]:
    """The ratios of ``v_i = (i, i²)`` by hand: the angle of the first axis of a symmetric 2x2 matrix."""
    second, third, fourth = (sum(i**power for i in range(1, 6)) for power in (2, 3, 4))
    angle = math.atan2(2 * third, second - fourth) / 2
    return [abs(i * math.cos(angle) + i * i * math.sin(angle)) / math.hypot(i, i * i) for i in range(1, 6)]


def test_classes_count_the_same_however_many_images_they_have() -> None:
    """Three images of class 0, which moves along a line, and one of class 2, whose way is bent by shifts to a side."""
    images, labels = dot().repeat(4, 1, 1, 1), torch.tensor([0, 0, 0, 2])
    images[3] = images[3].roll(-3, 1)  # over the middle, so that turning it goes across: a cosine of about 0
    found = alignment(given(images, labels), as_trained(placer(), "sabour2017_mnist"), images=4)
    ratios = bent()
    mean = sum(ratios) / 5
    variance = sum((ratio - mean) ** 2 for ratio in ratios) / 5
    for way in ("x+", "x-"):
        assert found[f"0 {way}"] == pytest.approx(1, abs=CLOSE)
        assert found[f"2 {way}"] == pytest.approx(mean, abs=CLOSE)
        assert found[f"average {way}"] == pytest.approx((1 + mean) / 2, abs=CLOSE)
        half = 1.959964 * math.sqrt(0 / 3 + variance / 1) / 2
        assert found[f"average {way}_half"] == pytest.approx(half, abs=CLOSE)
    for way in ("y+", "y-"):
        assert found[f"average {way}"] == pytest.approx(1, abs=CLOSE)
    assert "1 x+" not in found, "there is no image of it"
    sides = [float(found["cosines"][k, way]) for k in range(4) for way in range(3) if found["moved"][k, way]]
    assert found["cosine_mean"] == pytest.approx(sum(sides) / len(sides), abs=CLOSE)
    for name, count in (("below_minus", sum(c < -0.5 for c in sides)), ("above", sum(c > 0.5 for c in sides))):
        assert found[f"cosine_{name}_half"] == pytest.approx(100 * count / len(sides), abs=CLOSE)
        assert 0 < count < len(sides)
    assert min(map(abs, sides)) < 0.4


def test_the_ways_of_the_table_are_those_of_the_analysis() -> None:
    model = narrow("sabour2017_mnist")
    images, labels, _ = batch(model, 3)
    found = alignment(given(images, labels), as_trained(model, "sabour2017_mnist"), images=3)
    averages = dict(zip(found["names"], found["averages"].tolist(), strict=True))
    assert len(set(averages.values())) == 6
    for way, name in WAYS.items():
        assert found[f"average {way}"] == averages[name]
        assert found[f"2 {way}"] == float(found["ratios"][2, found["names"].index(name)])
        assert found[f"random {way}"] == found["reference"][0] > found[f"random as printed {way}"]


def changes(model: Any, images: Tensor, iterations: int) -> tuple[list[float], list[float]]:
    """Procedure 1 of Sabour 2017: the mean change of a logit, and of a coupling, in each iteration."""
    (layer,) = model.capsules.layers.children()
    with torch.no_grad():
        votes = torch.einsum("bix,ixjd->bijd", model.front(images).pose.flatten(1, -2), layer.weight)
    of_logits, of_couplings, b = [], [], torch.zeros_like(votes[..., 0])
    for _ in range(iterations):
        total = torch.einsum("bij,bijd->bjd", b.softmax(2), votes)
        square = total.square().sum(2, keepdim=True)
        agreement = torch.einsum("bjd,bijd->bij", total * square.sqrt() / (1 + square), votes)
        of_logits.append(float(agreement.abs().mean()))
        of_couplings.append(float(((b + agreement).softmax(2) - b.softmax(2)).abs().mean()))
        b = b + agreement
    return of_logits, of_couplings


def test_logits_before_and_after_training_are_those_of_the_fresh_and_the_trained_net() -> None:
    fields: dict[str, Any] = {"image": (1, 20, 20), "width": 4, "types": 2, "classes": 3, "dim": 4, "hidden": (8,)}
    model: Any = create_model("sabour2017_mnist", **fields)
    next(model.capsules.layers.children()).weight.data.mul_(20)  # as if it had learnt something
    images, labels, _ = batch(model, 3)
    torch.manual_seed(5)
    found = logits(given(images, labels), as_trained(model, "sabour2017_mnist", **fields), images=3, iterations=4)
    torch.manual_seed(5)
    for stage, net in (("untrained", create_model("sabour2017_mnist", **fields)), ("trained", model)):
        of_logits, of_couplings = changes(net, images, 4)
        for number in range(4):
            assert found[f"{stage} {number + 1}"] == pytest.approx(of_logits[number], rel=CLOSE)
            assert found[f"{stage} coupling {number + 1}"] == pytest.approx(of_couplings[number], abs=CLOSE)
        assert largest_difference(found[f"{stage}_change"][0], of_logits) < CLOSE
    assert found["trained 1"] > 10 * found["untrained 1"]
    assert found["trained coupling 1"] > 100 * CLOSE


def test_two_domains_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five digits at random places three are right, of four transformed ones one."""
    pixels = (100 * torch.rand(9, 1, 40, 40)).byte()
    parts = {"expanded-mnist": slice(0, 5), "affnist": slice(5, 9)}
    labels = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8])
    told = torch.tensor([0, 1, 2, 9, 9, 5, 9, 9, 9])
    images = pixels.float() / 255
    net = knowing("sabour2017_cnn_mnist", images, torch.eye(10)[told])
    context = given(images[:5], labels[:5])

    def dataset(self: object, name: str, split: str = "test", n: int | None = None) -> ImageSet:
        return ImageSet(name, split, pixels[parts[name]][:n], labels[parts[name]][:n], tuple("0123456789"))

    monkeypatch.setattr(type(context), "dataset", dataset)
    found = two_domains(context, net, images=5, affine=4, sweep=2)
    assert (found["expanded"], found["affine"]) == (60, 25)
    assert (found["expanded_images"], found["affine_images"]) == (5, 4)
