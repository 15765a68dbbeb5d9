"""AC-GAN: layers equal to TensorFlow's, losses and steps by hand, bit-exact resume."""

import io
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from tests.tolerances import EXACT, SAME, assert_different, assert_equal, largest_difference, relative_rms
from torchcaps.analysis.acgan import (
    GAN,
    Discriminator,
    Generator,
    discriminator_loss,
    generator_loss,
    train_acgan,
)

NARROW = 0.03


def two_class_images(n_images: int = 60) -> tuple[Tensor, Tensor]:
    """Images of two classes: bright on the left, bright on the right."""
    labels = torch.arange(n_images) % 2
    images = 0.1 * torch.rand(n_images, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    images[labels == 0, :, :, :14] += 0.9
    images[labels == 1, :, :, 14:] += 0.9
    return images, labels


def test_parameter_counts_are_those_of_the_keras_example() -> None:
    """An embedding, a dense layer and three transposed convolutions; four convolutions and two heads."""
    with torch.device("meta"):
        counts = [sum(p.numel() for p in net.parameters()) for net in (Generator(), Discriminator())]
    generator = 10 * 100 + 101 * 3456 + (384 * 192 * 25 + 192) + (192 * 96 * 25 + 96) + (96 * 25 + 1)
    discriminator = 320 + 18_496 + 73_856 + 295_168 + 7 * 7 * 256 * 11 + 11
    assert counts == [generator, discriminator] == [2_656_745, 525_835]


def same_conv(images: Tensor, weight: Tensor) -> Tensor:
    """TensorFlow's SAME convolution of stride 2 on even sizes: of an odd padding the larger half is at the end."""
    padding = weight.shape[-1] - 2
    before = padding // 2
    after = padding - before
    return F.conv2d(F.pad(images, (before, after, before, after)), weight, stride=2)


def test_upsampling_is_the_transpose_of_a_same_convolution() -> None:
    """``<conv(x), y> = <x, upsampled(y)>`` for all x and y defines TensorFlow's transposed convolution."""
    net = Generator(width=NARROW).double()
    for layer, side in ((net.up2, 7), (net.up3, 14)):
        weight, bias = layer.weight.detach(), layer.bias
        assert bias is not None
        y = torch.randn(2, weight.shape[0], side, side, dtype=torch.float64)
        x = torch.randn(2, weight.shape[1], 2 * side, 2 * side, dtype=torch.float64)
        upsampled = layer(y).detach()[..., :-1, :-1] - bias.detach()[:, None, None]
        assert upsampled.shape == x.shape
        assert float((same_conv(x, weight) * y).sum()) == pytest.approx(float((x * upsampled).sum()), rel=1e-10)


def test_the_discriminator_pads_as_tensorflow() -> None:
    net = Discriminator(width=NARROW).double().eval()
    images = torch.randn(3, 1, 28, 28, dtype=torch.float64)
    grid = images
    with torch.no_grad():
        for conv, stride in zip(net.convs, (2, 1, 2, 1), strict=True):
            weight, bias = conv.weight, conv.bias[:, None, None]  # type: ignore
            grid = (same_conv(grid, weight) if stride == 2 else F.conv2d(grid, weight, padding=1)) + bias
            grid = torch.where(grid > 0, grid, 0.2 * grid)
        real, classes = net(images)
    assert grid.shape[-2:] == (7, 7)
    assert largest_difference(real, grid.flatten(1) @ net.real.weight[0].detach() + net.real.bias.detach()) < EXACT
    assert classes.shape == (3, 10)


def test_losses_by_hand() -> None:
    zeros, labels = torch.zeros(4, 10, dtype=torch.float64), torch.tensor([3, 7])
    assert float(discriminator_loss(zeros[:, 0], zeros, labels)) == pytest.approx(math.log(2) + 2 * math.log(10))
    assert float(generator_loss(zeros[:, 0], zeros, labels.repeat(2))) == pytest.approx(math.log(2) + math.log(10))
    # The optimum for soft labels is the logits of 0.9 and 0.1; the classes of generated images are ignored.
    real = torch.logit(torch.tensor([0.9, 0.9, 0.1, 0.1], dtype=torch.float64)).requires_grad_()
    classes = torch.randn(4, 10, dtype=torch.float64).requires_grad_()
    discriminator_loss(real, classes, labels).backward()
    assert real.grad is not None
    assert classes.grad is not None
    assert largest_difference(real.grad, torch.zeros(4)) < EXACT
    expected = 2 * (classes.detach()[:2].softmax(1) - torch.eye(10, dtype=torch.float64)[labels]) / 2
    assert largest_difference(classes.grad[:2], expected) < EXACT
    assert classes.grad[2:].unique().tolist() == [0]


def test_resumed_training_is_bit_exact() -> None:
    images, labels = two_class_images(50)
    options = {"seed": 5, "batch_size": 20, "width": NARROW, "classes": 2}
    state = torch.get_rng_state()
    samples: list[tuple[int, Tensor]] = []
    uninterrupted = train_acgan(
        images, labels, 3, on_epoch=lambda n, gan: samples.append((n, gan.generate(2)[0])), **options
    )
    torch.testing.assert_close(torch.get_rng_state(), state, rtol=0, atol=0)
    half = train_acgan(images, labels, 1, **options)
    file = io.BytesIO()
    torch.save(half.state_dict(), file)
    file.seek(0)
    torch.rand(7)  # the global RNG state in between is irrelevant
    resumed = train_acgan(images, labels, 3, state=torch.load(file, weights_only=True), **options)
    torch.testing.assert_close(resumed.state_dict(), uninterrupted.state_dict(), rtol=0, atol=0)
    assert uninterrupted.epochs == resumed.epochs == 3
    assert [number for number, _ in samples] == [1, 2, 3]
    torch.testing.assert_close(half.generate(2)[0], samples[0][1], rtol=0, atol=0)
    torch.testing.assert_close(resumed.generate(2)[0], samples[2][1], rtol=0, atol=0)
    assert_different(samples[0][1], samples[2][1])
    other = train_acgan(images, labels, 1, **(options | {"seed": 6}))
    assert_different(other.generate(2)[0], samples[0][1])
    with pytest.raises(ValueError, match="seed=5"):
        train_acgan(images, labels, 3, state=half.state_dict(), **(options | {"seed": 6}))
    with pytest.raises(ValueError, match="discriminator, epochs"):
        GAN.from_state_dict({"classes": 2, "width": 1.0, "seed": 0, "generator": {}, "optimizers": []})


def test_generated_images_are_ordered_by_class_and_lie_in_0_1() -> None:
    gan = GAN(classes=3, width=NARROW)
    images, labels = gan.generate(4)
    assert images.shape == (12, 1, 28, 28)
    assert labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert 0 <= float(images.min()) < float(images.max()) <= 1
    assert_equal(images, gan.generate(4)[0])
    assert_different(images, gan.generate(4, seed=1)[0])


def test_the_discriminator_learns_the_classes() -> None:
    images, labels = two_class_images()
    calls: list[int] = []
    gan = train_acgan(images, labels, 5, batch_size=10, width=NARROW, classes=2, progress=lambda: calls.append(1))
    assert len(calls) == 30
    with torch.no_grad():
        predicted = gan.discriminator.eval()(images * 2 - 1)[1].argmax(1)
    assert float((predicted == labels).double().mean()) > 0.9


def test_the_generator_learns_against_a_fixed_discriminator() -> None:
    """With the same noise in every step its loss falls."""
    images, labels = two_class_images(10)
    gan = GAN(classes=2, width=NARROW)
    gan._optimizers[0].param_groups[0]["lr"] = 0.0
    before = [p.detach().clone() for p in gan.discriminator.parameters()]
    losses = []
    for _ in range(8):
        torch.manual_seed(0)
        losses.append(gan.step(images * 2 - 1, labels)[1])
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]
    after = [p.detach() for p in gan.discriminator.parameters()]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert {p.requires_grad for p in gan.discriminator.parameters()} == {True}


