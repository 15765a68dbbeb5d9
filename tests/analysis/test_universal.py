"""Universal perturbations, also against a linear classifier, whose best perturbation is known."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.models.narrow import batch, narrow
from tests.tolerances import assert_different
from torchcaps.analysis.common import evaluate_predictions
from torchcaps.analysis.universal import (
    PerturbationGenerator,
    UniversalOptions,
    UniversalPerturbation,
    train_universal,
)
from torchcaps.analysis.universal_figures import draw_universal, draw_universal_sizes
from torchcaps.models import Network


@pytest.mark.parametrize("image", [(1, 28, 28), (3, 32, 32), (1, 36, 36), (1, 40, 40), (2, 30, 21)])
def test_the_generator_works_for_any_image_size(image: tuple[int, int, int]) -> None:
    perturbations = PerturbationGenerator(image, width=8)(torch.rand(3, 100))
    assert perturbations.shape == (3, *image)
    assert float(perturbations.detach().abs().max()) <= 1


def test_layers_of_the_generator_for_28x28() -> None:
    layers = list(PerturbationGenerator((1, 28, 28)).layers)
    convs = [layer for layer in layers if isinstance(layer, nn.ConvTranspose2d)]
    sizes = [(c.in_channels, c.out_channels, c.kernel_size[0], c.stride[0], c.padding[0]) for c in convs]
    assert sizes == [(100, 128, 7, 1, 0), (128, 64, 4, 2, 1), (64, 1, 4, 2, 1)]
    assert [isinstance(layers[layers.index(conv) + 1], nn.BatchNorm2d) for conv in convs] == [True] * 3


def linear_model(margin: float) -> tuple[Network, Tensor]:
    """A two-class model whose logit is a signed sum of the pixels, and the signs."""
    model = narrow("chen2019_lenet", image=(1, 16, 16), classes=2)
    linear = nn.Linear(256, 2)
    rows, columns = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
    signs = torch.where((rows // 4 + columns // 8) % 2 == 0, 1.0, -1.0)
    with torch.no_grad():
        linear.weight.copy_(torch.stack([torch.zeros(256), signs.flatten()]))
        linear.bias.copy_(torch.tensor([0.0, margin]))
    model.front = nn.Sequential(nn.Flatten(), linear)
    return model, signs


@pytest.mark.parametrize("objective", ["random_class", "untargeted"])
def test_the_perturbation_of_a_linear_classifier_opposes_its_weights(objective: str) -> None:
    """Every image has a margin of 6; opposing signs subtract 0.1 * 256, random signs about 0.1 * 16."""
    model, signs = linear_model(margin=6.0)
    images, labels = torch.full((20, 1, 16, 16), 0.5), torch.ones(20, dtype=torch.long)
    result = train_universal(
        model, images, labels, images, labels, 0.1, iterations=40, eval_interval=15, objective=objective, lr=1e-2
    )
    assert result.iterations == (0, 15, 30, 40)
    assert result.clean_accuracy == result.random_noise_accuracy == 1
    assert result.accuracy[-1] == 0
    assert result.predicted.tolist() == [20, 0]
    assert result.true.tolist() == [0, 20]
    assert result.objective == objective
    assert float((result.perturbation[0].sign() == -signs).double().mean()) > 0.9
    assert 0.05 < float(result.perturbation.abs().max()) <= 0.1 + 1e-6


def short_training(model: Network, seed: int = 0, **options: float) -> UniversalPerturbation:
    images, labels, _ = batch(model, 12)
    return train_universal(
        model, images, labels, images[:5], labels[:5], iterations=2, eval_interval=1, seed=seed, batch_size=4, **options
    )


@pytest.mark.parametrize("name", ["chen2019_fc_mnist", "tsai2020_cnn_cifar10", "choi2019_mnist"])
def test_training_depends_on_the_seed_only_and_restores_the_model(name: str) -> None:
    """Weights, batch-norm statistics, mode, requires_grad and torch's global RNG state."""
    model = narrow(name).train()
    next(model.parameters()).requires_grad_(False)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = torch.get_rng_state()
    first, second, other = short_training(model), short_training(model), short_training(model, seed=1)
    torch.testing.assert_close(torch.get_rng_state(), state, rtol=0, atol=0)
    torch.testing.assert_close(second.perturbation, first.perturbation, rtol=0, atol=0)
    assert first.accuracy == second.accuracy
    assert_different(first.perturbation, other.perturbation)
    assert model.training is True
    assert [p.requires_grad for p in model.parameters()][:2] == [False, True]
    assert [name for name, p in model.named_parameters() if p.grad is not None] == []
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert first.perturbation.shape == model.spec.image
    assert int(first.predicted.sum()) == first.n_images == 5


