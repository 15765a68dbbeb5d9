"""Whether classifiers know digits that nobody wrote: those of a GAN. Chen 2019, table 3 and figure 2."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchcaps._core.labels import check_class_indices
from torchcaps._core.plotting import COLORS, MARKERS, new_figure, save_figure, show_image, style_axes
from torchcaps._core.random import hash64, permute_indices
from torchcaps.analysis.acgan import LATENT, SIDE, Discriminator, Generator
from torchcaps.analysis.attacks import judge
from torchcaps.analysis.common import Keep, Progress
from torchcaps.models import Network

__all__ = ["GAN", "Generalisation", "draw_generalisation", "draw_generated", "generalisation", "train_acgan"]

REAL, MADE = 0.9, 0.1  # soft labels
DASHES = ("-", "--", "-.", ":")
CLASS_WEIGHT = 2.0  # of real images' classes: 2, since Keras takes the mean over those images that have a weight
RATE, BETAS, EPSILON = 2e-4, (0.5, 0.999), 1e-7  # Keras' Adam


class GAN:
    """A generator and a discriminator of digits, and what training them further needs.

    Args:
        classes: how many.
        width: what the numbers of channels are multiplied by; 1 is the published net.
        seed: of the first weights, the order of the images, the noise and the dropout.

    Attributes:
        epochs: how many it was trained for. steps: how many of an epoch that has begun.
    """

    def __init__(self, classes: int = 10, width: float = 1.0, seed: int = 0) -> None:
        if not width > 0:
            raise ValueError(f"width must be above 0, got {width}")
        self.classes, self.width, self.seed, self.epochs, self.steps = classes, width, seed, 0, 0
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_step_seed(seed, -1, 0))
            self.generator, self.discriminator = Generator(classes, width), Discriminator(classes, width)
        self._optimizers = tuple(
            torch.optim.Adam(net.parameters(), RATE, BETAS, EPSILON) for net in (self.discriminator, self.generator)
        )

    @torch.no_grad()
    def generate(self, n_per_class: int, seed: int = 0, batch_size: int = 100) -> tuple[Tensor, Tensor]:
        """Make so many images of each class, in 0..1, in the order of the classes; the seed alone chooses the noise.

        Shapes:
            ``[classes * n, 1, 28, 28]``, labels ``[classes * n]``
        """
        if n_per_class < 1:
            raise ValueError(f"n_per_class must be 1 or more, got {n_per_class}")
        labels = torch.arange(self.classes).repeat_interleave(n_per_class)
        noise = _noise(len(labels), torch.Generator().manual_seed(seed))
        pieces = zip(noise.split(batch_size), labels.split(batch_size), strict=True)
        images = torch.cat([self.generator(*piece) for piece in pieces])
        return (images + 1) / 2, labels

    def state_dict(self) -> dict[str, Any]:
        """Return all that it is made of, for ``torch.save``."""
        return {
            "classes": self.classes,
            "width": self.width,
            "seed": self.seed,
            "epochs": self.epochs,
            "steps": self.steps,
            "generator": self.generator.state_dict(),
            "discriminator": self.discriminator.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> "GAN":
        """Make it again."""
        needed = {"classes", "width", "seed", "epochs", "steps", "generator", "discriminator", "optimizers"}
        missing = needed - set(state)
        if missing:
            raise ValueError(f"state must be what GAN.state_dict gave, and lacks {', '.join(sorted(missing))}")
        gan = cls(state["classes"], state["width"], state["seed"])
        gan.epochs, gan.steps = state["epochs"], state["steps"]
        gan.generator.load_state_dict(state["generator"])
        gan.discriminator.load_state_dict(state["discriminator"])
        for optimizer, saved in zip(gan._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        return gan

    def step(self, images: Tensor, labels: Tensor) -> tuple[float, float]:
        """Train on a batch of real images in -1..1: the discriminator, then the generator; return their losses.

        The discriminator tells real from made images and learns the classes of the real ones. The generator, on twice
        as many images, is to pass for real and to be read as the class it was asked for.
        """
        first, second = self._optimizers
        n = len(images)
        wanted = torch.randint(self.classes, (n,))
        with torch.no_grad():
            made = self.generator(_noise(n), wanted)
        real, classes = self.discriminator(torch.cat([images, made]))
        loss = judging_loss(real, classes, labels)
        first.zero_grad()
        loss.backward()
        first.step()

        wanted = torch.randint(self.classes, (2 * n,))
        self.discriminator.requires_grad_(False)  # it is looked through, not trained
        real, classes = self.discriminator(self.generator(_noise(2 * n), wanted))
        passing = passing_loss(real, classes, wanted)
        second.zero_grad()
        passing.backward()
        second.step()
        self.discriminator.requires_grad_(True)
        return loss.item(), passing.item()


def judging_loss(real: Tensor, classes: Tensor, labels: Tensor) -> Tensor:
    """Return the discriminator's loss on real images and as many made ones: which is which, and the real ones' classes.

    Shapes:
        logits ``[2 B]`` and ``[2 B, classes]``, labels ``[B] -> []``
    """
    n = len(labels)
    truth = torch.cat([real.new_full((n,), REAL), real.new_full((n,), MADE)])
    return F.binary_cross_entropy_with_logits(real, truth) + CLASS_WEIGHT * F.cross_entropy(classes[:n], labels)


def passing_loss(real: Tensor, classes: Tensor, wanted: Tensor) -> Tensor:
    """Return the generator's loss: to pass for real, and for the class that was wanted.

    Shapes:
        logits ``[B]`` and ``[B, classes]``, labels ``[B] -> []``
    """
    return F.binary_cross_entropy_with_logits(real, torch.full_like(real, REAL)) + F.cross_entropy(classes, wanted)


def _noise(n: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw what images are made of: U(-1, 1)."""
    return torch.rand(n, LATENT, generator=generator) * 2 - 1


