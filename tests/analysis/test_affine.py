"""Images turned, scaled, sheared and shifted, and what a model makes of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.narrow import batch, narrow
from tests.tolerances import SAME, relative_rms
from torchcaps.analysis.affine import (
    AMOUNTS,
    KINDS,
    affine_sweep,
    draw_affine,
    rotated,
    scaled,
    sheared,
    shifted,
    transformed,
)
from torchcaps.metrics import wilson_interval
from torchcaps.models import Network

NEAR = SAME[torch.float32]


class Quarters(nn.Module):
    """Logits that are the ink at the top, left, bottom and right of an image: classes 0 to 3, counter-clockwise."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(()))

    def forward(self, images: Tensor) -> Tensor:
        ink = images[:, 0]
        sides = ink[:, :9], ink[:, :, :9], ink[:, -9:], ink[:, :, -9:]
        return torch.stack([side.sum((1, 2)) for side in sides], dim=1) + self.nothing


def looker() -> Network:
    """A model that classifies by where the ink is."""
    model = narrow("sabour2017_cnn_mnist", classes=4)
    model.front = nn.Sequential(Quarters())
    return model


def dots() -> tuple[Tensor, Tensor]:
    """One dot each in the middle of the top, left, bottom and right."""
    images = torch.zeros(4, 1, 28, 28)
    for number, (row, column) in enumerate([(2, 13), (13, 2), (25, 13), (13, 25)]):
        images[number, 0, row : row + 2, column : column + 2] = 1
    return images, torch.arange(4)


def test_images_turn_counter_clockwise() -> None:
    image = torch.arange(16.0).view(1, 1, 4, 4)
    # By hand: a quarter turn brings the right-hand column to the top.
    expected = torch.tensor([[3.0, 7, 11, 15], [2, 6, 10, 14], [1, 5, 9, 13], [0, 4, 8, 12]])
    assert relative_rms(rotated(image, 90)[0, 0], expected) < NEAR
    assert relative_rms(rotated(image, -90)[0, 0], expected.flip(0, 1)) < NEAR


def test_images_shift_right_and_down_with_zeros_coming_in() -> None:
    image = torch.arange(1.0, 10).view(1, 1, 3, 3)
    assert torch.equal(shifted(image, right=1)[0, 0], torch.tensor([[0.0, 1, 2], [0, 4, 5], [0, 7, 8]]))
    assert torch.equal(shifted(image, down=2)[0, 0], torch.tensor([[0.0, 0, 0], [0, 0, 0], [1, 2, 3]]))
    assert torch.equal(shifted(image, -2, -1)[0, 0], torch.tensor([[6.0, 0, 0], [9, 0, 0], [0, 0, 0]]))
    assert torch.equal(shifted(image, right=7), torch.zeros(1, 1, 3, 3))
    assert torch.equal(transformed(image, "shift", 1), shifted(image, 1, 1))
    assert torch.equal(transformed(image, "shift_x", 1), shifted(image, right=1))
    assert torch.equal(transformed(image, "shift_y", 1), shifted(image, down=1))


def test_half_a_pixel_is_the_mean_of_two() -> None:
    image = torch.tensor([[2.0, 4, 8]]).view(1, 1, 1, 3)
    assert relative_rms(shifted(image, right=0.5), torch.tensor([[1.0, 3, 6]]).view(1, 1, 1, 3)) < NEAR


def test_a_shear_moves_what_is_below_to_the_right() -> None:
    column = torch.zeros(1, 1, 5, 5)
    column[..., 2] = 1
    assert relative_rms(sheared(column, 1.0)[0, 0], torch.eye(5)) < NEAR


def test_a_scale_of_two_doubles_distances_from_the_middle() -> None:
    image = torch.zeros(1, 1, 9, 9)
    image[..., 4, 6] = 1
    found = scaled(image, 2.0)[0, 0]
    assert torch.allclose(found[4, 8], torch.tensor(1.0))
    assert float(found[4, :7].abs().max()) < NEAR
    assert float(scaled(image, 0.5)[0, 0, 4, 5]) == pytest.approx(1.0, abs=NEAR)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_an_amount_that_changes_nothing(kind: str) -> None:
    images = torch.rand(2, 1, 7, 5)
    nothing = 1.0 if kind == "scale" else 0.0
    assert nothing in AMOUNTS[kind]
    assert torch.equal(transformed(images, kind, nothing), images)
    assert transformed(images.double(), kind, AMOUNTS[kind][0]).dtype == torch.float64


