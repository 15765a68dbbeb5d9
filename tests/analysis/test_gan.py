"""The GAN: its layers as TensorFlow's, its losses by hand, training that can stop anywhere."""

import io
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.models.narrow import batch, narrow
from tests.tolerances import EXACT, largest_difference
from torchcaps.analysis.acgan import Discriminator, Generator
from torchcaps.analysis.gan import (
    GAN,
    Generalization,
    draw_generalization,
    draw_generated,
    generalisation,
    judging_loss,
    passing_loss,
    train_acgan,
)

NARROW = 0.03


def digits(n_images: int = 60) -> tuple[Tensor, Tensor]:
    """Images of two classes: bright on the left, bright on the right."""
    labels = torch.arange(n_images) % 2
    images = 0.1 * torch.rand(n_images, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    images[labels == 0, :, :, :14] += 0.9
    images[labels == 1, :, :, 14:] += 0.9
    return images, labels


def test_the_nets_have_the_parameters_of_the_example() -> None:
    """By hand: an embedding, a dense layer, three transposed convolutions; four convolutions, two heads."""
    with torch.device("meta"):
        counts = [sum(p.numel() for p in net.parameters()) for net in (Generator(), Discriminator())]
    made = 10 * 100 + 101 * 3456 + (384 * 192 * 25 + 192) + (192 * 96 * 25 + 96) + (96 * 25 + 1)
    judged = 320 + 18_496 + 73_856 + 295_168 + 7 * 7 * 256 * 11 + 11
    assert counts == [made, judged] == [2_656_745, 525_835]


def same_conv(images: Tensor, weight: Tensor) -> Tensor:
    """TensorFlow's SAME convolution of stride 2 on even sides: of an odd padding the larger half is behind."""
    padding = weight.shape[-1] - 2
    before = padding // 2
    behind = padding - before
    return F.conv2d(F.pad(images, (before, behind, before, behind)), weight, stride=2)


def test_doubling_is_the_transpose_of_a_same_convolution() -> None:
    """``<conv(x), y> = <x, doubled(y)>`` for every x and y: what defines TensorFlow's transposed convolution."""
    net = Generator(width=NARROW).double()
    for layer, side in ((net.up2, 7), (net.up3, 14)):
        weight, bias = layer.weight.detach(), layer.bias
        assert bias is not None
        y = torch.randn(2, weight.shape[0], side, side, dtype=torch.float64)
        x = torch.randn(2, weight.shape[1], 2 * side, 2 * side, dtype=torch.float64)
        doubled = layer(y).detach()[..., :-1, :-1] - bias.detach()[:, None, None]
        assert doubled.shape == x.shape
        assert float((same_conv(x, weight) * y).sum()) == pytest.approx(float((x * doubled).sum()), rel=1e-10)


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


def test_the_losses_by_hand() -> None:
    zeros, labels = torch.zeros(4, 10, dtype=torch.float64), torch.tensor([3, 7])
    assert float(judging_loss(zeros[:, 0], zeros, labels)) == pytest.approx(math.log(2) + 2 * math.log(10))
    assert float(passing_loss(zeros[:, 0], zeros, labels.repeat(2))) == pytest.approx(math.log(2) + math.log(10))
    # Soft labels are met best by the logits of 0.9 and 0.1; the classes of made images count for nothing.
    real = torch.logit(torch.tensor([0.9, 0.9, 0.1, 0.1], dtype=torch.float64)).requires_grad_()
    classes = torch.randn(4, 10, dtype=torch.float64).requires_grad_()
    judging_loss(real, classes, labels).backward()
    assert real.grad is not None
    assert classes.grad is not None
    assert largest_difference(real.grad, torch.zeros(4)) < EXACT
    expected = 2 * (classes.detach()[:2].softmax(1) - torch.eye(10, dtype=torch.float64)[labels]) / 2
    assert largest_difference(classes.grad[:2], expected) < EXACT
    assert not bool(classes.grad[2:].any())


def equal(first: object, second: object) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(equal(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(equal, first, second))
    return first == second


def test_a_resumed_training_is_an_unbroken_one_bit_by_bit() -> None:
    images, labels = digits(50)
    options = {"seed": 5, "batch_size": 20, "width": NARROW, "classes": 2}
    state = torch.get_rng_state()
    seen: list[tuple[int, Tensor]] = []
    whole = train_acgan(images, labels, 3, on_epoch=lambda n, gan: seen.append((n, gan.generate(2)[0])), **options)
    assert torch.equal(torch.get_rng_state(), state)
    half = train_acgan(images, labels, 1, **options)
    file = io.BytesIO()
    torch.save(half.state_dict(), file)
    file.seek(0)
    torch.rand(7)  # what happens in between is of no account
    resumed = train_acgan(images, labels, 3, state=torch.load(file, weights_only=True), **options)
    assert equal(whole.state_dict(), resumed.state_dict())
    assert whole.epochs == resumed.epochs == 3
    assert [number for number, _ in seen] == [1, 2, 3]
    assert torch.equal(seen[0][1], half.generate(2)[0])
    assert torch.equal(seen[2][1], resumed.generate(2)[0])
    assert not equal(whole.state_dict(), half.state_dict())
    other = train_acgan(images, labels, 1, **(options | {"seed": 6}))
    assert not equal(other.generator.state_dict(), half.generator.state_dict())
    with pytest.raises(ValueError, match="ask for the same"):
        train_acgan(images, labels, 3, state=half.state_dict(), **(options | {"seed": 6}))
    with pytest.raises(ValueError, match="lacks discriminator, epochs"):
        GAN.from_state_dict({"classes": 2, "width": 1.0, "seed": 0, "generator": {}, "optimizers": []})


def test_made_images_come_by_class_and_lie_in_0_1() -> None:
    gan = GAN(classes=3, width=NARROW)
    images, labels = gan.generate(4)
    assert images.shape == (12, 1, 28, 28)
    assert labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert 0 <= float(images.min()) < float(images.max()) <= 1
    assert torch.equal(images, gan.generate(4)[0])
    assert not torch.equal(images, gan.generate(4, seed=1)[0])


def test_the_discriminator_learns_the_classes() -> None:
    images, labels = digits()
    ticks: list[int] = []
    gan = train_acgan(images, labels, 5, batch_size=10, width=NARROW, classes=2, progress=lambda: ticks.append(1))
    assert len(ticks) == 30
    with torch.no_grad():
        known = gan.discriminator.eval()(images * 2 - 1)[1].argmax(1)
    assert float((known == labels).double().mean()) > 0.9


def test_the_generator_learns_to_pass() -> None:
    """With one noise and a discriminator that stands still its loss falls."""
    images, labels = digits(10)
    gan = GAN(classes=2, width=NARROW)
    gan._optimizers[0].param_groups[0]["lr"] = 0.0
    judged = [p.detach().clone() for p in gan.discriminator.parameters()]
    losses = []
    for _ in range(8):
        torch.manual_seed(0)
        losses.append(gan.step(images * 2 - 1, labels)[1])
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]
    assert all(torch.equal(old, new) for old, new in zip(judged, gan.discriminator.parameters(), strict=True))
    assert all(p.requires_grad for p in gan.discriminator.parameters())


def test_errors_are_in_percent_of_the_same_images_for_every_model() -> None:
    first, second = narrow("chen2019_fc_mnist"), narrow("chen2019_lenet")
    images, _, _ = batch(first, 16)
    with torch.no_grad():
        labels = first.eval()(images).scores.argmax(1)
        theirs = second.eval()(images).scores.argmax(1)
    labels[:4] = (labels[:4] + 1) % 10  # four of sixteen are now wrong for the first
    result = generalisation({"FC": first, "LeNet": second}, images, labels, batch_size=5)
    assert result.models == ("FC", "LeNet")
    assert result.errors[0] == 25
    assert result.errors[1] == 100 * float((theirs != labels).double().mean())
    agree = (theirs == labels) & (torch.arange(16) >= 4)
    assert result.agree == 100 * float(agree.double().mean())
    assert result.n_images == 16


def test_refusals() -> None:
    images, labels = digits(20)
    for message, call in {
        r"images must be \[N, 1, 28, 28\]": lambda: train_acgan(images[..., 1:], labels),
        "images must be floating-point numbers in 0..1": lambda: train_acgan(images - 0.5, labels),
        "labels must be one for each of 20 images": lambda: train_acgan(images, labels[:3]),
        r"labels must lie in 0..1": lambda: train_acgan(images, labels + 1, classes=2),
        r"batch_size must lie in 1..20": lambda: train_acgan(images, labels, batch_size=21),
        "classes must be 2 or more": lambda: train_acgan(images, labels, classes=1),
        "width must be above 0": lambda: GAN(width=0),
        "n_per_class must be 1 or more": lambda: GAN(width=NARROW).generate(0),
        "models must be one or more": lambda: generalisation({}, images, labels),
        "images and labels must be as many": lambda: generalisation(
            {"LeNet": narrow("chen2019_lenet")}, images, labels[:1]
        ),
        "generated must be one stage or more": lambda: draw_generated({}, "none.png"),
        "results must be one epoch or more": lambda: draw_generalization({}, "none.png"),
        "results must be of the same models": lambda: draw_generalization(
            {1: Generalization(("a",), (1.0,), 5, 0.0), 2: Generalization(("b",), (1.0,), 5, 0.0)}, "none.png"
        ),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()


def test_the_figures_are_written(tmp_path: Path) -> None:
    gan = GAN(width=NARROW)
    draw_generated({"epoch 1": gan.generate(2), "epoch 2": gan.generate(4)}, tmp_path / "made.png", "AC-GAN")
    rows = {n: Generalization(("CNN", "FC"), (20.0 / n**4, 0.0), 4000, 80.0) for n in (1, 2, 3)}
    draw_generalization(rows, tmp_path / "errors.svg", "Generated digits")
    assert (tmp_path / "made.png").stat().st_size > 5_000
    assert "error on its images" in (tmp_path / "errors.svg").read_text()