def test_invalid_arguments_are_rejected() -> None:
    images, labels = two_class_images(20)
    for argument, call in {
        "images": lambda: train_acgan(images[..., 1:], labels),
        r"images .*0\.\.1": lambda: train_acgan(images - 0.5, labels),
        r"labels .*\[3\]": lambda: train_acgan(images, labels[:3]),
        r"labels .*0\.\.1": lambda: train_acgan(images, labels + 1, classes=2),
        "batch_size .*21": lambda: train_acgan(images, labels, batch_size=21),
        "classes .*1": lambda: train_acgan(images, labels, classes=1),
        "width .*0": lambda: GAN(width=0),
        "n_per_class .*0": lambda: GAN(width=NARROW).generate(0),
    }.items():
        with pytest.raises(ValueError, match=argument):
            call()


# A training step, by hand ---------------------------------------------------------------------------------------

CLOSE = SAME[torch.float64]


@pytest.fixture
def float64_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def calls() -> Iterator[dict[type, list[tuple[Any, Any]]]]:
    """Inputs and outputs of all generators and discriminators, in order."""
    recorded: dict[type, list[tuple[Any, Any]]] = {Generator: [], Discriminator: []}

    def record(module: nn.Module, inputs: Any, output: Any) -> None:
        if type(module) in recorded:
            recorded[type(module)].append((inputs, output))

    handle = register_module_forward_hook(record)
    yield recorded
    handle.remove()


def random_images(n: int = 6) -> tuple[Tensor, Tensor]:
    """Images in 0..1, one black and one white among them."""
    images = torch.rand(n, 1, 28, 28)
    images[0], images[1] = 0, 1
    return images, torch.arange(n) % 3


