"""Invalid arguments of `create_model` and `register_model`, and invalid inputs of models."""

from typing import Any

import pytest
import torch

from tests.bad_input.rejection import Rejection, check_rejection
from tests.models.narrow import narrow
from torchcaps import create_model
from torchcaps.models import LossConfig, OptimizerConfig, Recipe, Sabour2017, register_model
from torchcaps.routing import Dynamic

SABOUR, CNN = "sabour2017_mnist", "sabour2017_cnn_mnist"

# Name of the model, fields, type of the exception, argument, value, and an accepted value that the message must list.
CREATE: list[tuple[Any, dict[str, Any], type[Exception], str, str, str]] = [
    ("sabour2017_mnst", {}, ValueError, "model", "'sabour2017_mnst'", "'sabour2017_mnist'"),
    ("resnet", {}, ValueError, "model", "'resnet'", ""),
    ("zzz", {}, ValueError, "model", "'zzz'", "'capsnet_images'"),
    (7, {}, TypeError, "model", "7", "name"),
    (SABOUR, {"depth": 3}, ValueError, SABOUR, "'depth'", "'image'"),
    (SABOUR, {"num_classes": 3}, ValueError, SABOUR, "'num_classes'", "use classes=10"),
    (SABOUR, {"in_chans": 3}, ValueError, SABOUR, "'in_chans'", "use image=(channels, height, width)"),
    (SABOUR, {"classes": 1}, ValueError, "classes", "1", "2"),
    (SABOUR, {"classes": 2.5}, TypeError, "classes", "2.5", "int"),
    (SABOUR, {"image": (28, 28)}, ValueError, "image", "(28, 28)", "(channels, height, width)"),
    (SABOUR, {"image": (0, 28, 28)}, ValueError, "image", "0", "1"),
    (SABOUR, {"image": (1, 16, 28)}, ValueError, "image", "16x28", "17x17"),
    (SABOUR, {"image": (64, 64, 3)}, ValueError, "image", "64x3", "channels"),
    (SABOUR, {"image": 28}, ValueError, "image", "28", "(channels, height, width)"),
    (SABOUR, {"routing": "dynamc"}, ValueError, "routing", "'dynamc'", "'dynamic'"),
    (SABOUR, {"routing": Dynamic}, TypeError, "routing", "class", "Dynamic(3)"),
    (SABOUR, {"preset": "mine"}, ValueError, "preset", "'mine'", "'official'"),
    (SABOUR, {"reconstruction": 1}, TypeError, "reconstruction", "1", "True"),
    (SABOUR, {"n_objects": 11}, ValueError, "n_objects", "11", "10"),
    (SABOUR, {"hidden": 512}, ValueError, "hidden", "512", "tuple"),
    (SABOUR, {"hidden": (512, "a")}, TypeError, "hidden", "'a'", "int"),
    (SABOUR, {"width": 0}, ValueError, "width", "0", "1"),
    (SABOUR, {"types": -3}, ValueError, "types", "-3", "1"),
    (SABOUR, {"streamed": "never"}, ValueError, "streamed", "'never'", "'auto'"),
    (SABOUR, {"kernel": 4, "padding": "same"}, ValueError, "kernel", "4", "odd"),
    (CNN, {"preset": "official"}, ValueError, "preset", "'official'", "'paper'"),
    (CNN, {"dropout": 1.5}, ValueError, "dropout", "1.5", "1"),
    (CNN, {"features": (5,)}, ValueError, "features", "(5,)", "2"),
    ("sabour2017_cnn_multimnist", {"n_objects": 20}, ValueError, "n_objects", "20", "10"),
    ("hinton2018_smallnorb", {"preset": "official"}, ValueError, "preset", "'official'", "'paper'"),
    ("chen2019_conv_mnist", {"rows": 3}, ValueError, "rows", "3", "8"),
    ("chen2019_multi_cifar10", {"rows": 3}, ValueError, "rows", "3", "8"),
    ("yang2021_mnist", {"slope": -1.0}, ValueError, "slope", "-1.0", "0"),
    ("yang2021_mnist", {"penalty": "l3"}, ValueError, "penalty", "'l3'", "'l2'"),
    ("yang2021_mnist", {"penalty": "l1", "routing": "em"}, ValueError, "penalty", "EM", "Quadratic"),
    ("choi2019_cifar10", {"depth": -1}, ValueError, "depth", "-1", "0"),
    ("tsai2020_cifar10", {"dim": 15}, ValueError, "dim", "15", "16"),
    ("tsai2020_diverse_matrix", {"reconstruction": True}, ValueError, "reconstruction", "", "False"),
]


@pytest.mark.parametrize(("name", "fields", "error", "argument", "value", "accepted"), CREATE)
def test_invalid_model_is_rejected(
    name: Any, fields: dict[str, Any], error: type[Exception], argument: str, value: str, accepted: str
) -> None:
    check_rejection(Rejection(lambda: create_model(name, **fields), error, argument, value, accepted))


