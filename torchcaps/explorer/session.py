"""A run that is being explored: its network on pixels, its test images, and a description for the page."""

import copy
import dataclasses
import functools
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchcaps._core.random import permute_indices
from torchcaps._core.serialize import to_plain
from torchcaps.analysis import PixelNetwork
from torchcaps.analysis.common import capsule_layers, eval_mode
from torchcaps.data import Batch, DataError, Dataset, create_dataset, create_pipeline
from torchcaps.explorer.equations import routing_equation
from torchcaps.models import CapsuleNetwork, Network, create_model
from torchcaps.models.heads import ActivationHead, SharedClassifier
from torchcaps.models.pretrained import has_pretrained_decoder, list_pretrained
from torchcaps.profiling import estimate_memory, summarize
from torchcaps.profiling.summary import short_repr
from torchcaps.training.config import RunSpec
from torchcaps.training.errors import RunError
from torchcaps.training.inference import TrainedRun
from torchcaps.training.logging import read_metrics
from torchcaps.training.prediction import open_run_test_set, unprocessed_shape

__all__ = ["ExploredRun", "compute_lock", "iterations_changed", "load_pretrained_run"]

compute_lock = threading.Lock()  # one forward pass at a time: the layers' routing is changed while it runs
CURVE_COLUMNS = ("epoch", "train_accuracy", "val_accuracy", "train_loss", "val_loss", "lr")
DEFAULT_PRETRAINED = "mazzia2021_mnist"  # with decoder
EMBEDDED = "digits"  # test images of networks for MNIST, if MNIST itself is not at hand


class ExploredRun:
    """A trained run with its test images.

    Args:
        run: the run.
        name: name for the page.
        max_images: largest number of test images to use.

    Attributes:
        model: the network, which takes preprocessed images.
        pixels: the same network for pixels in 0..1.
        dataset: test images, or ``None`` with the reason in ``why_no_samples``.

    >>> run = ExploredRun(load_pretrained_run(), "pretrained", max_images=20)
    >>> run.shape, run.n_samples
    ((1, 28, 28), 20)
    """

    def __init__(self, run: TrainedRun, name: str, max_images: int = 1000) -> None:
        self.run, self.name = run, name
        self.model: Network = run.model.eval()
        # For tables: a copy with the same memory, whose routing and requires_grad no request changes.
        shared: dict[int, Tensor] = {id(buffer): buffer for buffer in run.model.buffers()}
        shared |= {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in run.model.parameters()}
        self._reference = copy.deepcopy(self.model, shared)
        self.dataset, self.why_no_samples = _open_samples(run)
        shape = unprocessed_shape(run) if self.dataset is None else self.dataset.shape
        self.pixels = PixelNetwork(self.model, run.pipeline, shape).eval()
        self.n_samples = 0
        if self.dataset is not None:  # in random order: stored data sets are often sorted by class
            self.n_samples = min(len(self.dataset), max_images)
            order = permute_indices(torch.arange(self.n_samples), len(self.dataset), seed=0, epoch=-1)
            self.dataset = self.dataset.subset(order)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the pixels, ``(channels, height, width)``."""
        return self.pixels.spec.image

    @property
    def capsules(self) -> CapsuleNetwork | None:
        """The network if it has capsules, otherwise ``None``."""
        return self.model if isinstance(self.model, CapsuleNetwork) else None

    def sample(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """Return test images in 0..1 ``[n, C, H, W]``, and their labels; raise a ValueError for an unknown index."""
        if self.dataset is None:
            raise ValueError(f"sample can't be used: {self.why_no_samples}")
        for index in indices:
            if index >= self.n_samples:
                raise ValueError(f"sample must be below {self.n_samples}, the number of test images, got {index}")
        batch = self.dataset.get_batch(torch.tensor(indices))
        only_images = Batch(batch.images, batch.labels, batch.images, batch.indices)
        return self.pixels.pipeline(only_images, train=False).images, batch.labels

    def label_sets(self, labels: Tensor) -> list[list[int]]:
        """Return the classes of each row of labels."""
        if self.model.n_objects is None:
            return [row.nonzero()[:, 0].tolist() for row in labels]
        return [sorted(row) if isinstance(row, list) else [row] for row in labels.tolist()]

    # Parts that a model may lack --------------------------------------------------------------------------------

    def missing_parts(self) -> dict[str, str]:
        """Return the reason for each part of the page that this model can't show."""
        missing: dict[str, str] = {}
        name = self.model.name
        if self.why_no_samples:
            missing["samples"] = self.why_no_samples
        network = self.capsules
        if network is None:
            reason = f"{name} is a convolutional network without capsules."
            return missing | dict.fromkeys(("capsules", "iterations", "decoder"), reason)
        if network.decoder is None:
            advice = "models for any number of objects per image have none"
            if network.n_objects is not None:
                advice = "train it with --reconstruction true"
            missing["decoder"] = f"{name} was built without a decoder: {advice}."
        if not self.iterative_layers():
            routings = " and ".join(
                sorted({type(layer.routing).__name__ for layer in capsule_layers(network).values()})
            )
            missing["iterations"] = f"{routings} routing computes its parents in one pass, without iterations."
        return missing

    def iterative_layers(self) -> list[Any]:
        """Return the capsule layers whose number of iterations can be changed."""
        network = self.capsules
        if network is None:
            return []
        layers = list(capsule_layers(network).values())
        iterative = [
            layer for layer in layers if any(f.name == "iterations" for f in dataclasses.fields(layer.routing))
        ]
        # Concurrent layers need the same number of iterations.
        return iterative if len(iterative) == len(layers) or network.capsules.schedule == "sequential" else []

    # Description ------------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """Return everything about the run that does not depend on an image."""
        model, network = self.model, self.capsules
        loss = model.recipe.loss
        description: dict[str, Any] = {
            "name": self.name,
            "model": model.name,
            "classes": list(self.run.classes),
            "shape": list(self.shape),
            "n_objects": model.n_objects,
            "n_samples": self.n_samples,
            "data": "" if self.dataset is None else self.dataset.name,
            "missing": self.missing_parts(),
            "score": self._score_name(),
            "margins": [0.1, loss.positive_margin] if loss.name == "margin" else None,
            "parameters": model.n_parameters,
            "weights": self.run.weights,
            "step": self.run.step,
            "note": self.run.note,
            "layers": [],
            "decoder": None,
        }
        if network is not None:
            description["layers"] = [_describe_layer(n, layer) for n, layer in capsule_layers(network).items()]
            description["schedule"] = network.capsules.schedule
            if network.decoder is not None:
                decoder = network.decoder
                description["decoder"] = {"classes": decoder.parents, "dim": decoder.dim, "image": list(decoder.image)}
        return description

    @functools.cached_property
    def training(self) -> dict[str, Any]:
        """The layer table, the memory of a training step, the learning curve and the settings."""
        summary = summarize(self._reference)
        memory = estimate_memory(self._reference, self.run.spec.recipe.batch_size)
        try:
            rows = read_metrics(Path(self.run.path) / "metrics.csv")
        except RunError as error:
            raise ValueError(str(error)) from error
        return {
            "title": summary.title,
            "table": summary.cells(),
            "memory": {**dataclasses.asdict(memory), "batch_size": self.run.spec.recipe.batch_size},
            "curve": [{name: _finite(row.get(name)) for name in CURVE_COLUMNS} for row in rows],
            "settings": to_plain(self.run.spec),
        }

    def _score_name(self) -> str:
        """Return the name of the quantity that `Network.probabilities` returns."""
        network = self.capsules
        if network is None or self.model.recipe.loss.name in ("cross_entropy", "binary"):
            return "probability"
        if isinstance(network.head, SharedClassifier):
            return "score"
        return "activation" if isinstance(network.head, ActivationHead) else "length"


