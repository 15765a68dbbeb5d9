"""Evaluation of a model on a data set: accuracy, loss, accuracy per class and confusion matrix."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from torchcaps._core.labels import as_multi_hot, split_labels
from torchcaps._core.serialize import pack_bits
from torchcaps._core.stats import wilson_interval
from torchcaps._core.values import deferred_checks, read_values
from torchcaps.data import Batch, Loader
from torchcaps.data.own import DataLoaderBatches
from torchcaps.models import Network, Output
from torchcaps.training.errors import CheckpointError

__all__ = ["BalancedLoss", "Evaluation", "RunningEvaluation", "batch_loss", "evaluate"]

UNBALANCED_RATIO = 1.5  # images of the most frequent class to those of the rarest, from which data counts as unbalanced


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation.

    Args:
        n: number of images.
        n_correct: number of images classified correctly, in the sense of `Network.is_correct`.
        loss: mean loss.
        class_counts: number of images that contain each class.
        class_correct: number of these images in which the class was predicted.
        confusion: confusion matrix ``[true][predicted]``; empty if images contain several objects.
        correct: whether each image is classified correctly, bool ``[n]`` in the order of the data set, if recorded.
    """

    n: int
    n_correct: int
    loss: float
    class_counts: list[int]
    class_correct: list[int]
    confusion: list[list[int]] = field(default_factory=list, repr=False)
    correct: Tensor | None = field(default=None, repr=False, compare=False)

    @property
    def accuracy(self) -> float:
        """Fraction of images classified correctly."""
        return self.n_correct / max(1, self.n)

    @property
    def balanced_accuracy(self) -> float:
        """Mean of the accuracies per class, over the classes that occur: equal to `accuracy` for balanced data.

        >>> Evaluation(10, 8, 0.5, class_counts=[8, 2], class_correct=[8, 0]).balanced_accuracy
        0.5
        """
        pairs = [(n, correct) for n, correct in zip(self.class_counts, self.class_correct, strict=True) if n]
        return sum(correct / n for n, correct in pairs) / max(1, len(pairs))

    @property
    def is_unbalanced(self) -> bool:
        """Whether the most frequent class has at least 1.5 times as many images as the rarest that occurs."""
        counts = [count for count in self.class_counts if count]
        return max(counts, default=0) >= UNBALANCED_RATIO * min(counts, default=1)

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % confidence interval of the accuracy."""
        return wilson_interval(self.n_correct, self.n)

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values; ``correct`` as hexadecimal digits, see `pack_bits`."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        if self.correct is not None:
            values["correct"] = pack_bits(self.correct)
        accuracies = {"accuracy": self.accuracy, "balanced_accuracy": self.balanced_accuracy}
        return {**accuracies, "interval": list(self.interval), **values}


class Reducer(Protocol):
    """Sum of a tensor over all processes."""

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return the sum."""
        ...


