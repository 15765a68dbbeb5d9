"""Networks with prescribed outputs and contexts with prescribed images, to test measurements."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.models.narrow import narrow
from torchcaps.capsules import Capsules
from torchcaps.data import Batch, create_pipeline
from torchcaps.models import Network
from torchcaps.reproduce.runner import MeasurementContext
from torchcaps.training import RunSpec, TrainedRun


@dataclass(frozen=True)
class FixedContext(MeasurementContext):
    """A context with fixed images by split."""

    batches: dict[str, Batch] = field(default_factory=dict)

    def batch(self, run: TrainedRun, name: str, n: int, split: str = "test", **options: Any) -> Batch:
        return Batch(*(part[:n] for part in self.batches[split]))


def fixed_context(
    images: Tensor, labels: Tensor, directory: Path = Path("none"), train: Batch | None = None
) -> FixedContext:
    """Return a context with these test images, which are their own reconstruction targets."""
    test = Batch(images, labels, images, torch.arange(len(images)))
    return FixedContext("smoke", 0, directory, batches={"test": test, "train": test if train is None else train})


def as_trained(model: Network, name: str, augmentation: str = "", **options: Any) -> TrainedRun:
    """Return a network as if it were that of a finished run."""
    classes = tuple(map(str, range(model.spec.classes)))
    spec = RunSpec.of(name, **options)
    return TrainedRun(Path("run"), spec, model.eval(), create_pipeline(augmentation), classes, "last", 0)


class NearestOutput(nn.Module):
    """Return the prescribed output of the nearest of a few known images."""

    def __init__(self, images: Tensor, outputs: Tensor) -> None:
        super().__init__()
        self.images, self.outputs = images.flatten(1), outputs
        self.scale = nn.Parameter(torch.ones((), dtype=outputs.dtype))

    def forward(self, images: Tensor) -> Tensor:
        return self.scale * self.outputs[torch.cdist(images.flatten(1), self.images).argmin(1)]


class PoseLayers(nn.Module):
    """Capsule layers that return their input as class capsules."""

    def forward(self, poses: Tensor) -> Capsules:
        return Capsules(poses)


def network_with_outputs(
    name: str, images: Tensor, outputs: Tensor, augmentation: str = "", **changes: Any
) -> TrainedRun:
    """Return a network with prescribed scores ``[B, classes]``, or class capsules ``[B, classes, D]``."""
    model: Any = narrow(name, image=tuple(images.shape[1:]), **changes)
    model.front = nn.Sequential(NearestOutput(images, outputs))
    if hasattr(model, "capsules"):
        model.capsules = PoseLayers()
    return as_trained(model, name, augmentation)
