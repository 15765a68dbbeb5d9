"""Auxiliary-classifier GAN (Odena 2017) of MNIST size: the networks of Chen 2019, section 4.2, and their training.

Architecture and settings are those of Keras' ``examples/mnist_acgan.py``, which the paper describes.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps._core.labels import check_class_indices
from torchcaps._core.random import hash64, permute_indices
from torchcaps.analysis.common import Progress, SaveState
from torchcaps.models.init import glorot_uniform, init_layers, truncated_normal_

__all__ = ["GAN", "Discriminator", "Generator", "discriminator_loss", "generator_loss", "train_acgan"]

LATENT_DIM = 100
IMAGE_SIZE = 28  # two upsamplings by 2 of a 7x7 grid
NEGATIVE_SLOPE, DROPOUT = 0.2, 0.3
REAL_LABEL, FAKE_LABEL = 0.9, 0.1  # soft labels
CLASS_WEIGHT = 2.0  # of the real images' class loss: Keras averages over the images with a sample weight
LR, BETAS, EPS = 2e-4, (0.5, 0.999), 1e-7  # Keras' Adam


class Generator(nn.Module):
    """Map noise and a class to an image in -1..1.

    Noise times the class embedding, elementwise; fully-connected to 3x3 with 384 channels; transposed 5x5 convolutions
    to 7x7 with 192, 14x14 with 96 and 28x28 with 1 channel. ReLU, at the end tanh.

    Args:
        classes: number of classes.
        width: factor on the numbers of channels.

    Shapes:
        noise ``[B, 100]``, labels ``[B] -> [B, 1, 28, 28]``
    """

    def __init__(self, classes: int = 10, width: float = 1.0) -> None:
        super().__init__()
        first, second, third = (_scale_channels(channels, width) for channels in (384, 192, 96))
        self.embedding: nn.Embedding = nn.Embedding(classes, LATENT_DIM)
        self.dense: nn.Linear = nn.Linear(LATENT_DIM, first * 9)
        self.up1: nn.ConvTranspose2d = nn.ConvTranspose2d(first, second, 5)
        self.up2: nn.ConvTranspose2d = nn.ConvTranspose2d(second, third, 5, stride=2, padding=1)
        self.up3: nn.ConvTranspose2d = nn.ConvTranspose2d(third, 1, 5, stride=2, padding=1)
        init_layers(self, glorot_uniform)
        with torch.no_grad():
            _glorot_normal_(self.embedding.weight)
            for layer in (self.up1, self.up2, self.up3):
                _glorot_normal_(layer.weight)
                assert layer.bias is not None
                layer.bias.zero_()

    def forward(self, noise: Tensor, labels: Tensor) -> Tensor:
        """Generate images."""
        grid = self.dense(noise * self.embedding(labels)).relu().unflatten(1, (-1, 3, 3))
        grid = self.up1(grid).relu()
        grid = _drop_last(self.up2(grid)).relu()
        return _drop_last(self.up3(grid)).tanh()


class Discriminator(nn.Module):
    """Map an image in -1..1 to the logit of being real and to class logits.

    3x3 convolutions with 32 (stride 2), 64, 128 (stride 2) and 256 channels, each with a leaky ReLU and dropout.

    Shapes:
        ``[B, 1, 28, 28] ->`` ``[B]`` and ``[B, classes]``
    """

    def __init__(self, classes: int = 10, width: float = 1.0) -> None:
        super().__init__()
        sizes = [1, *(_scale_channels(channels, width) for channels in (32, 64, 128, 256))]
        self.convs: nn.ModuleList = nn.ModuleList(
            nn.Conv2d(before, after, 3, stride=stride, padding=1 if stride == 1 else 0)
            for before, after, stride in zip(sizes, sizes[1:], (2, 1, 2, 1), strict=False)
        )
        features = sizes[-1] * (IMAGE_SIZE // 4) ** 2
        self.real: nn.Linear = nn.Linear(features, 1)
        self.classes: nn.Linear = nn.Linear(features, classes)
        init_layers(self, glorot_uniform)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits."""
        grid = images
        for conv in self.convs:
            if conv.stride == (2, 2):
                grid = F.pad(grid, (0, 1, 0, 1))  # TensorFlow's SAME pads the odd row and column at the end
            grid = F.dropout(F.leaky_relu(conv(grid), NEGATIVE_SLOPE), DROPOUT, self.training)
        features = grid.flatten(1)
        return self.real(features).squeeze(1), self.classes(features)


def _scale_channels(channels: int, width: float) -> int:
    return max(1, round(channels * width))


