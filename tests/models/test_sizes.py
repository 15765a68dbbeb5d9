"""Images of 20x20 to 64x64 with 1 to 4 channels, and 2 to 196 classes, in every model."""

import functools
import re

import pytest
import torch

import torchcaps
from tests.models.narrow import EVERY, narrow
from tests.sampling import covering_sample
from tests.tolerances import assert_finite
from torchcaps import create_model
from torchcaps.models.registry import MODELS

# (image, classes): the smallest, the largest, and one that is neither square nor even
SIZES = [((1, 20, 20), 2), ((4, 64, 64), 196), ((2, 33, 46), 7)]


def sampled_sizes() -> list[tuple[str, tuple[int, int, int], int]]:
    """Return each model with one of the sizes, or with every size if all cases run."""
    cases = [(name, *size) for name in torchcaps.list_models() for size in SIZES]
    return covering_sample(cases, 0, [lambda case: case[0], lambda case: case[1]])


@functools.cache
def min_side(name: str) -> int:
    """Return the side of the smallest square image of a model."""
    return MODELS.get(name).spec.min_image_side()


@pytest.mark.parametrize(("name", "image", "classes"), sampled_sizes())
def test_other_image_sizes_at_full_width(name: str, image: tuple[int, int, int], classes: int) -> None:
    """On the meta device: every layer fits its input, and the output has the new shape."""
    with torch.device("meta"):
        if min(image[1:]) < min_side(name):
            with pytest.raises(ValueError, match=rf"image .*{min_side(name)}x{min_side(name)}"):
                create_model(name, image=image, classes=classes)
            return
        model = create_model(name, image=image, classes=classes).eval()
        output = model(torch.empty(2, *image))
    assert output.scores.shape == (2, classes)
    if output.reconstruction is not None:
        assert output.reconstruction.shape[-3:] == image


@pytest.mark.parametrize(("name", "side"), [("chen2019_multi_cifar10", 23), ("capsnet_images", 7), ("cnn_images", 8)])
def test_smallest_images(name: str, side: int) -> None:
    assert min_side(name) == side


def test_all_other_models_take_20x20() -> None:
    """The networks for smallNORB have strided or many unpadded convolutions, which leave nothing of 20x20."""
    larger = {name for name in torchcaps.list_models() if min_side(name) > 20}
    smallnorb = {"mazzia2021_smallnorb", "byerly2021_smallnorb", "heinsen2019_smallnorb"}
    assert larger == {"chen2019_multi_cifar10"} | smallnorb


@pytest.mark.parametrize(("image", "classes"), [((1, 20, 20), 2), ((4, 33, 46), 23)], ids=["small", "odd"])
@EVERY
def test_other_image_sizes_give_finite_scores(name: str, image: tuple[int, int, int], classes: int) -> None:
    image = (image[0], *(max(side, min_side(name)) for side in image[1:]))
    model = narrow(name, image=image, classes=classes).eval()
    with torch.no_grad():
        scores = model(torch.rand(1, *image)).scores
    assert scores.shape == (1, classes)
    assert_finite(scores)


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("sabour2017_mnist", 17),
        ("sabour2017_cnn_multimnist", 4),
        ("tsai2020_cifar10", 13),
        ("tsai2020_dynamic_resnet_cifar10", 17),
        ("tsai2020_em_cifar10", 14),
        ("tsai2020_diverse_matrix", 13),
        ("tsai2020_diverse_cnn", 13),
        ("chen2019_multi_cifar10", 23),
        ("chen2019_fc_mnist", 17),
        ("hinton2018_smallnorb", 17),
        ("tsai2020_cnn_cifar10", 5),
    ],
)
def test_error_names_the_smallest_image(name: str, least: int) -> None:
    """That size works, one less does not."""
    channels = narrow(name).spec.image[0]
    assert (
        narrow(name, image=(channels, least, least)).eval()(torch.rand(1, channels, least, least)).scores.shape[0] == 1
    )
    with pytest.raises(ValueError, match=rf"image .*{least}x{least}.*window"):
        narrow(name, image=(channels, least - 1, least - 1))
    with pytest.raises(ValueError, match=re.escape(f"got {least + 9}x1")):
        narrow(name, image=(channels, least + 9, 1))