def _step_seed(seed: int, epoch: int, step: int) -> int:
    """Return a seed that is a function of the place in the training, so that nothing else has to be kept."""
    return int(hash64(hash64(hash64(torch.tensor(seed)) + epoch) + step)) & (2**63 - 1)


def train_acgan(
    images: Tensor,
    labels: Tensor,
    epochs: int = 5,
    seed: int = 0,
    batch_size: int = 100,
    width: float = 1.0,
    classes: int = 10,
    on_epoch: Callable[[int, GAN], object] | None = None,
    state: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    on_step: Keep | None = None,
) -> GAN:
    """Train an AC-GAN on digits, as for table 3 of Chen 2019: nets and settings of Keras' ``examples/mnist_acgan.py``.

    Args:
        images: ``[N, 1, 28, 28]`` in 0..1.
        labels: class numbers ``[N]``.
        epochs: how many in all, those of ``state`` counted.
        seed: of the first weights, the order of the images, the noise and the dropout.
        batch_size: real images in a step; what is over at an epoch's end is left out.
        width: what the numbers of channels are multiplied by; 1 is the published net.
        classes: how many.
        on_epoch: called with the number of each epoch that ends, from 1, and the GAN.
        state: a `GAN.state_dict` to go on from: the training ends as if it had never stopped, bit by bit, with the same
            images, batch size and number of threads.
        progress: called after each step.
        on_step: called after each step with a function that gives the state to go on from, so that it can be kept.

    Order, noise and dropout are functions of seed, epoch and step; the state of torch's own generator stays.

    Deviation: the images are shuffled, where the example takes them in the order of the file.
    """
    _check_images(images, classes)
    labels = check_class_indices(labels, classes)
    if labels.shape != images.shape[:1]:
        raise ValueError(f"labels must be one for each of {len(images)} images, got {list(labels.shape)}")
    if not 1 <= batch_size <= len(images):
        raise ValueError(f"batch_size must lie in 1..{len(images)}, the number of images, got {batch_size}")
    gan = GAN(classes, width, seed) if state is None else GAN.from_state_dict(state)
    if (gan.classes, gan.width, gan.seed) != (classes, width, seed):
        raise ValueError(
            f"state is of a GAN with classes={gan.classes}, width={gan.width}, seed={gan.seed}: "
            f"ask for the same, got classes={classes}, width={width}, seed={seed}"
        )
    for epoch in range(gan.epochs, epochs):
        for step in range(gan.steps, len(images) // batch_size):
            places = torch.arange(step * batch_size, (step + 1) * batch_size)
            index = permute_indices(places, len(images), seed, epoch)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(_step_seed(seed, epoch, step))
                losses = gan.step(images[index].float() * 2 - 1, labels[index])
            if not all(map(math.isfinite, losses)):
                raise ValueError(f"the losses of epoch {epoch + 1}, step {step + 1} are {losses}: try another seed")
            gan.steps = step + 1
            if progress is not None:
                progress()
            if on_step is not None:
                on_step(gan.state_dict)
        gan.epochs, gan.steps = epoch + 1, 0
        if on_epoch is not None:
            on_epoch(gan.epochs, gan)
    return gan


def _check_images(images: Tensor, classes: int) -> None:
    """Refuse what the nets are not made for."""
    if images.dim() != 4 or tuple(images.shape[1:]) != (1, SIDE, SIDE):
        raise ValueError(f"images must be [N, 1, {SIDE}, {SIDE}], as this GAN makes them, got {list(images.shape)}")
    if not images.is_floating_point() or images.min() < 0 or images.max() > 1:
        raise ValueError("images must be floating-point numbers in 0..1: they are stretched to -1..1 here")
    if classes < 2:
        raise ValueError(f"classes must be 2 or more, got {classes}")


@dataclass(frozen=True)
class Generalisation:
    """How often models fail on images that were made, in percent: a row of Chen 2019, table 3.

    Attributes:
        models: their names.
        errors: of each, in percent.
        n_images: what they are counted on; of 4,000 one image is 0.025 %.
        agree: the share of images that every model takes for the class they were made for, in percent.
    """

    models: tuple[str, ...]
    errors: tuple[float, ...]
    n_images: int
    agree: float


def generalisation(
    models: Mapping[str, Network],
    images: Tensor,
    labels: Tensor,
    batch_size: int = 128,
    progress: Progress | None = None,
) -> Generalisation:
    """Measure models, trained on real digits, on the same made ones: Chen 2019, table 3.

    An error may be the model's or the GAN's: early in its training it makes images of no class, or of another than it
    was asked for. So only the models' differences say something of them.

    Args:
        models: by the names to show.
        images: ``[B, C, H, W]`` in 0..1, as of `GAN.generate`; for models trained on bytes / 256 multiply them by
            255/256 first.
        labels: the classes that they were made for.
        batch_size: images at a time.
        progress: called after each piece.
    """
    if not models:
        raise ValueError("models must be one or more, got none")
    if len(images) == 0 or len(images) != len(labels):
        raise ValueError(f"images and labels must be as many, and not none, got {len(images)} and {len(labels)}")
    right = torch.stack([judge(model, images, labels, batch_size, progress)[0] for model in models.values()])
    errors = tuple(100 * int((~row).sum()) / len(images) for row in right)
    return Generalisation(tuple(models), errors, len(images), 100 * int(right.all(0).sum()) / len(images))


def draw_generated(
    generated: Mapping[str, tuple[Tensor, Tensor]], out: Path | str, title: str = "", n_per_class: int = 4
) -> None:
    """Draw made images, a column for each class and a block of rows for each stage of training: Chen 2019, figure 2.

    ``generated`` has the images and labels of each stage by its name, such as "epoch 1", as `GAN.generate` gives them.
    """
    if not generated:
        raise ValueError("generated must be one stage or more, got none")
    n_classes = 1 + max(int(labels.max()) for _, labels in generated.values())
    figure = new_figure(0.55 * n_classes + 0.9, (0.55 * n_per_class + 0.25) * len(generated) + 0.3)
    figure.suptitle(title, fontsize=11)
    grid = figure.subplots(len(generated), 1, squeeze=False)[:, 0]
    for axes, (name, (images, labels)) in zip(grid, generated.items(), strict=True):
        height, width = images.shape[-2:]
        sheet = images.new_ones(images.shape[1], n_per_class * (height + 1) - 1, n_classes * (width + 1) - 1)
        for column in range(n_classes):
            for row, image in enumerate(images[labels == column][:n_per_class]):
                top, left = row * (height + 1), column * (width + 1)
                sheet[:, top : top + height, left : left + width] = image
        show_image(axes, sheet)
        axes.set_axis_on()
        axes.spines[:].set_visible(False)
        axes.set_yticks([])
        axes.set_xticks([(width + 1) * column + width / 2 for column in range(n_classes)], range(n_classes))
        axes.tick_params(length=0, labelsize=8)
        axes.set_ylabel(name, fontsize=9)
    save_figure(figure, out)


def draw_generalisation(results: Mapping[int, Generalisation], out: Path | str, title: str = "") -> None:
    """Draw the models' errors by epoch of the GAN: Chen 2019, table 3."""
    if not results:
        raise ValueError("results must be one epoch or more, got none")
    names = next(iter(results.values())).models
    if any(result.models != names for result in results.values()):
        raise ValueError("results must be of the same models at every epoch")
    figure = new_figure(6, 3.6)
    axes = figure.subplots()
    epochs = sorted(results)
    for number, name in enumerate(names):
        errors = [results[epoch].errors[number] for epoch in epochs]
        style = {"color": COLORS[number % len(COLORS)], "marker": MARKERS[number % len(MARKERS)]}
        axes.plot(epochs, errors, label=name, linestyle=DASHES[number % len(DASHES)], **style)
    least = min(100 / result.n_images for result in results.values())
    axes.set_yscale("symlog", linthresh=least, linscale=0.4)  # errors fall by powers of ten, and to none at all
    ticks = [tick for tick in (0, 0.1, 1, 10, 100) if tick == 0 or tick > least]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_ylim(-least / 2, 100)
    axes.minorticks_off()
    axes.set_xticks(epochs)
    style_axes(axes, title, x="epochs that the GAN was trained for", y="error on its images, %")
    axes.legend(frameon=False, fontsize=9, handlelength=3)
    save_figure(figure, out)
