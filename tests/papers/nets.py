"""Networks whose answers are known, and contexts whose images are: what measurements are tried on."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.models.narrow import narrow
from torchcaps.capsules import Capsules
from torchcaps.data import Batch, create_pipeline
from torchcaps.models import Network
from torchcaps.reproduce.context import Context
from torchcaps.training import RunSpec, Trained


@dataclass(frozen=True)
class Given(Context):
    """A context with images of its own, by split."""

    batches: dict[str, Batch] = field(default_factory=dict)

    def batch(self, trained: Trained, name: str, n: int, split: str = "test", **options: Any) -> Batch:
        return Batch(*(part[:n] for part in self.batches[split]))


def given(images: Tensor, labels: Tensor, folder: Path = Path("none"), train: Batch | None = None) -> Given:
    """A context with these test images; they are their own targets."""
    test = Batch(images, labels, images, torch.arange(len(images)))
    return Given("smoke", 0, folder, batches={"test": test, "train": test if train is None else train})


def as_trained(model: Network, name: str, augmentation: str = "", **fields: Any) -> Trained:
    """A network as if it were a run's."""
    classes = tuple(map(str, range(model.spec.classes)))
    spec = RunSpec.of(name, **fields)
    return Trained(Path("run"), spec, model.eval(), create_pipeline(augmentation), classes, "last", 0)


class Known(nn.Module):
    """For each of a few images the answer that it was told, for others that of the nearest of them."""

    def __init__(self, images: Tensor, answers: Tensor) -> None:
        super().__init__()
        self.images, self.answers = images.flatten(1), answers
        self.size = nn.Parameter(torch.ones((), dtype=answers.dtype))

    def forward(self, images: Tensor) -> Tensor:
        return self.size * self.answers[torch.cdist(images.flatten(1), self.images).argmin(1)]


class Poses(nn.Module):
    """In the place of capsule layers: what comes in are the class capsules."""

    def forward(self, poses: Tensor) -> Capsules:
        return Capsules(poses)


def knowing(name: str, images: Tensor, answers: Tensor, augmentation: str = "", **changes: Any) -> Trained:
    """A network with known answers: scores ``[B, classes]``; of one with capsules these, ``[B, classes, D]``."""
    model: Any = narrow(name, image=tuple(images.shape[1:]), **changes)
    model.front = nn.Sequential(Known(images, answers))
    if hasattr(model, "capsules"):
        model.capsules = Poses()
    return as_trained(model, name, augmentation)