images = torch.rand(2, 1, 28, 28)
# Images, labels, type of the exception, argument, value, accepted value.
INPUTS: dict[str, tuple[torch.Tensor, Any, type[Exception], str, str, str]] = {
    "image size": (torch.rand(2, 1, 32, 32), None, ValueError, "images", "[2, 1, 32, 32]", "[B, 1, 28, 28]"),
    "image rank": (images[0], None, ValueError, "images", "[1, 28, 28]", "[B, 1, 28, 28]"),
    "image dtype": (images.byte(), None, TypeError, "images", "torch.uint8", "images.float() / 255"),
    "NaN": (torch.full_like(images, torch.nan), None, ValueError, "images", "1568", "finite"),
    "number of labels": (images, torch.tensor([1, 2, 3]), ValueError, "labels", "[3]", "2"),
    "label too large": (images, torch.tensor([1, 10]), ValueError, "labels", "10", "0..9"),
    "label dtype": (images, torch.tensor([1.0, 2.0]), TypeError, "labels", "torch.float32", "torch.int64"),
    "label columns": (images, torch.tensor([[1, 2], [3, 4]]), ValueError, "labels", "[2, 2]", "[B, 10]"),
    "label list": (images, [1, 2], TypeError, "labels", "list", "tensor"),
    "scalar label": (images, torch.tensor(1), ValueError, "labels", "[]", "2"),
}


@pytest.mark.parametrize("case", INPUTS)
@pytest.mark.parametrize("name", [SABOUR, CNN])
def test_invalid_model_input_is_rejected(name: str, case: str) -> None:
    images, labels, *expected = INPUTS[case]
    for model in (narrow(name), narrow(name).eval()):
        check_rejection(Rejection(lambda: model(images, labels), *expected))  # noqa: B023


@pytest.mark.parametrize(
    ("labels", "value", "accepted"),
    [
        (torch.tensor([1, 2]), "[2]", "[B, 2]"),
        (torch.eye(10)[:2], "1", "2"),
        (torch.tensor([[1, 2, 3], [4, 5, 6]]), "[2, 3]", "[B, 10]"),
        (torch.tensor([[1, 1], [2, 3]]), "twice", "2"),
    ],
    ids=["one label", "one-hot", "three labels", "equal labels"],
)
def test_invalid_labels_of_two_objects_are_rejected(labels: torch.Tensor, value: str, accepted: str) -> None:
    model = narrow("sabour2017_multimnist")
    check_rejection(Rejection(lambda: model(torch.rand(2, 1, 36, 36), labels), ValueError, "labels", value, accepted))


def loss_without_targets() -> None:
    model, labels = narrow(SABOUR), torch.tensor([1, 2])
    model.loss()(model(images, labels), labels)


OTHERS = {
    "decode without decoder": Rejection(
        lambda: narrow(SABOUR, reconstruction=False).decode(torch.rand(2, 10, 16)), ValueError, "decoder"
    ),
    "loss without targets": Rejection(loss_without_targets, ValueError, "targets"),
    "loss of a tensor": Rejection(
        lambda: narrow(SABOUR).loss()(torch.rand(2, 10), torch.tensor([1, 2])), TypeError, "output", "Tensor"
    ),
    "registered name": Rejection(lambda: register_model(SABOUR, Sabour2017()), ValueError, "model", f"'{SABOUR}'"),
    "unknown recipe field": Rejection(
        lambda: register_model("mine", Sabour2017(), foo=3), ValueError, "Recipe", "'foo'"
    ),
    "spec": Rejection(lambda: register_model("mine", 3), TypeError, "spec", "int"),  # type: ignore[arg-type]
    "learning rate": Rejection(lambda: OptimizerConfig("adam", 0.0), ValueError, "lr", "0.0", "0"),
    "optimizer": Rejection(
        lambda: OptimizerConfig("lion", 1.0),  # type: ignore[arg-type]
        ValueError,
        "name",
        "'lion'",
        "'adam'",
    ),
    "epochs and steps": Rejection(lambda: Recipe(epochs=3, steps=4), ValueError, "epochs", "4", "steps"),
    "batch size": Rejection(lambda: Recipe(batch_size=0), ValueError, "batch_size", "0", "1"),
    "validation fraction": Rejection(lambda: Recipe(val_fraction=1.0), ValueError, "val_fraction", "1.0", "0"),
    "margin steps": Rejection(lambda: LossConfig(margin_steps=0), ValueError, "margin_steps", "0", "1"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_invalid_use_of_a_model_is_rejected(name: str) -> None:
    check_rejection(OTHERS[name])


@pytest.mark.parametrize("attribute", ["recipe", "name", "spec", "n_objects"])
def test_settings_of_a_network_are_read_only(attribute: str) -> None:
    model = narrow(SABOUR)
    with pytest.raises(AttributeError, match=attribute):
        setattr(model, attribute, getattr(model, attribute))
