"""Measurement of what a class capsule states about known poses: linear probes on dSprites."""

import math
from typing import Any

import torch

from torchcaps.analysis import Subject, run_analysis
from torchcaps.analysis.pose import FACTORS
from torchcaps.data import Dataset, ImageSet
from torchcaps.reproduce.runner import MeasurementContext
from torchcaps.training import TrainedRun
from torchcaps.training.setup import limit_images

__all__ = ["measure_pose"]


def measure_pose(
    context: MeasurementContext, net: TrainedRun, n_train: int = 4_000, n_images: int = 4_000
) -> dict[str, Any]:
    """Measure the R2 of linear probes from the class capsule to position, scale and orientation.

    The control is the same network with initial weights, which differ by seed. At the scale smoke, whose images have no
    known factors, the factors are random numbers.

    Args:
        context: context of the measurement.
        net: the network; one without capsules is probed at the input of its last linear layer.
        n_train: number of training images that the probes are fitted to.
        n_images: largest number of test images, whose values of all factors are held out.

    Returns:
        for each factor its R2, averaged over classes, and ``untrained_`` that of the control; ``by_class``; the number
        of features and of images.
    """

    def open_split(split: str, n: int | None) -> Dataset:
        options = net.spec.data_options
        dataset = context.dataset(net.spec.recipe.data, split, None if context.scale == "smoke" else n, **options)
        return _with_random_factors(dataset, n) if context.scale == "smoke" else dataset

    subject = Subject(
        "net",
        net.model,
        net.loader(open_split("test", n_images)),
        lambda n: open_split("train", n),
        track=lambda n_steps: context.progress,
    )
    report = run_analysis("pose", subject, n_train=n_train, untrained_seed=context.seed)
    trained, untrained = report.result["net"], report.result["net, untrained"]
    numbers: dict[str, Any] = {}
    for prefix, scores in (("", trained), ("untrained_", untrained)):
        numbers |= {f"{prefix}{name}": value for name, value in zip(FACTORS, scores.mean(), strict=True)}
        rows = scores.r2.tolist()
        numbers[f"{prefix}by_class"] = [[value if math.isfinite(value) else None for value in row] for row in rows]
    return {**numbers, "features": trained.dim, "n_train": trained.n_train, "n": trained.n_test}


def _with_random_factors(dataset: Dataset, n: int | None) -> Dataset:
    """Return images of a data set without known factors, with random numbers in their place."""
    dataset = limit_images(dataset, n)
    assert isinstance(dataset, ImageSet)
    generator = torch.Generator().manual_seed(0)
    metadata = {name: torch.rand(len(dataset), generator=generator) for name in (*FACTORS, "symmetry")}
    return ImageSet(dataset.name, dataset.split, dataset.images, dataset.labels, dataset.classes, metadata)
