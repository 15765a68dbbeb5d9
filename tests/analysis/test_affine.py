"""Affine transformations of images, and the accuracy under them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.narrow import batch, narrow
from tests.tolerances import SAME, assert_equal, relative_rms
from torchcaps.analysis.affine import (
    AMOUNTS,
    TRANSFORMATIONS,
    affine_sweep,
    draw_affine,
    rotate,
    scale,
    shear,
    shift,
    transform,
)
from torchcaps.metrics import wilson_interval
from torchcaps.models import Network

NEAR = SAME[torch.float32]


class EdgeSums(nn.Module):
    """Logits: sums of the pixels at the top, left, bottom and right, classes 0 to 3, counter-clockwise."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(()))

    def forward(self, images: Tensor) -> Tensor:
        pixels = images[:, 0]
        sides = pixels[:, :9], pixels[:, :, :9], pixels[:, -9:], pixels[:, :, -9:]
        return torch.stack([side.sum((1, 2)) for side in sides], dim=1) + self.offset


def edge_classifier() -> Network:
    """A model that predicts the brightest edge of the image."""
    model = narrow("sabour2017_cnn_mnist", classes=4)
    model.front = nn.Sequential(EdgeSums())
    return model


def dots() -> tuple[Tensor, Tensor]:
    """One dot each in the middle of the top, left, bottom and right."""
    images = torch.zeros(4, 1, 28, 28)
    for number, (row, column) in enumerate([(2, 13), (13, 2), (25, 13), (13, 25)]):
        images[number, 0, row : row + 2, column : column + 2] = 1
    return images, torch.arange(4)


def test_rotation_is_counter_clockwise() -> None:
    image = torch.arange(16.0).view(1, 1, 4, 4)
    # A quarter turn brings the right column to the top.
    expected = torch.tensor([[3.0, 7, 11, 15], [2, 6, 10, 14], [1, 5, 9, 13], [0, 4, 8, 12]])
    assert relative_rms(rotate(image, 90)[0, 0], expected) < NEAR
    assert relative_rms(rotate(image, -90)[0, 0], expected.flip(0, 1)) < NEAR


def test_shift_moves_right_and_down_and_pads_with_zeros() -> None:
    image = torch.arange(1.0, 10).view(1, 1, 3, 3)
    assert_equal(shift(image, right=1)[0, 0], torch.tensor([[0.0, 1, 2], [0, 4, 5], [0, 7, 8]]))
    assert_equal(shift(image, down=2)[0, 0], torch.tensor([[0.0, 0, 0], [0, 0, 0], [1, 2, 3]]))
    assert_equal(shift(image, -2, -1)[0, 0], torch.tensor([[6.0, 0, 0], [9, 0, 0], [0, 0, 0]]))
    assert_equal(shift(image, right=7), torch.zeros(1, 1, 3, 3))
    assert_equal(transform(image, "shift", 1), shift(image, 1, 1))
    assert_equal(transform(image, "shift_x", 1), shift(image, right=1))
    assert_equal(transform(image, "shift_y", 1), shift(image, down=1))


def test_shift_by_half_a_pixel_averages_two_pixels() -> None:
    image = torch.tensor([[2.0, 4, 8]]).view(1, 1, 1, 3)
    assert relative_rms(shift(image, right=0.5), torch.tensor([[1.0, 3, 6]]).view(1, 1, 1, 3)) < NEAR


def test_shear_moves_lower_rows_to_the_right() -> None:
    column = torch.zeros(1, 1, 5, 5)
    column[..., 2] = 1
    assert relative_rms(shear(column, 1.0)[0, 0], torch.eye(5)) < NEAR


def test_scale_by_two_doubles_distances_from_the_centre() -> None:
    image = torch.zeros(1, 1, 9, 9)
    image[..., 4, 6] = 1
    enlarged = scale(image, 2.0)[0, 0]
    assert float(enlarged[4, 8]) == pytest.approx(1.0, abs=NEAR)
    assert float(enlarged[4, :7].abs().max()) < NEAR
    assert float(scale(image, 0.5)[0, 0, 4, 5]) == pytest.approx(1.0, abs=NEAR)


