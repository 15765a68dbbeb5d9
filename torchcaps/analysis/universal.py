"""One change that misleads a model on any image, made by a generator: Chen 2019, supplement 6.2 and figure 1 there."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps._core.labels import check_class_indices
from torchcaps._core.plotting import COLORS, MARKERS, new_figure, save_figure, style_axes
from torchcaps._core.random import permute_indices
from torchcaps.analysis.adversarial import Limit, frozen
from torchcaps.analysis.attacks import judge
from torchcaps.analysis.common import Keep, Progress
from torchcaps.models import Network

__all__ = ["PerturbationGenerator", "Universal", "draw_universal", "draw_universal_sizes", "train_universal"]

LATENT = 100


@dataclass(frozen=True)
class Universal:
    """One change of all images, and what is left of a model's accuracy.

    Attributes:
        eps: the largest change of a pixel.
        objective: what the generator was trained for.
        n_images: test images that each accuracy is of.
        iterations: of the generator, after which the accuracy was measured.
        accuracy: the share of test images recognised with the change made then, of one and the same noise.
        perturbation: the last change, ``[C, H, W]``, within ``eps``; with it added images are cut to their bounds.
        clean_accuracy: without any change.
        random_noise_accuracy: with ``eps`` or ``-eps`` at random in each pixel, the same in all images: what a change
            of this size costs without any training.
        true: test images of each class, ``[classes]``.
        predicted: how often each class is predicted with the last change, ``[classes]``.
    """

    eps: float
    objective: str
    n_images: int
    iterations: tuple[int, ...]
    accuracy: tuple[float, ...]
    perturbation: Tensor
    clean_accuracy: float
    random_noise_accuracy: float
    true: Tensor
    predicted: Tensor


class PerturbationGenerator(nn.Module):
    """Noise to a change of all pixels in -1..1: three transposed convolutions, each with a batch norm, then tanh.

    For 28x28: 7x7 to a grid of 7x7 with 128 channels, ReLU; 4x4 stride 2 to 64, ReLU; 4x4 stride 2 to the image's. The
    first window follows the image's size; what is over of an image that four does not divide is cut off.

    Args:
        image: ``(channels, height, width)``.
        width: channels of the first layer; the second has half of them.

    Shapes:
        ``[B, 100] -> [B, C, H, W]``

    Deviation: the supplement gives the number of layers and the noise only; sizes, ReLU and tanh are ours.
    """

    def __init__(self, image: tuple[int, int, int], width: int = 128) -> None:
        super().__init__()
        channels, height, breadth = self.image = image
        half = max(1, width // 2)
        self.layers = nn.Sequential(
            nn.ConvTranspose2d(LATENT, width, (-(-height // 4), -(-breadth // 4)), bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.ConvTranspose2d(width, half, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(half),
            nn.ReLU(),
            nn.ConvTranspose2d(half, channels, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, noise: Tensor) -> Tensor:
        """Make changes."""
        return self.layers(noise[:, :, None, None])[..., : self.image[1], : self.image[2]].tanh()


def train_universal(
    model: Network,
    images: Tensor,
    labels: Tensor,
    test_images: Tensor,
    test_labels: Tensor,
    eps: float = 32 / 255,
    iterations: int = 1000,
    every: int = 100,
    seed: int = 0,
    low: Limit = 0.0,
    high: Limit = 1.0,
    objective: Literal["wrong", "away"] = "wrong",
    rate: float = 1e-3,
    batch_size: int = 100,
    progress: Progress | None = None,
    state: Mapping[str, Any] | None = None,
    on_step: Keep | None = None,
) -> Universal:
    """Train a generator of changes that mislead a model on any image: Chen 2019, supplement 6.2, white-box.

    Of noise ``z ~ U[0, 1]^100`` it makes ``x' = clip(x + eps tanh(G(z)))``, and is trained to bring the frozen model's
    cross-entropy with a wrong class, drawn anew for each image, down. Every so many iterations the change made of one
    fixed noise is tried on all test images.

    Args:
        model: the classifier; it is left as it was found.
        images: to train with, ``[N, C, H, W]``, as the model takes them.
        labels: class numbers, ``[N]``.
        test_images: to measure with.
        test_labels: class numbers.
        eps: the largest change of a pixel, in the images' scale.
        iterations: of the generator.
        every: how many of them lie between two measurements.
        seed: of its first weights, the order of images, noise and wrong classes; torch's own generator stays as it is.
        low: the least value of a pixel, in the images' scale.
        high: the largest.
        objective: ``"wrong"``: towards a wrong class, as above. ``"away"``: the cross-entropy with the true class up.
        rate: of Adam.
        batch_size: images at a time, in training and measuring.
        progress: called after each iteration, and each piece that is measured.
        state: what ``on_step`` was given, to go on from; everything else must be the same. The training ends as if it
            had never stopped, bit by bit.
        on_step: called after each iteration with a function that gives the state, so that it can be kept.

    Deviation: the supplement has no ``eps`` and no optimiser, and says both that clean and changed logits should be
    alike and that a wrong label is assigned; the second is done here. A new wrong class each time is best served by
    scores that are all alike, and a net with large logits can be brought far towards that without being wrong more
    often: hence ``"away"``, which the paper does not have.
    """
    _check(model, images, test_images, eps, low, high)
    labels = _check_labels(model, labels, images, "labels")
    test_labels = _check_labels(model, test_labels, test_images, "test_labels")
    if objective not in ("wrong", "away"):
        raise ValueError(f"objective must be 'wrong' or 'away', got {objective!r}")
    if iterations < 1 or every < 1:
        raise ValueError(f"iterations and every must be 1 or more, got {iterations} and {every}")
    batch_size = min(batch_size, len(images))
    if batch_size < 2:
        raise ValueError("images must be two or more, and batch_size too: the generator's batch norms need a batch")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        generator = PerturbationGenerator(model.spec.image)
    optimizer = torch.optim.Adam(generator.parameters(), rate)
    chance = torch.Generator().manual_seed(seed + 1)
    fixed = torch.rand(1, LATENT, generator=chance)
    low, high = (torch.as_tensor(bound, dtype=images.dtype) for bound in (low, high))
    n_classes, n_batches = model.spec.classes, len(images) // batch_size

    def changed(clean: Tensor, change: Tensor) -> Tensor:
        return torch.minimum(torch.maximum(clean + change, low), high)

    @torch.no_grad()
    def fixed_change() -> Tensor:
        generator.eval()
        change = eps * generator(fixed)[0]
        generator.train()
        return change

    def measure(change: Tensor) -> tuple[float, Tensor]:
        right, found = judge(model, changed(test_images, change), test_labels, batch_size, progress)
        return float(right.double().mean()), found.sum(0)

    done, steps, accuracies = 0, [0], []

    def kept() -> dict[str, Any]:
        nets = {"generator": generator.state_dict(), "optimizer": optimizer.state_dict()}
        return {**nets, "chance": chance.get_state(), "done": done, "steps": steps, "accuracies": accuracies}

    if state is None:
        accuracies.append(measure(fixed_change())[0])
    else:
        generator.load_state_dict(state["generator"])
        optimizer.load_state_dict(state["optimizer"])
        chance.set_state(state["chance"])
        done, steps, accuracies = state["done"], list(state["steps"]), list(state["accuracies"])
    for step in range(done, iterations):
        places = torch.arange(batch_size) + step % n_batches * batch_size
        index = permute_indices(places, len(images), seed, step // n_batches)
        wrong = (labels[index] + torch.randint(1, n_classes, (batch_size,), generator=chance)) % n_classes
        noise = torch.rand(batch_size, LATENT, generator=chance)
        with frozen(model):
            scores = model(changed(images[index], eps * generator(noise))).scores
            loss = F.cross_entropy(scores, wrong) if objective == "wrong" else -F.cross_entropy(scores, labels[index])
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        if progress is not None:
            progress()
        if (step + 1) % every == 0 or step + 1 == iterations:
            steps.append(step + 1)
            accuracies.append(measure(fixed_change())[0])
        done = step + 1
        if on_step is not None:
            on_step(kept)
    perturbation = fixed_change()
    signs = torch.randint(0, 2, model.spec.image, generator=chance) * 2 - 1
    return Universal(
        eps=float(eps),
        objective=objective,
        n_images=len(test_images),
        iterations=tuple(steps),
        accuracy=tuple(accuracies),
        perturbation=perturbation,
        clean_accuracy=measure(torch.zeros(()))[0],
        random_noise_accuracy=measure(eps * signs)[0],
        true=test_labels.bincount(minlength=n_classes),
        predicted=measure(perturbation)[1],
    )


def _check(model: Network, images: Tensor, test_images: Tensor, eps: float, low: Limit, high: Limit) -> None:
    if model.n_objects != 1:
        raise ValueError(f"a universal change needs one class for each image, and images of {model.name} have several")
    if not eps > 0:
        raise ValueError(f"eps must be above 0, got {eps}")
    for name, given in (("images", images), ("test_images", test_images)):
        if given.dim() != 4 or tuple(given.shape[1:]) != model.spec.image or len(given) == 0:
            raise ValueError(f"{name} must be [B, {', '.join(map(str, model.spec.image))}], got {list(given.shape)}")
        if bool((given < low).any() or (given > high).any()):
            raise ValueError(
                f"{name} must lie within low and high, and reach from {float(given.min()):.4g} to "
                f"{float(given.max()):.4g}: give the bounds of images as the model takes them, eps in their scale"
            )


def _check_labels(model: Network, labels: Tensor, images: Tensor, name: str) -> Tensor:
    labels = check_class_indices(labels, model.spec.classes, name)
    if labels.shape != images.shape[:1]:
        raise ValueError(f"{name} must be one for each of {len(images)} images, got {list(labels.shape)}")
    return labels


def draw_universal(results: Mapping[str, Universal], out: Path | str, title: str = "") -> None:
    """Draw accuracy by iteration of the generator (Chen 2019, supplement, figure 1), and the changes themselves."""
    if not results:
        raise ValueError("results must be one or more, got none")
    figure = new_figure(max(7.0, 2.2 * len(results)), 5.6)
    figure.suptitle(title)
    upper, lower = figure.subfigures(2, 1, height_ratios=(3.4, 2.2))
    axes = upper.subplots()
    for number, (name, result) in enumerate(results.items()):
        colour, marker = COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)]
        shares = [100 * share for share in result.accuracy]
        axes.plot(result.iterations, shares, color=colour, marker=marker, markersize=4, label=name)
        noise = 100 * result.random_noise_accuracy
        axes.axhline(noise, color=colour, linestyle=(0, (1 + number, 2)), linewidth=1, label=f"{name}, random signs")
    style_axes(axes, x="iterations of the generator", y="accuracy, %")
    least = 100 * min(min(result.accuracy) for result in results.values())
    axes.set_ylim(0 if least < 60 else least - 2, 103 if least < 60 else 100.5)  # small drops are to be seen, too
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    for axes, (name, result) in zip(lower.subplots(1, len(results), squeeze=False)[0], results.items(), strict=True):
        _show_change(axes, result, name)
    save_figure(figure, out)


def draw_universal_sizes(results: Mapping[str, Mapping[str, Universal]], out: Path | str, title: str = "") -> None:
    """Draw accuracy by iteration for changes of several sizes: a panel for each model, under it its changes, and the
    sizes by what they are called.
    """
    if not results or not all(results.values()):
        raise ValueError("results must be one or more for each model, got none")
    figure = new_figure(max(7.0, 3.1 * len(results)), 5.4)
    figure.suptitle(title)
    upper, lower = figure.subfigures(2, 1, height_ratios=(3.4, 1.6))
    panels = upper.subplots(1, len(results), sharey=True, squeeze=False)[0]
    for axes, (name, sizes) in zip(panels, results.items(), strict=True):
        for number, (size, result) in enumerate(sizes.items()):
            colour, marker = COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)]
            shares = [100 * share for share in result.accuracy]
            axes.plot(result.iterations, shares, color=colour, marker=marker, markersize=4, label=size)
            axes.axhline(100 * result.random_noise_accuracy, color=colour, linestyle=":", linewidth=1.2)
        style_axes(axes, name, "iterations of the generator", "accuracy, %" if axes is panels[0] else "")
        axes.set_ylim(0, 103)
        axes.xaxis.get_major_locator().set_params(integer=True)
    panels[0].plot([], [], color="0.3", linestyle=":", linewidth=1.2, label="random signs")
    handles, words = panels[0].get_legend_handles_labels()
    upper.legend(handles, words, loc="outside lower center", ncols=len(words), fontsize=8, frameon=False)
    most = max(map(len, results.values()))
    blocks = lower.subfigures(1, len(results), squeeze=False)[0]
    for block, sizes in zip(blocks, results.values(), strict=True):
        grid = block.subplots(1, most, squeeze=False)[0]
        for axes in grid[len(sizes) :]:
            axes.set_axis_off()
        for axes, (size, result) in zip(grid, sizes.items(), strict=False):
            _show_change(axes, result, "")
            axes.set_title(size, fontsize=8)
    save_figure(figure, out)


def _show_change(axes: Any, result: Universal, name: str) -> None:
    """Show a change: grey is none, black and white are the most in either direction."""
    image = (result.perturbation / (2 * result.eps) + 0.5).clamp(0, 1)
    colour = image.expand(3, -1, -1) if image.shape[0] == 1 else image[:3]
    if image.shape[0] == 2:  # a stereo pair
        colour = torch.cat([image[:1], image[1:]], dim=2).expand(3, -1, -1)
    axes.imshow(colour.permute(1, 2, 0).numpy(), interpolation="nearest")
    axes.set_title(f"{name}\nwithin {result.eps:.3g}", fontsize=8)
    axes.set_axis_off()
