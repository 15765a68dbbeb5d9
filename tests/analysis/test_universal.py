"""One change for all images: against a linear classifier, whose best change is known."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.models.narrow import batch, narrow
from torchcaps.analysis.attacks import evaluate_predictions
from torchcaps.analysis.universal import (
    PerturbationGenerator,
    Universal,
    draw_universal,
    draw_universal_sizes,
    train_universal,
)
from torchcaps.models import Network


@pytest.mark.parametrize("image", [(1, 28, 28), (3, 32, 32), (1, 36, 36), (1, 40, 40), (2, 30, 21)])
def test_the_generator_makes_changes_of_any_size(image: tuple[int, int, int]) -> None:
    changes = PerturbationGenerator(image, width=8)(torch.rand(3, 100))
    assert changes.shape == (3, *image)
    assert float(changes.detach().abs().max()) <= 1


def test_the_generator_for_28_pixels_has_the_layers_of_the_reading() -> None:
    layers = list(PerturbationGenerator((1, 28, 28)).layers)
    convs = [layer for layer in layers if isinstance(layer, nn.ConvTranspose2d)]
    sizes = [(c.in_channels, c.out_channels, c.kernel_size[0], c.stride[0], c.padding[0]) for c in convs]
    assert sizes == [(100, 128, 7, 1, 0), (128, 64, 4, 2, 1), (64, 1, 4, 2, 1)]
    assert [isinstance(layers[layers.index(conv) + 1], nn.BatchNorm2d) for conv in convs] == [True] * 3


def linear_model(margin: float) -> tuple[Network, Tensor]:
    """A net with two classes that adds up pixels with signs, and the signs."""
    model = narrow("chen2019_lenet", image=(1, 16, 16), classes=2)
    linear = nn.Linear(256, 2)
    rows, columns = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
    signs = torch.where((rows // 4 + columns // 8) % 2 == 0, 1.0, -1.0)
    with torch.no_grad():
        linear.weight.copy_(torch.stack([torch.zeros(256), signs.flatten()]))
        linear.bias.copy_(torch.tensor([0.0, margin]))
    model.front = nn.Sequential(nn.Flatten(), linear)
    return model, signs


@pytest.mark.parametrize("objective", ["wrong", "away"])
def test_the_change_against_a_linear_classifier_is_against_its_weights(objective: str) -> None:
    """Every image is of class 1, by 6; signs against the weights take 0.1 * 256 off, random ones about 0.1 * 16."""
    model, signs = linear_model(margin=6.0)
    images, labels = torch.full((20, 1, 16, 16), 0.5), torch.ones(20, dtype=torch.long)
    result = train_universal(
        model, images, labels, images, labels, 0.1, iterations=40, every=15, objective=objective, rate=1e-2
    )
    assert result.iterations == (0, 15, 30, 40)
    assert result.clean_accuracy == result.random_noise_accuracy == 1
    assert result.accuracy[-1] == 0
    assert result.predicted.tolist() == [20, 0]
    assert result.true.tolist() == [0, 20]
    assert result.objective == objective
    assert float((result.perturbation[0].sign() == -signs).double().mean()) > 0.9
    assert 0.05 < float(result.perturbation.abs().max()) <= 0.1 + 1e-6


def trial(model: Network, seed: int = 0, **options: float) -> Universal:
    images, labels, _ = batch(model, 12)
    return train_universal(
        model, images, labels, images[:5], labels[:5], iterations=2, every=1, seed=seed, batch_size=4, **options
    )


@pytest.mark.parametrize("name", ["chen2019_fc_mnist", "tsai2020_cnn_cifar10", "choi2019_mnist"])
def test_it_is_a_function_of_its_seed_and_leaves_everything_as_it_was(name: str) -> None:
    """Weights, moving averages of batch norms, mode, which parameters are trained, torch's generator."""
    model = narrow(name).train()
    next(model.parameters()).requires_grad_(False)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = torch.get_rng_state()
    first, second, other = trial(model), trial(model), trial(model, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.perturbation, second.perturbation)
    assert first.accuracy == second.accuracy
    assert not torch.equal(first.perturbation, other.perturbation)
    assert model.training
    assert [p.requires_grad for p in model.parameters()][:2] == [False, True]
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert first.perturbation.shape == model.spec.image
    assert int(first.predicted.sum()) == first.n_images == 5