def test_real_images_are_scaled_to_the_range_of_generated_ones(calls: Any) -> None:
    """From 0..1 to -1..1, the range of tanh; as many generated images follow in the batch."""
    images, labels = random_images()
    train_acgan(images, labels, 1, batch_size=6, width=NARROW, classes=3)
    (first,), _ = calls[Discriminator][0]
    assert first.shape == (12, 1, 28, 28)
    order = torch.cdist(first[:6].flatten(1), (2 * images - 1).flatten(1)).argmin(1)
    assert sorted(order.tolist()) == list(range(6))
    assert relative_rms(first[:6], 2 * images[order] - 1) < SAME[torch.float32]
    assert (float(first.min()), float(first.max())) == (-1, 1)
    torch.testing.assert_close(first[6:], calls[Generator][0][1], rtol=0, atol=0)


def test_noise_is_uniform_from_minus_1_to_1(calls: Any) -> None:
    """21,600 values; fractions within four standard errors (0.0034 for a fraction of 0.5)."""
    gan = GAN(3, NARROW)
    images, labels = random_images(12)
    for _ in range(4):
        gan.step(images, labels)
    gan.generate(24)
    noises = [inputs[0] for inputs, _ in calls[Generator]]
    assert [len(noise) for noise in noises] == [12, 24] * 4 + [72]
    assert_different(noises[0], noises[2])
    noise = torch.cat(noises)
    assert -1 <= float(noise.min()) < -0.99
    assert 0.99 < float(noise.max()) <= 1
    n = noise.numel()
    for low, high in ((-1, 0), (-0.5, 0.5), (0.25, 0.75)):
        fraction, expected = float(((noise >= low) & (noise < high)).double().mean()), (high - low) / 2
        assert abs(fraction - expected) < 4 * math.sqrt(expected * (1 - expected) / n)


def soft_cross_entropy(logits: Tensor, truth: float) -> float:
    """The mean of -t log p - (1 - t) log(1 - p)."""
    values = [1 / (1 + math.exp(-x)) for x in logits.tolist()]
    return sum(-truth * math.log(p) - (1 - truth) * math.log(1 - p) for p in values) / len(values)


def class_cross_entropy(logits: Tensor, labels: Tensor) -> float:
    """The mean of -log p of the labels."""
    rows = zip(logits.tolist(), labels.tolist(), strict=True)
    return sum(math.log(sum(map(math.exp, row))) - row[label] for row, label in rows) / len(labels)


def test_step_losses_use_soft_labels_and_the_sampled_classes(float64_default: None, calls: Any) -> None:
    """0.9 for real and 0.1 for generated images; the generator's target is 0.9 and the classes it was given."""
    gan = GAN(10, NARROW)
    with torch.no_grad():  # logits far from 0
        for layer in (gan.discriminator.real, gan.discriminator.classes):
            layer.weight.mul_(30)
    images, labels = random_images()
    discriminator_value, generator_value = gan.step(2 * images - 1, labels)
    (real, classes), (fake_real, fake_classes) = (output for _, output in calls[Discriminator])
    (_, (_, sampled)) = (inputs for inputs, _ in calls[Generator])
    assert len(sampled) == 12
    assert len(sampled.unique()) > 3
    expected = (soft_cross_entropy(real[:6], 0.9) + soft_cross_entropy(real[6:], 0.1)) / 2 + 2 * class_cross_entropy(
        classes[:6], labels
    )
    assert discriminator_value == pytest.approx(expected, rel=CLOSE)
    expected = soft_cross_entropy(fake_real, 0.9) + class_cross_entropy(fake_classes, sampled)
    assert generator_value == pytest.approx(expected, rel=CLOSE)


def test_both_networks_are_trained_by_adam_as_in_the_keras_example(float64_default: None) -> None:
    """Three steps by hand: learning rate 0.0002, betas 0.5 and 0.999, epsilon 1e-7."""
    gan = GAN(3, NARROW)
    images, labels = random_images()
    weights = [*gan.discriminator.parameters(), *gan.generator.parameters()]
    expected_weights = [weight.detach().clone() for weight in weights]
    first, second = ([torch.zeros_like(weight) for weight in expected_weights] for _ in range(2))
    for step in (1, 2, 3):
        gan.step(2 * images - 1, labels)
        for n, weight in enumerate(weights):
            gradient = weight.grad
            assert gradient is not None
            first[n] = 0.5 * first[n] + 0.5 * gradient
            second[n] = 0.999 * second[n] + 0.001 * gradient**2
            mean, square = first[n] / (1 - 0.5**step), second[n] / (1 - 0.999**step)
            expected_weights[n] = expected_weights[n] - 2e-4 * mean / (square.sqrt() + 1e-7)
    for weight, expected in zip(weights, expected_weights, strict=True):
        assert relative_rms(weight, expected) < CLOSE


def test_images_and_networks_are_on_the_given_device() -> None:
    """Nothing is created on the CPU and mixed with tensors of a GPU, for which the meta device stands in."""
    gan = GAN(width=NARROW, device="meta")
    images, labels = gan.generate(2)
    assert (images.device.type, labels.device.type) == ("meta", "meta")
    assert {parameter.device.type for parameter in gan.discriminator.parameters()} == {"meta"}
    with pytest.raises(RuntimeError, match="item"):  # both networks are trained; only then the losses are read
        gan.step(torch.rand(4, 1, 28, 28, device="meta"), torch.zeros(4, dtype=torch.int64, device="meta"))