@pytest.mark.parametrize("kind", TRANSFORMATIONS)
def test_every_transformation_has_an_identity_amount(kind: str) -> None:
    images = torch.rand(2, 1, 7, 5)
    identity = 1.0 if kind == "scale" else 0.0
    assert identity in AMOUNTS[kind]
    assert_equal(transform(images, kind, identity), images)
    assert transform(images.double(), kind, AMOUNTS[kind][0]).dtype == torch.float64


def test_a_quarter_turn_changes_every_prediction_of_the_edge_classifier() -> None:
    images, labels = dots()
    amounts = {"rotation": (0, 90, -90)}
    plain = affine_sweep(edge_classifier(), images, labels, ("rotation",), amounts)
    turned = affine_sweep(edge_classifier(), images, (labels + 1) % 4, ("rotation",), amounts)
    assert plain.n_correct == ((4, 0, 0),)
    assert turned.n_correct == ((0, 4, 0),)  # counter-clockwise: the top becomes the left
    assert plain.n == 4


def test_a_shift_sweep_evaluates_the_shifted_images() -> None:
    images, labels = dots()
    # A dot at the left, shifted far to the right, is at the right.
    sweep = affine_sweep(edge_classifier(), images[1:2], labels[3:], ("shift_x",), {"shift_x": (0, 23)})
    assert sweep.n_correct == ((0, 1),)
    model = narrow("sabour2017_mnist").eval()
    images, labels, _ = batch(model)
    sweep = affine_sweep(model, images, labels, ("shift",), {"shift": (3,)})
    by_hand = torch.zeros_like(images)
    by_hand[:, :, 3:, 3:] = images[:, :, :-3, :-3]
    with torch.no_grad():
        assert sweep.n_correct == ((int(model.is_correct(model(by_hand), labels).sum()),),)


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
def test_identity_amounts_give_the_accuracy_without_transformation(name: str) -> None:
    model = narrow(name)
    images, labels, _ = batch(model)
    calls: list[int] = []
    identity = {"rotation": (0,), "scale": (1,), "shear": (0,), "shift": (0,)}
    sweep = affine_sweep(model, images, labels, amounts=identity, batch_size=5, progress=lambda: calls.append(1))
    assert model.training is True
    with torch.no_grad():
        n_correct = int(model.is_correct(model.eval()(images), labels).sum())
    assert sweep.n_correct == ((n_correct,),) * 4
    assert sweep.accuracy == ((n_correct / 8,),) * 4
    low, high = wilson_interval(n_correct, 8)
    assert (sweep.low, sweep.high) == (((low,),) * 4, ((high,),) * 4)
    assert len(calls) == 4 * 2


def test_invalid_arguments_are_rejected() -> None:
    images, labels = dots()
    model = edge_classifier()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"kinds": ("rotations",)}, "kind 'rotations'.*'rotation'"),
        ({"kinds": ()}, "kinds"),
        ({"kinds": ("scale",), "amounts": {"scale": (0.0,)}}, "scale.*0.0"),
        ({"kinds": ("scale",), "amounts": {"scale": ()}}, "amounts"),
        ({"kinds": ("scale",), "amounts": {"shear": (0.1,)}}, "amounts.*'shear'"),
        ({"kinds": ("shift",), "amounts": {"shift": (float("nan"),)}}, "amount.*nan"),
        ({"labels": labels[:2]}, "labels.*2"),
        ({"images": images[0]}, "images"),
    ]
    for changes, argument in cases:
        with pytest.raises(ValueError, match=argument):
            affine_sweep(**({"model": model, "images": images, "labels": labels} | changes))


def test_figure_with_one_and_with_several_models(tmp_path: Path) -> None:
    images, labels = dots()
    one = affine_sweep(edge_classifier(), images, labels)
    odd = affine_sweep(edge_classifier(), images, labels, ("scale", "shift_x", "shift_y"))
    draw_affine({"one": one, "another": one}, tmp_path / "two.png", "a title")
    draw_affine({"one": odd}, tmp_path / "three.svg")
    assert min((tmp_path / name).stat().st_size for name in ("two.png", "three.svg")) > 5000
    with pytest.raises(ValueError, match="results"):
        draw_affine({"one": one, "odd": odd}, tmp_path / "no.png")
    with pytest.raises(ValueError, match="results"):
        draw_affine({}, tmp_path / "no.png")