def test_a_quarter_turn_turns_every_answer_of_a_model_that_looks_where_the_ink_is() -> None:
    images, labels = dots()
    amounts = {"rotation": (0, 90, -90)}
    plain = affine_sweep(looker(), images, labels, ("rotation",), amounts)
    turned = affine_sweep(looker(), images, (labels + 1) % 4, ("rotation",), amounts)
    assert plain.n_right == ((4, 0, 0),)
    assert turned.n_right == ((0, 4, 0),)  # counter-clockwise: what was at the top is at the left
    assert plain.n == 4


def test_a_shift_of_pixels_is_the_shifted_image_by_hand() -> None:
    images, labels = dots()
    # A dot at the left, shifted far right, is at the right; that at the right has left the image.
    sweep = affine_sweep(looker(), images[1:2], labels[3:], ("shift_x",), {"shift_x": (0, 23)})
    assert sweep.n_right == ((0, 1),)
    model = narrow("sabour2017_mnist").eval()
    images, labels, _ = batch(model)
    sweep = affine_sweep(model, images, labels, ("shift",), {"shift": (3,)})
    by_hand = torch.zeros_like(images)
    by_hand[:, :, 3:, 3:] = images[:, :, :-3, :-3]
    with torch.no_grad():
        assert sweep.n_right == ((int(model.is_correct(model(by_hand), labels).sum()),),)


@pytest.mark.parametrize(
    "name",
    [
        "sabour2017_mnist",
        "sabour2017_multimnist",
        "tsai2020_diverse_matrix",
        "hinton2018_smallnorb",
        "tsai2020_resnet18_cifar10",
    ],
)
def test_no_change_gives_the_plain_accuracy(name: str) -> None:
    model = narrow(name)
    images, labels, _ = batch(model)
    calls: list[int] = []
    nothing = {"rotation": (0,), "scale": (1,), "shear": (0,), "shift": (0,)}
    sweep = affine_sweep(model, images, labels, amounts=nothing, batch_size=5, progress=lambda: calls.append(1))
    assert model.training  # as it was
    with torch.no_grad():
        right = int(model.is_correct(model.eval()(images), labels).sum())
    assert sweep.n_right == ((right,),) * 4
    assert sweep.accuracy == ((right / 8,),) * 4
    low, high = wilson_interval(right, 8)
    assert (sweep.low, sweep.high) == (((low,),) * 4, ((high,),) * 4)
    assert len(calls) == 4 * 2


def test_what_makes_no_sense_is_refused() -> None:
    images, labels = dots()
    model = looker()
    refusals: list[tuple[dict[str, Any], str]] = [
        ({"kinds": ("rotations",)}, "did you mean 'rotation'"),
        ({"kinds": ()}, "one or more"),
        ({"kinds": ("scale",), "amounts": {"scale": (0.0,)}}, "factor over 0"),
        ({"kinds": ("scale",), "amounts": {"scale": ()}}, "one or more"),
        ({"kinds": ("scale",), "amounts": {"shear": (0.1,)}}, "kinds that are asked for"),
        ({"kinds": ("shift",), "amounts": {"shift": (float("nan"),)}}, "finite"),
        ({"labels": labels[:2]}, "one for each of 4"),
        ({"images": images[0]}, r"\[B, C, H, W\]"),
    ]
    for changes, words in refusals:
        with pytest.raises(ValueError, match=words):
            affine_sweep(**({"model": model, "images": images, "labels": labels} | changes))


def test_curves_of_several_models_are_drawn(tmp_path: Path) -> None:
    images, labels = dots()
    one = affine_sweep(looker(), images, labels)
    odd = affine_sweep(looker(), images, labels, ("scale", "shift_x", "shift_y"))
    draw_affine({"one": one, "another": one}, tmp_path / "two.png", "a title")
    draw_affine({"one": odd}, tmp_path / "three.svg")
    assert all((tmp_path / name).stat().st_size > 5000 for name in ("two.png", "three.svg"))
    with pytest.raises(ValueError, match="same kinds"):
        draw_affine({"one": one, "odd": odd}, tmp_path / "no.png")
    with pytest.raises(ValueError, match="none"):
        draw_affine({}, tmp_path / "no.png")
