"""A step of the GAN's training: what its two nets are given, what is asked of them, and how far they move."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from tests.tolerances import SAME, relative_rms
from torchcaps.analysis.acgan import Discriminator, Generator
from torchcaps.analysis.gan import GAN, train_acgan

NARROW = 0.03
CLOSE = SAME[torch.float64]


@pytest.fixture
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def calls() -> Iterator[dict[type, list[tuple[Any, Any]]]]:
    """What generators and discriminators were given and what they made of it, in turn."""
    found: dict[type, list[tuple[Any, Any]]] = {Generator: [], Discriminator: []}

    def listen(module: nn.Module, inputs: Any, output: Any) -> None:
        if type(module) in found:
            found[type(module)].append((inputs, output))

    handle = register_module_forward_hook(listen)
    yield found
    handle.remove()


def digits(n: int = 6) -> tuple[Tensor, Tensor]:
    """Images in 0..1, black and white ones among them."""
    images = torch.rand(n, 1, 28, 28)
    images[0], images[1] = 0, 1
    return images, torch.arange(n) % 3


def test_the_discriminator_sees_the_images_in_the_range_of_the_made_ones(calls: Any) -> None:
    """From 0..1 to -1..1, where a tanh ends as well: all of them, and behind them as many made ones."""
    images, labels = digits()
    train_acgan(images, labels, 1, batch_size=6, width=NARROW, classes=3)
    (first,), _ = calls[Discriminator][0]
    assert first.shape == (12, 1, 28, 28)
    order = torch.cdist(first[:6].flatten(1), (2 * images - 1).flatten(1)).argmin(1)
    assert sorted(order.tolist()) == list(range(6))
    assert relative_rms(first[:6], 2 * images[order] - 1) < SAME[torch.float32]
    assert (float(first.min()), float(first.max())) == (-1, 1)
    assert torch.equal(first[6:], calls[Generator][0][1]), "the made ones as they are"


def test_noise_is_uniform_from_minus_1_to_1(calls: Any) -> None:
    """Of 21,600 numbers; a share of a half is known to 0.0034, so that four of these are 0.014."""
    gan = GAN(3, NARROW)
    images, labels = digits(12)
    for _ in range(4):
        gan.step(images, labels)
    gan.generate(24)
    noises = [inputs[0] for inputs, _ in calls[Generator]]
    assert [len(noise) for noise in noises] == [12, 24] * 4 + [72]
    assert not torch.equal(noises[0], noises[2])
    noise = torch.cat(noises)
    assert -1 <= float(noise.min()) < -0.99
    assert 0.99 < float(noise.max()) <= 1
    n = noise.numel()
    for low, high in ((-1, 0), (-0.5, 0.5), (0.25, 0.75)):
        share, expected = float(((noise >= low) & (noise < high)).double().mean()), (high - low) / 2
        assert abs(share - expected) < 4 * math.sqrt(expected * (1 - expected) / n)


def doubtful(logits: Tensor, truth: float) -> float:
    """The mean of -t log p - (1 - t) log(1 - p)."""
    values = [1 / (1 + math.exp(-x)) for x in logits.tolist()]
    return sum(-truth * math.log(p) - (1 - truth) * math.log(1 - p) for p in values) / len(values)


def of_classes(logits: Tensor, labels: Tensor) -> float:
    """The mean of -log p of the labels."""
    rows = zip(logits.tolist(), labels.tolist(), strict=True)
    return sum(math.log(sum(map(math.exp, row))) - row[label] for row, label in rows) / len(labels)


def test_a_step_asks_for_soft_labels_and_for_the_classes_that_were_drawn(double: None, calls: Any) -> None:
    """0.9 for real and 0.1 for made images; the generator is to pass for 0.9, and for the classes that it was given."""
    gan = GAN(10, NARROW)
    with torch.no_grad():  # nets that have an opinion
        for layer in (gan.discriminator.real, gan.discriminator.classes):
            layer.weight.mul_(30)
    images, labels = digits()
    judged, passed = gan.step(2 * images - 1, labels)
    (real, classes), (made_real, made_classes) = (output for _, output in calls[Discriminator])
    (_, (_, drawn)) = (inputs for inputs, _ in calls[Generator])
    assert len(drawn) == 12
    assert len(drawn.unique()) > 3
    expected = (doubtful(real[:6], 0.9) + doubtful(real[6:], 0.1)) / 2 + 2 * of_classes(classes[:6], labels)
    assert judged == pytest.approx(expected, rel=CLOSE)
    expected = doubtful(made_real, 0.9) + of_classes(made_classes, drawn)
    assert passed == pytest.approx(expected, rel=CLOSE)


def test_both_nets_are_trained_by_adam_as_in_the_example(double: None) -> None:
    """Three steps by hand: rate 0.0002, betas 0.5 and 0.999, epsilon 1e-7."""
    gan = GAN(3, NARROW)
    images, labels = digits()
    weights = [*gan.discriminator.parameters(), *gan.generator.parameters()]
    ours = [weight.detach().clone() for weight in weights]
    first, second = ([torch.zeros_like(weight) for weight in ours] for _ in range(2))
    for step in (1, 2, 3):
        gan.step(2 * images - 1, labels)
        for place, weight in enumerate(weights):
            slope = weight.grad
            assert slope is not None
            first[place] = 0.5 * first[place] + 0.5 * slope
            second[place] = 0.999 * second[place] + 0.001 * slope**2
            mean, square = first[place] / (1 - 0.5**step), second[place] / (1 - 0.999**step)
            ours[place] = ours[place] - 2e-4 * mean / (square.sqrt() + 1e-7)
    for weight, expected in zip(weights, ours, strict=True):
        assert relative_rms(weight, expected) < CLOSE