def _glorot_normal_(weight: Tensor) -> None:
    """Initialise as Keras' ``glorot_normal``: a truncated normal with the mean of both fans."""
    window = weight[0, 0].numel() if weight.dim() > 2 else 1
    truncated_normal_(weight, (2 / ((weight.shape[0] + weight.shape[1]) * window)) ** 0.5)


def _drop_last(grid: Tensor) -> Tensor:
    """Remove the last row and column: of three surplus rows TensorFlow's SAME removes one before and two after."""
    return grid[..., :-1, :-1]


class GAN:
    """Generator, discriminator and their optimisers.

    Args:
        classes: number of classes.
        width: factor on the numbers of channels; 1 is the published network.
        seed: seed of the initial weights.
        device: device of both networks and of the generated images.

    Attributes:
        epochs: number of completed training epochs.
        steps: number of completed steps of the current epoch.

    >>> gan = GAN(classes=10, width=0.1)
    >>> images, labels = gan.generate(n_per_class=2)
    >>> images.shape, labels[:4]
    (torch.Size([20, 1, 28, 28]), tensor([0, 0, 1, 1]))
    """

    def __init__(
        self, classes: int = 10, width: float = 1.0, seed: int = 0, device: torch.device | str = "cpu"
    ) -> None:
        if not width > 0:
            raise ValueError(f"width must be above 0, got {width}")
        self.classes = classes
        self.width = width
        self.seed = seed
        self.epochs: int = 0
        self.steps: int = 0
        self._device = torch.device(device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_step_seed(seed, -1, 0))
            self.generator: Generator = Generator(classes, width).to(device)  # equal weights on each device
            self.discriminator: Discriminator = Discriminator(classes, width).to(device)
        self._optimizers = tuple(
            torch.optim.Adam(network.parameters(), LR, BETAS, EPS) for network in (self.discriminator, self.generator)
        )

    @torch.no_grad()
    def generate(self, n_per_class: int, seed: int = 0, batch_size: int = 100) -> tuple[Tensor, Tensor]:
        """Generate ``n_per_class`` images of each class, in 0..1 and ordered by class; ``seed`` selects the noise.

        Shapes:
            images ``[classes * n, 1, 28, 28]``, labels ``[classes * n]``
        """
        if n_per_class < 1:
            raise ValueError(f"n_per_class must be 1 or more, got {n_per_class}")
        labels = torch.arange(self.classes, device=self._device).repeat_interleave(n_per_class)
        noise = _draw_noise(len(labels), torch.Generator().manual_seed(seed)).to(self._device)
        batches = zip(noise.split(batch_size), labels.split(batch_size), strict=True)
        images = torch.cat([self.generator(*batch) for batch in batches])
        return (images + 1) / 2, labels

    def state_dict(self) -> dict[str, Any]:
        """Return settings, weights and optimiser state, for ``torch.save``."""
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
    def from_state_dict(cls, state: Mapping[str, Any], device: torch.device | str = "cpu") -> "GAN":
        """Restore a GAN from its `state_dict`."""
        needed = {"classes", "width", "seed", "epochs", "steps", "generator", "discriminator", "optimizers"}
        missing = needed - set(state)
        if missing:
            raise ValueError(f"state must be a GAN.state_dict(), but lacks the keys {', '.join(sorted(missing))}")
        gan = cls(state["classes"], state["width"], state["seed"], device)
        gan.epochs, gan.steps = state["epochs"], state["steps"]
        gan.generator.load_state_dict(state["generator"])
        gan.discriminator.load_state_dict(state["discriminator"])
        for optimizer, saved in zip(gan._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        return gan

    def step(self, images: Tensor, labels: Tensor) -> tuple[float, float]:
        """Train discriminator, then generator, on a batch of real images in -1..1; return both losses.

        The discriminator learns to distinguish real from generated images and to classify the real ones. The generator,
        on twice as many images, learns to pass as real and as the class that it was given.
        """
        discriminator_optimizer, generator_optimizer = self._optimizers
        n = len(images)
        sampled = torch.randint(self.classes, (n,)).to(self._device)
        with torch.no_grad():
            generated = self.generator(_draw_noise(n).to(self._device), sampled)
        real, classes = self.discriminator(torch.cat([images, generated]))
        loss = discriminator_loss(real, classes, labels)
        discriminator_optimizer.zero_grad()
        loss.backward()
        discriminator_optimizer.step()

        sampled = torch.randint(self.classes, (2 * n,)).to(self._device)
        self.discriminator.requires_grad_(False)  # gradients pass through it to the generator
        real, classes = self.discriminator(self.generator(_draw_noise(2 * n).to(self._device), sampled))
        generator_value = generator_loss(real, classes, sampled)
        generator_optimizer.zero_grad()
        generator_value.backward()
        generator_optimizer.step()
        self.discriminator.requires_grad_(True)
        return loss.item(), generator_value.item()


def discriminator_loss(real: Tensor, classes: Tensor, labels: Tensor) -> Tensor:
    """Return the loss on real images followed by as many generated ones: real or generated, and the real ones' classes.

    Shapes:
        logits ``[2 B]`` and ``[2 B, classes]``, labels ``[B] -> []``
    """
    n = len(labels)
    truth = torch.cat([real.new_full((n,), REAL_LABEL), real.new_full((n,), FAKE_LABEL)])
    return F.binary_cross_entropy_with_logits(real, truth) + CLASS_WEIGHT * F.cross_entropy(classes[:n], labels)


def generator_loss(real: Tensor, classes: Tensor, labels: Tensor) -> Tensor:
    """Return the loss on generated images: to pass as real, and as the classes that were sampled.

    Shapes:
        logits ``[B]`` and ``[B, classes]``, labels ``[B] -> []``
    """
    targets = torch.full_like(real, REAL_LABEL)
    return F.binary_cross_entropy_with_logits(real, targets) + F.cross_entropy(classes, labels)


def _draw_noise(n: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw latent vectors from U(-1, 1): ``[n, 100]``."""
    return torch.rand(n, LATENT_DIM, generator=generator) * 2 - 1


def _step_seed(seed: int, epoch: int, step: int) -> int:
    """Return the seed of a training step, a function of its position, so that no RNG state has to be saved."""
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
    on_step: SaveState | None = None,
) -> GAN:
    """Train an AC-GAN on digits, as for Chen 2019, Table 3.

    Order, noise and dropout are functions of seed, epoch and step; torch's global RNG state is not changed.

    Args:
        images: ``[N, 1, 28, 28]`` in 0..1.
        labels: class indices ``[N]``.
        epochs: total number of epochs, including those of ``state``.
        seed: seed of the initial weights, the order of the images, the noise and the dropout.
        batch_size: real images per step; an incomplete last batch is dropped.
        width: factor on the numbers of channels; 1 is the published network.
        classes: number of classes.
        on_epoch: called after each epoch with its index, from 1, and the GAN.
        state: a `GAN.state_dict` to resume from: bit-exact for the same images, batch size and number of threads.
        progress: called after each step.
        on_step: called after each step with a function that returns the state to resume from.

    Deviation: the images are shuffled; the example takes them in the order of the file.

    >>> gan = train_acgan(torch.rand(8, 1, 28, 28), torch.arange(8), epochs=1, batch_size=4, width=0.1)
    >>> gan.epochs
    1
    """
    _check_images(images, classes)
    labels = check_class_indices(labels, classes)
    if labels.shape != images.shape[:1]:
        raise ValueError(f"labels must have one entry per image ({len(images)}), got {list(labels.shape)}")
    if not 1 <= batch_size <= len(images):
        raise ValueError(f"batch_size must lie in 1..{len(images)}, the number of images, got {batch_size}")
    device = images.device
    gan = GAN(classes, width, seed, device) if state is None else GAN.from_state_dict(state, device)
    if (gan.classes, gan.width, gan.seed) != (classes, width, seed):
        raise ValueError(
            f"state is of a GAN with classes={gan.classes}, width={gan.width}, seed={gan.seed}: "
            f"pass the same values, got classes={classes}, width={width}, seed={seed}"
        )
    for epoch in range(gan.epochs, epochs):
        for step in range(gan.steps, len(images) // batch_size):
            positions = torch.arange(step * batch_size, (step + 1) * batch_size)
            index = permute_indices(positions, len(images), seed, epoch)
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                torch.manual_seed(_step_seed(seed, epoch, step))
                losses = gan.step(images[index].float() * 2 - 1, labels[index])
            if not all(map(math.isfinite, losses)):
                raise ValueError(
                    f"non-finite GAN loss in epoch {epoch + 1}, step {step + 1}: {losses}; try another seed"
                )
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
    """Raise a ValueError if the GAN can't be trained on these images and this number of classes."""
    if images.dim() != 4 or tuple(images.shape[1:]) != (1, IMAGE_SIZE, IMAGE_SIZE):
        shape = f"[N, 1, {IMAGE_SIZE}, {IMAGE_SIZE}]"
        raise ValueError(f"images must be {shape}, the size that this GAN generates, got {list(images.shape)}")
    if not images.is_floating_point() or images.min() < 0 or images.max() > 1:
        raise ValueError(
            f"images must be floating-point numbers in 0..1, got {images.dtype} in "
            f"{float(images.min()):.4g}..{float(images.max()):.4g}"
        )
    if classes < 2:
        raise ValueError(f"classes must be 2 or more, got {classes}")
