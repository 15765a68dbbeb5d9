"""Invalid model names, field values, images and labels: the error names the argument and the value."""

import pytest
import torch

from tests.models.narrow import narrow
from torchcaps import create_model
from torchcaps._core.labels import split_labels
from torchcaps.models import LossConfig, OptimizerConfig, Recipe, Sabour2017, register
from torchcaps.routing import Dynamic


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("sabour2017_mnst", {}, "model .*'sabour2017_mnst'.*'sabour2017_mnist'"),  # suggests the closest name
        ("resnet", {}, "model .*'resnet'"),
        ("zzz", {}, "model .*'zzz'.*'capsnet_images'"),
        (7, {}, "model .*7"),
        ("sabour2017_mnist", {"depth": 3}, "sabour2017_mnist .*'depth'.*'image', 'classes'"),
        ("sabour2017_mnist", {"classes": 1}, "classes .*2.*got 1"),
        ("sabour2017_mnist", {"classes": 2.5}, "classes .*int.*got 2.5"),
        ("sabour2017_mnist", {"image": (28, 28)}, r"image .*\(channels, height, width\).*got \(28, 28\)"),
        ("sabour2017_mnist", {"image": (0, 28, 28)}, "image's channels .*got 0"),
        ("sabour2017_mnist", {"image": (1, 16, 28)}, "image .*17x17.*sabour2017_mnist.*got 16x28"),
        ("sabour2017_mnist", {"image": (64, 64, 3)}, "image .*got 64x3.*channels"),
        ("sabour2017_mnist", {"image": 28}, "image .*got 28"),
        ("sabour2017_mnist", {"routing": "dynamc"}, "routing .*'dynamc'.*'dynamic'"),
        ("sabour2017_mnist", {"routing": Dynamic}, "routing .*got Dynamic"),
        ("sabour2017_mnist", {"preset": "mine"}, "preset .*'paper' or 'official'.*got 'mine'"),
        ("sabour2017_mnist", {"reconstruction": 1}, "reconstruction .*True or False.*got 1"),
        ("sabour2017_mnist", {"n_objects": 11}, "n_objects .*10.*got 11"),
        ("sabour2017_mnist", {"hidden": 512}, "hidden .*tuple of ints.*got 512"),
        ("sabour2017_mnist", {"hidden": (512, "a")}, "hidden .*int.*got 'a'"),
        ("sabour2017_mnist", {"width": 0}, "width .*1.*got 0"),
        ("sabour2017_mnist", {"types": -3}, "types .*1.*got -3"),
        ("sabour2017_mnist", {"streamed": "never"}, "streamed .*True, False or 'auto'.*got 'never'"),
        ("sabour2017_mnist", {"kernel": 4, "padding": "same"}, "kernel .*padding='same'.*got 4"),
        ("sabour2017_cnn_mnist", {"preset": "official"}, "preset .*'paper'.*got 'official'"),
        ("sabour2017_cnn_mnist", {"dropout": 1.5}, "dropout .*got 1.5"),
        ("sabour2017_cnn_mnist", {"features": (5,)}, r"features .*2 ints.*got \(5,\)"),
        ("sabour2017_cnn_multimnist", {"n_objects": 20}, "n_objects .*10.*got 20"),
        ("hinton2018_smallnorb", {"preset": "official"}, "preset .*'paper'.*got 'official'"),
        ("chen2019_conv_mnist", {"rows": 3}, "rows .*primary_dim.*8.*got 3"),
        ("chen2019_multi_cifar10", {"rows": 3}, "rows .*dim.*8.*got 3"),
        ("choi2019_cifar10", {"depth": -1}, "depth .*0.*got -1"),
        ("tsai2020_cifar10", {"dim": 15}, "dim .*square.*got 15"),
        ("tsai2020_diverse_matrix", {"reconstruction": True}, "reconstruction .*False"),
        ("yang2021_mnist", {"slope": -1.0}, "slope .*got -1.0"),
        ("yang2021_mnist", {"penalty": "l3"}, "penalty .*'l1' or 'l2'.*got 'l3'"),
        ("yang2021_mnist", {"penalty": "l1", "routing": "em"}, "penalty .*Quadratic.*EM"),
    ],
)
def test_invalid_names_and_fields(name: str, changes: dict[str, object], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        create_model(name, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (torch.rand(2, 1, 32, 32), None, r"images .*\[B, 1, 28, 28\], got \[2, 1, 32, 32\].*create_model"),
        (torch.rand(1, 28, 28), None, r"images .*\[B, 1, 28, 28\], got \[1, 28, 28\]"),
        (torch.zeros(2, 1, 28, 28, dtype=torch.uint8), None, r"images .*torch.uint8.*images.float\(\) / 255"),
        (torch.full((2, 1, 28, 28), torch.nan), None, "images .*finite"),
        (torch.rand(2, 1, 28, 28), torch.tensor([1, 2, 3]), r"labels .*2 images.*got \[3\]"),
        (torch.rand(2, 1, 28, 28), torch.tensor([1, 10]), r"labels .*0..9, got 10"),
        (torch.rand(2, 1, 28, 28), torch.tensor([1.0, 2.0]), "labels .*integers.*got torch.float32"),
        (torch.rand(2, 1, 28, 28), torch.tensor([[1, 2], [3, 4]]), r"labels .*\[B\] or .*\[B, 10\], got \[2, 2\]"),
        (torch.rand(2, 1, 28, 28), [1, 2], "labels .*tensor.*got list"),
        (torch.rand(2, 1, 28, 28), torch.tensor(1), r"labels .*2 images.*got \[\]"),
    ],
)
@pytest.mark.parametrize("name", ["sabour2017_mnist", "sabour2017_cnn_mnist"])
def test_images_and_labels_that_do_not_fit(name: str, images: torch.Tensor, labels: torch.Tensor, message: str) -> None:
    for model in (narrow(name), narrow(name).eval()):
        with pytest.raises((ValueError, TypeError), match=message):
            model(images, labels)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.tensor([1, 2]), r"labels .*\[B, 2\] or .*\[B, 10\], got \[2\]"),
        (torch.eye(10)[:2], "labels .*2 of 10 classes.*got one with 1"),
        (torch.tensor([[1, 2, 3], [4, 5, 6]]), r"labels .*got \[2, 3\]"),
        (torch.tensor([[1, 1], [2, 3]]), "labels .*2 different classes"),
    ],
)
def test_labels_of_two_objects(labels: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        narrow("sabour2017_multimnist")(torch.rand(2, 1, 36, 36), labels)


def test_split_labels_accepts_indices_and_multi_hot() -> None:
    indices, hot = split_labels(torch.tensor([[3, 1], [0, 2]]), 4, 2)
    assert indices.tolist() == [[3, 1], [0, 2]]
    assert hot.tolist() == [[0, 1, 0, 1], [1, 0, 1, 0]]
    assert split_labels(hot, 4, 2)[0].tolist() == [[1, 3], [0, 2]]
    assert split_labels(hot.bool(), 4, 2)[0].tolist() == [[1, 3], [0, 2]]
    assert split_labels(torch.tensor([2, 0]), 3)[1].tolist() == [[0, 0, 1], [1, 0, 0]]
    assert split_labels(torch.tensor([[0, 0, 1], [1, 0, 0]]), 3)[0].tolist() == [2, 0]
    assert split_labels(torch.tensor([[0, 1], [1, 0]]), 2, 2)[0].tolist() == [
        [0, 1],
        [1, 0],
    ]  # indices, not multi-hot


def test_decoding_without_decoder_and_loss_without_targets() -> None:
    model = narrow("sabour2017_mnist", reconstruction=False)
    with pytest.raises(ValueError, match=r"sabour2017_mnist .*decoder.*reconstruction=True"):
        model.decode(torch.rand(2, 10, 16))
    model = narrow("sabour2017_mnist")
    labels = torch.tensor([1, 2])
    with pytest.raises(ValueError, match=r"targets .*reconstruction=False"):
        model.loss()(model(torch.rand(2, 1, 28, 28), labels), labels)


def test_names_are_registered_once() -> None:
    with pytest.raises(ValueError, match=r"model .*'sabour2017_mnist'"):
        register("sabour2017_mnist", Sabour2017())


def test_invalid_registrations() -> None:
    with pytest.raises(ValueError, match=r"Recipe .*'foo'"):
        register("mine", Sabour2017(), foo=3)
    with pytest.raises(TypeError, match=r"spec .*got int"):
        register("mine", 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"output .*Output.*got Tensor"):
        narrow("sabour2017_mnist").loss()(torch.rand(2, 10), torch.tensor([1, 2]))


def test_invalid_recipes() -> None:
    with pytest.raises(ValueError, match=r"lr .*0.*got 0"):
        OptimizerConfig("adam", 0.0)
    with pytest.raises(ValueError, match=r"epochs and steps .*3.*4"):
        Recipe(epochs=3, steps=4)
    with pytest.raises(ValueError, match=r"batch_size .*1.*got 0"):
        Recipe(batch_size=0)
    with pytest.raises(ValueError, match=r"val_fraction .*got 1.0"):
        Recipe(val_fraction=1.0)
    with pytest.raises(ValueError, match=r"name .*'adam', 'sgd' or 'rmsprop'.*got 'lion'"):
        OptimizerConfig("lion", 1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"margin_steps .*1.*got 0"):
        LossConfig(margin_steps=0)


@pytest.mark.parametrize("attribute", ["recipe", "name", "spec", "n_objects"])
def test_networks_do_not_change_their_settings(attribute: str) -> None:
    model = narrow("sabour2017_mnist")
    with pytest.raises(AttributeError, match=attribute):
        setattr(model, attribute, getattr(model, attribute))
