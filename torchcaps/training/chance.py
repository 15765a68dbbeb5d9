"""Report of a run that is not better than guessing after an epoch, with likely reasons."""

import math
from collections.abc import Iterator

import torch
from torch import nn

from torchcaps.data import Batch, Dataset
from torchcaps.metrics import dead_fraction
from torchcaps.models import Network, Recipe
from torchcaps.training.evaluation import Evaluation

__all__ = ["MIN_IMAGES", "MIN_STEPS", "describe_chance", "describe_overfitting", "is_at_chance"]

MIN_STEPS = 30  # before which a run is not expected to learn, unless it ends
MIN_IMAGES = 20  # fewer are not enough to tell learning from chance
STANDARD_ERRORS = 2.0  # above the accuracy of guessing that count as learning
CONSTANT_SPREAD = 1e-3  # standard deviation of scores over images, relative to their mean, of a constant output
NORM_STEPS = 50  # after which running statistics of batch normalisation with momentum 0.1 are those of the data
SMALL_GRADIENT, LARGE_GRADIENT = 1e-5, 1e3  # gradient norms that suggest another learning rate


def is_at_chance(result: Evaluation) -> bool:
    """Return whether neither accuracy nor balanced accuracy is more than two standard errors above guessing.

    Guessing is right for the most frequent class, and has a balanced accuracy of one over the number of classes. In
    unbalanced data a network that has learned rare classes may still have the accuracy of the most frequent one.

    >>> [is_at_chance(Evaluation(100, n, 0.7, [50, 50], [n // 2, n // 2])) for n in (52, 80)]
    [True, False]
    >>> is_at_chance(Evaluation(1000, 900, 0.7, [900, 100], [830, 70]))
    False
    """
    counts = [count for count in result.class_counts if count]
    if result.n < MIN_IMAGES or not counts:
        return False
    chance = max(counts) / result.n
    error = math.sqrt(chance * (1 - chance) / result.n)
    balanced_error = math.sqrt(sum(0.25 / count for count in counts)) / len(counts)  # an upper bound
    return (
        result.accuracy <= chance + STANDARD_ERRORS * error
        and result.balanced_accuracy <= 1 / len(counts) + STANDARD_ERRORS * balanced_error
    )


def describe_chance(
    result: Evaluation, network: Network, batch: Batch, dataset: Dataset, recipe: Recipe, grad_norm: float
) -> Iterator[str]:
    """Yield the lines of the report: the accuracy of guessing, and likely reasons with what to try.

    Args:
        result: training accuracy of the epoch.
        network: the network; its mode is restored.
        batch: a few training images.
        dataset: the training set.
        recipe: training settings of the run.
        grad_norm: gradient norm of the last step.
    """
    chance, lr = max(result.class_counts) / result.n, recipe.optimizer.lr
    if chance == 1:
        name = dataset.classes[result.class_counts.index(result.n)]
        yield f"warning: all training images have the label {name!r}, so there is nothing to learn; check the labels"
        return
    yield (
        f"warning: after an epoch the training accuracy of {100 * result.accuracy:.1f} % is not above chance "
        f"({100 * chance:.1f} %, always the most frequent class); likely reasons:"
    )
    yield f"  - {_describe_outputs(result, network, batch, dataset, recipe.class_weights == 'balanced')}"
    if grad_norm < SMALL_GRADIENT:
        yield f"  - learning rate: the gradient norm is {grad_norm:.1e}, nothing is learned; try --lr {10 * lr:g}"
    elif grad_norm > LARGE_GRADIENT:
        yield f"  - learning rate: the gradient norm is {grad_norm:.1e}; try --lr {lr / 10:g} or --max-grad-norm 1"
    else:
        yield f"  - learning rate: {lr:g} may be too high or too low for this model; try --lr {lr / 10:g}"
    yield (
        "  - labels: images in the wrong class or with shuffled labels can't be learned; look at some images of "
        f"{dataset.name} with their labels ('torchcaps data sample' draws those of data sets and directories)"
    )


def describe_overfitting(
    train: Evaluation, result: Evaluation, split: str, network: nn.Module, n_steps: int
) -> Iterator[str]:
    """Yield the lines of the report of a run that has learned its training images only.

    Args:
        train: training accuracy since the previous evaluation, above chance.
        result: accuracy on other images, not above chance.
        split: name of their split.
        network: the network.
        n_steps: optimiser steps of the run.
    """
    chance = max(result.class_counts) / result.n
    if chance == 1:
        yield f"warning: all images of the {split} split have the same label: check the labels"
        return
    yield (
        f"warning: the {split} accuracy of {100 * result.accuracy:.1f} % is not above chance ({100 * chance:.1f} %), "
        f"although the training accuracy is {100 * train.accuracy:.1f} %; likely reasons:"
    )
    if result.accuracy > chance:
        yield f"  - few images: those of the {split} split are {result.n:,}, with which more can't be told from chance"
    if n_steps < NORM_STEPS and any(isinstance(module, nn.BatchNorm2d) for module in network.modules()):
        yield (
            f"  - too few steps: batch normalisation needs about {NORM_STEPS} to know the mean and variance that it "
            f"uses in evaluation, and the run had {n_steps}; train longer, or try a smaller --batch-size"
        )
    else:
        yield "  - overfitting: the training images are learned by heart; use more images, or augmentation"
    yield f"  - different images: those of the {split} split are not like the training images, or have other labels"


def _describe_outputs(result: Evaluation, network: Network, batch: Batch, dataset: Dataset, is_balanced: bool) -> str:
    """Return a sentence about dead capsules, constant outputs or predictions of a single class."""
    was_training = network.training
    network.eval()
    try:
        with torch.no_grad():
            output = network(batch.images)
    finally:
        network.train(was_training)
    scores = output.scores.float()
    if output.capsules is not None:
        activity = output.capsules.activation if output.capsules.activation is not None else output.capsules.length()
        dead = float(dead_fraction(activity.float()))
        if dead:
            return (
                f"dead capsules: {100 * dead:.0f} % of the class capsules are inactive for all images; try a lower "
                "--lr or fewer routing iterations"
            )
    if len(scores) > 1 and float(scores.std(0).max()) <= CONSTANT_SPREAD * (float(scores.abs().mean()) + 1e-12):
        return "dead capsules: the scores are the same for all images; try a lower --lr or fewer routing iterations"
    predicted = [sum(row[index] for row in result.confusion) for index in range(len(result.class_counts))]
    if result.confusion and max(predicted) > 0.95 * result.n:
        name = dataset.classes[predicted.index(max(predicted))]
        advice = "more epochs" if is_balanced else "--class-weights balanced if it is the most frequent class"
        return f"a single prediction: nearly all images are predicted as {name!r}; try {advice}"
    return "too little training: the scores differ between images, so more epochs may help"
