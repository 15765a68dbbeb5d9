"""Linear probes of known poses: position, scale and orientation from the class capsule of an image's true class."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchcaps._core.plotting import COLORS, new_figure, save_figure, style_axes
from torchcaps._core.validation import FieldError
from torchcaps.analysis.common import eval_mode, first_labels
from torchcaps.analysis.registry import Analysis, Column, Subject, Summary, register_analysis
from torchcaps.data import Dataset, Loader
from torchcaps.models import Network

__all__ = ["FACTORS", "PoseOptions", "ProbeScores", "draw_pose", "pose_features", "pose_targets", "probe_pose"]

FACTORS = ("x", "y", "scale", "orientation")
KEYS = (*FACTORS, "symmetry")  # in the metadata of a data set
MIN_STD = 1e-8  # of a feature or factor; below it, it is constant
LOWEST_SHOWN = -0.25  # R2 in the figure


@dataclass(frozen=True)
class PoseOptions:
    """Options of the probe.

    Args:
        n_train: number of training images that the probe is fitted to.
        ridge: L2 penalty of the linear map, relative to the variance of the features.
        untrained_seed: seed of the initial weights of the untrained control.
    """

    n_train: int = 4_000
    ridge: float = 1e-3
    untrained_seed: int = 0

    def __post_init__(self) -> None:
        if self.n_train < 1:
            raise FieldError(self, "n_train", f"must be 1 or more, got {self.n_train}")
        if not 0 < self.ridge < math.inf:
            raise FieldError(self, "ridge", f"must be above 0, got {self.ridge:g}")


@dataclass(frozen=True)
class ProbeScores:
    """R2 of linear probes on images whose values of all factors are held out.

    Args:
        r2: of each class and factor, NaN for a class without images or a factor without variance, ``[classes, 4]``.
        dim: number of features that the probe reads.
        n_train, n_test: number of images that the probe was fitted to, and tested on.
    """

    r2: Tensor
    dim: int
    n_train: int
    n_test: int

    def mean(self) -> list[float]:
        """Return the mean R2 over the classes, of each of `FACTORS`."""
        return self.r2.nanmean(0).tolist()


def pose_targets(metadata: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the targets of the probes, one tensor for each of `FACTORS`.

    An orientation ``θ`` of a shape that ``s`` rotations map to itself is known modulo ``2π / s``: its targets are
    ``cos sθ`` and ``sin sθ``.

    Args:
        metadata: x, y, scale, orientation in radians, and symmetry (``s``), ``[N]`` each.

    Shapes:
        x, y and scale ``[N, 1]``; orientation ``[N, 2]``
    """
    angle = metadata["orientation"].double() * metadata["symmetry"]
    plain = [metadata[name].double().unsqueeze(1) for name in FACTORS[:-1]]
    return [*plain, torch.stack([angle.cos(), angle.sin()], dim=1)]