def test_the_model_sees_images_within_their_bounds_alone() -> None:
    model = narrow("chen2019_lenet")
    seen: list[Tensor] = []
    hook = model.register_forward_pre_hook(lambda _, given: seen.append(given[0].detach()))
    images, labels, _ = batch(model, 8)
    mean = images.mean(0) / 2
    centred = images * 255 / 256 - mean
    train_universal(model, centred, labels, centred, labels, 0.5, 2, 1, low=-mean, high=255 / 256 - mean)
    hook.remove()
    everything = torch.cat(seen) + mean
    assert -1e-6 <= float(everything.min()) < 1e-6
    assert 255 / 256 - 1e-6 < float(everything.max()) <= 255 / 256 + 1e-6


def test_the_accuracies_are_those_of_the_changed_images() -> None:
    model = narrow("chen2019_lenet")
    images, labels, _ = batch(model, 12)
    result = trial(model)
    right, found = evaluate_predictions(model, (images[:5] + result.perturbation).clamp(0, 1), labels[:5])
    assert result.accuracy[-1] == float(right.double().mean())
    assert torch.equal(result.predicted, found.sum(0))
    assert result.clean_accuracy == float(evaluate_predictions(model, images[:5], labels[:5])[0].double().mean())


def test_refusals() -> None:
    model = narrow("chen2019_lenet")
    images, labels, _ = batch(model)
    good = (model, images, labels, images, labels)
    for message, call in {
        "images must lie within low and high": lambda: train_universal(model, images - 1, labels, images, labels),
        "test_images must be": lambda: train_universal(model, images, labels, images[:, :, 1:], labels),
        "test_labels must be one for each": lambda: train_universal(model, images, labels, images, labels[:2]),
        "eps must be above 0": lambda: train_universal(*good, eps=0),
        "iterations and every must be 1 or more": lambda: train_universal(*good, every=0),
        "objective must be 'wrong' or 'away'": lambda: train_universal(*good, objective="up"),  # type: ignore
        "images must be two or more": lambda: train_universal(model, images[:1], labels[:1], images, labels),
        "results must be one or more, got": lambda: draw_universal({}, "none.png"),
        "results must be one or more for each": lambda: draw_universal_sizes({"LeNet": {}}, "none.png"),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()
    several = narrow("sabour2017_multimnist")
    images, labels, _ = batch(several)
    with pytest.raises(ValueError, match="needs one class for each image"):
        train_universal(several, images, labels, images, labels)


def test_the_figure_is_written(tmp_path: Path) -> None:
    result = trial(narrow("chen2019_lenet"))
    draw_universal({"LeNet": result}, tmp_path / "one.png", "Universal")
    colours = [torch.rand(channels, 32, 32) - 0.5 for channels in (2, 3)]
    others = [dataclasses.replace(result, perturbation=colour) for colour in colours]
    draw_universal({"stereo": others[0], "colour": others[1]}, tmp_path / "two.svg")
    assert (tmp_path / "one.png").stat().st_size > 10_000
    assert "random signs" in (tmp_path / "two.svg").read_text()


def test_the_figure_of_several_sizes_is_written(tmp_path: Path) -> None:
    result = trial(narrow("chen2019_lenet"))
    sizes = {"8 levels": result, "16 levels": dataclasses.replace(result, eps=0.063)}
    draw_universal_sizes({"LeNet": sizes, "another": {"8 levels": result}}, tmp_path / "sizes.svg", "Universal")
    text = (tmp_path / "sizes.svg").read_text()
    assert all(words in text for words in ("8 levels", "16 levels", "LeNet", "another", "random signs"))
