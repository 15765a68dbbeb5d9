"""What a measurement is given: its options, its seed, images, and a word to the bar now and then."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchcaps.data import Batch, Dataset, Loader, create_dataset
from torchcaps.data.registry import find_spec
from torchcaps.reproduce.scales import Scale
from torchcaps.training import Trained
from torchcaps.training.setup import some_of

__all__ = ["Context", "first_of_each", "mean_of"]


@dataclass(frozen=True)
class Context:
    """Where a measurement stands.

    Args:
        scale, seed: of the work that it is part of.
        folder: its own, for what it must not lose when it is killed.
        data_dir: the data folder.
        tick: to be called now and then, so that the bar moves.
        records: what came out of the measurements before it, by name.
    """

    scale: Scale
    seed: int
    folder: Path
    data_dir: str | None = None
    tick: Callable[[], object] = lambda: None
    records: dict[str, dict[str, Any]] = field(default_factory=dict)

    def dataset(self, name: str, split: str = "test", n: int | None = None, **options: Any) -> Dataset:
        """Return a data set or so many of its images; at the scale ``smoke`` the embedded digits stand for it."""
        if self.scale == "smoke":
            made = name == "affnist" or bool(find_spec(name).made_from)
            name = "affnist-style" if name == "affnist" else name if made else "digits"
            options |= {"source": "digits"} if made else {}
        elif self.scale == "cpu" and name == "affnist":
            name = "affnist-style"  # what there always is; the official set is for the full scale
        known = set(type(find_spec(name)).__dataclass_fields__)
        found = create_dataset(name, split, self.data_dir, **{k: v for k, v in options.items() if k in known})
        return some_of(found, n)

    def batch(self, trained: Trained, name: str, n: int, split: str = "test", **options: Any) -> Batch:
        """Return so many images of a data set, spread over all of it, as a network wants them."""
        loader = trained.loader(self.dataset(name, split, n, **options))
        return self.joined(loader)

    def joined(self, loader: Loader) -> Batch:
        """Return all batches of a loader as one."""
        batches = list(loader.epoch(0))
        parts = [[getattr(batch, key) for batch in batches] for key in ("images", "labels", "targets", "indices")]
        return Batch(*(torch.cat(part) for part in parts))

    def test_batch(self, trained: Trained, n: int, **options: Any) -> Batch:
        """Return test images of the data set that a network was trained on."""
        recipe = trained.spec.recipe
        return self.batch(trained, recipe.data, n, **{**trained.spec.data_options, **options})


def first_of_each(labels: Tensor, n: int) -> Tensor:
    """Return the places of the first ``n`` images of each class, in the order of classes."""
    return torch.cat([(labels == number).nonzero()[:n, 0] for number in labels.unique(sorted=True)])


def mean_of(name: str, values: Tensor) -> dict[str, float | None]:
    """Return the mean of numbers, one an image or more, and half of its 95 % interval, as a record names them."""
    if not len(values):
        return {name: None}
    of_images = values.double().flatten(1).mean(1) if values.dim() > 1 else values.double()
    half = 1.959964 * float(of_images.std()) / math.sqrt(len(of_images)) if len(of_images) > 1 else 0.0
    return {name: float(of_images.mean()), f"{name}_half": half}