def pose_features(model: Network, loader: Loader) -> tuple[Tensor, Tensor, Tensor]:
    """Return the features that a probe reads: the class capsule of each image's true class, or the input of the last
    linear layer of a network without capsules.

    Shapes:
        features ``[N, D]``, float64; labels ``[N]``; indices of the images in the data set ``[N]``
    """
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    inputs: list[Tensor] = []

    def record(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        inputs.append(arguments[0])

    handle = layers[-1].register_forward_pre_hook(record) if layers else None
    features, labels, indices = [], [], []
    try:
        with eval_mode(model):
            for batch in loader.epoch(0):
                inputs.clear()
                output = model(batch.images)
                label = first_labels(model, batch.labels, len(batch.images))
                if output.capsules is not None:
                    pose = output.capsules.pose
                    feature = pose[torch.arange(len(pose), device=pose.device), label.to(pose.device)]
                elif inputs:
                    feature = inputs[-1]
                else:
                    raise ValueError(f"{model.name} has neither class capsules nor a linear layer to probe")
                features.append(feature.flatten(1).cpu().double())
                labels.append(label.cpu())
                indices.append(batch.indices)
    finally:
        if handle is not None:
            handle.remove()
    return torch.cat(features), torch.cat(labels), torch.cat(indices)


def probe_pose(
    train: tuple[Tensor, Tensor, Sequence[Tensor]],
    test: tuple[Tensor, Tensor, Sequence[Tensor]],
    n_classes: int,
    ridge: float = 1e-3,
) -> ProbeScores:
    """Fit a linear map from features to each factor, one per class, and return its R2 on other images.

    With ``m`` the mean target of the test images of a class, ``R2 = 1 - Σ |y - ŷ|² / Σ |y - m|²``; both sums contain
    both targets of the orientation.

    Args:
        train: features ``[N, D]``, class indices ``[N]``, and the targets of `pose_targets`, to fit the maps.
        test: the same of the images that R2 is measured on.
        n_classes: number of classes.
        ridge: L2 penalty, relative to the variance of the features.

    >>> features = torch.rand(50, 3, dtype=torch.float64)
    >>> targets = [features @ torch.rand(3, 1, dtype=torch.float64) for _ in range(4)]
    >>> labels = torch.zeros(50, dtype=torch.int64)
    >>> scores = probe_pose((features, labels, targets), (features, labels, targets), 1)
    >>> bool((scores.r2 > 0.99).all())
    True
    """
    r2 = torch.full((n_classes, len(FACTORS)), math.nan, dtype=torch.float64)
    for label in range(n_classes):
        fitted, tested = train[1] == label, test[1] == label
        if not bool(fitted.any()) or not bool(tested.any()):
            continue
        mean, std = train[0][fitted].mean(0), train[0][fitted].std(0, correction=0)
        scale = torch.where(std > MIN_STD, 1 / std.clamp_min(MIN_STD), 0.0)
        x, x_test = ((part[0][mask] - mean) * scale for part, mask in ((train, fitted), (test, tested)))
        gram = x.T @ x + ridge * len(x) * torch.eye(x.shape[1], dtype=x.dtype)
        for factor, (targets, test_targets) in enumerate(zip(train[2], test[2], strict=True)):
            y, y_test = targets[fitted], test_targets[tested]
            weight = torch.linalg.solve(gram, x.T @ (y - y.mean(0)))
            error = (y_test - y.mean(0) - x_test @ weight).square().sum()
            variance = (y_test - y_test.mean(0)).square().sum()
            if variance > MIN_STD**2 * len(y_test):
                r2[label, factor] = 1 - error / variance
    return ProbeScores(r2, train[0].shape[1], len(train[0]), len(test[0]))


def _metadata(dataset: Dataset) -> Mapping[str, Tensor]:
    """Return the known factors of a data set; raise a ValueError if it has none."""
    metadata = getattr(dataset, "metadata", {})
    missing = [key for key in KEYS if key not in metadata]
    if missing:
        raise ValueError(
            f"{dataset.name}: the analysis 'pose' needs images with known {', '.join(KEYS)}, and {', '.join(missing)} "
            "is missing: train a network on the data set 'dsprites' (torchcaps train --data dsprites)"
        )
    return metadata


def _score(model: Network, train: Loader, test: Loader, options: PoseOptions) -> ProbeScores:
    """Return the scores of probes that are fitted to the images of one loader and tested on those of another."""
    parts = []
    for loader in (train, test):
        features, labels, indices = pose_features(model, loader)
        targets = [target[indices] for target in pose_targets(_metadata(loader.dataset))]
        parts.append((features, labels, targets))
    return probe_pose(parts[0], parts[1], model.spec.classes, options.ridge)


def untrained_copy(model: Network, train: Loader, seed: int) -> Network:
    """Return the same network with initial weights.

    Batch normalisation gets the mean and variance of the training images, as in training; otherwise it would have
    those of none.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = copy.copy(model.spec).build(model.name, model.recipe)
    network.to(next(model.parameters()).device).train()
    norms = [module for module in network.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the mean over all batches
    if norms:
        with torch.no_grad():
            for batch in train.epoch(0):
                network.front(batch.images)
    return network.eval()


# Figure -------------------------------------------------------------------------------------------------------------


def draw_pose(
    results: Mapping[str, ProbeScores], out: Path | str, title: str = "", classes: Sequence[str] | None = None
) -> None:
    """Draw the R2 of each factor: a bar per network, the mean over classes, and a marker per class.

    Args:
        results: by the name of the network.
        out: the file, .png, .svg or .pdf.
        title: above the figure.
        classes: class names, by default their indices.
    """
    figure = new_figure(8.0, 3.6 + 0.2 * math.ceil(len(results) / 2))
    axes = figure.subplots()
    width = 0.8 / len(results)
    n_classes = len(next(iter(results.values())).r2)
    names = [str(n) for n in range(n_classes)] if classes is None else list(classes)
    for n, (name, scores) in enumerate(results.items()):
        positions = [factor - 0.4 + (n + 0.5) * width for factor in range(len(FACTORS))]
        heights = [max(value, LOWEST_SHOWN) if math.isfinite(value) else 0.0 for value in scores.mean()]
        color, hatch = COLORS[n // 2 % len(COLORS)], "//" if name.endswith("untrained") else ""
        label = f"{name} ({scores.dim} features)"
        axes.bar(positions, heights, 0.92 * width, color=color, alpha=0.35 if hatch else 0.8, hatch=hatch, label=label)
        for index in range(n_classes):
            values = scores.r2[index].clamp_min(LOWEST_SHOWN).tolist()
            style = {"marker": "so^vDP*X"[index % 8], "color": "black", "markersize": 3.5, "linestyle": ""}
            axes.plot(positions, values, **style, label=names[index] if n == 0 and n_classes <= 8 else None)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(FACTORS)), FACTORS)
    axes.set_ylim(LOWEST_SHOWN - 0.05, 1.02)
    style_axes(axes, "", "", "R2 on held-out values")
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    if title:
        figure.suptitle(title, fontsize=11)
    save_figure(figure, out)


# Declaration --------------------------------------------------------------------------------------------------------


def _run(subjects: Sequence[Subject], options: PoseOptions) -> dict[str, ProbeScores]:
    """Fit and score linear probes of each model, and of an untrained copy of it."""
    results = {}
    for subject in subjects:
        test = subject.loader
        _metadata(test.dataset)
        dataset = subject.training_set(options.n_train)
        train = Loader(dataset, test.batch_size, pipeline=test.pipeline, train=False, device=test.device)
        progress = subject.track(2)
        for name, model in ((subject.name, subject.model), (f"{subject.name}, untrained", None)):
            network = model or untrained_copy(subject.model, train, options.untrained_seed)
            results[name] = _score(network, train, test, options)
            progress()
    return results


def _by_factor(values: list[float]) -> dict[str, float | None]:
    """Return numbers by the names of the factors, NaN as ``None``."""
    return {name: None if math.isnan(value) else value for name, value in zip(FACTORS, values, strict=True)}


def _summarize(results: Mapping[str, ProbeScores], classes: Sequence[str]) -> Summary:
    """Return the summary table: R2 of position, scale and orientation, mean over classes, by network."""
    rows: dict[str, dict[str, Any]] = {}
    for name, scores in results.items():
        by_class = {classes[n]: _by_factor(row) for n, row in enumerate(scores.r2.tolist())}
        means = _by_factor(scores.mean())
        rows[name] = {"features": scores.dim, **means, "by_class": by_class, "n_train": scores.n_train}
    first = next(iter(results.values()))
    columns = {"features": Column("features", ",d"), **{name: Column(name, ".3f") for name in FACTORS}}
    notes = (
        f"R2 of linear probes, one per class, fitted to {first.n_train:,} training images; mean over classes.",
        "Features: the capsule of the true class, or the input of the last linear layer. Orientation modulo symmetry.",
    )
    return Summary("pose from the class capsule (R2)", first.n_test, "network", columns, rows, notes)


POSE = register_analysis(
    Analysis(
        "pose",
        "position, scale and orientation of dsprites from the class capsule: R2 of linear probes",
        _run,
        _summarize,
        draw_pose,
        PoseOptions,
        n_images=4_000,
        compares_models=True,
    )
)