def test_perturbed_images_are_clipped_to_their_bounds() -> None:
    model = narrow("chen2019_lenet")
    inputs: list[Tensor] = []
    hook = model.register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach()))
    images, labels, _ = batch(model, 8)
    mean = images.mean(0) / 2
    centred = images * 255 / 256 - mean
    train_universal(model, centred, labels, centred, labels, 0.5, 2, 1, low=-mean, high=255 / 256 - mean)
    hook.remove()
    pixels = torch.cat(inputs) + mean
    assert -1e-6 <= float(pixels.min()) < 1e-6
    assert 255 / 256 - 1e-6 < float(pixels.max()) <= 255 / 256 + 1e-6


def test_accuracies_are_those_of_the_perturbed_images() -> None:
    model = narrow("chen2019_lenet")
    images, labels, _ = batch(model, 12)
    result = short_training(model)
    correct, predicted = evaluate_predictions(model, (images[:5] + result.perturbation).clamp(0, 1), labels[:5])
    assert result.accuracy[-1] == float(correct.double().mean())
    assert result.predicted.tolist() == predicted.sum(0).tolist()
    assert result.clean_accuracy == float(evaluate_predictions(model, images[:5], labels[:5])[0].double().mean())


def test_invalid_arguments_are_rejected() -> None:
    model = narrow("chen2019_lenet")
    images, labels, _ = batch(model)
    good = (model, images, labels, images, labels)
    for message, call in {
        "^images .*low and high": lambda: train_universal(model, images - 1, labels, images, labels),
        "test_images": lambda: train_universal(model, images, labels, images[:, :, 1:], labels),
        "test_labels": lambda: train_universal(model, images, labels, images, labels[:2]),
        "eps .*0": lambda: train_universal(*good, eps=0),
        "eval_interval .*0": lambda: train_universal(*good, eval_interval=0),
        "objective .*'up'": lambda: train_universal(*good, objective="up"),  # type: ignore
        "batch_size .*1": lambda: train_universal(model, images[:1], labels[:1], images, labels),
        "^results": lambda: draw_universal({}, "none.png"),
        "results .*each model": lambda: draw_universal_sizes({"LeNet": {}}, "none.png"),
        "iterations .*0": lambda: UniversalOptions(iterations=0),
        "max_train_images .*0": lambda: UniversalOptions(max_train_images=0),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()
    several = narrow("sabour2017_multimnist")
    images, labels, _ = batch(several)
    with pytest.raises(ValueError, match="sabour2017_multimnist"):
        train_universal(several, images, labels, images, labels)


def test_figure_of_several_models(tmp_path: Path) -> None:
    result = short_training(narrow("chen2019_lenet"))
    draw_universal({"LeNet": result}, tmp_path / "one.png", "Universal")
    images = [torch.rand(channels, 32, 32) - 0.5 for channels in (2, 3)]
    others = [dataclasses.replace(result, perturbation=image) for image in images]
    draw_universal({"stereo": others[0], "color": others[1]}, tmp_path / "two.svg")
    assert (tmp_path / "one.png").stat().st_size > 10_000
    text = (tmp_path / "two.svg").read_text()
    assert [name in text for name in ("stereo", "color")] == [True, True]


def test_figure_of_several_sizes(tmp_path: Path) -> None:
    result = short_training(narrow("chen2019_lenet"))
    sizes = {"8 levels": result, "16 levels": dataclasses.replace(result, eps=0.063)}
    draw_universal_sizes({"LeNet": sizes, "another": {"8 levels": result}}, tmp_path / "sizes.svg", "Universal")
    text = (tmp_path / "sizes.svg").read_text()
    assert [name for name in ("8 levels", "16 levels", "LeNet", "another") if name not in text] == []