def _finite(value: float | None) -> float | None:
    """Return a number that JSON can represent; ``None`` for those of a training that diverged."""
    return value if value is not None and math.isfinite(value) else None


def load_pretrained_run() -> TrainedRun | None:
    """Return a network with the weights of the package as a run; ``None`` if the package has no weights.

    >>> run = load_pretrained_run()
    >>> run.spec.model, run.weights
    ('mazzia2021_mnist', 'pretrained')
    """
    names = list_pretrained()
    if not names:
        return None
    name = DEFAULT_PRETRAINED if DEFAULT_PRETRAINED in names else names[0]
    changes: dict[str, Any] = {"reconstruction": True} if has_pretrained_decoder(name) else {}
    spec = RunSpec.of(name, **changes)
    model = create_model(name, pretrained=True, **changes)
    classes = tuple(str(index) for index in range(model.spec.classes))
    digits = create_dataset(EMBEDDED, "test")
    if (model.spec.classes, model.n_objects) == (digits.n_classes, 1) and "mnist" in spec.recipe.data:
        classes = digits.classes
    return TrainedRun(Path(name), spec, model, create_pipeline(spec.recipe.augmentation), classes, "pretrained", 0)


def _open_samples(run: TrainedRun) -> tuple[Dataset | None, str]:
    """Return the test set of a run or, for MNIST, the embedded digits; otherwise ``None`` and the reason."""
    try:
        dataset = open_run_test_set(run, download=False)
        if dataset is not None:
            run.loader(dataset)  # checks shape and classes
            return dataset, ""
        reason = f"{run.spec.recipe.data} has no test set"
    except (DataError, ValueError, OSError) as error:
        reason = str(error)
    try:
        dataset = create_dataset(EMBEDDED, "test")
        run.loader(dataset)
        return dataset, ""
    except (DataError, ValueError):
        return None, f"no test images: {reason}"


def _describe_layer(name: str, layer: Any) -> dict[str, Any]:
    """Return name, routing and sizes of a capsule layer."""
    routing, geometry = layer.routing, layer.geometry
    return {
        "name": name,
        "kind": type(layer).__name__,
        "routing": short_repr(routing),
        "algorithm": type(routing).__name__,
        "paper": routing.paper,
        "equation_number": routing.equation,
        "equation": routing_equation(type(routing)),
        "coupling_axis": routing.coupling_axis,
        "iterations": routing.iterations,
        "parents": geometry.parents,
        "dim": geometry.dim,
    }


@contextmanager
def iterations_changed(run: ExploredRun, iterations: int | None) -> Iterator[None]:
    """Context manager: evaluation mode, and another number of routing iterations. The caller holds `compute_lock`."""
    layers = run.iterative_layers() if iterations is not None else []
    original = [layer.routing for layer in layers]
    try:
        for layer in layers:
            layer.routing = dataclasses.replace(layer.routing, iterations=iterations)
        with eval_mode(run.model):
            yield
    finally:
        for layer, routing in zip(layers, original, strict=True):
            layer.routing = routing