class RunningEvaluation:
    """Counts of an evaluation, updated batch by batch; the counts of several processes can be summed.

    Args:
        model: network whose predictions are counted.
        n_images: size of the data set, to record for each of its images whether it is classified correctly.
    """

    def __init__(self, model: Network, n_images: int | None = None) -> None:
        classes = model.spec.classes
        self.counts = torch.zeros(2 + 2 * classes + classes * classes, dtype=torch.int64)
        self.loss = torch.zeros((), dtype=torch.float64)
        self.model = model
        self.classes = classes
        self.correct: Tensor | None = None if n_images is None else torch.zeros(n_images, dtype=torch.uint8)

    def update(self, scores: Tensor, labels: Tensor, loss: float, indices: Tensor | None = None) -> None:
        """Add a batch.

        Args:
            scores: scores of the network, ``[B, classes]``.
            labels: true labels.
            loss: mean loss of the batch.
            indices: indices of the images in the data set, if ``n_images`` was given.
        """
        scores, labels = scores.detach().float().cpu(), labels.cpu()
        classes, n = self.classes, len(labels)
        self.counts[0] += n
        correct = self.model.is_correct(scores, labels)
        self.counts[1] += correct.sum()
        if self.correct is not None:
            assert indices is not None
            self.correct[indices] = correct.to(torch.uint8)
        class_counts, class_correct, confusion = self.counts[2:].split([classes, classes, classes * classes])
        if self.model.n_objects == 1:
            true, predicted = split_labels(labels, classes, 1)[0], self.model.predict(scores)
            confusion += torch.bincount(true * classes + predicted, minlength=classes * classes)
            class_counts += torch.bincount(true, minlength=classes)
            class_correct += torch.bincount(true[predicted == true], minlength=classes)
        else:
            present = self._present(labels)
            class_counts += present.sum(0)
            class_correct += (present & self.model.predict_multi_hot(scores)).sum(0)
        self.loss += loss * n

    def _present(self, labels: Tensor) -> Tensor:
        """Return which classes each image contains, bool ``[B, classes]``."""
        n_objects = self.model.n_objects
        if n_objects is None:
            return as_multi_hot(labels, self.classes) > 0
        return split_labels(labels, self.classes, n_objects)[1] > 0

    def compute(self, reduce: Reducer | None = None) -> Evaluation:
        """Return the evaluation of all batches so far.

        Args:
            reduce: sums the counts over all processes.
        """
        counts, loss = (reduce(self.counts), reduce(self.loss)) if reduce else (self.counts, self.loss)
        classes, n = self.classes, int(counts[0])
        class_counts, class_correct, confusion = counts[2:].split([classes, classes, classes * classes])
        matrix = confusion.view(classes, classes).tolist() if self.model.n_objects == 1 else []
        correct = self.correct
        if correct is not None:
            correct = (reduce(correct) if reduce else correct).bool()
        per_class = class_counts.tolist(), class_correct.tolist()
        return Evaluation(n, int(counts[1]), float(loss) / max(1, n), *per_class, matrix, correct)

    def to_plain(self) -> dict[str, Any]:
        """Return the counts as JSON values, for a checkpoint."""
        return {"counts": self.counts.tolist(), "loss": float(self.loss)}

    def restore(self, values: dict[str, Any]) -> None:
        """Continue from the counts of a checkpoint; raise `CheckpointError` if they are not those of this model."""
        try:
            counts = torch.tensor(values["counts"], dtype=torch.int64)
            loss = torch.tensor(float(values["loss"]), dtype=torch.float64)
        except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise CheckpointError(f"the checkpoint has no valid counts: {error}") from error
        if counts.shape != self.counts.shape:
            raise CheckpointError(f"the checkpoint has {list(counts.shape)} counts, not {list(self.counts.shape)}")
        self.counts = counts
        self.loss = loss


def evaluate(
    network: Network,
    loader: Loader | DataLoaderBatches,
    loss: nn.Module,
    step: float = math.inf,
    reduce: Reducer | None = None,
    progress: Callable[[], object] | None = None,
) -> Evaluation:
    """Evaluate a network on a data set, in evaluation mode and without gradients.

    Args:
        network: the network.
        loader: batches of the data set.
        loss: loss of the network's output.
        step: training step, for the margin of the spread loss.
        reduce: sums the counts over all processes.
        progress: called after each batch.
    """
    was_training = network.training
    network.eval()
    running = RunningEvaluation(network, len(loader.dataset))
    try:
        with torch.no_grad():
            for batch in loader.epoch(0):
                with deferred_checks():
                    output = network(batch.images, batch.labels)
                    value = batch_loss(loss, output, batch, step)
                    scores, labels, value = read_values(output.scores, batch.labels, value)
                running.update(scores, labels, float(value), batch.indices)
                if progress is not None:
                    progress()
    finally:
        network.train(was_training)
    return running.compute(reduce)


class BalancedLoss(nn.Module):
    """Loss in which all classes count equally: images are weighted inversely to the frequency of their class.

    Image i has the weight ``N / (C n_i)``, for ``N`` images, ``C`` classes that occur, and ``n_i`` images of its class;
    the mean weight of the training images is 1.

    Args:
        loss: loss per image, that is with ``reduction="none"``.
        labels: class indices of the training images, ``[N]``.
        classes: number of classes.
    """

    def __init__(self, loss: nn.Module, labels: Tensor, classes: int) -> None:
        super().__init__()
        counts = torch.bincount(labels, minlength=classes)
        weights = len(labels) / (int((counts > 0).sum()) * counts.clamp(min=1))
        self.loss = loss
        self.weights = weights

    def forward(self, output: Output, labels: Tensor, targets: Tensor | None = None, step: float = math.inf) -> Tensor:
        """Return the mean of the weighted losses."""
        losses = self.loss(output, labels, targets, step)
        indices = split_labels(labels, len(self.weights), 1)[0]
        return (losses * self.weights.to(losses)[indices]).mean()


def batch_loss(loss: nn.Module, output: Output, batch: Batch, step: float) -> Tensor:
    """Return the loss of a network's output for a batch at a training step."""
    return loss(output, batch.labels, batch.targets, step)
