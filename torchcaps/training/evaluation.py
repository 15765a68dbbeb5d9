"""What a model does on a data set: counts that several processes add up, and what is read off them."""

import math
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from torchcaps._core.labels import as_multi_hot, split_labels
from torchcaps.data import Batch, Loader
from torchcaps.metrics import wilson_interval
from torchcaps.models import Network, Output

__all__ = ["Measures", "Tally", "evaluate"]


@dataclass(frozen=True)
class Measures:
    """How good a model was on images.

    Args:
        n: how many images.
        n_right: how many of them it recognised.
        loss: the mean.
        seen, found: for each class how many images show it, and in how many of these it was predicted.
        confusion: for one object an image: which class was taken for which, ``[true][predicted]``.
        correct: whether each image is classified correctly, bool ``[n]`` in the order of the data set, if recorded.
    """

    n: int
    n_right: int
    loss: float
    seen: list[int]
    found: list[int]
    confusion: list[list[int]] = field(default_factory=list, repr=False)
    correct: Tensor | None = field(default=None, repr=False, compare=False)

    @property
    def accuracy(self) -> float:
        """The share that it recognised."""
        return self.n_right / max(1, self.n)

    @property
    def interval(self) -> tuple[float, float]:
        """What the share may be on other such images, with 95 % confidence."""
        return wilson_interval(self.n_right, self.n)


class Reducer(Protocol):
    """Adds tensors up over the processes."""

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return the sum."""
        ...


class Tally:
    """Counts over batches; those of several processes add up to what one would have counted.

    Args:
        model: the network whose predictions are counted.
        n_images: size of the data set, to record for each of its images whether it is classified correctly.
    """

    def __init__(self, model: Network, n_images: int | None = None) -> None:
        classes = model.spec.classes
        self.counts = torch.zeros(2 + 2 * classes + classes * classes, dtype=torch.int64)
        self.loss = torch.zeros((), dtype=torch.float64)
        self.model, self.classes = model, classes
        self.correct = None if n_images is None else torch.zeros(n_images, dtype=torch.uint8)

    def add(self, scores: Tensor, labels: Tensor, loss: float, indices: Tensor | None = None) -> None:
        """Count a batch.

        Args:
            scores: the network's scores, ``[B, classes]``.
            labels: true labels.
            loss: mean loss of the batch.
            indices: indices of the images in the data set, if ``correct`` is recorded.
        """
        scores, labels = scores.detach().float().cpu(), labels.cpu()
        classes, n = self.classes, len(labels)
        self.counts[0] += n
        correct = self.model.is_correct(scores, labels)
        self.counts[1] += correct.sum()
        if self.correct is not None:
            assert indices is not None
            self.correct[indices] = correct.to(torch.uint8)
        seen, found, confusion = self.counts[2:].split([classes, classes, classes * classes])
        if self.model.n_objects == 1:
            numbers, predicted = split_labels(labels, classes, 1)[0], self.model.predict(scores)
            confusion += torch.bincount(numbers * classes + predicted, minlength=classes * classes)
            seen += torch.bincount(numbers, minlength=classes)
            found += torch.bincount(numbers[predicted == numbers], minlength=classes)
        else:
            there, told = self._sets(scores, labels)
            seen += there.sum(0)
            found += (there & told).sum(0)
        self.loss += loss * n

    def _sets(self, scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return which classes are there, and which were predicted: truth values ``[B, classes]``."""
        n_objects = self.model.n_objects
        if n_objects is None:
            there = as_multi_hot(labels, self.classes) > 0
        else:
            there = split_labels(labels, self.classes, n_objects)[1] > 0
        return there, self.model.predict_multi_hot(scores)

    def measures(self, reduce: Reducer | None = None) -> Measures:
        """Return what was counted, by all processes together."""
        counts, loss = (reduce(self.counts), reduce(self.loss)) if reduce else (self.counts, self.loss)
        classes, n = self.classes, max(1, int(counts[0]))
        seen, found, confusion = counts[2:].split([classes, classes, classes * classes])
        table = confusion.view(classes, classes).tolist() if self.model.n_objects == 1 else []
        correct = self.correct
        if correct is not None:
            correct = (reduce(correct) if reduce else correct).bool()
        return Measures(int(counts[0]), int(counts[1]), float(loss) / n, seen.tolist(), found.tolist(), table, correct)

    def plain(self) -> dict[str, Any]:
        """Return the counts as a checkpoint keeps them."""
        return {"counts": self.counts.tolist(), "loss": float(self.loss)}

    def restore(self, values: dict[str, Any]) -> None:
        """Go on from counts that a checkpoint kept."""
        self.counts = torch.tensor(values["counts"], dtype=torch.int64)
        self.loss = torch.tensor(values["loss"], dtype=torch.float64)


def evaluate(
    network: Network,
    loader: Loader,
    loss: nn.Module,
    step: float = math.inf,
    reduce: Reducer | None = None,
    progress: Any = None,
) -> Measures:
    """Go through a data set without learning.

    Args:
        network: the network.
        loader: of the images.
        loss: the objective.
        step: the training step, which the margin of the spread loss depends on.
        reduce: adds up over processes.
        progress: is told of every batch.
    """
    was_training = network.training
    network.eval()
    tally = Tally(network, len(loader.dataset))
    try:
        with torch.no_grad():
            for index, batch in enumerate(loader.epoch(0)):
                output = network(batch.images, batch.labels)
                value = float(loss_of(loss, output, batch, step))
                tally.add(output.scores, batch.labels, value, loader.indices(0, index))
                if progress is not None:
                    progress()
    finally:
        network.train(was_training)
    return tally.measures(reduce)


def loss_of(loss: nn.Module, output: Output, batch: Batch, step: float) -> Tensor:
    """Return the loss of a batch."""
    return loss(output, batch.labels, batch.targets, step)
