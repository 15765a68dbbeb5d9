"""Models asked for wrongly, or given what they can't take: one sentence that says what was wrong."""

import pytest
import torch

from tests.models.narrow import narrow
from torchcaps import create_model
from torchcaps._core.labels import split_labels
from torchcaps.models import OptimizerConfig, Recipe, Sabour2017, register
from torchcaps.routing import Dynamic


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "sabour2017_mnst",
            {},
            "model must be the name of one, got 'sabour2017_mnst': did you mean 'sabour2017_mnist'",
        ),
        ("resnet", {}, "did you mean '"),
        ("zzz", {}, "there are 'capsnet_images', .* and 43 more"),
        ("sabour2017_mnist", {"depth": 3}, "sabour2017_mnist has no field 'depth': it has 'image', 'classes'"),
        ("sabour2017_mnist", {"classes": 1}, "classes must be 2 or more, got 1"),
        ("sabour2017_mnist", {"classes": 2.5}, "classes must be a whole number, got 2.5"),
        ("sabour2017_mnist", {"image": (28, 28)}, r"image must be \(channels, height, width\), got \(28, 28\)"),
        ("sabour2017_mnist", {"image": (0, 28, 28)}, "image's channels must be 1 or more, got 0"),
        ("sabour2017_mnist", {"image": (1, 16, 28)}, "image must be 17x17 or larger for sabour2017_mnist, got 16x28"),
        ("sabour2017_mnist", {"image": 28}, "image must be"),
        ("sabour2017_mnist", {"routing": "dynamc"}, "did you mean 'dynamic'"),
        ("sabour2017_mnist", {"routing": Dynamic}, "a class: call it"),
        ("sabour2017_mnist", {"preset": "mine"}, "preset must be 'paper' or 'official', got 'mine'"),
        ("sabour2017_mnist", {"reconstruction": 1}, "reconstruction must be True or False, got 1"),
        ("sabour2017_mnist", {"n_objects": 11}, "n_objects must be at most the number of classes, 10, got 11"),
        ("sabour2017_mnist", {"hidden": 512}, "hidden must be a tuple of whole numbers, got 512"),
        ("sabour2017_mnist", {"hidden": (512, "a")}, "hidden must be a whole number, got 'a'"),
        ("sabour2017_mnist", {"width": 0}, "width must be 1 or more, got 0"),
        ("sabour2017_mnist", {"types": -3}, "types must be 1 or more, got -3"),
        ("sabour2017_mnist", {"streamed": "never"}, "streamed must be True, False or 'auto', got 'never'"),
        ("hinton2018_smallnorb", {"preset": "official"}, "its authors have released no code"),
        ("sabour2017_cnn_mnist", {"preset": "official"}, "its authors have released no code"),
        ("sabour2017_cnn_multimnist", {"n_objects": 20}, "n_objects must be at most the number of classes, 10, got 20"),
        ("sabour2017_cnn_mnist", {"dropout": 1.5}, "dropout must be 0 or more and at most 1, got 1.5"),
        ("sabour2017_mnist", {"kernel": 4, "padding": "same"}, "kernel must be odd with padding='same'"),
        ("sabour2017_mnist", {"image": (64, 64, 3)}, "The channels come first"),
        ("chen2019_conv_mnist", {"rows": 3}, "rows must divide primary_dim, 8"),
        ("chen2019_multi_cifar10", {"rows": 3}, "rows must divide dim, 8"),
        ("yang2021_mnist", {"slope": -1.0}, "slope must be 0 or more and at most 1"),
        ("choi2019_cifar10", {"depth": -1}, "depth must be 0 or more, got -1"),
        ("tsai2020_cifar10", {"dim": 15}, "dim must be a square number"),
        ("tsai2020_diverse_matrix", {"reconstruction": True}, "an image has any number of objects"),
        ("yang2021_mnist", {"penalty": "l3"}, "penalty must be 'l1' or 'l2', got 'l3'"),
        ("yang2021_mnist", {"penalty": "l1", "routing": "em"}, "penalty belongs to Quadratic routing"),
        ("sabour2017_cnn_mnist", {"features": (5,)}, "features must be 2 whole numbers"),
        (7, {}, "model must be the name of one, got 7"),
    ],
)
def test_a_model_asked_for_wrongly(name: str, changes: dict[str, object], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        create_model(name, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (torch.rand(2, 1, 32, 32), None, r"images must be \[B, 1, 28, 28\], got \[2, 1, 32, 32\]: create_model"),
        (torch.rand(1, 28, 28), None, r"images must be \[B, 1, 28, 28\], got \[1, 28, 28\]"),
        (
            torch.zeros(2, 1, 28, 28, dtype=torch.uint8),
            None,
            r"images must be floating-point numbers in 0..1, got torch.uint8: take images.float\(\) / 255",
        ),
        (torch.full((2, 1, 28, 28), torch.nan), None, "images must hold finite numbers"),
        (torch.rand(2, 1, 28, 28), torch.tensor([1, 2, 3]), r"labels must be one for each of 2 images, got \[3\]"),
        (torch.rand(2, 1, 28, 28), torch.tensor([1, 10]), r"labels must lie in 0..9, got 10"),
        (torch.rand(2, 1, 28, 28), torch.tensor([1.0, 2.0]), "labels must be whole numbers"),
        (
            torch.rand(2, 1, 28, 28),
            torch.tensor([[1, 2], [3, 4]]),
            r"labels must be class numbers \[B\] or zeros and ones",
        ),
        (torch.rand(2, 1, 28, 28), [1, 2], "labels must be a tensor, got list"),
        (torch.rand(2, 1, 28, 28), torch.tensor(1), r"labels must be one for each of 2 images, got \[\]"),
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
        (torch.tensor([1, 2]), r"labels must be class numbers \[B, 2\] or zeros and ones \[B, 10\], got \[2\]"),
        (torch.eye(10)[:2], "labels must name 2 of 10 classes for each image, got one with 1"),
        (torch.tensor([[1, 2, 3], [4, 5, 6]]), r"got \[2, 3\]"),
        (torch.tensor([[1, 1], [2, 3]]), "labels must name 2 different classes for each image, got one named twice"),
    ],
)
def test_labels_of_two_objects(labels: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        narrow("sabour2017_multimnist")(torch.rand(2, 1, 36, 36), labels)


def test_labels_both_ways() -> None:
    numbers, hot = split_labels(torch.tensor([[3, 1], [0, 2]]), 4, 2)
    assert numbers.tolist() == [[3, 1], [0, 2]]
    assert hot.tolist() == [[0, 1, 0, 1], [1, 0, 1, 0]]
    assert split_labels(hot, 4, 2)[0].tolist() == [[1, 3], [0, 2]]
    assert split_labels(hot.bool(), 4, 2)[0].tolist() == [[1, 3], [0, 2]]
    assert split_labels(torch.tensor([2, 0]), 3)[1].tolist() == [[0, 0, 1], [1, 0, 0]]
    assert split_labels(torch.tensor([[0, 0, 1], [1, 0, 0]]), 3)[0].tolist() == [2, 0]
    assert split_labels(torch.tensor([[0, 1], [1, 0]]), 2, 2)[0].tolist() == [
        [0, 1],
        [1, 0],
    ]  # numbers, not zeros and ones


def test_decoding_without_a_decoder_and_a_loss_without_targets() -> None:
    model = narrow("sabour2017_mnist", reconstruction=False)
    with pytest.raises(ValueError, match="was built without a decoder"):
        model.decode(torch.rand(2, 10, 16))
    model = narrow("sabour2017_mnist")
    labels = torch.tensor([1, 2])
    with pytest.raises(ValueError, match="targets must be given"):
        model.loss()(model(torch.rand(2, 1, 28, 28), labels), labels)


def test_a_name_is_given_once() -> None:
    with pytest.raises(ValueError, match="a model named 'sabour2017_mnist' exists already"):
        register("sabour2017_mnist", Sabour2017())


def test_a_registration_that_could_not_be_built_is_refused() -> None:
    with pytest.raises(ValueError, match="Recipe has no field 'foo'"):
        register("mine", Sabour2017(), foo=3)
    with pytest.raises(TypeError, match="spec must be a model's choice"):
        register("mine", 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="output must be what the model returns, an Output, got Tensor"):
        narrow("sabour2017_mnist").loss()(torch.rand(2, 10), torch.tensor([1, 2]))


def test_an_optimiser_without_a_rate() -> None:
    with pytest.raises(ValueError, match="rate must be over 0, got 0"):
        OptimizerConfig("adam", 0.0)
    with pytest.raises(ValueError, match="give epochs or steps, not both, got 3 and 4"):
        Recipe(epochs=3, steps=4)
    with pytest.raises(ValueError, match="batch_size must be 1 or more, got 0"):
        Recipe(batch_size=0)
    with pytest.raises(ValueError, match="kind must be 'adam', 'sgd' or 'rmsprop', got 'lion'"):
        OptimizerConfig("lion", 1.0)  # type: ignore[arg-type]
